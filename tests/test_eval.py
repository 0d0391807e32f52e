"""04_eval: its arithmetic by hand, and the stage against a small server that speaks vLLM's HTTP."""
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

# A stand-in for `python -m vllm.entrypoints.openai.api_server`: answers are a function of the
# prompt; with K drafted tokens each step of an answer has 1 + (step number % (K + 1)) tokens.
# FAKE tells what goes wrong: load, die (while it is asked), differ, far (by no near tie), deaf.
FAKE = '''
import asyncio, json, os, signal, subprocess, sys, time
from aiohttp import web
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
name, fault = flags["--served-model-name"], os.environ.get("FAKE", "")
k = json.loads(flags.get("--speculative-config", '{"num_speculative_tokens": 0}'))["num_speculative_tokens"]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["FAKE_PIDS"], "a").write(f"{os.getpid()} {child.pid}\\n")
print("usage stats:", "off" if os.environ.get("VLLM_NO_USAGE_STATS") == "1" else "on", flush=True)
if fault == "load" and k:
    print("(APIServer pid=1) ERROR 12-01 10:00:00 [core.py:9] ValueError: no such tensor fc.weight", flush=True)
    child.kill()
    sys.exit(1)
if fault == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), child.wait(), os._exit(0)))
drafts, per, asked = 0, [0] * k, 0
async def models(_):
    return web.json_response({"data": [{"id": name}]})
async def metrics(_):
    lines = ['vllm:generation_tokens_total{engine="0"} 7.0']
    if k:
        lines += [f'vllm:spec_decode_num_{key}_total{{engine="0",model_name="a b"}} {float(value)}' for key, value in
                  (("drafts", drafts), ("draft_tokens", drafts * k), ("accepted_tokens", sum(per)))]
        lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {n:.1f}'
                  for i, n in enumerate(per)]
    return web.Response(text="\\n".join(lines) + "\\n")
async def complete(request):
    global drafts, asked
    body = await request.json()
    if not body.get("stream"):
        top = {f"token_id:{t}": (0.0 if t < 900 else -9.0 if fault == "far" else -0.01) for t in range(1, 2000)}
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": [top]}}]})
    asked += 1
    if fault == "die" and k and asked > 6:
        print("RuntimeError: the engine is gone", flush=True)
        os._exit(1)
    total = min(body["max_tokens"], 5 + sum(body["prompt"]) % 20)
    answer = [10 + (sum(body["prompt"]) + i) % 500 for i in range(total)]
    if fault in ("differ", "far") and k and sum(body["prompt"]) % 2:
        answer[3] = 950
    response = web.StreamResponse()
    await response.prepare(request)
    at = step = 0
    while at < total:
        await asyncio.sleep(float(os.environ.get("FAKE_PACE", 0.002)))
        accepted = step % (k + 1) if step else 0
        if step and k:
            drafts += 1
            for i in range(accepted):
                per[i] += 1
        ids = answer[at:at + 1 + accepted]
        at += len(ids)
        step += 1
        chunk = {"choices": [{"token_ids": ids, "text": "", "finish_reason": "stop" if at >= total else None}]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
    if body.get("stream_options"):
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\\n\\n")
    await response.write(b"data: [DONE]\\n\\n")
    return response
async def tokenize(request):
    return web.json_response({"tokens": [ord(c) % 90 + 1 for c in (await request.json())["messages"][-1]["content"]]})
async def detokenize(request):
    return web.json_response({"prompt": "".join(f"<{t}>" for t in (await request.json())["tokens"])})
app = web.Application()
app.router.add_get("/v1/models", models)
app.router.add_get("/metrics", metrics)
app.router.add_post("/v1/completions", complete)
app.router.add_post("/tokenize", tokenize)
app.router.add_post("/detokenize", detokenize)
web.run_app(app, host="127.0.0.1", port=int(flags["--port"]), handle_signals=False, print=None)
'''

SETTINGS = {"TENSOR_PARALLEL": "1", "ENGINE_ARGS": "--dtype float32", "SERVE_ARGS": "",
            "CONCURRENCIES": "1,4", "TEMPERATURES": "0", "QUESTIONS_PER_LEVEL": "4", "REPEATS": "2",
            "DRAFT_TOKENS": "1,3"}


