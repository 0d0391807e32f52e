"""02_extract.py without an engine: bytes, plan, stock, proof and faults, against slow references."""
import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

H, META = 64, {"format": "1", "store": "fp8", "layer_ids": "2,15,27", "last_layer": "30", "run": "r"}


@pytest.fixture(scope="module")
def stage02(load):
    return load("02_extract")


def make_sample(length=20, prompt_len=6, name="a", split="train"):
    ids = numpy.arange(1, length + 1, dtype="int32")
    return {"id": name, "split": split, "prompt_len": prompt_len, "token_ids": ids}


def make_states(length=20, planes=4, seed=0):
    torch.manual_seed(seed)
    return (torch.randn(length, planes, H) * torch.tensor([.1, 1., 4., 9.])[:, None]).bfloat16()


def pack(stage02, sample, store="fp8", seed=0):
    states = make_states(len(sample["token_ids"]), seed=seed)
    return stage02.pack(sample, states, store)


def test_importing_starts_nothing():
    code = "import sys, importlib; importlib.import_module('02_extract'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent,
                          capture_output=True, text=True)
    assert done.stdout == "False\n" and not done.stderr


def unpack(values, scale, store):
    """Slow and obvious: one value at a time."""
    if store == "bf16":
        return values.float()
    if store == "fp8":
        return values.float() * scale.float()[..., None]
    result = torch.zeros(*values.shape[:-1], values.shape[-1] * 2)
    for index in numpy.ndindex(*values.shape):
        low, high = int(values[index]) & 15, int(values[index]) >> 4
        j = index[-1] * 2
        for k, code in ((j, low), (j + 1, high)):
            result[(*index[:-1], k)] = (code - 8) * float(scale[(*index[:-1], k // 32)])
    return result


@pytest.mark.parametrize("store, bound", [("bf16", 0.004), ("fp8", 0.04), ("int4", 0.12)])
def test_a_value_is_stored_times_scale(stage02, store, bound):
    states = make_states(5)
    values, scale = stage02.quantise(states, store)
    back = unpack(values, scale, store)
    error = (back - states.float()).norm(dim=-1) / states.float().norm(dim=-1)
    assert error.max() < bound
    assert {"bf16": None, "fp8": torch.float32, "int4": torch.float16}[store] == getattr(scale, "dtype", None)


def test_quantise_keeps_extremes_finite(stage02):
    states = torch.zeros(1, 3, H)
    states[0, 0, 0], states[0, 1, 1], states[0, 2, :] = 3e5, -3e5, 1e-6
    for store in "fp8", "int4":
        values, scale = stage02.quantise(states, store)
        back = unpack(values, scale, store)
        assert back.isfinite().all()
        assert back[0, 0, 0] == pytest.approx(3e5, rel=0.1) and back[0, 1, 1] == pytest.approx(-3e5, rel=.1)


@pytest.mark.parametrize("store", ["bf16", "fp8", "int4"])
def test_shard_holds_what_the_docstring_says(stage02, tmp_path, store):
    samples = [make_sample(20, 6, "a"), make_sample(9, 3, "b")]
    packed = {each["id"]: pack(stage02, each, store, i) for i, each in enumerate(samples)}
    path = tmp_path / "train-00000.safetensors"
    facts = stage02.write_shard(path, packed, META | {"store": store})
    tensors = load_file(path)
    assert tensors["token_ids"].tolist() == [*range(1, 21), *range(1, 10)]
    assert tensors["sample_start"].tolist() == [0, 20, 29] and tensors["prompt_len"].tolist() == [6, 3]
    assert tensors["sample_start"].dtype == torch.int64 and tensors["prompt_len"].dtype == torch.int32
    assert len(tensors["g"]) == 19 + 8 and len(tensors["y"]) == 13 + 5
    g = unpack(tensors["g"], tensors.get("g_scale"), store)
    y = unpack(tensors["y"], tensors.get("y_scale"), store)
    want = make_states(9, seed=1).float()
    close = {"bf16": 0.01, "fp8": 0.08, "int4": 0.2}[store]
    assert ((g[19:] - want[:-1, :3]).norm(dim=-1) < close * want[:-1, :3].norm(dim=-1)).all()
    assert ((y[13:] - want[3:-1, 3]).norm(dim=-1) < close * want[3:-1, 3].norm(dim=-1)).all()
    assert facts["bytes"] == path.stat().st_size and facts["samples"] == 2 and facts["tokens"] == 29
    assert facts["answer_tokens"] == 14 + 6 and facts["split"] == "train"
    metadata, again = stage02.read_shard(path)
    assert again == facts and json.loads(metadata["ids"]) == ["a", "b"] and metadata["store"] == store
    planned = sum(stage02.sample_bytes(each, store, H) for each in samples)
    assert 0 < path.stat().st_size - planned < 1200  # the header


@pytest.mark.parametrize("store", ["bf16", "fp8", "int4"])
def test_03_reads_what_02_writes(stage02, load, tmp_path, store):
    """The true writer feeds the true reader; the values against one at a time."""
    train = load("03_train")
    train.import_torch()
    samples, name = [make_sample(20, 6, "a"), make_sample(9, 3, "b")], "train-00000.safetensors"
    packed = {each["id"]: pack(stage02, each, store, i) for i, each in enumerate(samples)}
    facts = stage02.write_shard(tmp_path / name, packed, META | {"store": store})
    manifest = {"hidden_size": H, "store": store, "files": {name: facts}}
    found = train.read_shards(tmp_path, manifest, "train", 4096)
    assert [(each.n, each.P) for each in found] == [(20, 6), (9, 3)]
    row = train.to_device(train.load_row(found, 3), SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32))
    states = [make_states(20, seed=0), make_states(9, seed=1)]
    g = [unpack(*stage02.quantise(each[:-2, :3], store), store).flatten(1) for each in states]
    y = [unpack(*stage02.quantise(each[P:-1, 3], store), store) for each, P in zip(states, (6, 3))]
    torch.testing.assert_close(row["g"], torch.cat(g))  # keys: all but the last two
    torch.testing.assert_close(row["y"], torch.cat(y))
    assert row["token"].tolist() == [*range(2, 20), *range(2, 9)]


def test_stock_takes_up_whole_shards_and_only_those(stage02, tmp_path, capsys):
    known = {}
    for i in range(5):
        path = tmp_path / f"train-{i:05}.safetensors"
        known[path.name] = stage02.write_shard(path, {f"s{i}": pack(stage02, make_sample())}, META)
    del known["train-00004.safetensors"]  # renamed, but killed before the manifest was written
    raw = bytearray((tmp_path / "train-00001.safetensors").read_bytes())
    raw[-5] ^= 1
    (tmp_path / "train-00001.safetensors").write_bytes(raw)
    os.truncate(tmp_path / "train-00002.safetensors", len(raw) - 100)
    (tmp_path / "train-00003.safetensors").unlink()
    (tmp_path / ".train-00007.safetensors.99.tmp").write_bytes(b"half")
    files, done = stage02.take_stock(tmp_path, "", known, "r")
    assert {path.name for path in files} == {"train-00000.safetensors", "train-00004.safetensors"}
    assert done == {("train", "s0"), ("train", "s4")}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in files)
    assert capsys.readouterr().out.count("made again") == 2
    with pytest.raises(SystemExit):
        stage02.take_stock(tmp_path, "", known, "another run")


def test_shards_take_free_names_and_keep_the_splits_apart(stage02, monkeypatch, tmp_path):
    (tmp_path / "train-00001.safetensors").touch()
    samples = [make_sample(name=f"h{i}", split="heldout") for i in range(3)]
    samples += [make_sample(name=f"t{i}") for i in range(5)]
    manifest, _ = run_extract(stage02, monkeypatch, tmp_path, samples, shard_samples=2)
    assert [(name, json.loads(stage02.read_shard(tmp_path / name)[0]["ids"])) for name in manifest["files"]] == [
        ("heldout-00000.safetensors", ["h0", "h1"]), ("heldout-00001.safetensors", ["h2"]),
        ("train-00000.safetensors", ["t0", "t1"]), ("train-00002.safetensors", ["t2", "t3"]),
        ("train-00003.safetensors", ["t4"])]


def test_layers(stage02, tmp_path):
    config = tmp_path / "config.json"
    assert stage02.choose_layers("", config, 61) == [2, 30, 58]
    assert stage02.choose_layers("20, 1,5", config, 30) == [1, 5, 20]
    key = "eagle_aux_hidden_state_layer_ids"
    for content in {key: [1, 29, 57]}, {"eagle_config": {key: [1, 29, 57]}}:
        config.write_text(json.dumps(content))
        assert stage02.choose_layers("", config, 61) == [1, 29, 57]
        assert stage02.choose_layers("2,3,4", config, 61) == [2, 3, 4]
    for bad in "1,2", "1,2,2", "1,2,30", "1,2,x", "1,2,3,4", "-1,2,3":
        with pytest.raises(SystemExit) as stop:
            stage02.choose_layers(bad, config, 30)
        assert stop.value.code == 1


def write_samples(directory, train, heldout):
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in ("samples", train), ("heldout_samples", heldout):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(name, length, prompt_len):
    return {"id": name, "token_ids": list(range(length)), "prompt_len": prompt_len}


def test_samples_are_cut_skipped_and_parted_by_id(stage02, tmp_path):
    rows = [row(f"s{i}", 20, 5) for i in range(200)]
    write_samples(tmp_path, rows + [row("long", 50, 5), row("no answer left", 50, 29), row("one", 6, 5)],
                  [row("h", 20, 5)])
    samples, counts = stage02.read_samples(tmp_path, "", 30, 100)
    assert counts == {"skipped": 2, "cut": 2} and len(samples) == 202
    assert samples[0]["split"] == "heldout" and len(samples[-1]["token_ids"]) == 30
    parts = [stage02.read_samples(tmp_path, f"{i}/4", 30, 100)[0] for i in (1, 2, 3, 4)]
    assert sorted(each["id"] for part in parts for each in part) == sorted(s["id"] for s in samples)
    assert min(map(len, parts)) > 30
    random.shuffle(rows)  # membership does not depend on order, nor on what else there is
    write_samples(tmp_path, rows[:100], [])
    again = {each["id"] for each in stage02.read_samples(tmp_path, "2/4", 30, 100)[0]}
    assert again == {each["id"] for each in parts[1]} & {each["id"] for each in rows[:100]}


@pytest.mark.parametrize("bad", ['{"id": "x"}', "no json", '{"id": "x", "token_ids": [1, 999], "prompt_len": 1}',
                                 '{"id": "x", "token_ids": [], "prompt_len": 1}'])
def test_a_bad_sample_is_named(stage02, tmp_path, capsys, bad):
    write_samples(tmp_path, [row("a", 20, 5)], [])
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write(bad + "\n")
    with pytest.raises(SystemExit):
        stage02.read_samples(tmp_path, "", 30, 100)
    assert "samples.jsonl:2 is no sample" in capsys.readouterr().err


def test_store_is_the_widest_that_fits(stage02, monkeypatch, tmp_path, capsys):
    samples = [make_sample(1000, 100, f"{i}") for i in range(1000)]
    need = {store: sum(stage02.sample_bytes(each, store, H) for each in samples) / 1e9
            for store in ("bf16", "fp8", "int4")}
    def choose(given, free_gb, reserve_gb=0):
        monkeypatch.setattr(stage02.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_gb * 1e9))
        return stage02.choose_store(given, samples, H, tmp_path, reserve_gb)
    for store in need:
        assert choose("auto", need[store] / 0.94) == store
        assert choose("auto", need[store] / 0.96) != store if store != "int4" else True
        assert choose(store, 99) == store
    assert choose("auto", need["bf16"] + 5, 5.1) == "fp8"  # MIN_FREE_GB counts
    for given, free in ("auto", need["int4"]), ("bf16", need["fp8"] * 1.1):
        with pytest.raises(SystemExit):
            choose(given, free)
    text = capsys.readouterr().err
    assert "to fix: make room, or take 950 samples" in text and "STORE=fp8/int4" in text


