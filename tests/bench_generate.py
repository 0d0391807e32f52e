#!/usr/bin/env python3
"""How fast 01b asks, beside vLLM's own benchmark client, on one server with the same questions.

    .venv/bin/python tests/bench_generate.py [TARGET]    # 5 minutes on 2 cores

Starts a server of TARGET (default .cache/target), lets `vllm bench serve` and 01b each ask the same
64 questions twice, in turn, with the same limits and the same 64 requests in flight, and prints
tokens/s of both, their ratio (at least 0.95 is wanted) and the share of a core that 01b needs, as it
is and brought to 300 tokens/s (less than 0.15 is wanted). Nothing else may run meanwhile.
"""
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KIT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(KIT), str(KIT / "tests")]
from conftest import serving  # noqa: E402
QUESTIONS, MAX_TOKENS, CONCURRENCY = 64, 160, 64
BENCH = ("from vllm.benchmarks.serve import add_cli_args, main; "
         "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
         "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())")


def bench(url, target, questions, tmp):
    """Tokens/s of `vllm bench serve`."""
    path = tmp / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": q["messages"][-1]["content"]}) + "\n"
                            for q in questions))
    subprocess.run(
        [sys.executable, "-c", BENCH, "--backend", "openai-chat", "--base-url", url, "--endpoint",
         "/v1/chat/completions", "--model", target, "--dataset-name", "custom", "--dataset-path",
         path, "--skip-chat-template", "--custom-output-len", str(MAX_TOKENS), "--num-prompts",
         str(len(questions)), "--max-concurrency", str(CONCURRENCY), "--temperature", "0.6",
         "--top-p", "0.95", "--disable-shuffle", "--disable-tqdm", "--save-result", "--result-dir",
         tmp, "--result-filename", "bench.json"], check=True, stdout=subprocess.DEVNULL)
    return json.loads((tmp / "bench.json").read_text())["output_throughput"]


def ours(url, target, questions, tmp):
    """(tokens/s, share of a core) of 01b."""
    from transformers import AutoTokenizer
    module = importlib.import_module("01b_generate_synthetic")
    s = module.settings(["--server-url", url, "--target", target, "--max-tokens", str(MAX_TOKENS),
                         "--concurrency", str(CONCURRENCY), "--temperature", "0.6"])
    fleet = module.Fleet(s, AutoTokenizer.from_pretrained(target), 49152)
    fleet.greet(url)  # the other one's probe is not counted either
    book = module.Book(Path(tempfile.mkdtemp(dir=tmp)), questions)
    start_sec, cpu_sec = time.perf_counter(), time.process_time()
    module.run(questions, [], book, fleet)
    sec = time.perf_counter() - start_sec
    return book.tokens["answer"] / sec, (time.process_time() - cpu_sec) / sec


def main():
    target = sys.argv[1] if len(sys.argv) > 1 else str(KIT / ".cache/target")
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        subprocess.run([sys.executable, KIT / "01_generate.py", "--data", tmp / "data", "--target",
                        target, "--dataset", KIT / "tests/demo_questions.parquet", "--num-samples",
                        "200", "--heldout", "1"], check=True, stdout=subprocess.DEVNULL)
        rows = map(json.loads, (tmp / "data/01_generate/questions.jsonl").open(encoding="utf-8"))
        questions = [q for q in rows if len(q["messages"]) == 1][:QUESTIONS]
        with serving(tmp / "server.log", "--model", target, "--dtype", "bfloat16",
                     "--no-enable-prefix-caching") as url:
            bench(url, target, questions[:16], tmp)  # warm-up
            theirs, mine = [], []
            for _ in range(2):
                theirs.append(bench(url, target, questions, tmp))
                mine.append(ours(url, target, questions, tmp))
    rate, core = (sum(pair[i] for pair in mine) / len(mine) for i in (0, 1))
    print(f"vllm bench serve: {', '.join(f'{r:.0f}' for r in theirs)} tokens/s")
    print(f"01b: {', '.join(f'{r:.0f}' for r, _ in mine)} tokens/s")
    print(f"ratio {rate * len(theirs) / sum(theirs):.3f}; client: {core:.3f} of a core, "
          f"{core * 300 / rate:.3f} at 300 tokens/s; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
