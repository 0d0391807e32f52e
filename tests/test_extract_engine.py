"""02_extract.py with a real vLLM on the CPU: against transformers, growth, damage, parts, targets."""
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import clean_environ
from make_tiny import make_model

ENGINE = {"KIT_TENSOR_PARALLEL": "1", "KIT_MAX_BATCHED_TOKENS": "1024", "KIT_STAGING_GB": "0.05",
          "KIT_MIN_FREE_GB": "0.01", "KIT_SHARD_GB": "0.01",
          "KIT_ENGINE_ARGS": "--enforce-eager --dtype float32"}


def write_samples(data, target_id, train, heldout, vocab=49152, longest=200):
    """Samples as 01b writes them; sample i is the same whatever the counts."""
    out = data / "01b_generate_synthetic"
    out.mkdir(parents=True, exist_ok=True)
    for name, prefix, count in ("samples", "t", train), ("heldout_samples", "h", heldout):
        with open(out / f"{name}.jsonl", "w") as file:
            for i in range(count):
                rng = random.Random(f"{prefix}{i}")
                length = rng.randint(12, longest)
                file.write(json.dumps({
                    "id": hashlib.sha256(f"{prefix}{i}".encode()).hexdigest()[:16],
                    "token_ids": [rng.randrange(vocab) for _ in range(length)],
                    "prompt_len": rng.randint(1, length - 4)}) + "\n")
    (out / "manifest.json").write_text(json.dumps({
        "stage": out.name, "settings": {}, "inputs": {"target": target_id}, "files": {}, "done": True,
        "counts": {"samples": train, "heldout_samples": heldout}}))


def read_shards(out):
    """{(split, id): (token_ids, g, y)} as float32, and the manifest; each id once."""
    found, manifest = {}, json.loads((out / "manifest.json").read_text())
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            ids = json.loads(file.metadata()["ids"])
        g, y = (tensors[name].float() * (tensors[name + "_scale"][..., None] if name + "_scale" in
                tensors else 1) for name in ("g", "y"))
        at_g = at_y = 0
        for i, name in enumerate(ids):
            a, b = tensors["sample_start"][i:i + 2].tolist()
            rows, answers = b - a - 1, b - a - 1 - int(tensors["prompt_len"][i])
            key = path.name.split("-")[-2], name
            assert key not in found
            found[key] = tensors["token_ids"][a:b], g[at_g:at_g + rows], y[at_y:at_y + answers]
            at_g, at_y = at_g + rows, at_y + answers
        assert at_g == len(g) and at_y == len(y)
    return found, manifest


def assert_like_transformers(found, model, layers, last, bound):
    """Every row of every sample against transformers' hidden_states (the last before its norm)."""
    final = {}
    norm = [module for name, module in model.named_modules() if name.endswith("norm")][-1]
    norm.register_forward_pre_hook(lambda module, args: final.update(before=args[0]))
    for token_ids, g, y in found.values():
        with torch.no_grad():
            hidden = model(token_ids[None].long(), output_hidden_states=True).hidden_states
        for plane, layer in enumerate(layers):
            want = hidden[layer][0, :-1].float()
            assert ((g[:, plane] - want).norm(dim=-1) < bound * want.norm(dim=-1)).all()
        want = final["before"][0, :-1].float()[-len(y):]
        assert ((y - want).norm(dim=-1) < bound * want.norm(dim=-1)).all()


@pytest.fixture(scope="module")
def small(stage, load, target, tmp_path_factory):
    """(data, environment, output): 30 + 6 samples extracted in f32 into bf16 shards."""
    data = tmp_path_factory.mktemp("extract")
    env = ENGINE | {"KIT_DATA": str(data), "KIT_TARGET": str(target)}
    write_samples(data, load("02_extract").find_model(str(target))[1], 30, 6)
    return data, env, stage("02_extract", "--store", "bf16", env=env).stdout