def test_reference_plan_fits_its_volume(stage02):
    """25,000 answers of 4,096 tokens of Kimi-K2.5 on 2.8 TB: int4 only; sizes as in the design."""
    sample = make_sample(4296, 200)
    sizes = {store: stage02.sample_bytes(sample, store, 7168) for store in ("bf16", "fp8", "int4")}
    four_planes = 4296 * 4 * 7168 * 2
    assert sizes["fp8"] / four_planes < 0.51 and sizes["int4"] / four_planes < 0.285
    assert sizes["int4"] * 25000 < 2.8e12 * 0.95 < sizes["fp8"] * 25000 * 1.05


def fake_output(stage02, monkeypatch, states, ids):
    connector = SimpleNamespace(cleanup_hidden_states=lambda path: None, load_hidden_states=lambda path:
                                {"hidden_states": states, "token_ids": torch.tensor(ids)})
    monkeypatch.setattr(stage02, "import_module", lambda name: connector)
    return SimpleNamespace(kv_transfer_params={"hidden_states_path": "x"}, prompt_logprobs=None)


def spoil(kind, states, ids):
    if kind == "short":
        return states[:-1], ids
    if kind == "echo":
        return states, ids[::-1]
    if kind == "nan":
        states[3, 1, 5] = float("nan")
    if kind == "inf":
        states[3, 1, 5] = float("inf")
    if kind == "zero row":
        states[7, 2] = 0
    if kind == "zero plane":
        states[:, 3] = 0
    if kind == "constant":
        states[:, 1] = states[0, 1].clone()
    if kind == "twice":
        states[:, 3] = states[:, 2]
    return states, ids


