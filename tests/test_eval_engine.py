"""04_eval with a real vLLM: float32 loses nothing, its clock agrees with vLLM's own benchmark, and
every way a measurement can end badly."""
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import KIT, clean_environ, free_port, wait_until_ready
from test_eval import FAKE

pytestmark = pytest.mark.engine
FLAGS = "--dtype float32 --enforce-eager --max-model-len 2048"
SMALL = {"TENSOR_PARALLEL": "1", "ENGINE_ARGS": FLAGS, "SERVE_ARGS": "", "CONCURRENCIES": "8",
         "TEMPERATURES": "0", "REPEATS": "1", "QUESTIONS_PER_LEVEL": "1"}


class Box:
    """$DATA in `data` with the finished stages of the demo and 8 held-out questions; 04_eval on it."""

    def __init__(self, demo, data, target):
        self.sessions, self.data, self.env = set(), data, {"KIT_DATA": str(data), "KIT_TARGET": str(target)} | {
            "KIT_" + name: value for name, value in SMALL.items()}
        for name in ("02_extract", "03_train"):
            (data / name).symlink_to(demo / name)
        asked = data / "01b_generate_synthetic"
        asked.mkdir()
        (asked / "manifest.json").write_bytes((demo / asked.name / "manifest.json").read_bytes())
        lines = (demo / asked.name / "heldout_samples.jsonl").read_text().split("\n")[:8]
        (asked / "heldout_samples.jsonl").write_text("\n".join(lines) + "\n")
        self.run_dir = data / "04_eval" / next(demo.glob("03_train/*/manifest.json")).parent.name
        self.drafter = demo / "03_train" / self.run_dir.name / "drafter"

    def start(self, **settings):
        env = clean_environ(**self.env | {"KIT_" + name: str(value) for name, value in settings.items()})
        self.log = open(self.data / "log", "w+")
        return subprocess.Popen([sys.executable, "-u", KIT / "04_eval.py"], env=env, text=True,
                                stdout=self.log, stderr=subprocess.STDOUT)

    def run(self, **settings):
        status = self.start(**settings).wait(900)
        return status, self.said()

    def said(self):
        return (self.data / "log").read_text()

    def wait_for(self, words, child, seconds=240):
        deadline = time.monotonic() + seconds
        while words not in self.said():
            assert child.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        self.left()

    def results(self):
        return json.loads((self.run_dir / "results.json").read_text())

    def left(self):
        """{pid: name} of 04_eval, its servers and all that they started."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                name, fields = (path / "stat").read_text().rsplit(") ", 1)
                state, session = fields.split()[0], int(fields.split()[3])
                if f"KIT_DATA={self.data}\0".encode() in (path / "environ").read_bytes() and session == int(path.name):
                    self.sessions.add(session)  # an engine hides its environment
                if session in self.sessions and state != "Z":
                    found[int(path.name)] = name.split("(", 1)[1]
            except OSError:
                pass
        return found

    def halves(self):
        return [path for path in self.data.rglob("*") if path.name.endswith(".tmp")]


@pytest.fixture
def box(demo, target, tmp_path):
    return Box(demo, tmp_path, target)


def test_float32_answers_are_the_targets_own(box):
    status, said = box.run()
    assert status == 0, said
    got = box.results()
    assert got["dtype"] == "float32" and got["compared_outputs"] == 8
    assert got["identical_outputs"] == 8, got["partings"]
    assert got["acceptance_length"] > 1.05 and len(got["acceptance_by_position"]) == 3


# slow, this and all below: each starts servers of its own
@pytest.mark.slow
def test_questions_temperatures_second_drafter_and_k_beyond_training(box):
    files = []
    for name, rows in {
            "sums": [{"messages": [{"role": "user", "content": f"What is {i} plus {i + 3}?"}]} for i in range(3)],
            "mt": [{"category": kind, "id": f"mt{i}", "messages": [
                {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a fact."},
                {"role": "assistant", "content": "Bees dance."}, {"role": "user", "content": f"{i} more."}]}
                for i, kind in enumerate(("writing", "reasoning", "writing"))]}.items():
        files.append(box.data / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = json.loads((box.drafter.parent / "manifest.json").read_text())["num_ttt_steps"]
    k = steps + 1
    status, said = box.run(QUESTIONS=",".join(map(str, files)), TEMPERATURES="0.6", SECOND_DRAFTER=box.drafter,
                           NUM_SPECULATIVE_TOKENS=k, DRAFT_TOKENS=k, MAX_TOKENS=48, CONCURRENCIES="1,4")
    assert status == 0, said
    got = box.results()
    assert got["questions"] == 6 == got["identical_outputs"]
    assert set(got["by_category"]) == {"sums", "writing", "reasoning"}
    ours, second = got["by_k"][str(k)], got["by_k"][f"drafter-k{k}"]  # the same drafter, so the same counters
    assert ours["acceptance_by_position"] == second["acceptance_by_position"] and len(
        ours["acceptance_by_position"]) == k
    assert {(row["name"], row["temperature"], row["concurrency"]) for row in got["measurements"]} == {
        (name, t, c) for name in ("plain", f"k{k}", f"drafter-k{k}") for t in (0, 0.6) for c in (1, 4)}
    assert any(f"K = {k} is more than the {steps} steps" in note for note in got["notes"]) and "TTT_STEPS" in said
    assert got["offline_acceptance_by_position"] == [] and len(got["examples"]) == 2  # a pass at 1 asks two
    assert any(drafted for shown in got["examples"] for _, drafted in shown["pieces"])
    assert not box.left() and not box.halves()


@pytest.mark.slow
def test_killed_interrupted_not_loaded_and_continued(box, demo):
    """One series on one directory: the plain target is measured once."""
    child = box.start()
    box.wait_for("k3: ready", child)
    time.sleep(2)
    engine = [pid for pid, name in box.left().items() if "Engine" in name]
    assert len(engine) == 1, box.left()
    os.kill(engine[0], signal.SIGKILL)
    assert child.wait(60) == 1
    assert "k3: the server failed while it was measured" in box.said() and "Traceback" not in box.said()
    assert not box.left() and not box.halves()
    assert [path.name for path in box.run_dir.glob("configs/*.json")] == ["plain.json"]

    for words, number, status in ("plain: measured before", signal.SIGINT, 130), ("k3: ready", signal.SIGTERM, 143):
        child = box.start()  # first while the server loads, then while it answers
        box.wait_for(words, child)
        time.sleep(2)
        box.left()
        child.send_signal(number)
        start = time.monotonic()
        assert child.wait(60) == status and time.monotonic() - start < 8, time.monotonic() - start
        assert "to continue: run it again" in box.said() and "Traceback" not in box.said()
        assert not box.left() and not box.halves()

    (box.data / "03_train").unlink()  # a drafter with a tensor too many, which vLLM does not load
    train = box.data / "03_train" / box.run_dir.name
    (train / "drafter").mkdir(parents=True)
    for path in box.drafter.parent.glob("*.*"):
        (train / path.name).symlink_to(path)
    import torch
    from safetensors.torch import load_file, save_file
    tensors = load_file(box.drafter / "model.safetensors") | {"no_such.weight": torch.zeros(3)}
    save_file(tensors, train / "drafter/model.safetensors")
    (train / "drafter/config.json").write_bytes((box.drafter / "config.json").read_bytes())
    status, said = box.run()
    assert status == 1 and "k3: no server" in said and "no_such" in said and "Traceback" not in said
    assert not box.left()

    (train / "drafter/model.safetensors").write_bytes((box.drafter / "model.safetensors").read_bytes())
    status, said = box.run()
    assert status == 0 and "plain: measured before" in said and box.results()["identical_outputs"] == 8, said


@pytest.fixture(scope="module")
def servers(demo, target, tmp_path_factory):
    """SERVERS: a plain server and one with the demo's drafter, started by somebody else."""
    log, names, children = tmp_path_factory.mktemp("servers") / "log", [], []
    drafter = next(demo.glob("03_train/*/drafter"))
    draft = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    try:
        for name, more in ("plain", []), ("k3", ["--speculative-config", json.dumps(draft)]):
            port = free_port()
            children.append(subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--host",
                 "127.0.0.1", "--port", str(port), *FLAGS.split(), *more], env=clean_environ(),
                stdout=log.open("w"), stderr=subprocess.STDOUT))
            names.append(f"{name}=http://127.0.0.1:{port}")
            wait_until_ready(names[-1].partition("=")[2], children[-1], log)
        yield ",".join(names), children
    finally:
        for child in children:
            child.terminate()
            child.wait(60)


