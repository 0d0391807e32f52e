"""Stage 03 from a published drafter: what is kept, what is refused, the download it waits for."""
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import clean_environ
from safetensors.torch import load_file, save_file
from test_preflight import Hub, box, ended, serve  # noqa: F401
from test_train import H, ONE_THREAD, V, data, finished, flags, run, train  # noqa: F401


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def root(finished, tmp_path):  # noqa: F811
    """A target and its states, without a 03_train."""
    for part in ("data/02_extract", "target"):
        shutil.copytree(finished / part, tmp_path / part)
    return tmp_path


@pytest.mark.parametrize("names", ["midlayer.", "layers.0."])
def test_start_from_a_published_drafter(finished, root, run, names):  # noqa: F811
    """Its map, geometry and rope are kept, whatever it calls its layer; an embedding is left alone."""
    given = root / "published"
    shutil.copytree(finished / "data/03_train/n24/drafter", given)
    w = {name.replace("midlayer.", names): t for name, t in load_file(given / "model.safetensors").items()}
    save_file(w | {"embed_tokens.weight": torch.zeros(V, H)}, given / "model.safetensors")
    config = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps(config | {"rope_theta": 5e4, "rope_parameters": None}))
    said = run(root, drafter=given, **{"max-steps": 2}).stdout
    out = root / "data/03_train/n24/drafter"
    assert torch.equal(load_file(out / "model.safetensors")["d2t"], w["d2t"])
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 5e4
    assert "step 0, held out: acceptance length" in said and "covers" in said
    assert "KIT_LAYER_IDS=3,5,6" in said  # nearly useless as it is: perhaps the other numbering


def test_another_drafter_under_the_same_run_is_refused(finished, root, run):  # noqa: F811
    """Two of one geometry have the same config.json."""
    for name, scale in (("one", 1), ("two", 2)):
        shutil.copytree(finished / "data/03_train/n24/drafter", root / name)
        w = load_file(root / name / "model.safetensors")
        save_file(w | {"fc.weight": w["fc.weight"] * scale}, root / name / "model.safetensors")
    run(root, drafter=root / "one", **{"max-steps": 1})
    ended = run(root, check=False, drafter=root / "two", **{"max-steps": 1})
    assert ended.returncode == 1 and "drafter (there" in ended.stdout and "already done" not in ended.stdout


