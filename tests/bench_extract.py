#!/usr/bin/env python3
"""What 02_extract costs beside the plain prefill of the same engine on the same samples.

    KIT_DATA=demo-data KIT_TARGET=... KIT_TENSOR_PARALLEL=1 KIT_ENGINE_ARGS="--enforce-eager" \
        .venv/bin/python tests/bench_extract.py [--repeat 2]

Runs the stage in a temporary directory over the samples of $KIT_DATA, and the same engine with
nothing extracted; both are warmed up by the proof's number of samples first. On an idle machine.
Prints one JSON object: tokens/s of both, their ratio (want 0.95), MB/s written, the share of time
spent writing, peak memory of the stage in MB, bytes a token over four bf16 planes by store.
"""
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KIT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(KIT))
kit = importlib.import_module("02_extract")


def plain(repeat):
    """Tokens/s of the engine with nothing extracted, the best of `repeat`."""
    sys.argv = sys.argv[:1]
    s = kit.settings()
    directory, _ = kit.find_model(s.TARGET)
    config = json.loads((directory / "config.json").read_text())
    samples = kit.read_samples(Path(s.DATA) / s.SAMPLES_FROM, "", s.MAX_LEN, config["vocab_size"])[0]
    tokens = [len(sample["token_ids"]) for sample in samples]
    engine = kit.start_engine(s, max(tokens), [], None)
    row_bytes = 4 * config["hidden_size"] * 2
    nothing = lambda sample, output: None
    list(kit.prefill(engine, samples[:4 * kit.PROBES], 10 ** 9, nothing))
    rates = []
    for _ in range(repeat):
        begin = time.time()
        list(kit.prefill(engine, samples, s.STAGING_GB * 1e9 / row_bytes, nothing))
        rates.append(sum(tokens) / (time.time() - begin))
    return max(rates)


def extract(store, repeat):
    """(run.json of the best of `repeat`, manifest, peak memory in MB) of the stage itself."""
    best = None
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="bench_extract.") as directory:
            data, given = Path(directory), Path(os.environ["KIT_DATA"])
            source = os.environ.get("KIT_SAMPLES_FROM", "01b_generate_synthetic")
            shutil.copytree(given / source, data / source)
            subprocess.run([sys.executable, KIT / "02_extract.py", "--data", data, "--store", store],
                           check=True, stdout=sys.stderr)
            run = json.loads((data / "02_extract/run.json").read_text())
            manifest = json.loads((data / "02_extract/manifest.json").read_text())
        if not best or run["seconds"] < best[0]["seconds"]:
            best = run, manifest, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return best


def main():
    if sys.argv[1:2] == ["--plain"]:
        return print("PLAIN", plain(int(sys.argv[2])))
    repeat = int(sys.argv[2]) if sys.argv[1:2] == ["--repeat"] else 1
    result = {}
    for store in os.environ.get("STORES", "bf16 fp8 int4").split():
        run, manifest, peak = extract(store, repeat)
        size = sum(facts["bytes"] for facts in manifest["files"].values())
        result[store] = {
            "tokens_per_sec": round(run["tokens"] / run["seconds"], 1),
            "mb_per_sec": round(size / run["seconds"] / 1e6, 2),
            "writing_share": round(run["writing_sec"] / run["seconds"], 4),
            "peak_memory_mb": round(peak),
            "of_four_bf16_planes": round(
                manifest["bytes_per_token"] / (8 * manifest["hidden_size"]), 4)}
    done = subprocess.run([sys.executable, __file__, "--plain", str(repeat)], check=True,
                          stdout=subprocess.PIPE, text=True)
    rate = float(done.stdout.split("PLAIN ")[1].split()[0])
    for each in result.values():
        each["over_plain"] = round(each["tokens_per_sec"] / rate, 3)
    print(json.dumps({"plain_tokens_per_sec": round(rate, 1), **result}, indent=1))


if __name__ == "__main__":
    main()
