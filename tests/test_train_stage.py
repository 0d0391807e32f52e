"""Stage 03 as a process on tiny data: its files, continuing, faults, two processes."""
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import clean_environ
from safetensors.torch import load_file, save_file
from test_train import (H, LAYERS, ONE_THREAD, V, data, finished, flags, make_data,  # noqa: F401
                        read, run, tiny_drafter, train)


def rows(root, run="n24"):
    return [json.loads(line) for line in (root / f"data/03_train/{run}/metrics.jsonl").read_text().splitlines()]


def copy(source, root):
    shutil.copytree(source, root, dirs_exist_ok=True)
    return root / "data/03_train/n24"


def newest(out):
    return sorted((out / "checkpoints").iterdir())[-1]


def test_what_a_run_leaves(finished, train):
    out = finished / "data/03_train/n24"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["done"] and manifest["draft_vocab_size"] == 200 and 0 < manifest["vocab_coverage"] <= 1
    assert {"drafter/config.json", "drafter/model.safetensors", "drafter/README.md"} <= manifest["files"].keys()
    assert len(manifest["best"]["acceptance_by_position"]) == 3 and (out / "curves.png").stat().st_size > 5000
    steps = [row for row in rows(finished) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    for key in ("loss", "loss_by_ttt_step", "acceptance_by_ttt_step", "lr", "tokens_per_sec", "memory_gb"):
        assert all(key in row for row in steps)
    assert [row["step"] for row in rows(finished) if "heldout" in row] == [0, 3, 6]
    config = json.loads((out / "drafter/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYERS == \
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config["max_position_embeddings"] == 512 and config["vocab_size"] == V
    w = load_file(out / "drafter/model.safetensors")
    vocab = w["d2t"] + torch.arange(200)
    assert w["d2t"].dtype == torch.int64 and vocab.tolist() == w["t2d"].nonzero()[:, 0].tolist()
    assert {name: list(t.shape) for name, t in w.items() if name not in ("d2t", "t2d")} == \
        train.drafter_shapes(config)


def test_done_again_other_settings_and_another_run(finished, tmp_path, run):
    out = copy(finished, tmp_path)
    start = time.monotonic()
    assert "already done" in run(tmp_path).stdout and time.monotonic() - start < 2
    refused = run(tmp_path, check=False, **{"ttt-steps": 3})
    assert refused.returncode == 1 and "TTT_STEPS (there 4, now 3)" in refused.stdout
    facts = json.loads((out / "manifest.json").read_text())  # as of a release that had no such setting
    old = facts | {"settings": {name: value for name, value in facts["settings"].items() if name != "PATIENCE"}}
    (out / "manifest.json").write_text(json.dumps(old))
    refused = run(tmp_path, check=False)
    assert refused.returncode == 1 and "PATIENCE (there None, now 5)" in refused.stdout
    (out / "manifest.json").write_text(json.dumps(facts))
    run(tmp_path, **{"ttt-steps": 3, "run": "three", "max-steps": 2})
    assert (out / "manifest.json").exists() and (out.parent / "three/drafter/model.safetensors").exists()


def test_n_plus_n_steps_are_2n(finished, tmp_path, run):
    """From the checkpoint of step 3 to 6, as after kill -9: weights, moments and metrics to the bit."""
    out = copy(finished, tmp_path)
    newest(out).unlink()
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"done": False}))
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # torn by the kill
    assert run(tmp_path).stdout.count(" steps, ") <= 2  # of the progress: not a line a step
    a, b = (load_file(newest(root / "data/03_train/n24")) for root in (finished, tmp_path))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert any(name.startswith("momentum_buffer") for name in a)
    assert [row.get("loss") for row in rows(finished)] == [row.get("loss") for row in rows(tmp_path)]


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(path.read_bytes()[:1000]),
                                   lambda path: path.write_bytes(b""),
                                   lambda path: save_file({"x": torch.zeros(1)}, path, {"state": "{}"})],
                         ids=["torn", "empty", "other"])
def test_unreadable_checkpoint_falls_back(finished, tmp_path, run, spoil):
    out = copy(finished, tmp_path)
    spoil(newest(out))
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"done": False}))
    said = run(tmp_path).stdout
    assert f"cannot read {newest(out)}" in said and "taking the one before" in said
    a, b = (load_file(newest(root / "data/03_train/n24")) for root in (finished, tmp_path))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_no_checkpoint_that_can_be_read_is_told_and_nothing_is_lost(finished, tmp_path, run):
    out = copy(finished, tmp_path)
    for path in (out / "checkpoints").iterdir():
        path.write_bytes(b"")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"done": False}))
    before = [(out / name).read_bytes() for name in ("metrics.jsonl", "drafter/model.safetensors")]
    ended = run(tmp_path, check=False)
    assert ended.returncode == 1 and "no checkpoint is whole; to fix: mv" in ended.stdout
    assert before == [(out / name).read_bytes() for name in ("metrics.jsonl", "drafter/model.safetensors")]