@pytest.fixture(scope="module")
def ev(load):
    return load("04_eval")


def write_manifest(directory, stage, inputs, **more):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_text(json.dumps(
        {"stage": stage, "settings": {}, "inputs": inputs, "size": {}, "files": {}, "done": True} | more))


@pytest.fixture
def box(tmp_path, kit):
    """A finished 03_train of a small target, and run(env, flags) of 04_eval with the stand-in."""
    data, target = tmp_path / "data", tmp_path / "little"
    target.mkdir()
    config = {"hidden_size": 8, "vocab_size": 2000, "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))
    target_id = hashlib.sha256((target / "config.json").read_bytes()).hexdigest()[:16]
    inputs = {"target": target_id}
    write_manifest(data / "01b_generate_synthetic", "01b_generate_synthetic", inputs,
                   settings={"MAX_TOKENS": 24})
    rows = [{"id": f"q{i}", "source": "ab"[i % 2], "token_ids": [i + 3, 4, 5, 99], "prompt_len": 3}
            for i in range(8)]
    (data / "01b_generate_synthetic/heldout_samples.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows))
    write_manifest(data / "02_extract", "02_extract", inputs, counts={"samples": 10},
                   settings={"SAMPLES_FROM": "01b_generate_synthetic"})
    train = data / "03_train/n10"
    write_manifest(train, "03_train", inputs, num_ttt_steps=3, files={
        "drafter/model.safetensors": {"bytes": 1, "sha256": "0" * 64}},
        best={"acceptance_length": 2.5, "acceptance_by_position": [0.75, 0.5, 0.25], "step": 4})
    (train / "drafter").mkdir()
    (train / "drafter/model.safetensors").write_text("x")
    (train / "drafter/config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    (train / "curves.png").write_bytes(b"a picture")
    module = tmp_path / "fake/vllm/entrypoints/openai"
    module.mkdir(parents=True)
    for directory in (module, module.parent, module.parent.parent):
        (directory / "__init__.py").write_text("")
    (module / "api_server.py").write_text(FAKE)
    env = {k: v for k, v in os.environ.items() if not k.startswith("KIT_")} | {
        "PYTHONPATH": str(tmp_path / "fake"), "FAKE_PIDS": str(tmp_path / "pids"),
        "KIT_DATA": str(data), "KIT_TARGET": str(target)} | {"KIT_" + k: v for k, v in SETTINGS.items()}

    class Box:
        out, pids = data / "04_eval/n10", tmp_path / "pids"

        def start(self, fault="", *flags):
            return subprocess.Popen([sys.executable, "-u", kit / "04_eval.py", *flags], text=True,
                                    env=env | {"FAKE": fault}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        def run(self, fault="", *flags):
            child = self.start(fault, *flags)
            text = child.communicate(timeout=120)[0]
            return child.returncode, text

        def left(self):
            """Process ids of servers and their children that still run."""
            ids = self.pids.read_text().split() if self.pids.exists() else []
            return [pid for pid in ids if alive(pid)]

        def results(self):
            return json.loads((self.out / "results.json").read_text())
    Box.data, Box.tmp = data, tmp_path
    return Box()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def one_pass(rate, temperature=0, concurrency=1, tpot=10.0, length=None):
    return {"temperature": temperature, "concurrency": concurrency, "tokens_per_sec": rate,
            "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "tpot_p50_ms": tpot, "tpot_p99_ms": 9.0,
            "acceptance_length": length}


# ---- pure functions ----

def test_acceptance_is_the_counters_ratio(ev):
    old = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 9, 0: 6, 1: 2, 2: 1}
    new = {"drafts": 110, "draft_tokens": 330, "accepted_tokens": 99, 0: 56, 1: 32, 2: 11}
    got = ev.acceptance(new, old)
    assert got["acceptance_length"] == pytest.approx(1.9)
    assert got["acceptance_by_position"] == pytest.approx([0.5, 0.3, 0.1])
    assert got["wasted"] == pytest.approx(0.7) and got["drafts"] == 100
    nothing = ev.acceptance(old, old)
    assert nothing["acceptance_length"] is None and nothing["wasted"] is None


def test_verdict_needs_passes_that_do_not_overlap(ev):
    records = [
        {"name": "plain", "k": None, "passes": [one_pass(20), one_pass(22), one_pass(100, 0, 8)]},
        {"name": "k1", "k": 1, "passes": [one_pass(24), one_pass(25), one_pass(60, 0, 8)]},
        {"name": "k3", "k": 3, "passes": [one_pass(19), one_pass(30), one_pass(130, 0, 8)]},
        {"name": "plain-again", "k": None, "passes": [one_pass(21)]}]
    rows = {(r["name"], r["concurrency"]): r for r in ev.compare_speed(records)}
    assert rows["plain", 1]["tokens_per_sec"] == 21 and rows["plain", 1]["passes"] == 3
    assert rows["k1", 1]["speedup"] == pytest.approx(24.5 / 21) and rows["k1", 1]["verdict"] == "faster"
    assert rows["k3", 1]["verdict"] == "none"
    assert rows["k1", 8]["verdict"] == "slower" and rows["k3", 8]["speedup"] == pytest.approx(1.3)


def test_advice_names_the_best_k_and_the_slow_one(ev):
    rows = ev.compare_speed([
        {"name": "plain", "k": None, "passes": [one_pass(20, tpot=50), one_pass(100, 0, 8, 80)]},
        {"name": "k1", "k": 1, "passes": [one_pass(25, tpot=40), one_pass(60, 0, 8, 130)]},
        {"name": "k3", "k": 3, "passes": [one_pass(24, tpot=42), one_pass(90, 0, 8, 90)]}])
    first, second = (ev.advise({row["name"]: row for row in rows if row["concurrency"] == c}, "k3") for c in (1, 8))
    assert "1 at once: 1.20 ×" in first and "20.0 became 24.0" in first and "best is k1" in first and "1.25 ×" in first
    assert "0.90 ×" in second and "best is plain" in second and "k1 (0.60)" in second and "k3 (0.90)" in second


def test_warnings(ev):
    well = {"faults": 0, "acceptance_length": 1.5}
    assert ev.warn(well, [0.01, -0.04], 3, 3) == [] == ev.warn(well, [], 3, 3)
    assert "do not serve" in ev.warn(well | {"faults": 2}, [], 3, 3)[0]
    assert "wiring" in ev.warn(well | {"acceptance_length": 1.0}, [], 3, 3)[0]
    assert "-0.060" in ev.warn(well, [0.01, -0.06], 3, 3)[0] and "rope" in ev.warn(well, [0.01, -0.06], 3, 3)[0]
    assert "TTT_STEPS" in ev.warn(well, [], 4, 3)[0]


def test_acceptance_by_context_length(ev):
    answer = {"steps": [1, 3, 1, 2]}  # contexts 11, 14, 15 before the steps that had a draft
    assert ev.by_context_length([({"token_ids": [0] * 10}, answer)], least=3) == {"8 to 15": 2.0}
    assert ev.by_context_length([({"token_ids": [0] * 13}, answer)] * 2, least=2) == {"8 to 15": 3.0, "16 to 31": 1.5}
    assert ev.by_context_length([({"token_ids": [0] * 10}, answer)], least=4) == {}


def test_bars_of_a_drafter_of_which_nothing_is_accepted(ev):
    drawn = ev.bars("Accepted", {"k3": [0.0, 0.0], "offline": {}})
    assert drawn.count("width:0%") == 2 and drawn.count("0.00") == 2


def test_questions_files(ev, tmp_path):
    path = tmp_path / "mt.jsonl"
    turns = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "1"), ("user", "2"))]
    talk = [{"role": r, "content": c} for r, c in
            (("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))]
    path.write_text(json.dumps({"messages": turns, "category": "b"}) + "\n\n"
                    + json.dumps({"messages": talk, "id": "x"}) + "\n")
    first, second = ev.read_questions([path])
    same = tmp_path / "same.jsonl"  # ids need not differ between files
    same.write_text(json.dumps({"messages": talk, "id": "x"}) + "\n")
    assert len({question["id"] for question in ev.read_questions([path, same])}) == 3
    assert (first["category"], len(first["messages"])) == ("b", 2)
    assert second["id"] == "x-1" and second["category"] == "mt" and len(second["messages"]) == 3
    for bad in ("{}", "no json", '{"messages": [{"role": "system", "content": ""}]}', '{"messages": 3}', ""):
        path.write_text(bad)
        with pytest.raises(SystemExit):
            ev.read_questions([path])


def test_serve_flags(ev):
    import argparse
    s = argparse.Namespace(TENSOR_PARALLEL=8, PIPELINE_PARALLEL=1, DATA_PARALLEL=2, TRUST_REMOTE_CODE=True,
                           ENGINE_ARGS="--a 'b c'", SERVE_ARGS="--d")
    flags = ev.serve_flags(s, "/x", 3)
    assert flags[:5] == ["--trust-remote-code", "--tensor-parallel-size", "8", "--data-parallel-size", "2"]
    assert flags[5:8] == ["--a", "b c", "--d"] and json.loads(flags[9]) == {
        "method": "eagle3", "model": "/x", "num_speculative_tokens": 3}
    assert "--speculative-config" not in ev.serve_flags(s)


def test_reason_is_the_cause_not_the_wrapper(ev, tmp_path):
    log = tmp_path / "log"
    log.write_text("(APIServer pid=7) INFO 12-01 10:00:00 [x.py:1] fine\n"
                   "(EngineCore pid=8) ERROR 12-01 10:00:00 [core.py:1] ValueError: no tensor fc.weight\n"
                   "(APIServer pid=7) RuntimeError: Engine core failed. See root cause above.\n")
    assert ev.reason(log) == "ValueError: no tensor fc.weight"


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A file that holds the GPU memory in use, which an nvidia-smi of ours tells."""
    used, command = tmp_path / "used", tmp_path / "bin/nvidia-smi"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\ncat {used}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    used.write_text("500\n500\n")
    return used


def test_waits_for_gpu_memory_but_not_for_ever(ev, tmp_path, gpu, monkeypatch, capsys):
    (tmp_path / "server.py").write_text(FAKE)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    command, log = [sys.executable, str(tmp_path / "server.py"), "--model", "x"], tmp_path / "log"
    assert ev.gpu_memory_mb() == 1000
    with ev.serving("plain", command, log):
        gpu.write_text("9000\n9000\n")
        threading.Timer(2, gpu.write_text, ["500\n500\n"]).start()
        start = time.monotonic()
    assert 1.5 < time.monotonic() - start < 10
    monkeypatch.setattr(ev, "GPU_SEC", 2)
    with pytest.raises(SystemExit), ev.serving("plain", command, log):
        gpu.write_text("9000\n9000\n")
    assert "GPU memory is still in use" in capsys.readouterr().err
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)]


# ---- the stage, with the stand-in ----

def test_stage_measures_and_a_second_run_is_done(box):
    status, text = box.run()
    assert status == 0, text
    got = box.results()
    # counted by hand from the stand-in's rule for the 8 prompts 3+i, 4, 5
    drafts, per, parts, tokens = 0, [0, 0, 0], 0, 0
    for i in range(8):
        total, at, step = min(24, 5 + (12 + i) % 20), 1, 1
        while at < total:
            accepted = step % 4
            drafts += 1
            for p in range(accepted):
                per[p] += 1
            at += 1 + accepted
            step += 1
    assert got["acceptance_by_position"] == pytest.approx([n / drafts for n in per])
    assert got["acceptance_length"] == pytest.approx(1 + sum(per) / drafts)
    assert got["num_speculative_tokens"] == 3 and set(got["by_k"]) == {"1", "3"}
    assert got["offline_acceptance_length"] == 2.5 and got["questions"] == 8
    assert (got["identical_outputs"], got["compared_outputs"], got["faults"]) == (8, 8, 0)
    assert set(got["tokens_per_sec"]) == {"1", "4"} == set(got["speedup"])
    assert all(set(v) == {"plain", "drafter"} for v in got["tokens_per_sec"].values())
    assert set(got["by_category"]) == {"a", "b"} and got["dtype"] == "float32"
    assert text.strip().splitlines()[-1] == got["serve_command"]
    assert got["serve_command"].startswith("vllm serve ") and '"method": "eagle3"' in got["serve_command"]
    page = (box.out / "report.html").read_text()
    assert got["serve_command"].split(" '")[0] in page and page.count("<figure>") == 5 and "http" not in page
    assert not box.left() and not [p for p in box.out.rglob("*") if p.name.endswith(".tmp")]
    assert "usage stats: off" in (box.out / "configs/k3.log").read_text()
    begin = time.monotonic()
    status, text = box.run()
    assert status == 0 and "already done" in text and time.monotonic() - begin < 2


def test_another_k_is_added_and_other_settings_are_refused(box):
    assert box.run("", "--draft-tokens", "3")[0] == 0
    before = (box.out / "configs/k3.json").stat().st_mtime_ns
    status, text = box.run("", "--draft-tokens", "2,3")
    assert status == 0 and set(box.results()["by_k"]) == {"2", "3"}, text
    assert (box.out / "configs/k3.json").stat().st_mtime_ns == before
    status, text = box.run("", "--draft-tokens", "2,3", "--concurrencies", "2")
    assert status == 1 and "concurrencies" in text.lower() and "mv " in text
    status, text = box.run("", "--draft-tokens", "2,3", "--num-speculative-tokens", "2")
    assert status == 1 and "num_speculative_tokens" in text and "mv " in text


@pytest.mark.parametrize("fault,words", [
    ("load", "no such tensor fc.weight"), ("die", "the engine is gone")])
def test_a_server_that_dies_is_told_with_its_reason_and_the_rest_is_kept(box, fault, words):
    status, text = box.run(fault)
    assert status == 1 and words in text and "Traceback" not in text, text
    assert not box.left()
    assert sorted(p.name for p in (box.out / "configs").glob("*.json")) == ["plain.json"]
    assert not (box.out / "results.json").exists()
    status, text = box.run()
    assert status == 0 and "plain: measured before" in text


@pytest.mark.parametrize("number,fault", [
    (signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGKILL, ""),
    # slow: at the end of the last run each deaf server is given 30 s
    pytest.param(signal.SIGTERM, "deaf", marks=pytest.mark.slow)])
def test_ended_from_outside_leaves_no_server(box, number, fault):
    child = box.start(fault)
    while not (box.out / "configs/plain.json").exists():
        assert child.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(number)
    start = time.monotonic()
    text = child.communicate(timeout=60)[0]
    assert time.monotonic() - start < (7 if fault == "deaf" else 3)
    assert child.returncode == (-9 if number == signal.SIGKILL else 128 + number), text
    assert "Traceback" not in text and ("run it again" in text or number == signal.SIGKILL)
    time.sleep(0.5 if number == signal.SIGKILL else 0)
    assert not box.left()
    assert box.run()[0] == 0


def test_a_measurement_is_kept_though_somebody_takes_the_memory_meanwhile(gpu, box):
    child = box.start()
    for line in child.stdout:
        if "plain: ready" in line:
            break
    gpu.write_text("9000\n9000\n")
    deadline = time.monotonic() + 60
    while not (box.out / "configs/plain.json").exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 143 and not box.left()


def test_another_vllm_does_not_go_on_with_what_one_has_measured(box):
    assert box.run("", "--draft-tokens", "3")[0] == 0
    path = box.out / "configs/plain.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"box": record["box"] | {"torch": "1.0"}}))
    status, text = box.run("", "--draft-tokens", "2,3")
    assert status == 1 and "plain was measured with" in text and f"to fix: mv {path}" in text


def test_a_key_goes_to_the_server_and_no_proxy_stands_between(ev, monkeypatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "x"}]}')

        def log_message(self, *_):
            pass
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
        url = f"http://127.0.0.1:{server.server_port}"
        assert ev.served_model(url) is None  # it wants a key
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert ev.served_model(url) == "x"
        server.shutdown()


def test_outputs_that_differ(box):
    status, text = box.run("differ", "--draft-tokens", "3")
    got = box.results()
    assert status == 0 and got["compared_outputs"] == 8 and got["identical_outputs"] == 4
    assert got["faults"] == 4 and "do not serve" in text  # 0.01 nats is no near tie in float32
    assert {part["position"] for part in got["partings"]} == {3}
    assert got["partings"][0]["gap_nats"] == pytest.approx(0.01)


def test_servers_that_run_already(box, tmp_path):
    import socket
    servers, names = [], []
    for name, k in (("plain", 0), ("k3", 3)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = ["--served-model-name", "little", "--port", str(port)] + (
            ["--speculative-config", json.dumps({"num_speculative_tokens": k})] if k else [])
        servers.append(subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
            env=os.environ | {"PYTHONPATH": str(tmp_path / "fake"), "FAKE_PIDS": str(tmp_path / "pids")}))
        names.append(f"{name}=http://127.0.0.1:{port}")
    try:
        time.sleep(1.5)
        status, text = box.run("", "--servers", ",".join(names), "--draft-tokens", "3")
        assert status == 0, text
        assert box.results()["acceptance_length"] > 1.5 and all(s.poll() is None for s in servers)
        swapped = f"plain={names[1].split('=', 1)[1]},k3={names[1].split('=', 1)[1]}"
        box.out.rename(tmp_path / "old")
        status, text = box.run("", "--servers", swapped, "--draft-tokens", "3")
        assert status == 1 and "want 0" in text
    finally:
        [server.terminate() for server in servers]
        [server.wait() for server in servers]


def test_wrong_inputs_in_one_line(box):
    def refused(*words, flags=()):
        status, text = box.run("", *flags)
        assert status in (1, 2) and "Traceback" not in text and all(word in text for word in words), text
        assert not box.pids.exists()
    refused("DRAFT_TOKENS", flags=["--draft-tokens", "1,x"])
    refused("CONCURRENCIES", flags=["--concurrencies", "0,1"])
    refused("SERVERS", flags=["--servers", "plain=http://127.0.0.1:9"])
    refused("no file of questions", flags=["--questions", str(box.tmp / "none.jsonl")])
    refused("is not finished", flags=["--run", "other"])
    drafter = box.data / "03_train/n10/drafter"
    config = (drafter / "config.json").read_text()
    (drafter / "config.json").write_text(config.replace("2000", "2001"))
    refused("for another target", "2001")
    (drafter / "config.json").write_text(config)
    published = box.tmp / "published"
    published.mkdir()
    (published / "config.json").write_text(config.replace('"hidden_size": 8', '"hidden_size": 16'))
    refused("published is for another target", "16", flags=["--second-drafter", str(published)])
    heldout = box.data / "01b_generate_synthetic/heldout_samples.jsonl"
    rows = heldout.read_text()
    heldout.write_text("")
    refused("no questions", "HELDOUT")
    heldout.write_text(rows)
    (box.tmp / "little/config.json").write_text('{"hidden_size": 9, "vocab_size": 2000}')
    refused("another target")


def test_notes_tell_of_parity_and_of_k_beyond_training(box):
    status, text = box.run("", "--draft-tokens", "4", "--repeats", "1")
    assert status == 0, text
    notes = " ".join(box.results()["notes"])
    assert status == 0 and "training's estimate" in notes and "rope" in notes and "TTT_STEPS" in notes
    assert notes.split(";")[0] in (box.out / "report.html").read_text().replace("&#x27;", "'")


def test_recorded_answers_are_not_compared_with_the_targets_own(box):
    """03 judges by the recorded tokens then, vLLM by the target's: no parity, and no false alarm."""
    path = box.data / "02_extract/manifest.json"
    path.write_text(path.read_text().replace("01b_generate_synthetic", "01_generate"))
    source = box.data / "01_generate"
    (box.data / "01b_generate_synthetic").rename(source)
    facts = (source / "manifest.json").read_text()
    (source / "manifest.json").write_text(facts.replace("01b_generate_synthetic", "01_generate"))
    status, text = box.run("", "--draft-tokens", "3")
    assert status == 0 and box.results()["offline_acceptance_by_position"] == [] and "fault" not in text


def test_questions_of_their_own(box):
    path = box.tmp / "gsm.jsonl"
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": "ab" * i}]}) + "\n"
                            for i in range(1, 4)))
    status, text = box.run("", "--questions", str(path), "--draft-tokens", "3", "--max-tokens", "30")
    got = box.results()
    assert status == 0 and got["questions"] == 3 and got["by_category"].keys() == {"gsm"}, text
    assert got["offline_acceptance_length"] is None and got["parity_gap_by_position"] == []
