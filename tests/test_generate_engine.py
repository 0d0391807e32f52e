"""01 and 01b with a real vLLM server: token ids, greedy answers, kills, growth."""
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import clean_environ

pytestmark = pytest.mark.engine
NAME = "01b_generate_synthetic"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def choose(stage, kit, target, data, number):
    stage("01_generate", "--data", data, "--target", target, "--dataset", kit / "tests/demo_questions.parquet",
          "--num-samples", number, "--heldout", 4)


def flags(data, target, server):
    return ["--data", data, "--target", target, "--server-url", server, "--max-tokens", 48, "--concurrency", 16,
            "--temperature", 0.6]


def check(data, tokenizer):
    """Each user turn has one sample or one rejection, and its ids are those of the template."""
    out = data / NAME
    questions = lines(data / "01_generate/questions.jsonl") + lines(data / "01_generate/heldout.jsonl")
    samples = lines(out / "samples.jsonl") + lines(out / "heldout_samples.jsonl")
    seen = [row["id"] for row in samples + lines(out / "rejected.jsonl")]
    assert sorted(seen) == sorted(i for q in questions for i in q["turn_ids"])
    first = {q["turn_ids"][0]: q["messages"] for q in questions}
    for row in samples:
        prompt, answer = row["token_ids"][:row["prompt_len"]], row["token_ids"][row["prompt_len"]:]
        if row["turn"] == 0:
            until = next(i for i, m in enumerate(first[row["id"]]) if m["role"] == "user") + 1
            assert prompt == tokenizer.apply_chat_template(first[row["id"]][:until], add_generation_prompt=True,
                                                           tokenize=True, return_dict=False)
        assert 0 < len(answer) <= 48 and (answer[-1] == 2) == (row["finish_reason"] == "stop")
        assert tokenizer.decode(answer, skip_special_tokens=True).strip() == row["text"]
    return samples


def test_answers_are_token_exact_and_survive_kill_9_and_growth(stage, kit, target, server, tmp_path):
    from transformers import AutoTokenizer
    tokenizer, source = AutoTokenizer.from_pretrained(target), random.Random(1)
    choose(stage, kit, target, tmp_path, 24)
    for _ in range(2):
        process = subprocess.Popen([sys.executable, kit / f"{NAME}.py", *map(str, flags(tmp_path, target, server))],
                                   env=clean_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(source.uniform(6, 12))
        process.kill()
        process.wait()
    stage(NAME, *flags(tmp_path, target, server))
    before = check(tmp_path, tokenizer)
    choose(stage, kit, target, tmp_path, 32)
    stage(NAME, *flags(tmp_path, target, server))
    after = check(tmp_path, tokenizer)
    assert len(after) > len(before) and [row for row in before if row not in after] == []
    manifest = json.loads((tmp_path / NAME / "manifest.json").read_text())
    assert manifest["done"] and manifest["server"]["max_model_len"] == 2048
    assert "already done" in stage(NAME, *flags(tmp_path, target, server)).stdout


@pytest.mark.slow  # 3 minutes: two starts of a server of its own
def test_a_server_killed_and_restarted_mid_run(stage, kit, target, tmp_path):
    from conftest import free_port
    from transformers import AutoTokenizer
    port = free_port()

    def serve():
        return subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--host", "127.0.0.1",
             "--port", str(port), "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048"],
            env=clean_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    choose(stage, kit, target, tmp_path, 60)
    process = serve()
    client = subprocess.Popen(
        [sys.executable, kit / f"{NAME}.py", *map(str, flags(tmp_path, target, f"http://127.0.0.1:{port}"))],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not (tmp_path / NAME / "samples.jsonl").exists() or len(lines(tmp_path / NAME / "samples.jsonl")) < 10:
            assert client.poll() is None
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = serve()
        text = client.communicate(timeout=400)[0]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        client.kill()
    assert client.returncode == 0, text
    check(tmp_path, AutoTokenizer.from_pretrained(target))
