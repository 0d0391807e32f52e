"""Long runs and several servers: memory, file handles and speed stay flat; two servers share one DATA.

SOAK (default 2000) is the number of samples; 2,000 take 3 minutes on two idle cores.
"""
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import requests
from conftest import KIT, clean_environ, serving
from make_tiny import make_target
from test_extract_engine import ENGINE

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # minutes, and two servers at once
NAME, SOAK = "01b_generate_synthetic", int(os.environ.get("SOAK", 2000))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "target"
    make_target(directory, "llama")
    return directory


@pytest.fixture(scope="module")
def data(tiny, stage, tmp_path_factory):
    """A $DATA with SOAK short questions, 20 of them held out."""
    data = tmp_path_factory.mktemp("soak")
    rows = data / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {i} and {i % 7}?"}) + "\n" for i in range(SOAK)))
    stage("01_generate", "--data", data, "--target", tiny, "--dataset", rows, "--num-samples", SOAK - 20,
          "--heldout", 20)
    return data


def watch(name, count, env, *flags):
    """Run a stage; [(seconds, samples done, bytes resident, open files)] twice a second, of it and of
    its children: vLLM's engine is one."""
    log = tempfile.TemporaryFile("w+")
    process = subprocess.Popen([sys.executable, "-u", KIT / f"{name}.py", *map(str, flags)],
                               env=clean_environ(**env), stdout=log, stderr=subprocess.STDOUT)
    seen, start, parent = [], time.monotonic(), psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # one ended meanwhile
            family = [parent, *parent.children(recursive=True)]
            seen.append((time.monotonic() - start, count(), sum(each.memory_info().rss for each in family),
                         sum(each.num_fds() for each in family)))
        time.sleep(0.5)
    log.seek(0)
    assert process.returncode == 0, log.read()
    return seen


def assert_flat(seen):
    """From the 200th sample to the last: no growth of memory and files, no loss of speed."""
    seen = [row for row in seen if 200 <= row[1] < max(row[1] for row in seen)]  # then it only ends
    third = len(seen) // 3
    assert third >= 3, "too few samples to judge"
    early, late = seen[:third], seen[-third:]
    print(f"{len(seen)} looks; resident MB {early[0][2] / 1e6:.0f} to {late[-1][2] / 1e6:.0f}; "
          f"files {early[0][3]} to {late[-1][3]}")
    rates = [(rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0]) for rows in (early, late)]
    print(f"samples a second {rates[0]:.1f}, then {rates[1]:.1f}")
    assert max(row[2] for row in late) < 1.1 * max(row[2] for row in early) + 20e6
    assert max(row[3] for row in late) <= max(row[3] for row in early) + 5
    assert rates[1] > 0.6 * rates[0]


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_01b_and_02_over_many_samples(data, tiny, tmp_path_factory):
    """Two servers answer, in turn; then one engine extracts."""
    log = tmp_path_factory.mktemp("servers")
    served = ["--model", tiny, "--dtype", "bfloat16"]
    with serving(log / "a", *served) as a, serving(log / "b", *served) as b:
        out = data / NAME
        files = [out / f"{name}.jsonl" for name in ("samples", "heldout_samples", "rejected")]
        seen = watch(NAME, lambda: sum(map(lines, files)), {}, "--data", data, "--target", tiny, "--server-url",
                     f"{a},{b}", "--max-tokens", 8, "--concurrency", 32)
        answered = [requests.get(url + "/metrics", timeout=10).text for url in (a, b)]
    assert_flat(seen)
    counts = [sum(float(line.split()[-1]) for line in text.splitlines()
                  if line.startswith("vllm:request_success_total")) for text in answered]
    print(f"answered by the two servers: {counts}")
    assert sum(counts) >= SOAK and min(counts) > 0.3 * sum(counts)
    assert sum(map(lines, files)) == SOAK
    shards = data / "02_extract"
    seen = watch("02_extract", lambda: sum(
        facts["samples"] for facts in json.loads((shards / "manifest.json").read_text())["files"].values())
        if (shards / "manifest.json").exists() else 0, ENGINE | {"KIT_SHARD_GB": "0.001", "KIT_STORE": "fp8"},
        "--data", data, "--target", tiny)
    assert_flat(seen)
    assert json.loads((shards / "manifest.json").read_text())["done"]