def copy_of(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.engine
def test_states_are_those_of_transformers(small, target):
    from transformers import AutoModelForCausalLM
    found, manifest = read_shards(small[0] / "02_extract")
    assert len(found) == 36 and manifest["done"] and manifest["layer_ids"] == [2, 15, 27]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    few = {key: found[key] for key in list(found)[::5]}
    assert_like_transformers(few, model, [2, 15, 27], 30, 0.004)
    for (split, name), (token_ids, _, _) in found.items():  # every id has its own tokens
        rng = random.Random(next(f"{split[0]}{i}" for i in range(30) if hashlib.sha256(
            f"{split[0]}{i}".encode()).hexdigest()[:16] == name))
        length = rng.randint(12, 200)
        assert token_ids.tolist() == [rng.randrange(49152) for _ in range(length)]


@pytest.mark.engine
def test_manifest_tells_what_there_is(small):
    found, manifest = read_shards(small[0] / "02_extract")
    counts = manifest["counts"]
    assert counts["samples"] == 30 and counts["heldout_samples"] == 6 and counts["put_aside"] == 0
    assert counts["tokens"] == sum(len(token_ids) for token_ids, _, _ in found.values())
    assert counts["answer_tokens"] == sum(len(y) + 1 for _, _, y in found.values())
    assert set(manifest["files"]) == {path.name for path in (small[0] / "02_extract").glob("*.safetensors")}
    assert manifest["proof"]["logprob_gap_max"] < 0.01  # f32
    assert manifest["settings"]["STORE"] == manifest["store"] == "bf16" and manifest["last_layer"] == 30
    assert not list(Path("/dev/shm").glob("02_extract-*"))


@pytest.mark.engine
def test_done_is_told_at_once_and_other_settings_are_refused(small, stage):
    data, env, _ = small
    begin = time.time()
    assert "already done" in stage("02_extract", env=env).stdout  # STORE auto keeps what it is
    assert time.time() - begin < 5  # 2 s on an idle machine
    for flags in ("--store", "fp8"), ("--layer-ids", "1,2,3"), ("--max-len", 100):
        done = stage("02_extract", *flags, env=env, check=False)
        assert done.returncode == 1 and "another result" in done.stdout and "mv " in done.stdout


@pytest.mark.engine
def test_growth_and_damage_make_only_what_is_needed(small, stage, load, target, tmp_path):
    data = copy_of(small[0], tmp_path)
    out, env = data / "02_extract", small[1] | {"KIT_DATA": str(data)}
    before, manifest = read_shards(out)
    shards = sorted(out.glob("train-*"))
    raw = bytearray(shards[0].read_bytes())
    raw[-99] ^= 4
    shards[0].write_bytes(raw)
    os.truncate(shards[1], 5000)
    (out / ".train-00009.safetensors.1.tmp").write_bytes(b"half")
    made_again = sum(manifest["files"][path.name]["samples"] for path in shards[:2])
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors") if path not in shards[:2]}
    write_samples(data, load("02_extract").find_model(str(target))[1], 40, 6)
    text = stage("02_extract", env=env).stdout
    assert f"{made_again + 10} samples to do" in text
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in kept.items())
    after, manifest = read_shards(out)
    assert len(after) == 46 and manifest["done"] and not list(out.glob(".*.tmp"))
    for key, (token_ids, g, y) in before.items():
        assert after[key][0].equal(token_ids)
        torch.testing.assert_close(after[key][1], g, rtol=0.02, atol=0.02)
        torch.testing.assert_close(after[key][2], y, rtol=0.02, atol=0.02)


def left_of(data):
    """Pids of the processes started for this directory that are there after 10 seconds."""
    for _ in range(100):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                found += [path.parent.name] * (f"KIT_DATA={data}".encode() in path.read_bytes())
            except OSError:  # it ended meanwhile
                pass
        if not found:
            break
        time.sleep(0.1)
    return found


def start(env, out):
    return subprocess.Popen([sys.executable, "-u", Path(__file__).parent.parent / "02_extract.py"],
                            env=clean_environ(**env), stdout=open(out, "a"), stderr=subprocess.STDOUT)


