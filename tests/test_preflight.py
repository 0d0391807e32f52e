"""00_preflight.sh on made-up boxes: faults are found, a healthy box has none, nothing is left."""
import ctypes
import fcntl
import hashlib
import http.server
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

KIMI = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840,
        "intermediate_size": 18432, "num_attention_heads": 64}
SMALL = KIMI | {"hidden_size": 64, "vocab_size": 500, "intermediate_size": 128,
                "num_attention_heads": 4}
GPU = "{i}, NVIDIA RTX PRO 6000 Blackwell, 97887, {free}, 580.95.05, 12.0, GPU-{i}a"  # as nvidia-smi does
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def shard(path, tensors, size_bytes=0):
    """A safetensors file of zeros (sparse): {name: shape} in bf16, padded to size_bytes of data."""
    head, end = {}, 0
    for name, shape in tensors.items():
        n = 2
        for length in shape:
            n *= length
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + n]}
    if size_bytes > end:
        head["rest"] = {"dtype": "U8", "shape": [size_bytes - end],
                        "data_offsets": [end, size_bytes]}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + max(end, size_bytes))


def make_target(path, config=SMALL, shards=3, size_bytes=1000):
    """A target of sparse shards, whole in everything that preflight looks at."""
    path.mkdir(parents=True)
    where = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        shard(path / name, {f"model.layers.{i}.w": [2, 3]}, size_bytes // shards)
        where |= {f"model.layers.{i}.w": name}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (path / "config.json").write_text(json.dumps({"text_config": config}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def make_drafter(path, config=SMALL, draft_vocab=100, size_bytes=0):
    H, V = config["hidden_size"], config["vocab_size"]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": draft_vocab}))
    shard(path / "model.safetensors", {"fc.weight": [H, 3 * H], "lm_head.weight": [draft_vocab, H],
                                       "d2t": [draft_vocab], "t2d": [V]}, size_bytes)
    return path


def make_questions(path, rows=1200, column="conversations"):
    turns = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    path.write_text("".join(
        json.dumps({column: turns, "source": str(i)}) + "\n" for i in range(rows)))
    return path


class Box:
    """A made-up box: a target, a data set, a data directory; run() is a preflight on it."""

    def __init__(self, kit, tmp):
        self.kit, self.tmp, self.data = kit, tmp, tmp / "data"
        self.target = make_target(tmp / "target")
        self.questions = make_questions(tmp / "questions.jsonl")
        self.bin, self.path = tmp / "bin", None
        self.bin.mkdir()
        self.data.mkdir()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.env = {"KIT_DATA": self.data, "KIT_TARGET": self.target, "KIT_DATASET": self.questions,
                    "KIT_NUM_SAMPLES": 1000, "KIT_HELDOUT": 20, "KIT_DEVICE": "cpu",
                    "KIT_DRAFTER": "",
                    "KIT_TENSOR_PARALLEL": 1, "KIT_MAX_TOKENS": 100, "KIT_WRITE_TEST_GB": 0,
                    "KIT_STAGING_GB": 0.01, "KIT_SERVER_URL": self.url,
                    "KIT_PYTHON": sys.executable}

    def start(self, **env):
        kept = {key: value for key, value in os.environ.items()
                if not key.startswith(("KIT_", "HF_"))}
        env = {key: str(value) for key, value in (kept | self.env | env).items()
               if value is not None}
        env["PATH"] = self.path or f"{self.bin}:{env['PATH']}"
        return subprocess.Popen([self.kit / "00_preflight.sh"], env=env, text=True, cwd="/",
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                start_new_session=True)

    def run(self, **env):
        """Sets .out, .status; returns {check: [(level, message, fix)]} from preflight.json."""
        before = os.times()
        process = self.start(**env)
        self.out = process.communicate(timeout=120)[0]
        self.status, now = process.returncode, os.times()  # CPU seconds: others may be busy here
        self.seconds = sum(now[2:4]) - sum(before[2:4])
        path = Path(env.get("KIT_DATA", self.data) or "/data", "logs/preflight.json")
        self.json = json.loads(path.read_text()) if path.exists() else {"checks": []}
        found = {}
        for check in self.json["checks"]:
            found.setdefault(check["check"], []).append(
                (check["level"], check["message"], check["fix"]))
        failed = "FAIL" in [level for rows in found.values() for level, *_ in rows]
        assert (self.status != 0) == failed or not found, self.out
        broke = {check for check, rows in found.items() if rows[0][1].startswith("not checked")}
        assert not broke or "FAIL" in [found[x][0][0] for x in found.keys() - broke], self.out
        return found

    def smi(self, gpus="", apps="", status=0):
        """Put a fake nvidia-smi on PATH."""
        (self.bin / "nvidia-smi").write_text(
            f'#!/bin/sh\ncase "$*" in *compute-apps*) printf "{apps}" ;; *) printf "{gpus}" ;;\n'
            "esac\n"
            f"exit {status}\n")
        (self.bin / "nvidia-smi").chmod(0o755)

    def hide(self, tool):
        """Make `tool` look as if it were not installed: a PATH of links without it."""
        for folder in reversed(os.environ["PATH"].split(":")):
            for path in Path(folder).glob("*"):
                if path.name != tool and not (self.bin / path.name).is_symlink():
                    (self.bin / path.name).symlink_to(path)
        self.path = str(self.bin)

    def gpu_env(self):
        """Settings of a box with 8 GPUs, with a torch that was built for CUDA 13."""
        torch = self.tmp / "site/torch"
        torch.mkdir(parents=True, exist_ok=True)
        (torch / "__init__.py").write_text("raise AssertionError('preflight imported torch')")
        (torch / "version.py").write_text(
            "from typing import Optional\ncuda: Optional[str] = '13.0'\n")
        return {"KIT_DEVICE": "auto", "KIT_TENSOR_PARALLEL": 8, "PYTHONPATH": torch.parent}


@pytest.fixture
def box(kit, tmp_path):
    return Box(kit, tmp_path)


@pytest.fixture
def mount(tmp_path):
    """mount(path, "size=1g"): a tmpfs there until the test ends."""
    mounted = []

    def make(path, options):
        path.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
        mounted.append(path)
        return path
    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def levels(found):
    return {check: rows[0][0] for check, rows in found.items()}


def tree(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


# ---- healthy boxes ------------------------------------------------------------------------------
@root
def test_healthy_cpu_box(box, mount):
    mount(box.data, "size=30g")
    before = {path for folder in (box.kit, box.kit / "tests") for path in folder.iterdir()}
    found = box.run(KIT_WRITE_TEST_GB=0.05)
    assert box.status == 0 and set(levels(found).values()) == {"ok"}, box.out
    assert {"settings", "software", "mount", "write speed", "there", "model", "data", "server",
            "gpus", "memory", "drafter", "space", "training"} == set(found)
    assert tree(box.data) == ["logs", "logs/preflight.json"]  # and the test file is gone
    after = {path for folder in (box.kit, box.kit / "tests") for path in folder.iterdir()}
    assert after == before
    assert box.json["verdict"] == "ok" and int(box.json["box"]["write_mbs"]) > 0
    assert box.seconds < 5 and max(map(len, box.out.splitlines())) <= 200


@root
def test_the_reference_box_and_its_plan(box, mount):
    """8 x 96 GB, 540 GB of Kimi, a 2.8 TB volume: fp8 does not fit, what is advised does."""
    target = make_target(box.tmp / "kimi", KIMI, 119, 540_000_000_000)
    questions = make_questions(box.tmp / "many.jsonl", 26000)
    box.smi("\\n".join(GPU.format(i=i, free=97000) for i in range(8)))
    mount(box.data, f"size={2_800_000_000_000 // 1024}k")
    env = box.gpu_env() | {"KIT_TARGET": target, "KIT_DATASET": questions, "KIT_NUM_SAMPLES": 25000,
                           "KIT_HELDOUT": 200, "KIT_MAX_TOKENS": 4096, "KIT_DRAFTER":
                           make_drafter(box.tmp / "published", KIMI, 32000)}
    found = box.run(**env)
    small = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 70e9  # this box's own memory
    assert {key: level for key, level in levels(found).items() if level != "ok"} == (
        {"memory": "FAIL"} if small else {}), box.out
    assert box.json["plan"]["store"] == "int4"
    assert box.json["plan"]["bytes_per_token"] == {"bf16": 57344, "fp8": 28688, "int4": 16128}
    hours = box.json["plan"]["hours"]
    assert abs(hours["01b_generate_synthetic"] - 18.7) < 0.1
    assert abs(hours["02_extract"] - 9.6) < 0.1
    assert 30e9 < box.json["plan"]["training_bytes"] < 36e9  # 19 GB of state, head, embedding, rows
    found = box.run(**env, KIT_STORE="fp8")
    level, message, fix = found["space"][0]
    assert level == "FAIL" and "4,096 tokens x 28.7 kB = 2.96 TB (fp8)" in message
    assert f"NUM_SAMPLES={box.json['plan']['largest_num_samples']}" in fix
    assert "MAX_LEN=36" in fix and "STORE=int4 (1.66 TB)" in fix
    for name, value in (part.split("=") for part in fix.split(" (")[0].split(", or ")):
        found = box.run(**env | {"KIT_STORE": "fp8", "KIT_" + name: value})
        assert found["space"][0][0] == "ok", name
    assert box.run(**env | {"KIT_STORE": "fp8", "KIT_NUM_SAMPLES": 23000})["space"][0][0] == "FAIL"


# ---- the disk -----------------------------------------------------------------------------------
def test_root_disk_only_on_purpose(box):
    found = box.run()
    assert box.status == 0 and found["mount"][0][0] == "warn"
    if not Path("/data").exists():
        box.run(KIT_DATA=None)
        assert box.status == 1 and "FAIL  mount: /data is not mounted" in box.out
        assert not Path("/data").exists()


@root
def test_disk_faults(box, mount):
    mount(box.data, "size=100m,nr_inodes=40")
    found = box.run(KIT_NUM_SAMPLES=1100)
    assert {"mount": "ok", "space": "FAIL", "inodes": "FAIL"}.items() <= levels(found).items()
    (box.data / "full").write_bytes(b"")
    for i in range(40):  # until no inode is left: then it cannot be written
        try:
            (box.data / str(i)).touch()
        except OSError:
            break
    (box.data / "logs/preflight.json").unlink()
    (box.data / "41").touch()
    box.run()
    assert box.status == 1 and "FAIL  mount:" in box.out and "cannot write" in box.out
    (box.data / "41").unlink()
    subprocess.run(["mount", "-o", "remount,ro", box.data], check=True)
    box.run()
    assert box.status == 1 and "FAIL  mount:" in box.out and "cannot write" in box.out


@pytest.mark.parametrize("tool", ["dd", "fio"])
def test_write_speed_by_either_tool(box, tool):
    if tool == "dd":
        box.hide("fio")
    elif not shutil.which("fio"):
        pytest.skip("fio is not installed")
    level, message, _ = box.run(KIT_WRITE_TEST_GB=0.05)["write speed"][0]
    assert level == "ok" and message.endswith(f"({tool})"), message
    assert box.json["box"]["write_mbs"] > 1 and box.json["box"]["read_mbs"] > 1
    assert tree(box.data) == ["logs", "logs/preflight.json"]


@pytest.fixture
def hung(tmp_path):
    """hung(path): a mount there whose server takes the calls and never answers, as a dead NFS."""
    mounted, threads = [], []

    def make(path):
        path.mkdir(exist_ok=True)
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        flags = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
        assert not ctypes.CDLL(None).mount(b"fuse", str(path).encode(), b"fuse", 0, flags)
        select.select([fuse], [], [], 5)
        unique = struct.unpack_from("<Q", os.read(fuse, 1 << 20), 8)[0]  # FUSE_INIT is answered
        os.write(fuse, struct.pack("<IiQIIIIHHIIHHI28x", 80, 0, unique, 7, 31, 65536, 0, 12, 10,
                                   65536, 1, 1, 0, 0))
        mounted.append(path)
        threads.append(threading.Thread(target=serve, args=(fuse,), daemon=True))
        threads[-1].start()
        return path

    def serve(fuse):  # what was read cannot even be killed any more; closing ends it with an error
        deadline = time.monotonic() + 60
        while mounted and time.monotonic() < deadline:
            if select.select([fuse], [], [], 0.05)[0]:
                os.read(fuse, 1 << 20)
        os.close(fuse)
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting a FUSE file system needs root and /dev/fuse")
    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)
    mounted.clear()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name, check", [
    ("KIT_DATA", "mount"), ("KIT_TARGET", "model"), *(  # slow: each waits for 5 s, by the same code
        pytest.param(*more, marks=pytest.mark.slow) for more in (
            ("KIT_DATASET", "data"), ("KIT_DRAFTER", "drafter"), ("HF_HUB_CACHE", "model")))])
def test_a_dead_mount_is_told(box, hung, name, check):
    """Each place that it looks at, and something below it; all other checks are made."""
    place = hung(box.tmp / "dead") / ("" if name == "HF_HUB_CACHE" else "below")
    start, env = time.monotonic(), {name: place}
    process = box.start(**env | ({"KIT_TARGET": "some/model"} if name == "HF_HUB_CACHE" else {}))
    out = process.communicate(timeout=60)[0]
    assert time.monotonic() - start < 30 and process.returncode == 1
    assert f"FAIL  {check}: {place} does not answer in 5 s: a dead mount" in out
    assert " server:" in out and " memory:" in out and out.splitlines()[-1].startswith("preflight:")


@pytest.mark.parametrize("tool", ["dd", "fio"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_while_it_writes_it_leaves_nothing(box, number, tool):
    """ctrl-C goes to all processes, kill and a lost terminal to the first."""
    if tool == "dd":
        box.hide("fio")
    elif not shutil.which("fio"):
        pytest.skip("fio is not installed")
    process = box.start(KIT_WRITE_TEST_GB=2)
    deadline = time.monotonic() + 60
    while not list(box.data.glob("logs/.write_test.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(box.data.glob("logs/.write_test.*"))
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out = process.communicate(timeout=20)[0]
    assert process.returncode == 130 and "run it again" in out and "Traceback" not in out
    assert tree(box.data) == ["logs"]
    left = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert f".write_test.{process.pid}.tmp" not in left


def test_results_leftovers_and_another_run(box):
    stage = box.data / "01_generate"
    stage.mkdir()
    (stage / "manifest.json").write_text(json.dumps(
        {"stage": "01_generate", "done": True, "size": {"NUM_SAMPLES": 1000}}))
    (stage / ".samples.jsonl.4194999.tmp").write_text("torn")  # no pid is that large
    (stage / f".new.{os.getpid()}.tmp").write_text("in use")
    with open(stage / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("pid 77 on here", file=lock, flush=True)
        found = box.run()
    assert found["in the way"][0][:2] == ("FAIL", f"{stage} is in use by pid 77 on here")
    assert [row[0] for row in found["there"]] == ["ok", "warn"]
    assert "01_generate done (1,000)" in found["there"][0][1]
    assert found["there"][1][2] == f"rm {stage}/.samples.jsonl.4194999.tmp"


# ---- GPUs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("gpus, apps, status, want", [
    ([97000] * 8, "", 0, ""),
    ([97000] * 5 + [20000] + [97000] * 2, "4711, python3, 76000", 0,
     "GPU 5 in use by pid 4711 python3"),
    ([97000] * 4, "", 0, "4 GPUs (CUDA_VISIBLE_DEVICES: all), the engine wants 8"),
    ([], "", 0, "no GPU: nvidia-smi shows none"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "", 9,
     "no GPU: NVIDIA-SMI has failed"),
])
def test_gpus(box, gpus, apps, status, want):
    text = gpus if isinstance(gpus, str) else "\\n".join(
        GPU.format(i=i, free=free) for i, free in enumerate(gpus))
    box.smi(text, apps, status)
    found = box.run(**box.gpu_env())
    assert found["gpus"][0][0] == ("FAIL" if want else "ok"), box.out
    assert want in found["gpus"][0][1] and ("kill 4711" in found["gpus"][0][2] or not apps)


def test_more_gpu_faults(box):
    env = box.gpu_env()
    assert "no nvidia-smi" in box.run(**env)["gpus"][0][1]
    target = make_target(box.tmp / "large", KIMI, 10, 800_000_000_000)
    box.smi("\\n".join(GPU.format(i=i, free=97000).replace("580.95", "570.1") for i in range(8)))
    found = box.run(**env | {"KIT_TARGET": target, "CUDA_VISIBLE_DEVICES": "0,1"})
    lines = "\n".join(row[1] for row in found["gpus"])
    assert "2 GPUs (CUDA_VISIBLE_DEVICES: 0,1)" in lines and "a GPU has 0.9 of 103 GB" in lines
    assert "driver 570.1.05 is too old for torch's CUDA 13" in lines


@pytest.mark.parametrize("mask, want, level", [
    ("0,1", 2, "ok"), ("1,0", 2, "ok"), ("GPU-0a,GPU-1a", 2, "ok"), ("5", 1, "FAIL"),
    ("", 1, "FAIL"), ("-1", 1, "FAIL"), ("0,1", 3, "FAIL")])
def test_a_gpu_that_is_masked_is_not_looked_at(box, mask, want, level):
    """Somebody else has GPU 5: it is in the way only of a run that may see it."""
    box.smi("\\n".join(GPU.format(i=i, free=20000 if i == 5 else 97000) for i in range(8)),
            "4711, python3, 76000")
    env = box.gpu_env() | {"CUDA_VISIBLE_DEVICES": mask, "KIT_TENSOR_PARALLEL": want}
    found = box.run(**env)
    assert found["gpus"][0][0] == level, box.out
    assert ("4711" in found["gpus"][0][1]) == (mask == "5")


# ---- the model and the data set -----------------------------------------------------------------
def test_model_faults(box):
    one, two, three = sorted(box.target.glob("*.safetensors"))
    whole = {path: path.read_bytes() for path in (one, two, three)}
    one.write_bytes(whole[one][:-1])
    two.write_bytes(whole[two] + b"\0")
    three.unlink()
    (box.target / "chat_template.jinja").unlink()
    level, message, fix = box.run()["model"][0]
    assert level == "FAIL" and box.status == 1 and "and 1 more" in message
    size = len(whole[one])
    assert f"{one.name} is {size - 1:,} bytes, its header wants {size:,}" in message
    assert f"{two.name} is" in message and f"{three.name} is missing" in message
    for path, content in whole.items():
        path.write_bytes(content)
    index = box.target / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    where["weight_map"]["model.layers.9.w"] = one.name
    index.write_text(json.dumps(where))
    two.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = box.run(KIT_DATASET="no/such-set", HF_ENDPOINT=box.url)["model"][0][1]
    assert f"{one.name} lacks model.layers.9.w" in message and "no chat template" in message
    assert f"{two.name} has no readable header" in message
    assert "FAIL  data: no/such-set is neither here nor on the hub" in box.out
    box.run(KIT_TARGET="some/model", HF_HUB_CACHE=box.tmp / "empty")
    assert "FAIL  model: some/model is not on this box" in box.out
    assert "hf download some/model" in box.out


def test_full_verification(box):
    paths = sorted(box.target.glob("*.safetensors"))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    (box.target / "SHA256SUMS").write_text("".join(f"{v}  {k}\n" for k, v in sums.items()))
    assert box.run(KIT_VERIFY="full")["sha256"][0][:2] == ("ok", "3 files are what they should be")
    (box.target / "SHA256SUMS").write_text("".join(f"{v}  {k}\n" for k, v in list(sums.items())[:2]))
    assert box.run(KIT_VERIFY="full")["sha256"][0][:2] == ("FAIL", "1 files have nothing to compare with")
    (box.target / "SHA256SUMS").write_text("".join(f"{v}  {k}\n" for k, v in sums.items()))
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1
    paths[1].write_bytes(content)
    found = box.run(KIT_VERIFY="full")
    assert found["model"][0][0] == "ok" and found["sha256"][0][0] == "FAIL"
    assert found["sha256"][0][1] == f"wrong: {paths[1].name}"


def test_data_set_and_settings_faults(box):
    other = make_questions(box.tmp / "other.jsonl", column="text")
    found = box.run(KIT_DATASET=other, KIT_NUM_SAMPELS=5)
    assert found["data"][0][0] == "FAIL"
    assert "columns text, source hold no conversations" in found["data"][0][1]
    assert found["settings"][0] == ("warn", "no file has a constant for KIT_NUM_SAMPELS",
                                    "did you mean KIT_NUM_SAMPLES?")
    found = box.run(KIT_NUM_SAMPLES=9000)
    assert found["data"][0][0] == "FAIL" and "1,200 rows, 9,020 needed" in found["data"][0][1]
    torn = box.tmp / "torn.parquet"
    torn.write_bytes(b"PAR1 and no more")
    box.run(KIT_DATASET=torn, KIT_EPOCHS="many")
    assert "FAIL  data:" in box.out and "FAIL  settings:" in box.out and "--epochs" in box.out
    found = box.run(KIT_DATASET=torn)["data"][0]
    assert found[0] == "FAIL" and "is no whole parquet file" in found[1]


def feature(name, *fields, dtype="string"):
    """A column as `datasets` writes it into a data set's card."""
    return {"name": name} | ({"list": [{"name": field, "dtype": "string"} for field in fields]}
                             if fields else {"dtype": dtype})


@pytest.mark.parametrize("features, rows, level, message", [
    ([feature("conversations", "from", "value"), feature("source")], 5000, "ok", "5,000 rows by its"),
    ([feature("messages", "role", "content")], 0, "ok", "0 rows by its card"),
    ([feature("messages", "content", "role")], 5000, "ok", "5,000 rows"),
    ([feature("prompt")], 5000, "ok", "5,000 rows"),
    ([feature("conversations", "from", "value")], 900, "FAIL", "900 rows by its card, 1,020 needed"),
    ([feature("instruction"), feature("output")], 5000, "FAIL", "columns instruction, output hold no"),
    ([feature("conversations", "speaker", "text")], 5000, "FAIL", "columns conversations hold no"),
    ([feature("conversations")], 5000, "FAIL", "columns conversations hold no conversations"),
    ([], 5000, "warn", "its card names no columns"),
])
def test_data_set_on_the_hub(box, serve, features, rows, level, message):
    """Rows and columns are known from its card, before anything is copied."""
    card = {"dataset_info": {"features": features, "splits": [
        {"name": "train", "num_examples": rows}]}}
    env = {"KIT_DATASET": "some/set", "HF_ENDPOINT": serve({"/api/datasets/some/set": (200, {
        "id": "some/set", "sha": "b" * 40, "siblings": [], "cardData": card})})}
    found = box.run(**env, KIT_NUM_SAMPLES=1000)["data"]
    assert found[0][0] == level and message in found[0][1]


def test_configurations_of_a_data_set_on_the_hub(box, serve):
    one = {"features": [feature("prompt")], "splits": [{"name": "train", "num_examples": 700}]}
    env = {"KIT_DATASET": "some/set", "HF_ENDPOINT": serve({"/api/datasets/some/set": (200, {
        "id": "some/set", "sha": "b" * 40, "siblings": [], "cardData": {
            "dataset_info": [one | {"config_name": "a"}, one | {"config_name": "b"}]}})})}
    assert box.run(**env)["data"][0][:2] == (
        "ok", "some/set: 1,400 rows by its card, 1,020 needed; 01_generate copies it")


@pytest.mark.parametrize("file, key", [("config.json", "AutoConfig"),
                                       ("tokenizer_config.json", "AutoTokenizer")])
def test_code_that_comes_with_the_model(box, file, key):
    config = json.loads((box.target / file).read_text()) | {"auto_map": {key: "own.Class"}}
    (box.target / file).write_text(json.dumps(config))
    level, message, fix = box.run()["model"][0]
    assert level == "warn" and f"code of its own, for {key}" in message
    assert fix.startswith("TRUST_REMOTE_CODE=1")
    assert box.run(KIT_TRUST_REMOTE_CODE=1)["model"][0][0] == "ok"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json",
                                  "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"half": ', b"\xff\xfe", b"[1]", b"7"])
def test_damaged_json_of_the_model(box, file, content):
    (box.target / file).write_bytes(content)
    found = box.run()
    assert found["model"][0][0] == "FAIL" and f"{file} is damaged" in found["model"][0][1], box.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_while_it_verifies(box, number):
    """SIGTERM to its pid alone, ctrl-C to all: nothing runs on, nothing is left."""
    sums = {}
    for path in sorted(box.target.glob("*.safetensors"))[:1]:
        shard(path, {"model.layers.0.w": [2, 3]}, 60_000_000_000)  # a minute of hashing, sparse
        sums[path.name] = "0" * 64
    (box.target / "SHA256SUMS").write_text("".join(f"{v}  {k}\n" for k, v in sums.items()))
    process = box.start(KIT_VERIFY="full")
    for line in process.stdout:
        if " model:" in line:
            break
    time.sleep(0.5)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.terminate()
    out = process.communicate(timeout=10)[0]
    assert process.returncode == 130 and "run it again" in out and "Traceback" not in out
    left = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True,
                          text=True)
    assert left.stdout.split() == [] and tree(box.data) == ["logs"]


# ---- the server ---------------------------------------------------------------------------------
class Answer(http.server.BaseHTTPRequestHandler):
    """Routes of the test's server: {path: (status, JSON, bytes or a function of the handler)}."""

    def do_GET(self):
        status, body = self.server.routes.get(self.path.split("?")[0], (404, {}))
        if callable(body):
            return body(self)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """serve(routes): a local HTTP server, its URL; ends with the test."""
    servers = []

    def start(routes):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        server.routes, server.daemon_threads = routes, True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_servers_that_answer(box, serve):
    def vllm(name):
        return {"/health": (200, b""), "/v1/models": (200, {"data": [
            {"id": name, "root": name, "owned_by": "vllm", "max_model_len": 2048}]})}
    good, other = serve(vllm(str(box.target))), serve(vllm("another/model"))
    dead, alien = serve({"/health": (503, b"")}), serve({"/": (200, b"hello")})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = box.run(KIT_SERVER_URL=",".join([good, other, dead, alien, hangs]))
        dead_log = "ERROR [core] EngineCore died: torch.OutOfMemoryError: CUDA out of memory."
        (box.data / "logs/server.log").write_text(f"Application startup complete.\n{dead_log}\n")
        last_words = box.run(KIT_SERVER_URL=dead)["server"][0]
        assert last_words[:2] == ("FAIL", f"{dead}: its engine is dead: {dead_log}")
    rows = [(level, message) for level, message, _ in found["server"]]
    assert rows[0] == ("ok", f"{good} is healthy: {box.target}, max length 2,048")
    assert rows[1] == ("FAIL", f"{other} serves another/model, not {box.target}")
    assert rows[2] == ("FAIL", f"{dead}: its engine is dead")
    assert rows[3] == ("FAIL", f"{alien} is something else, not vLLM (status 404 on /health)")
    assert rows[4] == ("FAIL", f"{hangs} takes the connection and does not answer in 3 s")
    found = box.run(KIT_SERVER_URL=good, KIT_MAX_TOKENS=2048)
    assert found["server"][0][0] == "FAIL" and "no room for MAX_TOKENS" in found["server"][0][1]


@pytest.mark.parametrize("target, cards, level", [
    ("here", [("/models/target", "/models/target")], "ok"),  # the same name elsewhere, as 01b takes it
    ("here", [("alias", "/models/target")], "ok"),
    ("here", [("lora", "/adapters/one"), ("x", "/models/target")], "ok"),
    ("here", [("/models/target-2", "/models/target-2")], "FAIL"),
    ("hub/Kimi-K2.5", [("Kimi-K2.5", None)], "ok"), ("hub/Kimi-K2.5", [("Kimi-K2", None)], "FAIL"),
])
def test_the_same_model_under_another_name(box, serve, target, cards, level):
    url = serve({"/health": (200, b""), "/v1/models": (200, {"data": [
        {"id": name, "root": root, "max_model_len": None} for name, root in cards]})})
    env = {} if target == "here" else {"KIT_TARGET": target, "HF_HUB_CACHE": box.tmp / "empty"}
    assert box.run(KIT_SERVER_URL=url, **env)["server"][0][0] == level


def test_a_server_that_wants_a_key(box, serve):
    """It gets VLLM_API_KEY, which no other process can read, nor a file shows."""
    seen = []

    def models(handler):
        seen.append(subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout)
        right = handler.headers["Authorization"] == "Bearer topsecret123"
        body = json.dumps({"data": [{"id": "target", "max_model_len": 2048}]} if right else {})
        handler.send_response(200 if right else 401)
        handler.send_header("Content-Length", len(body))
        handler.end_headers()
        handler.wfile.write(body.encode())
    url = serve({"/health": (200, b""), "/v1/models": (200, models)})
    for key in (None, "wrong"):
        level, message, fix = box.run(KIT_SERVER_URL=url, VLLM_API_KEY=key)["server"][0]
        assert level == "FAIL" and "key" in message and "VLLM_API_KEY" in fix
    assert box.run(KIT_SERVER_URL=url, VLLM_API_KEY="topsecret123")["server"][0][0] == "ok"
    assert len(seen) == 3 and not any("topsecret123" in text or "Bearer" in text for text in seen)
    assert "topsecret123" not in box.out + (box.data / "logs/preflight.json").read_text()


def test_a_list_of_silent_servers_costs_no_more_than_one(box):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        found = box.run(KIT_SERVER_URL=",".join([
            f"http://127.0.0.1:{silent.getsockname()[1]}"] * 8))
        assert time.monotonic() - start < 20 and len(found["server"]) == 8


def test_servers_that_refuse(box):
    assert box.run()["server"][0][:2] == ("ok", f"{box.url} is not running; run_all.sh starts it")
    log = box.data / "logs/server.log"
    log.write_text("INFO 12-01 05:00:00 [x] Loading\nLoading safetensors checkpoint shards:  42% "
                   "Completed "
                   "| 50/119 [10:02<13:51, 12.05s/it]\r")
    level, message, _ = box.run()["server"][0]
    assert level == "ok" and f"{box.url} is loading: 42% shards 50/119" in message
    command = [sys.executable, "-c", "import time; time.sleep(60)",
               "vllm.entrypoints.openai.api_server"]
    with subprocess.Popen([*command, "--port", box.url.split(":")[-1]]) as process:
        os.utime(log, (0, 0))  # silent for long, but the process is there
        message = box.run()["server"][0][1]
        assert "50/119, for 0 min (pid " + str(process.pid) in message
        process.kill()
    os.utime(log)
    with log.open("a") as file:
        print("ERROR 12-01 05:10:00 [core] torch.OutOfMemoryError: CUDA out of memory.", file=file)
    level, message, _ = box.run()["server"][0]
    assert level == "warn" and message.endswith("torch.OutOfMemoryError: CUDA out of memory.")
    log.write_text("Application startup complete.\nINFO Shutting down\n")
    assert "is not running" in box.run()["server"][0][1]


# ---- the published drafter ----------------------------------------------------------------------
class Hub:
    """A hub of one repository, made of the files of a directory; it can be slow, or break off."""

    def __init__(self, directory, serve):
        self.files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
        self.files = {"README.md": b"# it", "training_state.pt": b"x" * 1000} | self.files
        self.rate, self.asked, self.starts, sha = None, [], [], "a" * 40
        siblings = [{"rfilename": name, "size": len(self.files[name])} for name in self.files]
        tree = [{"type": "file", "path": name, "size": len(content),
                 "oid": hashlib.sha1(content).hexdigest()} for name, content in self.files.items()]
        routes = {"/api/models/some/drafter": (200, {
            "id": "some/drafter", "modelId": "some/drafter", "sha": sha, "siblings": siblings})}
        routes[f"/api/models/some/drafter/revision/{sha}"] = routes["/api/models/some/drafter"]
        routes[f"/api/models/some/drafter/tree/{sha}"] = 200, tree
        routes |= {f"/some/drafter/resolve/{sha}/{name}": (200, self.send) for name in self.files}
        self.url, self.routes = serve(routes), routes

    def send(self, handler):
        name = handler.path.split("/")[-1]
        content = self.files[name]
        start = int((handler.headers["Range"] or "=0-").split("=")[1].split("-")[0])
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        content = content[start:]
        handler.send_header("Content-Length", len(content))
        handler.send_header("X-Repo-Commit", "a" * 40)
        handler.send_header("ETag", hashlib.sha1(content).hexdigest())
        handler.end_headers()
        if handler.command == "HEAD":
            return
        self.asked.append(name)
        self.starts.append(start)
        try:
            for at in range(0, len(content), 1_000_000):
                handler.wfile.write(content[at:at + 1_000_000])
                if self.rate:
                    time.sleep(len(content[at:at + 1_000_000]) / self.rate)
        except OSError:
            pass  # the client was killed


def ended(pid_file):
    """Wait until the download that holds the lock of its pid file is over."""
    deadline = time.monotonic() + 30
    with open(pid_file) as lock:
        while time.monotonic() < deadline:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
    raise AssertionError("the download does not end")


def test_download_is_killed_and_continued(box, serve):
    hub = Hub(make_drafter(box.tmp / "published", size_bytes=90_000_000), serve)
    here, home = box.data / "drafter", box.tmp / "home"
    env = {"KIT_DRAFTER": "some/drafter", "HF_ENDPOINT": hub.url, "HOME": home}
    hub.rate = 10_000_000
    found = box.run(**env)
    assert box.status == 0 and "downloading some/drafter" in found["drafter"][0][1]
    pid = int((here / ".download.pid").read_text())
    while "model.safetensors" not in hub.asked or not (here / "config.json").exists():
        time.sleep(0.05)
    found = box.run(**env)  # a second one looks, and starts none
    assert int((here / ".download.pid").read_text()) == pid
    assert " of 90 MB" in found["drafter"][0][1]
    assert hub.asked.count("model.safetensors") == 1
    part = here / ".model.safetensors.part"
    while part.stat().st_size == 0:  # the client writes 10 MB at a time
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    ended(here / ".download.pid")
    size = part.stat().st_size
    hub.rate, hub.asked, hub.starts = None, [], []
    found = box.run(**env)
    assert found["drafter"][0][0] == "ok" and "downloading" in found["drafter"][0][1]
    ended(here / ".download.pid")
    assert hub.asked == ["model.safetensors"]  # what was whole is not fetched again
    assert hub.starts == [size] and size > 0  # nor what there was of the other
    found = box.run(**env)
    assert found["drafter"][0][1].endswith("draft vocabulary 100, fits the target"), box.out
    assert (here / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert sorted(path.name for path in here.iterdir() if path.name[0] != ".") == [
        "README.md", "config.json", "model.safetensors"]
    assert not list(here.glob(".*.part"))
    assert len(hub.asked) == 1 and not home.exists()  # nothing in the cache of the user
    found = box.run(**env | {"KIT_DRAFTER": "some/other"})
    assert "holds some/drafter, DRAFTER is some/other" in found["drafter"][0][1]


@pytest.mark.parametrize("fault", ["refused", "cut", "moved on"])
def test_a_download_that_failed_is_told_and_continued(box, serve, fault):
    hub = Hub(make_drafter(box.tmp / "published", size_bytes=30_000_000), serve)
    here, route = box.data / "drafter", f"/some/drafter/resolve/{'a' * 40}/model.safetensors"
    env = {"KIT_DRAFTER": "some/drafter", "HF_ENDPOINT": hub.url, "HOME": box.tmp / "home"}

    def cut(handler):
        if not handler.headers["Range"]:
            handler.send_response(200)
            handler.send_header("Content-Length", len(hub.files["model.safetensors"]))
            handler.end_headers()
            handler.wfile.write(hub.files["model.safetensors"][:25_000_000])
        else:
            handler.send_error(403, "the hub's own words")
    hub.routes[route] = {"refused": (403, {"error": "Access denied"}), "cut": (200, cut),
                         "moved on": (403, {"error": "for now"})}[fault]
    box.run(**env)
    ended(here / ".download.pid")
    hub.routes[route] = 200, hub.send
    if fault == "moved on":  # the repository has a new commit: what was begun is what is finished
        hub.routes["/api/models/some/drafter"][1]["sha"] = "b" * 40
        hub.routes["/api/models/some/drafter/revision/" + "a" * 40] = 200, (
            hub.routes["/api/models/some/drafter"][1] | {"sha": "a" * 40})
    hub.starts = []
    level, message, _ = box.run(**env)["drafter"][0]
    words = {"refused": "Access denied", "cut": "permissions", "moved on": "for now"}[fault]
    assert level == "warn" and "the last try: " in message and words in message
    ended(here / ".download.pid")
    assert box.run(**env)["drafter"][0][0] == "ok"
    assert len(hub.starts) == 1 and (hub.starts[0] > 20_000_000) == (fault == "cut")
    assert (here / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_drafter_faults(box, serve):
    found = box.run(KIT_DRAFTER="some/drafter", HF_ENDPOINT=serve({}))
    assert found["drafter"][0][0] == "FAIL"
    assert "download of some/drafter failed" in found["drafter"][0][1]
    (box.data / "logs/drafter_download.log").read_text().index("error")
    assert not (box.data / "drafter").exists()
    found = box.run(KIT_DRAFTER=make_drafter(box.tmp / "wide", SMALL | {"hidden_size": 128}))
    assert found["drafter"][0][0] == "FAIL"
    assert "hidden_size is 128, the target wants 64" in found["drafter"][0][1]
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}  # 02 reads no directory of DRAFTER
    odd = make_drafter(box.tmp / "odd", SMALL | layers)
    level, said, fix = box.run(KIT_DRAFTER=odd)["drafter"][0]
    assert level == "FAIL" and "reads layers [1, 2, 3], 02 would extract" in said and fix == "LAYER_IDS=1,2,3"
    assert box.run(KIT_DRAFTER=odd, KIT_LAYER_IDS="1,2,3")["drafter"][0][0] == "ok"
    hub = Hub(make_drafter(box.tmp / "published"), serve)
    hub.files["model.safetensors"] = bytes(len(hub.files["model.safetensors"]))  # damaged
    env = {"KIT_DRAFTER": "some/drafter", "HF_ENDPOINT": hub.url, "HOME": box.tmp / "home"}
    box.run(**env)
    ended(box.data / "drafter/.download.pid")
    found = box.run(**env)
    assert found["drafter"][0][0] == "FAIL"
    assert "model.safetensors has no readable header" in found["drafter"][0][1]


# ---- the plan -----------------------------------------------------------------------------------
def test_plan_takes_what_was_measured(box):
    first = {"stage": "01_generate", "done": True, "size": {"NUM_SAMPLES": 300}, "counts": {
        "questions": 300, "heldout": 20, "samples": 900, "heldout_samples": 60},
             "tokens": {"answer": 1}}
    (box.data / "01_generate").mkdir()
    (box.data / "01_generate/manifest.json").write_text(json.dumps(first))
    box.run()
    assert box.json["plan"]["samples"] == 3 * 1020  # recorded answers tell turns, not lengths
    assert box.json["plan"]["measured"] is None and box.json["plan"]["tokens_per_sample"] == 100
    made = {"stage": "01b_generate_synthetic", "done": True, "size": {"questions": 50}, "counts": {
        "samples": 90, "heldout_samples": 10}, "tokens": {"prompt": 2000, "answer": 6000}}
    (box.data / "01b_generate_synthetic").mkdir()
    (box.data / "01b_generate_synthetic/manifest.json").write_text(json.dumps(made))
    (box.data / "02_extract").mkdir()
    (box.data / "02_extract/run.json").write_text('{"seconds": 4.0, "tokens": 1000}')
    (box.data / "03_train/n90").mkdir(parents=True)
    (box.data / "03_train/n90/metrics.jsonl").write_text('{"step": 1, "tokens_per_sec": 777.0}\n')
    box.run(KIT_STORE="bf16")
    plan = box.json["plan"]
    assert plan["measured"] == "01b_generate_synthetic" and plan["tokens_per_sample"] == 80
    assert plan["samples"] == 2 * 1020  # two answers a question
    assert plan["bytes_per_token"]["bf16"] == 2 * 64 * 3.75  # y at answer positions only
    assert plan["bytes"]["02_extract"] == 2040 * 80 * 480
    assert plan["rates"]["03_train"] == [777, "measured"]
    assert plan["rates"]["02_extract"] == [250, "measured"]
    assert plan["rates"]["01b_generate_synthetic"][1].startswith("assumed")


def test_hours_of_all_stages_as_they_were_measured(box):
    for name, run in (("01_generate", {"seconds": 7200}), ("04_eval/n90", {"seconds": 3600}),
                      ("01b_generate_synthetic", {"seconds": 100, "tokens": 5000})):
        (box.data / name).mkdir(parents=True)
        (box.data / name / "run.json").write_text(json.dumps(run))
    box.run()
    assert box.json["plan"]["rates"]["01b_generate_synthetic"] == [50, "measured"]
    hours = box.json["plan"]["hours"]
    assert hours["01_generate"] == 2 and hours["04_eval"] == 1 and len(hours) == 5
    assert hours["01b_generate_synthetic"] == 1020 * 100 / 50 / 3600
    assert box.out.count(" h") >= 6


@root
@pytest.mark.parametrize("env", [{}, {"KIT_STORE": "fp8"}, {"KIT_MAX_TOKENS": 3000}, {"KIT_LAYER_IDS": "2,3"},
                                 {"KIT_MAX_LEN": 90, "KIT_STORE": "bf16"}, {"KIT_NUM_SAMPLES": 9e7}])
def test_what_the_space_line_advises_fits(box, mount, env):
    """Each of the values in the fix, set alone, makes the plan fit."""
    mount(box.data, "size=100m")
    env = {"KIT_NUM_SAMPLES": 4000, "KIT_MIN_FREE_GB": 0, "KIT_DATASET": box.questions} | env
    env["KIT_NUM_SAMPLES"] = int(env["KIT_NUM_SAMPLES"])
    level, message, fix = box.run(**env)["space"][0]
    assert level == "FAIL", box.out
    values = [part.split(" (")[0].split("=") for part in fix.split(", or ") if "=" in part]
    assert values or fix == "a larger volume"
    for name, value in values:
        assert box.run(**env | {"KIT_" + name: value})["space"][0][0] == "ok", (name, value)


@root
def test_a_store_that_02_has_begun_with_is_kept_and_no_other_advised(box, mount):
    mount(box.data, "size=165m")
    (box.data / "02_extract").mkdir()
    (box.data / "02_extract/manifest.json").write_text('{"store": "bf16", "size": {}}')
    level, message, fix = box.run(KIT_STORE="int4", KIT_NUM_SAMPLES=1100, KIT_MIN_FREE_GB=0)["space"][0]
    assert level == "FAIL" and "(bf16)" in message and "STORE" not in fix and "NUM_SAMPLES" in fix


def test_a_tool_that_is_missing(box):
    box.hide("findmnt")
    found = box.run()
    assert found["software"][0][:2] == ("FAIL", "no findmnt")


def test_shellcheck(kit):
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not tool:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([tool, kit / "00_preflight.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