def test_bad_drafters_are_named(finished, root, run):  # noqa: F811
    good = finished / "data/03_train/n24/drafter"
    w, config = load_file(good / "model.safetensors"), json.loads((good / "config.json").read_text())
    twice, less = w["d2t"].clone(), w["t2d"].clone()
    twice[1] = twice[0] - 1
    less[less.nonzero()[0]] = False
    broken = {
        "missing": (w | {"fc.weight": None}, {}, "fc.weight is None, want [64, 192]"),
        "shape": (w | {"norm.weight": torch.ones(32)}, {}, "norm.weight is [32], want [64]"),
        "extra": (w | {"fc.bias": torch.ones(H)}, {}, "fc.bias is [64], want None"),
        "out": (w | {"d2t": w["d2t"] + V}, {}, "d2t leads out of the 300 ids of the target"),
        "twice": (w | {"d2t": twice}, {}, "d2t leads to a token twice"),
        "short": (w | {"d2t": w["d2t"][:-1].clone()}, {}, "d2t is [199], want [200]"),
        "no-map": (w | {"d2t": None, "t2d": None}, {}, "d2t is None, want [200]"),
        "contradicts": (w | {"t2d": less}, {}, "t2d names other tokens than d2t"),
        "long-t2d": (w | {"t2d": torch.ones(V + 1, dtype=torch.bool)}, {}, "t2d is [301], want [300]"),
        "width": (w, {"hidden_size": 128}, "hidden_size is 128, want 64"),
        "vocabulary": (w, {"vocab_size": 301}, "vocab_size is 301, want 300"),
        "odd": (w, {"norm_before_residual": True}, "norm_before_residual"),
        "scaled": (w, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        "layers": (w, {IDS: [1, 4, 6]}, "it reads layers [1, 4, 6], not [2, 4, 5]"),
        "nested": (w, {IDS: None, "eagle_config": {IDS: [2, 3, 4]}}, "it reads layers [2, 3, 4]"),
        "no-heads": (w, {"num_attention_heads": None}, "num_attention_heads"),
        "torn": (b"torn", {}, "to fix"),
        "nothing": (None, None, "nor is it whole in"),
        "empty": (None, {}, "is None, want")}
    for name, (tensors, changed, message) in broken.items():
        given = root / name
        given.mkdir()
        if changed is not None:
            (given / "config.json").write_text(json.dumps(config | changed))
        if isinstance(tensors, dict):
            save_file({n: t for n, t in tensors.items() if t is not None}, given / "model.safetensors")
        elif tensors:
            (given / "model.safetensors").write_bytes(tensors)
        ended = run(root, drafter=given, check=False, run=name)
        last = ended.stdout.strip().splitlines()[-1]
        assert ended.returncode == 1 and "Traceback" not in ended.stdout, (name, ended.stdout)
        assert last.startswith("03_train: ") and message in last and "to fix" in last, (name, last)
        assert not list((root / "data/03_train").glob("*/drafter")), name


@pytest.fixture
def hub(finished, box, serve):  # noqa: F811
    """A hub with a drafter of 12 MB for the target of `finished`, which box.env's preflight asks."""
    published = box.tmp / "published"
    shutil.copytree(finished / "data/03_train/n24/drafter", published)
    (published / "README.md").write_bytes(b"x" * 12_000_000)
    shutil.rmtree(box.target)
    for part in ("data/02_extract", "target"):
        shutil.copytree(finished / part, box.tmp / part)
    hub = Hub(published, serve)
    box.env |= {"KIT_DRAFTER": "some/drafter", "HF_ENDPOINT": hub.url, "HOME": box.tmp / "home"}
    return hub


def test_waits_for_the_download(hub, box):  # noqa: F811
    """Started by preflight and slow: 03 says what it waits for, and then trains from it."""
    hub.rate = 2_000_000
    assert "downloading" in box.run()["drafter"][0][1]
    process = subprocess.Popen(
        [sys.executable, "-u", "03_train.py", *flags(box.tmp, drafter="some/drafter", **{"max-steps": 1})],
        env=clean_environ(**ONE_THREAD), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "some/drafter from" in said and "when its download has ended" in said
    out = box.data / "03_train/n24/drafter"
    want = load_file(box.tmp / "published/model.safetensors")["d2t"]
    assert torch.equal(load_file(out / "model.safetensors")["d2t"], want)


def test_fails_with_the_error_of_the_download(hub, box, run, serve):  # noqa: F811
    def last(**more):
        done = run(box.tmp, check=False, drafter="some/drafter", **more)
        assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
        return done.stdout.strip().splitlines()[-1]
    assert "no drafter some/drafter, nor" in last() and "./00_preflight.sh goes on" in last()  # never begun
    box.run(HF_ENDPOINT=serve({}))
    assert "Repository Not Found" in last() or "404" in last()
    hub.rate = 1_000_000
    box.run()
    pid = int((box.data / "drafter/.download.pid").read_text())
    waiting = subprocess.Popen(
        [sys.executable, "-u", "03_train.py", *flags(box.tmp, drafter="some/drafter")], text=True,
        env=clean_environ(**ONE_THREAD), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while "when its download" not in waiting.stdout.readline():
        assert waiting.poll() is None
    os.kill(pid, signal.SIGKILL)
    said = waiting.communicate(timeout=30)[0]
    assert waiting.returncode == 1 and "no drafter some/drafter, nor" in said
    assert "no drafter some/other, nor" in run(box.tmp, check=False, drafter="some/other").stdout