@pytest.mark.parametrize("kind", ["", "short", "echo", "nan", "inf", "zero row", "zero plane", "constant", "twice"])
def test_every_sample_is_checked(stage02, monkeypatch, kind):
    sample = make_sample()
    states, ids = spoil(kind, make_states(), sample["token_ids"].tolist())
    output = fake_output(stage02, monkeypatch, states, ids)
    assert bool(stage02.take_states(sample, output)[1]) == bool(kind)
    output.kv_transfer_params = None
    assert "no states" in stage02.take_states(sample, output)[1]


class FakeEngine:
    """Finishes two requests a step, last in first out; counts the tokens that it holds."""
    def __init__(self):
        self.requests, self.held, self.most = [], 0, 0

    def add_request(self, name, prompt, params):
        self.requests.append((name, prompt["prompt_token_ids"]))
        self.held += len(prompt["prompt_token_ids"])
        self.most = max(self.most, self.held)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        done = [self.requests.pop() for _ in range(min(2, len(self.requests)))]
        self.held -= sum(len(ids) for _, ids in done)
        return [SimpleNamespace(request_id=name, finished=True) for name, _ in done]


def test_prefill_keeps_order_and_bound(stage02, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: given))
    samples = [make_sample(length, 3, f"{length}") for length in (5, 9, 300, 7, 30, 31, 8, 4, 64)]
    for window, most in (0, 300), (64, 300), (10 ** 6, 458):
        engine = FakeEngine()
        got = list(stage02.prefill(engine, samples, window, lambda sample, output: output.request_id))
        assert [name for _, name in got] == [each["id"] for each in samples] and engine.most == most


