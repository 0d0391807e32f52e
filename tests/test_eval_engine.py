"""04_eval with a real vLLM: float32 loses nothing, and its clock agrees with vLLM's own benchmark."""
import asyncio
import json
import statistics

import pytest


@pytest.mark.engine
def test_float32_answers_are_the_targets_own(demo, stage, tmp_path):
    first = json.loads(next(demo.glob("04_eval/*/results.json")).read_text())
    for name in ("02_extract", "03_train"):
        (tmp_path / name).symlink_to(demo / name)
    asked = tmp_path / "01b_generate_synthetic"
    asked.mkdir()
    (asked / "manifest.json").write_bytes((demo / asked.name / "manifest.json").read_bytes())
    lines = (demo / asked.name / "heldout_samples.jsonl").read_text().split("\n")[:8]
    (asked / "heldout_samples.jsonl").write_text("\n".join(lines) + "\n")
    done = stage("04_eval", env={
        "KIT_DATA": str(tmp_path), "KIT_TARGET": first["target"], "KIT_DEVICE": "cpu", "KIT_SERVE_ARGS": "",
        "KIT_ENGINE_ARGS": "--dtype float32 --enforce-eager --max-model-len 2048", "KIT_TENSOR_PARALLEL": "1",
        "KIT_CONCURRENCIES": "8", "KIT_TEMPERATURES": "0", "KIT_REPEATS": "1", "KIT_PLAIN_AGAIN": "no",
        "KIT_QUESTIONS_PER_LEVEL": "1"})
    got = json.loads(next(tmp_path.glob("04_eval/*/results.json")).read_text())
    assert got["dtype"] == "float32" and got["compared_outputs"] == 8, done.stdout
    assert got["identical_outputs"] == 8, got["partings"]
    assert got["acceptance_length"] > 1.05 and len(got["acceptance_by_position"]) == 3


@pytest.mark.engine
# slow: a timing on 2 cores is only worth something on a quiet machine
@pytest.mark.slow
def test_tokens_per_sec_agree_with_vllms_benchmark(server, load):
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    ev, concurrency, max_tokens = load("04_eval"), 8, 96
    model = ev.served_model(server)
    questions = [{"token_ids": ev.call(server + "/tokenize", model=model, messages=[
        {"role": "user", "content": f"Tell me about the number {i} and what people use it for."}])["tokens"]}
        for i in range(16)]

    def ours(salt):
        return ev.run_pass(server, model, questions, 0, concurrency, max_tokens, salt)[1]["tokens_per_sec"]

    def theirs(salt):
        requests = [SampleRequest(prompt=q["token_ids"], prompt_len=len(q["token_ids"]),
                                  expected_output_len=max_tokens) for q in questions]
        return asyncio.run(benchmark(
            task_type=TaskType.GENERATION, endpoint_type="openai", api_url=server + "/v1/completions",
            base_url=server, model_id=model, model_name=model, tokenizer=None, input_requests=requests,
            logprobs=None, request_rate=float("inf"), burstiness=1.0, disable_tqdm=True, num_warmups=0,
            profile=False, selected_percentile_metrics=["ttft"], selected_percentiles=[50.0], ignore_eos=False,
            goodput_config_dict={}, max_concurrency=concurrency, lora_modules=None, extra_headers=None,
            extra_body={"temperature": 0, "cache_salt": salt}, ready_check_timeout_sec=0))["output_throughput"]

    ours("warm")
    pairs = [(ours(f"a{i}"), theirs(f"b{i}")) for i in range(4)]
    ratio = statistics.median(a / b for a, b in pairs)
    print("tokens/s ours, vLLM's:", pairs, "median ratio", ratio)
    assert 0.97 < ratio < 1.03, pairs
