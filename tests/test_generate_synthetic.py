"""01b_generate_synthetic against a small server of our own that can be told to misbehave.

The server speaks as vLLM does (/v1/models, /version, /health, /v1/chat/completions with token ids);
its answers follow from the question, so every sample can be checked.
"""
import fcntl
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import clean_environ

NAME = "01b_generate_synthetic"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def module(load):
    return load(NAME)


@pytest.fixture(scope="session")
def light(tmp_path_factory):
    """Environment in which transformers finds no torch: a start costs 1 s instead of 4 s."""
    path = tmp_path_factory.mktemp("light")
    (path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    return {"PYTHONPATH": str(path)}


@pytest.fixture(scope="session")
def tokenizer(target):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(target)


class Server(ThreadingHTTPServer):
    """A fake vLLM. `fault(number, body)` says what goes wrong with a request: None, a status, or
    hang, half, garbage, reset; `answer(messages)` gives (content, reasoning, finish_reason)."""
    daemon_threads, request_queue_size = True, 512

    def __init__(self, tokenizer, model, port=0):
        self.connections = []
        super().__init__(("127.0.0.1", port), Handler)
        self.tokenizer, self.model, self.url = tokenizer, model, f"http://127.0.0.1:{self.server_port}"
        self.asked, self.bodies, self.headers_seen, self.lock = Counter(), [], [], threading.Lock()
        self.fault, self.delay_sec, self.key = (lambda number, body: None), 0.0, None
        self.answer = lambda messages: (f"An answer to: {messages[-1]['content']}", None, "stop")
        self.words = "the server's own words"  # of a refusal
        self.mend = lambda reply: reply  # the last word on a whole reply
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # clients that were killed

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def stop(self):
        """As a kill does it: nothing listens, and the connections are reset."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, status, content, cut=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self):
        server = self.server
        if self.path == "/v1/models":
            self.send(200, {"object": "list", "data": [{
                "id": str(server.model), "root": str(server.model), "owned_by": "vllm",
                "max_model_len": 2048}]})
        elif self.path in ("/version", "/health"):
            self.send(200, {"version": "0.0.7"})
        else:
            self.send(404, {"detail": "Not Found"})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
            return self.send(401, {"error": "Unauthorized"})
        probe = body["messages"][-1]["content"] == "What is 2 + 3?"
        with server.lock:
            number = len(server.bodies)
            if not probe:
                server.bodies.append(body)
        fault = None if probe else server.fault(number, body)
        time.sleep(0 if probe else server.delay_sec)
        if fault == "hang":
            time.sleep(20)
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "garbage":
            self.send(200, random.choice([b"{\"choices\": [", b"<html>", b"[]", b"null", b"\xff\xfe",
                                          b"{\"choices\": []}", b"{\"choices\": [{\"message\": {}}]}"]))
        elif isinstance(fault, int):
            self.send(fault, {"error": {"message": server.words}})
        else:
            self.reply(body, fault, probe)

    def reply(self, body, fault, probe):
        server = self.server
        prompt = list(server.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=True, return_dict=False,
            **body["chat_template_kwargs"]))
        content, reasoning, reason = server.answer(body["messages"])
        text = (f"{reasoning or ''}</think>" if reasoning is not None else "") + (content or "")
        answer = server.tokenizer.encode(text) + [server.tokenizer.eos_token_id] * (reason == "stop")
        if probe:
            answer, reason = answer[:1], "length"
        reply = server.mend({
            "model": body["model"], "prompt_token_ids": prompt, "choices": [{
                "index": 0, "message": {"role": "assistant", "content": content, "reasoning": reasoning or None},
                "finish_reason": reason, "token_ids": answer}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}})
        if not probe and fault is None:
            with server.lock:
                server.asked[json.dumps(body["messages"])] += 1
        self.send(200, reply, cut=100 if fault == "half" else None)


@pytest.fixture
def fake(tokenizer, target):
    """fake(port=0): a running fake server of the target."""
    servers = []

    def start(port=0):
        servers.append(Server(tokenizer, target, port))
        return servers[-1]
    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def data(stage, target, tmp_path, light):
    """A $DATA of 60 rows: data.choose(n) lets 01 choose, data.run(server) runs 01b."""
    return Data(stage, target, tmp_path, light)


class Data:
    def __init__(self, stage, target, tmp_path, light):
        self.stage, self.target, self.light, self.path = stage, target, light, tmp_path / "data"
        self.out, self.rows = self.path / NAME, tmp_path / "rows.jsonl"
        self.write(60)

    def write(self, number, two_turns=False):
        later = [{"from": "gpt", "value": "recorded"}, {"from": "human", "value": "and then"}]
        self.rows.write_text("".join(json.dumps({"conversations": [
            {"from": "human", "value": f"Question {i}, please?"}, *later * two_turns],
            "source": "x"}) + "\n" for i in range(number)))

    def choose(self, number, heldout=5):
        self.stage("01_generate", "--data", self.path, "--target", self.target, "--dataset", self.rows,
                   "--num-samples", number, "--heldout", heldout, env=self.light)
        return self

    def flags(self, server, *flags):
        urls = server if isinstance(server, str) else server.url
        return ["--data", self.path, "--target", self.target, "--server-url", urls, "--max-tokens", 64,
                "--concurrency", 16, "--read-timeout-sec", 2, *flags]

    def run(self, server, *flags, check=True, env=None):
        done = self.stage(NAME, *self.flags(server, *flags), check=check, timeout=120,
                          env=self.light | (env or {}))
        assert "Traceback" not in done.stdout, done.stdout
        return done

    def start(self, kit, server, *flags):
        return subprocess.Popen([sys.executable, "-u", kit / f"{NAME}.py", *map(str, self.flags(server, *flags))],
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env=clean_environ(**self.light))

    def rows_of(self, name):
        path = self.out / f"{name}.jsonl"
        return lines(path) if path.exists() else []

    def check_all(self, number, heldout=5):
        """Every question has exactly one sample, or an entry in errors.jsonl, and the right one."""
        wanted = {row["id"]: row for name in ("questions", "heldout") for row in lines(self.path / "01_generate" / f"{name}.jsonl")}
        rows = self.rows_of("samples") + self.rows_of("heldout_samples") + self.rows_of("errors")
        assert len(wanted) == number + heldout and sorted(r["id"] for r in rows) == sorted(wanted)
        for row in rows:
            if "token_ids" in row:
                assert row["text"] == f"An answer to: {wanted[row['id']]['messages'][-1]['content']}"
        return self.rows_of("errors")

    def manifest(self):
        return json.loads((self.out / "manifest.json").read_text())


# ---- judging ------------------------------------------------------------------------------------
def sample(text, reasoning=None, finish="stop"):
    return {"text": text, "reasoning": reasoning, "finish_reason": finish}


@pytest.mark.parametrize("row, thinking, keep_cut, want", [
    (sample("Paris is the capital of France."), False, True, None),
    (sample("Yes"), False, True, None), (sample("1111"), False, True, None), (sample("🎉"), False, True, None),
    (sample("你好，世界。"), False, True, None), (sample("| a | b |\n|---|---|\n| 1 | 2 |"), False, True, None),
    (sample("!" * 500), False, True, "repetition"), (sample("!" * 500, finish="length"), False, True, "repetition"),
    (sample("Good start. " + "and then I said " * 30), False, True, "repetition"),
    (sample("", "think " * 100, "length"), True, True, "repetition"),
    (sample("x", finish="repetition"), False, True, "repetition"),
    (sample("A long and sensible answer, " * 1 + " ".join(map(str, range(200)))), False, True, None),
    (sample(""), False, True, "empty"), (sample("", "", "length"), False, True, "empty"),
    (sample("\u200b\u200b\x07"), False, True, "not printable"), (sample("\ufffd\ufffd"), False, True, "not printable"),
    (sample("cut in the mid", finish="length"), False, True, None),
    (sample("cut in the mid", finish="length"), False, False, "cut"),
    (sample("", "I was thinking", "length"), True, True, None),
    (sample("", "I was thinking", "length"), True, False, "cut"),
    (sample("", "I was thinking"), True, True, "no </think>"), (sample("plain"), True, True, "no </think>"),
    (sample("Yes", "I was thinking"), True, True, None), (sample("Yes", ""), True, True, None),
    (sample("", "thought"), False, True, "empty"),
])
def test_verdict(module, row, thinking, keep_cut, want):
    assert module.verdict(row, thinking, keep_cut) == want


def test_repeats_against_a_slow_reference(module):
    def slow(text):
        half = text[len(text) // 2:]
        return len(half) >= 8 and any(all(half[i] == half[i % p] for i in range(len(half)))
                                      for p in range(1, 201) if len(half) >= 2 * p)
    source = random.Random(3)
    for _ in range(500):
        phrase = "".join(source.choice("ab ") for _ in range(source.randint(1, 12)))
        text = "".join(source.choice("abc ") for _ in range(source.randint(0, 30))) + phrase * source.randint(1, 9)
        assert module.repeats(text) == slow(text), text


def whole(**changes):
    reply = {"prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 3},
             "choices": [{"token_ids": [3, 4, 5], "finish_reason": "stop",
                          "message": {"content": "a", "reasoning": None}}]}
    for key, value in changes.items():
        (reply if key in reply else reply["choices"][0])[key] = value
    return reply


@pytest.mark.parametrize("reply", [
    None, [], {}, "text", 7, whole(choices=[]), whole(choices=None), whole(usage=None), whole(usage={}),
    whole(prompt_token_ids=None), whole(prompt_token_ids=[1]), whole(token_ids=None), whole(token_ids=[3]),
    whole(token_ids=[3, 4, 10]), whole(token_ids=[3, 4, -1]), whole(token_ids=[3, 4, "5"]), whole(token_ids=[3, 4, None]),
    whole(message=None), whole(message="text"), whole(message={"content": 5}), whole(message={"content": 5, "reasoning": "x"}), whole(message={"content": "a", "reasoning": 5}),
    whole(finish_reason=None), whole(finish_reason="abort"), whole(finish_reason="error"),
])
def test_a_reply_that_is_not_whole_is_told(module, reply):
    with pytest.raises(ValueError):
        module.read_reply(reply, 10, False)


@pytest.mark.parametrize("content, reasoning, opens, want", [
    ("a", None, False, ("a", None)), ("a", "why", True, ("a", "why")), (None, "why", True, ("", "why")),
    ("why</think>a", None, True, ("a", "why")), ("<think>why</think>\n\na", None, False, ("a", "why")),
    ("only thinking", None, True, ("", "only thinking")), ("<think>only", None, False, ("", "only")), (None, None, False, ("", None)),
])
def test_thinking_is_split_off(module, content, reasoning, opens, want):
    row = module.read_reply(whole(message={"content": content, "reasoning": reasoning}), 10, opens)
    assert (row["text"], row["reasoning"]) == want
    assert row["token_ids"] == [1, 2, 3, 4, 5] and row["prompt_len"] == 2


@pytest.mark.parametrize("answer, content, want", [
    ([9, 4, 5], "a", ("a", "")),  # a parser took </think> out and found no thought: the answer is no thought
    ([3, 9, 5], "a", ("a", "")), ([9, 4, 5], "</think>a", ("a", "")),
])
def test_an_empty_thought_leaves_the_answer(module, answer, content, want):
    row = module.read_reply(whole(token_ids=answer, message={"content": content, "reasoning": None}), 10, True, 9)
    assert (row["text"], row["reasoning"]) == want and module.verdict(row, True, True) is None


# ---- the run ------------------------------------------------------------------------------------
def test_answers_growth_and_already_done(data, fake, tokenizer):
    server, before, tokens = fake(), 0, 0
    for number in (5, 20, 40):
        done = data.choose(number).run(server)
        data.check_all(number)
        assert sum(server.asked.values()) == len(server.asked) == number + 5  # nothing asked twice
        assert "answers of" in done.stdout.splitlines()[-1] and number > before
        manifest, before = data.manifest(), number
        assert manifest["done"] and manifest["size"] == {"questions": number + 5}
        assert manifest["counts"]["samples"] == number and manifest["counts"]["heldout_samples"] == 5
        assert manifest["server"] == {"model": str(data.target), "max_model_len": 2048}
        pace = json.loads((data.out / "run.json").read_text())
        assert pace["tokens"] == manifest["tokens"]["answer"] - tokens and 0 < pace["seconds"] < 60
        tokens = manifest["tokens"]["answer"]
        assert manifest["settings"]["TEMPERATURE"] == 1.0 and manifest["vocab_size"] == 49152
    assert "already done" in data.run("http://127.0.0.1:9").stdout  # needs no server
    samples = data.rows_of("samples") + data.rows_of("heldout_samples")
    assert set(samples[0]) == {"id", "source", "turn", "token_ids", "prompt_len", "finish_reason", "made_by",
                               "prompt", "text", "reasoning"}
    for row in samples:
        assert tokenizer.decode(row["token_ids"][row["prompt_len"]:]) == row["text"] + "<|im_end|>"
    assert manifest["tokens"] == {
        "prompt": sum(row["prompt_len"] for row in samples),
        "answer": sum(len(row["token_ids"]) - row["prompt_len"] for row in samples)}
    temperatures = Counter(body["temperature"] for body in server.bodies)
    assert temperatures == {0.0: 5, 1.0: 40} and "seed" not in server.bodies[0]
    assert (data.out / "lengths.png").stat().st_size > 1000 and not list(data.out.glob(".*"))
    refused = data.run(server, "--temperature", "0.5", check=False)
    assert refused.returncode == 1 and "TEMPERATURE (there 1.0, now 0.5)" in refused.stdout


def test_turns_are_asked_in_order_with_the_targets_own_answers(data, fake):
    data.write(30, two_turns=True)
    server = fake()
    server.answer = lambda messages: (f"visible {messages[-1]['content']}", "secret thoughts", "stop")
    data.choose(10, heldout=2).run(server)
    samples = data.rows_of("samples")
    assert len(samples) == 20 and Counter(row["turn"] for row in samples) == {0: 10, 1: 10}
    assert all(row["reasoning"] == "secret thoughts" for row in samples)
    for body in server.bodies:
        texts = [m["content"] for m in body["messages"]]
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"][:len(texts)]
        assert len(texts) == 1 or texts[1] == f"visible {texts[0]}"
        assert "secret" not in json.dumps(body)
    questions = lines(data.path / "01_generate/questions.jsonl")
    assert {row["id"] for row in samples} == {i for q in questions for i in q["turn_ids"]}


def test_a_conversation_ends_where_an_answer_cannot_be_built_on(data, fake):
    data.write(30, two_turns=True)
    server = fake()
    server.answer = lambda messages: ((None, "long thoughts", "length") if messages[-1]["content"] < "Question 15"
                                      else ("fine", "why", "stop"))
    data.choose(10, heldout=2).run(server)
    samples, rejected = data.rows_of("samples"), data.rows_of("rejected")
    assert rejected and {row["reason"] for row in rejected} == {"no history"}
    assert len(samples) + len(rejected) + len(data.rows_of("heldout_samples")) == 24
    cut = [row for row in samples if row["finish_reason"] == "length"]
    assert cut and all(row["text"] == "" and row["reasoning"] == "long thoughts" for row in cut)  # kept


FAULTS = {"500": 500, "503": 503, "429": 429, "hang": "hang", "half": "half", "garbage": "garbage", "reset": "reset"}


def misbehave(share, seed=0):
    source = random.Random(seed)
    return lambda number, body: source.choice(list(FAULTS.values())) if source.random() < share else None


def test_faults_in_four_of_ten_replies_lose_nothing(data, fake):
    server = fake()
    server.fault = misbehave(0.4)
    data.choose(50)
    for _ in range(5):
        if data.run(server, check=False).returncode == 0 and data.manifest()["counts"]["errors"] == 0:
            break
    assert data.check_all(50) == [] and data.manifest()["done"]
    assert max(server.asked.values()) <= 2  # a half-sent answer is asked again, a whole one is not


@pytest.mark.slow  # 2 minutes; test_generate_engine.py kills it in front of a real server
def test_kill_9_at_20_random_moments(data, fake, kit):
    times = 20
    server, source = fake(), random.Random(times)
    server.delay_sec, server.fault = 0.6, misbehave(0.1)
    data.choose(50)
    for _ in range(times):
        process = data.start(kit, server, "--concurrency", 3)
        time.sleep(source.uniform(2, 7))
        process.kill()
        process.communicate()
    server.delay_sec, server.fault = 0, lambda number, body: None
    data.run(server)
    assert data.check_all(50) == []
    assert sum(server.asked.values()) <= 55 + 3 * times + 10


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_cleanly_within_5_seconds(data, fake, kit, number, status):
    server = fake()
    server.fault = lambda n, body: "hang" if n > 10 else None
    data.choose(40)
    process = data.start(kit, server, "--read-timeout-sec", 100)
    while len(server.bodies) < 20:
        time.sleep(0.1)
    start = time.monotonic()
    process.send_signal(number)
    text = process.communicate(timeout=20)[0]
    assert time.monotonic() - start < 5 and process.returncode == status
    assert "run it again" in text.strip().splitlines()[-1] and "Traceback" not in text, text
    assert not (data.out / ".lock").exists() and 5 <= len(data.rows_of("samples") + data.rows_of("heldout_samples")) <= 11
    server.fault = lambda n, body: None
    data.run(server)
    assert data.check_all(40) == []


@pytest.mark.parametrize("fault", [500, "hang"])
def test_a_server_that_fails_draws_no_questions_from_a_good_one(data, fake, fault):
    """The one that fails at once, or whose engine hangs, is always the least busy."""
    good, bad = fake(), fake()
    bad.fault, good.delay_sec = lambda n, body: fault, 0.1
    data.choose(50)
    done = data.run(f"{bad.url},{good.url}", "--concurrency", 8)
    assert f"{bad.url} is away" in done.stdout and data.check_all(50) == []
    assert sum(good.asked.values()) == 55


def test_servers_that_die_and_return(data, fake, kit):
    first, second = fake(), fake()
    first.delay_sec = second.delay_sec = 0.3
    data.choose(50)
    process = data.start(kit, f"{first.url}, {second.url}/", "--concurrency", 4)
    while len(first.bodies) < 4 or len(second.bodies) < 4:
        time.sleep(0.05)
    port = first.server_port
    first.stop()  # the other one goes on
    time.sleep(2)
    assert process.poll() is None and len(second.bodies) > 4
    again = fake(port)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert data.check_all(50) == [] and len(again.bodies) + len(second.bodies) > 30
    assert f"{first.url} is away" in text


def test_it_waits_for_a_server_says_so_and_gives_up(data, fake, kit):
    data.choose(10)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    start = time.monotonic()
    done = data.run(url, "--give-up-min", 0, check=False)
    assert done.returncode == 3 and "no server" in done.stdout and "vllm serve" in done.stdout
    assert time.monotonic() - start < 15
    process = data.start(kit, url)
    time.sleep(12)
    assert process.poll() is None
    server = fake(port)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "no server, waiting" in text, text
    assert data.check_all(10) == [] and server.bodies


def test_what_failed_for_good_is_in_errors_and_asked_again(data, fake):
    server = fake()
    server.words = "no room for Bearer topsecret123"  # what a server says is kept, but not the key
    data.choose(40)
    bad = [row["messages"][0]["content"] for row in lines(data.path / "01_generate/questions.jsonl")[:2]]
    server.fault = lambda n, body: 500 if body["messages"][0]["content"] in bad else None
    done = data.run(server, check=False, env={"VLLM_API_KEY": "topsecret123"})
    assert done.returncode == 1 and "2 of 45 questions failed" in done.stdout.splitlines()[-1]
    errors = data.check_all(40)
    assert len(errors) == 2 and all("no room for Bearer ***" in row["reason"] for row in errors)
    assert "topsecret123" not in done.stdout
    server.fault = lambda n, body: None
    asked = len(server.bodies)
    data.run(server)
    assert data.check_all(40) == [] and len(server.bodies) == asked + 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422])
def test_a_4xx_stops_at_once_with_the_servers_message(data, fake, status):
    server = fake()
    server.fault = lambda n, body: status if n >= 12 else None
    done = data.choose(40).run(server, check=False)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1 and "the server's own words" in last and last.startswith(NAME) and str(status) in last
    assert len(data.rows_of("samples") + data.rows_of("heldout_samples")) >= 5 and len(server.bodies) <= 40


def test_the_key_goes_to_the_server_and_to_no_log(data, fake):
    server = fake()
    server.key = "topsecret123"
    done = data.choose(5).run(server, check=False)
    assert done.returncode == 1 and "VLLM_API_KEY" in done.stdout
    done = data.run(server, env={"VLLM_API_KEY": "topsecret123"})
    assert "topsecret123" not in done.stdout
    assert not [p for p in data.path.rglob("*") if p.is_file() and b"topsecret123" in p.read_bytes()]


@pytest.mark.parametrize("key", ["top\rsecret123", "top\nsecret123", "topsecret123\u2026", "top secret123"])
def test_a_key_that_cannot_be_sent_is_not_shown(data, key):
    done = data.choose(5).run("http://127.0.0.1:9", check=False, env={"VLLM_API_KEY": key})
    assert done.returncode == 1 and "VLLM_API_KEY" in done.stdout.splitlines()[-1]
    assert "secret123" not in done.stdout


def test_a_key_with_white_space_around_is_sent(data, fake):
    server = fake()
    server.key = "topsecret123"
    data.choose(5).run(server, env={"VLLM_API_KEY": " topsecret123\r\n"})


def test_a_key_that_the_server_repeats_is_not_shown(data, fake):
    server = fake()
    server.words = "Incorrect API key provided: topsecret123"
    server.fault = lambda n, body: 401
    done = data.choose(5).run(server, check=False, env={"VLLM_API_KEY": "topsecret123"})
    assert done.returncode == 1 and "Incorrect API key provided: ***" in done.stdout
    assert "topsecret123" not in done.stdout
    assert not [p for p in data.path.rglob("*") if p.is_file() and b"topsecret123" in p.read_bytes()]


def wrong_model(server):
    server.model = "/models/another-model"


def no_ids(server):
    server.mend = lambda reply: {key: value for key, value in reply.items() if key != "prompt_token_ids"}


def other_template(server):
    server.mend = lambda reply: reply | {"prompt_token_ids": [9] * len(reply["prompt_token_ids"])}


def outside(server):
    server.mend = lambda reply: reply | {"choices": [reply["choices"][0] | {"token_ids": [60000]}],
                                         "usage": reply["usage"] | {"completion_tokens": 1}}


@pytest.mark.parametrize("spoil, want", [
    (wrong_model, "another-model"), (no_ids, "returns no token ids (version 0.0.7)"),
    (other_template, "its own chat template"), (outside, "outside the vocabulary of 49,152")])
def test_a_server_that_will_not_do_is_named(data, fake, spoil, want):
    server = fake()
    spoil(server)
    done = data.choose(5).run(server, "--give-up-min", 0, check=False)
    last = done.stdout.strip().splitlines()[-1]
    status = 3 if spoil is outside else 1  # a broken reply may pass: it is waited for, GIVE_UP_MIN
    assert done.returncode == status and want in last and server.url in last and "; to fix: " in last


def test_a_server_that_is_no_vllm(data, tmp_path):
    """The web server of the standard library, on an empty folder: everything is 404."""
    data.choose(5)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
                               cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        done = data.run(f"http://127.0.0.1:{port}", check=False)
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 1 and "vLLM" in done.stdout.splitlines()[-1]


def test_too_many_degenerate_answers_stop_the_run_with_an_example(data, fake):
    server = fake()
    server.answer = lambda messages: ("!" * 300, None, "length")
    data.write(300)
    done = data.choose(250).run(server, check=False)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1 and "degenerate" in last and "!!!!" in last
    assert not data.rows_of("samples") and {r["reason"] for r in data.rows_of("rejected")} == {"repetition"}
    assert 90 <= len(data.rows_of("rejected")) < 150  # judged at 100, the held-out ones among them
    assert not data.manifest()["done"]


def test_a_few_degenerate_and_cut_answers_are_set_aside(data, fake):
    server = fake()

    def answer(messages):
        ending = messages[-1]["content"].split(",")[0][-1]
        return {"1": ("ha " * 99, None, "length"), "2": ("a cut answ", None, "length")}.get(ending, ("fine", None, "stop"))
    server.answer = answer
    data.choose(50).run(server, "--keep-cut", "0")
    rejected = Counter(row["reason"] for row in data.rows_of("rejected"))
    assert set(rejected) == {"repetition", "cut"} and len(data.rows_of("samples")) == 50 - sum(rejected.values())
    assert data.manifest()["counts"]["reasons"] == rejected
    assert len(data.rows_of("heldout_samples")) == 5  # nothing is trained on these


def test_a_question_too_long_for_the_server_is_rejected_before_it_is_asked(data, fake):
    with data.rows.open("a") as file:
        file.write(json.dumps({"prompt": "word " * 3000, "source": "x"}) + "\n")
        file.write(json.dumps({"prompt": "ward " * 1000, "source": "x"}) + "\n")
    server = fake()
    server.answer = lambda messages: ("fine", None, "stop")
    data.choose(57).run(server)
    assert [row["reason"] for row in data.rows_of("rejected")] == ["too long"]
    assert min(body["max_tokens"] for body in server.bodies) == 64 and len(server.bodies) == 61
    assert data.manifest()["done"]


def test_thinking_extra_body_and_greedy(data, fake):
    server = fake()
    data.choose(5).run(server, "--thinking", "0", "--extra-body", '{"top_k": 20, "repetition_penalty": 1.1}')
    for body in server.bodies:
        assert body["chat_template_kwargs"] == {"thinking": False} and body["return_token_ids"] is True
        assert ("top_k" in body) == ("repetition_penalty" in body) == (body["temperature"] > 0)
    for bad in ("nonsense", '{"a":}', "{}}", "[]", "7", "", "null"):
        done = data.run(server, "--extra-body", bad, check=False)
        assert done.returncode == 2 and "EXTRA_BODY" in done.stdout


@pytest.mark.parametrize("tail", [b'{"id": "x", "text": "half', b'{"id": 5}', b"\0\0\0\0", b"\xff\n", b"{}\n"])
def test_a_torn_last_line_is_dropped_and_said(data, fake, module, tail, capsys, tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"id": "a", "text": "b"}\n' + tail)
    assert list(module.read_back(path)) == [{"id": "a", "text": "b"}]
    assert "dropped 1 torn line" in capsys.readouterr().out
    assert path.read_bytes() == b'{"id": "a", "text": "b"}\n'
    path.write_bytes(b'{"id": "a", "text": "b"}\ngarbage\n{"id": "c", "text": "d"}\n')
    with pytest.raises(SystemExit):
        list(module.read_back(path))
    assert "damaged in line 2" in capsys.readouterr().err and len(path.read_bytes()) == 58


def test_a_full_disk_while_appending(data, fake, tmp_path):
    server, disk = fake(), tmp_path / "data"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=92k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        server.answer = lambda messages: (" ".join(map(str, range(150))), None, "stop")
        done = data.choose(50).run(server, check=False)
        assert done.returncode == 1 and "No space left" in done.stdout.strip().splitlines()[-1], done.stdout
        before = sum(path.read_bytes().count(b"\n") for path in data.out.glob("*samples.jsonl"))
        subprocess.run(["mount", "-o", "remount,size=4096k", disk], check=True)
        data.run(server)
        ids = [row["id"] for row in data.rows_of("samples") + data.rows_of("heldout_samples")]
        assert len(ids) == len(set(ids)) == 55 and before > 0
        assert sum(server.asked.values()) <= 55 + 16
    finally:
        subprocess.run(["umount", "-l", disk])


def test_an_unfinished_01_and_another_target(data, fake, stage):
    done = data.run("http://127.0.0.1:9", check=False)
    assert done.returncode == 1 and "is not finished" in done.stdout
    data.choose(5)
    path = data.path / "01_generate/manifest.json"
    path.write_text(path.read_text().replace('"target": "', '"target": "0'))
    done = data.run("http://127.0.0.1:9", check=False)
    assert done.returncode == 1 and "is of another target" in done.stdout


def test_a_log_gets_plain_lines_and_a_terminal_a_bar(data, fake, kit):
    import pty
    server = fake()
    done = data.choose(20).run(server)
    assert "tokens/s out" in done.stdout and "\x1b" not in done.stdout
    data.choose(40)
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    process = subprocess.Popen([sys.executable, kit / f"{NAME}.py", *map(str, data.flags(server))],
                               stdout=child, stderr=child, env=clean_environ(**data.light))
    os.close(child)
    text = b""
    while True:
        try:
            text += (more := os.read(main, 65536))
        except OSError:
            break
        if not more:
            break
    assert process.wait() == 0 and b"45/45" in text and b"tokens/s out" in text