def fake_proof(stage02, monkeypatch, spoiled=""):
    """Run prove() on an 'engine' that computes logprobs from the true last plane."""
    torch.manual_seed(1)
    norm, head = torch.rand(H) + 0.5, torch.randn(100, H) * 0.3
    samples = [make_sample(30, 5, f"{i}") for i in range(3)]
    def prefill(engine, probes, window, load, logprobs=None):
        for i, probe in enumerate(probes):
            states = make_states(30, seed=i)
            x = states[:, 3].float()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm
            scores = (x @ head.T).log_softmax(-1)
            theirs = [None] + [{int(t): SimpleNamespace(logprob=scores[j, t].item())}
                               for j, t in enumerate(probe["token_ids"][1:])]
            if spoiled == "early":  # one layer early: near, but not the last plane
                states[:, 3] += 0.3 * states[:, 2]
            if spoiled == "swapped" and logprobs is None and i == 1:  # one of three has another's states
                states = make_states(30, seed=0)
            if spoiled == "shrinking":
                states[:, 0] *= 1e4
            fault = "rows missing" if spoiled == "fault" else ""
            yield probe, (states, fault, theirs)
    monkeypatch.setattr(stage02, "prefill", prefill)
    return stage02.prove(SimpleNamespace(reset_prefix_cache=lambda: None), samples, norm, head, 1e-6, 99)


def test_proof_tells_true_states_from_each_known_fault(stage02, monkeypatch):
    proof, fault = fake_proof(stage02, monkeypatch)
    assert not fault and proof["logprob_gap_max"] < 0.01 and proof["tokens"] == 87
    for spoiled, word in [("early", "logprobs"), ("swapped", "batch"), ("shrinking", "norms"), ("fault", "rows missing")]:
        assert word in fake_proof(stage02, monkeypatch, spoiled)[1]