@pytest.mark.slow  # each kill costs a start of the engine
@pytest.mark.engine
def test_killed_at_random_moments_equals_uninterrupted(small, stage, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(small[0] / "01b_generate_synthetic", data / "01b_generate_synthetic")
    env = small[1] | {"KIT_DATA": str(data), "KIT_STORE": "bf16", "KIT_SHARD_GB": "0.0005"}
    log, rng = tmp_path / "log", random.Random(3)
    for _ in range(int(os.environ.get("KILLS", 4))):
        process = start(env, log)
        begin, delay = time.time(), None
        while process.poll() is None:
            if delay is None and "ready in" in log.read_text().rsplit("samples to do", 1)[-1]:
                delay = time.time() + rng.uniform(0, 6)  # the engine is up, shards come
            if time.time() > (delay or begin + 120):
                process.send_signal(signal.SIGKILL)
            time.sleep(0.02)
        process.wait()
        assert not left_of(data), "an engine outlived its stage"
        if process.returncode == 0:
            break
    stage("02_extract", env=env)
    want, _ = read_shards(small[0] / "02_extract")
    found, manifest = read_shards(data / "02_extract")
    assert manifest["done"] and found.keys() == want.keys()
    for key in want:
        assert found[key][0].equal(want[key][0])
        torch.testing.assert_close(found[key][1], want[key][1], rtol=0.02, atol=0.02)


@pytest.mark.slow  # three starts of the engine
@pytest.mark.engine
def test_parts_fill_one_directory(small, stage, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(small[0] / "01b_generate_synthetic", data / "01b_generate_synthetic")
    env = small[1] | {"KIT_DATA": str(data), "KIT_STORE": "bf16"}
    stage("02_extract", "--part", "1/2", env=env)
    stage("02_extract", "--part", "2/2", env=env)
    text = stage("02_extract", env=env).stdout
    assert "0 samples to do" in text and "ready in" not in text  # a merge starts no engine
    found, manifest = read_shards(data / "02_extract")
    assert found.keys() == read_shards(small[0] / "02_extract")[0].keys()
    assert manifest["counts"]["samples"] == 30 and all(name.startswith("part") for name in manifest["files"])
    assert "already done" in stage("02_extract", env=env).stdout
    assert "already done" in stage("02_extract", "--part", "1/2", env=env).stdout


@pytest.mark.slow  # needs the right to mount a tmpfs; three starts of the engine
@pytest.mark.engine
def test_a_disk_that_fills_up_loses_one_shard_at_most(small, stage, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", data]).returncode:
        pytest.skip("may not mount")
    try:
        shutil.copytree(small[0] / "01b_generate_synthetic", data / "01b_generate_synthetic")
        env = small[1] | {"KIT_DATA": str(data), "KIT_STORE": "bf16", "KIT_SHARD_GB": "0.002", "KIT_MIN_FREE_GB": "0"}
        # Somebody else fills the disk: up to the stop line, then in the middle of a shard.
        for free, message in (5_000_000, "MIN_FREE_GB is near"), (1_000_000, "No space left"):
            log = tmp_path / message
            process = start(env, log)
            while process.poll() is None and "ready in" not in log.read_text():
                time.sleep(0.1)
            (data / "filler").write_bytes(b"x" * (shutil.disk_usage(data).free - free))
            assert process.wait(120) == 1 and message in log.read_text(), log.read_text()
            assert "Traceback" not in log.read_text()
            whole = json.loads((data / "02_extract/manifest.json").read_text())["files"]
            assert whole and not list((data / "02_extract").glob(".*.tmp"))
            (data / "filler").unlink()
        stage("02_extract", env=env)
        found, manifest = read_shards(data / "02_extract")
        assert found.keys() == read_shards(small[0] / "02_extract")[0].keys()
        assert whole.items() <= manifest["files"].items()
    finally:
        assert not left_of(data), "an engine outlived its stage"
        subprocess.run(["umount", "--lazy", data], check=True)  # shards are mapped in here


MLA = "--enforce-eager --dtype float32 --attention-config '{\"backend\":\"CPU_MLA\"}'"


@pytest.mark.slow  # a start of the engine each
@pytest.mark.engine
@pytest.mark.parametrize("kind, tensor_parallel", [
    ("deepseek_v3", 1), ("deepseek_v3", 2), ("kimi", 1)])
def test_mla_and_moe_targets(stage, load, tmp_path, kind, tensor_parallel):
    model = make_model(tmp_path / "target", kind, vocab_size=512)
    write_samples(tmp_path, load("02_extract").find_model(str(tmp_path / "target"))[1], 12, 3, vocab=512)
    stage("02_extract", "--store", "bf16", "--tensor-parallel", tensor_parallel, env=ENGINE | {
        "KIT_DATA": str(tmp_path), "KIT_TARGET": str(tmp_path / "target"),
        "KIT_ENGINE_ARGS": MLA + " --language-model-only" * (kind == "kimi")} | (
            {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tensor_parallel == 2 else {}))  # one core each
    found, manifest = read_shards(tmp_path / "02_extract")
    assert len(found) == 15 and manifest["proof"]["logprob_gap_max"] < 0.01
    assert_like_transformers(found, model, manifest["layer_ids"], 8, 0.02)