@pytest.mark.slow
def test_servers_that_run_already(box, servers):
    names, children = servers
    status, said = box.run(SERVERS=names, REPEATS=2)
    assert status == 0, said
    got = box.results()
    assert got["identical_outputs"] == 8 and got["acceptance_length"] > 1.05
    assert json.loads((box.run_dir / "configs/plain-again.json").read_text())["load_sec"] is None
    assert [row["passes"] for row in got["measurements"] if row["name"] == "plain"] == [4]
    assert all(child.poll() is None for child in children) and not box.left()


@pytest.mark.slow
def test_a_server_with_another_drafter_and_something_else_at_its_port(box, servers):
    plain, k3 = (part.partition("=")[2] for part in servers[0].split(","))
    status, said = box.run(SERVERS=f"plain={plain},k3={plain}")
    assert status == 1 and "drafted 0 tokens a step, want 3" in said and "Traceback" not in said
    port = free_port()
    other = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
                             cwd=box.data, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        status, said = box.run(SERVERS=f"plain={plain},k3=http://127.0.0.1:{port}")
    finally:
        other.kill()
        other.wait()
    assert status == 1 and f"nothing answers at http://127.0.0.1:{port}" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_fills_leaves_nothing_half_written(box, servers):
    small = box.data / "04_eval"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        box.run_dir.mkdir()
        (box.run_dir / "ballast").write_bytes(bytes(48 << 10))
        status, said = box.run(SERVERS=servers[0])
        assert status == 1 and "No space left" in said and "run it again" in said and "Traceback" not in said
        assert not box.halves() and not (box.run_dir / "report.html").exists()
        whole = {path.name: json.loads(path.read_text()) for path in box.run_dir.rglob("*.json")}
        assert whole["manifest.json"]["done"] is False
        subprocess.run(["mount", "-o", "remount,size=8m", small], check=True)
        status, said = box.run(SERVERS=servers[0])
        assert status == 0 and box.results()["identical_outputs"] == 8, said
        assert said.count("measured before") == len({"plain.json", "k3.json"} & set(whole))
    finally:
        subprocess.run(["umount", small], check=True)