@pytest.mark.parametrize("prefix, tied", [("", False), ("", True), ("language_model.", False)])
def test_norm_and_head_by_name(stage02, tmp_path, prefix, tied):
    norm, head, embed = torch.rand(H), torch.rand(9, H), torch.rand(9, H)
    one = {f"{prefix}model.embed_tokens.weight": embed, f"{prefix}model.layers.0.norm.weight": norm + 1}
    two = {f"{prefix}model.norm.weight": norm, "vision_tower.norm.weight": norm + 2}
    two |= {} if tied else {f"{prefix}lm_head.weight": head}
    save_file(one, tmp_path / "model-1.safetensors")
    save_file(two, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        **dict.fromkeys(one, "model-1.safetensors"), **dict.fromkeys(two, "model-2.safetensors")}}))
    found = list(stage02.read_norm_and_head(tmp_path))
    assert found[0].equal(norm) and found[1].equal(embed if tied else head)


def fake_prefill(stage02, monkeypatch, spoiled):
    """prefill() whose states of the samples `spoiled` are a row short."""
    def prefill(engine, samples, window, load):
        for sample in samples:
            bad = sample["id"] in spoiled
            output = fake_output(stage02, monkeypatch, make_states()[:-1 if bad else None],
                                 sample["token_ids"].tolist())
            yield sample, load(sample, output)
    return prefill


def run_extract(stage02, monkeypatch, tmp_path, samples, spoiled=(), min_free_gb=0, shard_samples=10):
    """(manifest, why it stopped) of extract() on samples, or on so many, without an engine."""
    samples = [make_sample(name=f"{i}") for i in range(samples)] if isinstance(samples, int) else samples
    monkeypatch.setattr(stage02, "prefill", fake_prefill(stage02, monkeypatch, spoiled))
    monkeypatch.setattr(stage02, "sample_bytes", lambda sample, store, hidden_size: 1)
    manifest, why = {"files": {}, "put_aside": {}, "hidden_size": H, "size": {"samples": len(samples)}}, []
    monkeypatch.setattr(stage02, "fail", lambda message, status=1: why.append(message) or sys.exit(status))
    s = SimpleNamespace(MIN_FREE_GB=min_free_gb, SHARD_GB=shard_samples / 1e9)
    try:
        stage02.extract(None, samples, s, tmp_path, "", manifest, META, 99)
    except SystemExit as stop:
        assert stop.code == 1
    except OSError as error:  # the guard at the end of the file tells it
        why.append(str(error))
    return manifest, "".join(why)


def test_a_bad_sample_is_put_aside_and_many_stop_the_run(stage02, monkeypatch, tmp_path):
    manifest, why = run_extract(stage02, monkeypatch, tmp_path, 100, ["5"])
    assert not why and list(manifest["put_aside"]) == ["5"] and len(manifest["files"]) == 10
    assert sum(facts["samples"] for facts in manifest["files"].values()) == 99
    other = tmp_path / "other"
    other.mkdir()
    manifest, why = run_extract(stage02, monkeypatch, other, 100, ["5", "6"])
    assert "2 of 100 samples have bad states" in why


@pytest.fixture
def run_main(stage02, monkeypatch, tmp_path):
    """run_main(train, *flags, spoiled=()): main() on so many samples, the engine alone left out; {id: why} put aside."""
    target, source = tmp_path / "target", tmp_path / "01b_generate_synthetic"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({
        "hidden_size": H, "num_hidden_layers": 8, "vocab_size": 100, "max_position_embeddings": 99}))

    def run(train, *flags, spoiled=()):
        write_samples(source, [row(f"t{i}", 20, 6) | {"token_ids": list(range(1, 21))} for i in range(train)], [])
        (source / "manifest.json").write_text(json.dumps({
            "stage": source.name, "settings": {}, "inputs": {"target": stage02.find_model(target)[1]}, "done": True,
            "counts": {"samples": train, "heldout_samples": 0}}))
        monkeypatch.setattr(stage02, "prefill", fake_prefill(stage02, monkeypatch, spoiled))
        monkeypatch.setattr(stage02, "run_engine", lambda s, config, directory, samples, out, prefix, manifest,
                            metadata: stage02.extract(None, samples, s, out, prefix, manifest, metadata, 99))
        monkeypatch.setattr(stage02.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["02", "--data", str(tmp_path), "--target", str(target), "--store", "bf16",
                                          "--min-free-gb", "0", *flags])
        stage02.main()
        part = "".join(flags).replace("--part", "part").replace("/", "of")
        return json.loads((tmp_path / "02_extract" / part / "manifest.json").read_text())
    return run