def test_it_ends_when_acceptance_grows_no_more(data, tmp_path, run):
    """And what else shows there: one checkpoint kept, none half, a draft vocabulary that is the target's."""
    out = copy(data, tmp_path)
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints/.step-00000001.safetensors.1.tmp").write_bytes(b"half")  # of a run that was killed
    said = run(tmp_path, **{"max-steps": 50, "eval-every": 1, "patience": 2, "keep": 1, "learning-rate": 1e-9,
                            "draft-vocab": V, "row-tokens": 24}).stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["steps"] == 2 and [path.name for path in (out / "checkpoints").iterdir()] == [
        "step-00000002.safetensors"]
    assert {"d2t", "t2d"}.isdisjoint(load_file(out / "drafter/model.safetensors"))
    assert manifest["best"]["by_context_length"]["from 0"]["drafts"] == manifest["best"]["drafts"] > 0
    lost = [0, 0]
    for number, name in enumerate(("train", "heldout")):
        for path in (tmp_path / "data/02_extract").glob(f"{name}*.safetensors"):
            starts = load_file(path)["sample_start"]
            lost[number] += int((starts.diff() - 24).clamp(0).sum())
    assert f"ROW_TOKENS cuts {lost[0]:,} tokens off train" in said and f"cuts {lost[1]:,} tokens off heldout" in said


def test_sigterm_saves_and_says_how_to_continue(data, tmp_path, run):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    more = {"max-steps": 400, "eval-every": 400, "draft-vocab": 200}
    process = subprocess.Popen([sys.executable, "-u", "03_train.py", *flags(tmp_path, **more)], text=True,
                               env=clean_environ(**ONE_THREAD), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = tmp_path / "data/03_train/n24/metrics.jsonl"
    while not log.exists() or log.read_text().count("loss_by") < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and "run it again" in said.strip().splitlines()[-1]
    step = rows(tmp_path)[-1]["step"]
    assert newest(tmp_path / "data/03_train/n24").name == f"step-{step:08d}.safetensors"


def test_a_step_that_is_not_finite_changes_nothing(train, data, monkeypatch):
    s = SimpleNamespace(STEP_WEIGHT=1.0, TTT_STEPS=2, ROW_TOKENS=96)
    d, samples = tiny_drafter(train), read(train, data)[:3]
    optimizers, plain = train.make_optimizers(d.w), train.loss_and_gradient

    def poisoned(*given):
        sums = plain(*given)
        d.w["fc.weight"].grad[0, 0] = math.inf
        return sums
    before = {name: p.detach().clone() for name, p in d.w.items()}
    for patched in (poisoned, plain):
        monkeypatch.setattr(train, "loss_and_gradient", patched)
        result = train.train_step(d, optimizers, [train.load_row(samples, 2)], 1e-2, s, 1)
        same = all(torch.equal(before[name], p) for name, p in d.w.items())
        assert (result is None) == same == (patched is poisoned)


@pytest.mark.parametrize("every", [50, 1])
def test_ten_steps_not_finite_end_the_run(data, tmp_path, run, every):
    """A learning rate out of all bounds; the last good checkpoint is there and readable, and none of
    weights that are no longer finite, though an evaluation comes just then."""
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    ended = run(tmp_path, check=False, **{"learning-rate": 1e38, "max-steps": 60, "eval-every": every, "warmup": 0,
                                         "patience": 99, "keep": 1})
    assert ended.returncode == 1 and "no finite gradient in 10 steps" in ended.stdout
    assert all(t.isfinite().all() for t in load_file(newest(tmp_path / "data/03_train/n24")).values())


def test_two_processes_equal_one_with_twice_the_rows(data, tmp_path):
    """torchrun with gloo: the same loss curve, the same acceptance."""
    losses = []
    for processes, accumulate in ((1, 2), (2, 1)):
        root = tmp_path / str(processes)
        shutil.copytree(data, root)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=29511",
             "03_train.py", *flags(root, accumulate=accumulate)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=clean_environ(**ONE_THREAD), timeout=300)
        assert done.returncode == 0, done.stdout[-3000:]
        losses.append([row["loss"] for row in rows(root) if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2) and len(losses[0]) == 6


def test_bad_shards_are_named(tmp_path, run):
    def spoil(root, change, manifest=None):
        path = root / "data/02_extract/train-00000.safetensors"
        save_file(change(load_file(path)), path, {"format": "1"})
        facts = json.loads((root / "data/02_extract/manifest.json").read_text())
        facts["files"][path.name]["bytes"] = path.stat().st_size
        (root / "data/02_extract/manifest.json").write_text(json.dumps(facts | (manifest or {})))
    poison = torch.full((1, 3, H), math.nan).bfloat16()
    for name, change, facts, message in (
            ("nan", lambda w: w | {"g": torch.cat([poison, w["g"][1:]])}, None, "not finite"),
            ("width", lambda w: w | {"y": w["y"][:, :32].contiguous()}, None, "g and y are"),
            ("rows", lambda w: w | {"g": w["g"][:-1].contiguous()}, None, "g and y are"),
            ("index", lambda w: w | {"sample_start": torch.zeros(1, dtype=torch.int64), "prompt_len":
                                     torch.zeros(0, dtype=torch.int32)}, None, "index is empty"),
            ("target", lambda w: w, {"inputs": {"target": "0" * 16}}, "of another target")):
        spoil(make_data(tmp_path / name), change, facts)
        ended = run(tmp_path / name, check=False)
        assert ended.returncode == 1 and message in ended.stdout and "Traceback" not in ended.stdout, name
        assert "to fix" in ended.stdout and "train-00001" not in ended.stdout  # the good one