def compare_clocks(ev, url, questions, concurrency, max_tokens, pairs):
    """Medians of tokens/s of 04_eval's client and of vLLM's own benchmark client, in turn."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    def ours():
        return ev.run_pass(url, "plain", questions, 0, concurrency, max_tokens)[1]["tokens_per_sec"]

    def theirs():
        requests = [SampleRequest(prompt=q["token_ids"], prompt_len=len(q["token_ids"]),
                                  expected_output_len=max_tokens) for q in questions]
        return asyncio.run(benchmark(
            task_type=TaskType.GENERATION, endpoint_type="openai", api_url=url + "/v1/completions",
            base_url=url, model_id="plain", model_name="plain", tokenizer=None, input_requests=requests,
            logprobs=None, request_rate=float("inf"), burstiness=1.0, disable_tqdm=True, num_warmups=0,
            profile=False, selected_percentile_metrics=["ttft"], selected_percentiles=[50.0], ignore_eos=False,
            goodput_config_dict={}, max_concurrency=concurrency, lora_modules=None, extra_headers=None,
            extra_body={"temperature": 0}, ready_check_timeout_sec=0))["output_throughput"]

    ours()
    rates = [(ours(), theirs()) if i % 2 else (theirs(), ours())[::-1] for i in range(pairs)]
    print("tokens/s ours, vLLM's:", rates)
    return [statistics.median(rate) for rate in zip(*rates)]


@pytest.mark.slow
def test_the_clock_agrees_with_vllms_benchmark_client(load, tmp_path, monkeypatch):
    """Against the stand-in, which sets the pace, so that a busy machine decides nothing."""
    ev = load("04_eval")
    (tmp_path / "server.py").write_text(FAKE)
    for name, value in ("FAKE_PIDS", str(tmp_path / "pids")), ("FAKE_PACE", "0.05"):
        monkeypatch.setenv(name, value)
    questions = [{"token_ids": [i, 7, 9]} for i in range(3, 19)]
    with ev.serving("plain", [sys.executable, str(tmp_path / "server.py")], tmp_path / "log") as (url, _):
        ours, theirs = compare_clocks(ev, url, questions, 4, 96, 3)
    assert ours == pytest.approx(theirs, rel=0.03)


# a timing on 2 cores is only worth something on a quiet machine
@pytest.mark.slow
def test_tokens_per_sec_agree_with_vllms_benchmark(target, load, tmp_path, monkeypatch):
    ev = load("04_eval")
    for name, value in clean_environ().items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--dtype",
               "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    with ev.serving("plain", command, tmp_path / "log") as (url, _):
        questions = [{"token_ids": ev.call(url + "/tokenize", model="plain", messages=[
            {"role": "user", "content": f"Tell me about the number {i} and what people use it for."}]
            ).json()["tokens"]} for i in range(16)]
        ours, theirs = compare_clocks(ev, url, questions, 8, 96, 6)
    assert ours == pytest.approx(theirs, rel=0.03)