def test_a_sample_put_aside_stays_aside_when_the_run_grows_and_is_not_done_again(run_main, capsys):
    assert list(run_main(100, spoiled=["t5"])["put_aside"]) == ["t5"]
    capsys.readouterr()
    manifest = run_main(140, spoiled=["t5"])
    assert "40 samples to do, 100 done" in capsys.readouterr().out
    assert list(manifest["put_aside"]) == ["t5"] and manifest["counts"]["samples"] == 139 and manifest["done"]


def test_parts_after_a_whole_run_and_with_a_sample_put_aside_are_merged(run_main, capsys):
    run_main(100)
    first, second = (run_main(300, "--part", part, spoiled=["t105"]) for part in ("1/2", "2/2"))
    assert first["done"] and second["done"] and list(first["put_aside"] | second["put_aside"]) == ["t105"]
    assert first["counts"]["samples"] + second["counts"]["samples"] == 199  # of their own; 100 were there
    capsys.readouterr()
    manifest = run_main(300, spoiled=["t105"])
    assert "0 samples to do" in capsys.readouterr().out
    assert manifest["done"] and manifest["counts"]["samples"] == 299 and list(manifest["put_aside"]) == ["t105"]


def test_the_stop_line_leaves_whole_shards(stage02, monkeypatch, tmp_path):
    free = iter([3e9, 2e9, 1.1e9, 0.9e9])
    monkeypatch.setattr(stage02.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    manifest, why = run_extract(stage02, monkeypatch, tmp_path, 60, min_free_gb=1)
    assert "MIN_FREE_GB" in why and len(manifest["files"]) == 4
    assert json.loads((tmp_path / "manifest.json").read_text())["files"] == manifest["files"]


def test_errors_that_a_user_can_cause(stage, tmp_path, target):
    source = tmp_path / "01b_generate_synthetic"
    write_samples(source, [row("a", 20, 5)], [])
    flags = ["--data", tmp_path, "--target", target]
    done = stage("02_extract", *flags, check=False)
    assert done.returncode == 1 and "not finished" in done.stdout
    (source / "manifest.json").write_text(json.dumps({
        "stage": "01b_generate_synthetic", "settings": {}, "inputs": {"target": "other"}, "done": True,
        "counts": {"samples": 1, "heldout_samples": 0}}))
    done = stage("02_extract", *flags, check=False)
    assert done.returncode == 1 and "is of target other" in done.stdout
    for part in "4", "0/4", "5/4", "1/4/4":
        done = stage("02_extract", *flags, "--part", part, check=False)
        assert done.returncode == 2 and "PART" in done.stdout and "Traceback" not in done.stdout
    facts = json.loads((source / "manifest.json").read_text())
    facts["inputs"]["target"] = importlib.import_module("02_extract").find_model(target)[1]
    (source / "manifest.json").write_text(json.dumps(facts))
    (source / "samples.jsonl").unlink()  # any error of the disk is told at the end of the file, not raised
    done = stage("02_extract", *flags, "--store", "bf16", check=False)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1 and "No such file" in last and "to fix: " in last and "Traceback" not in done.stdout


def test_a_full_tmpfs_costs_one_shard(stage02, monkeypatch, tmp_path):
    """The real ENOSPC, from safetensors and from the manifest's writer; what is whole stays."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]).returncode:
        pytest.skip("may not mount")
    try:
        manifest, why = run_extract(stage02, monkeypatch, tmp_path, 60)
        assert "No space left" in why and 0 < len(manifest["files"]) < 6
        assert not list(tmp_path.glob(".*.tmp"))
        files, done = stage02.take_stock(tmp_path, "", manifest["files"], "r")
        assert {path.name for path in files} == set(manifest["files"])
        assert len(done) == sum(facts["samples"] for facts in files.values())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_children_die_with_a_killed_stage(kit):
    """A forked child of a process that is killed with -9."""
    code = """
import importlib, multiprocessing, os, sys, time
stage = importlib.import_module("02_extract")
os.register_at_fork(after_in_child=stage.die_with_parent)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=kit, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.time() + 5
    while Path(f"/proc/{child}").exists() and time.time() < deadline:
        if " Z " in Path(f"/proc/{child}/stat").read_text():  # ended, not yet reaped
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()
