"""The whole kit with a real vLLM: `./run_all.sh demo`, cut down, and what it left behind."""
import json
import os
import re
import signal
import subprocess
import time

import pytest
from conftest import demo_environ

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def results(demo):
    return json.loads(next(demo.glob("04_eval/*/results.json")).read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_stage_is_done(demo):
    samples = json.loads((demo / "02_extract/manifest.json").read_text())["counts"]["samples"]
    for directory in ("01_generate", "01b_generate_synthetic", "02_extract", f"03_train/n{samples}",
                      f"04_eval/n{samples}"):
        assert json.loads((demo / directory / "manifest.json").read_text())["done"] is True
    assert not list(demo.rglob("*.tmp")) and not list(demo.rglob(".lock"))


def test_questions_and_answers_belong_together(demo):
    questions, heldout = (lines(demo / f"01_generate/{n}.jsonl") for n in ("questions", "heldout"))
    assert (len(questions), len(heldout)) == (96, 24)
    assert not {q["id"] for q in questions} & {q["id"] for q in heldout}
    answers = lines(demo / "01b_generate_synthetic/samples.jsonl")
    turns = sum(m["role"] == "user" for q in questions for m in q["messages"])
    rejected = lines(demo / "01b_generate_synthetic/rejected.jsonl")
    assert len({a["id"] for a in answers}) == len(answers) and len(answers) + len(rejected) <= turns
    assert {q["id"] for q in questions} <= {a["id"] for a in answers + rejected}
    for answer in answers:
        assert 0 < answer["prompt_len"] < len(answer["token_ids"]) <= answer["prompt_len"] + 96


def test_results_hold_what_the_user_wanted_to_know(demo, results):
    asked = lines(demo / "01b_generate_synthetic/heldout_samples.jsonl")  # one for each user turn
    assert results["num_speculative_tokens"] == 3
    assert results["questions"] == len(asked) == results["compared_outputs"] >= 24
    by_position = results["acceptance_by_position"]
    assert len(by_position) == 3 and by_position == sorted(by_position, reverse=True)
    assert results["acceptance_length"] == pytest.approx(1 + sum(by_position), abs=1e-6)
    assert results["acceptance_length"] > 1.15  # from 96 answers; a wiring fault gives exactly 1.0
    for speeds, speedup in zip(results["tokens_per_sec"].values(), results["speedup"].values(), strict=True):
        assert speedup == pytest.approx(speeds["drafter"] / speeds["plain"])


def test_offline_acceptance_means_what_vllm_counts(results):
    for offline, served in zip(results["offline_acceptance_by_position"],
                               results["acceptance_by_position"], strict=True):
        assert offline == pytest.approx(served, abs=0.05)


def test_the_run_ends_with_the_command_that_serves(demo):
    text = (demo / "run_all.log").read_text()
    assert "vllm serve" in text[-3000:] and "acceptance length" in text[-3000:]
    assert "report.html" in text[-3000:]


def test_a_second_run_finds_everything_done(demo, kit):
    before = {p: p.stat().st_mtime_ns for p in demo.rglob("*") if p.is_file() and p.parent.name != "logs"}
    start = time.monotonic()
    done = subprocess.run(["./run_all.sh", "demo"], cwd=kit, env=demo_environ(demo), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and done.stdout.count("already done") == 5, done.stdout
    assert time.monotonic() - start < 30
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_only_the_named_stages_run(demo, kit):
    done = subprocess.run(["./run_all.sh", "demo", "03_train", "04_eval"], cwd=kit, text=True,
                          env=demo_environ(demo), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and done.stdout.count("already done") == 2, done.stdout


def test_a_failing_stage_stops_the_run_and_names_what_continues(demo, kit):
    env = demo_environ(demo) | {"KIT_SEED": "5"}  # 01 holds the result of another seed
    done = subprocess.run(["./run_all.sh", "demo"], cwd=kit, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 1
    assert "01_generate failed" in done.stdout and re.search("to continue: .*KIT_SEED=5 .*./run_all.sh demo\n", done.stdout)
    assert "==== 01b" not in done.stdout


def test_interrupted_while_the_server_loads_leaves_no_process(demo, kit, tmp_path):
    """A lost terminal ends nothing; SIGTERM does, while the server loads and nobody reads any more (as
    after ctrl-C under tee): run_all.sh and its children are gone, the lock too."""
    data = tmp_path / "data"
    env = demo_environ(data)
    run = subprocess.Popen(["./run_all.sh", "demo", "01_generate", "01b_generate_synthetic"], cwd=kit,
                           env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid = None
    for line in run.stdout:
        if "the server loads (pid" in line:
            pid = int(line.split("(pid ")[1].split(",")[0])
            break
    run.stdout.close()
    run.send_signal(signal.SIGHUP)
    time.sleep(3)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    run.stdout = None
    text = run.communicate(timeout=90)[1]
    assert run.returncode == 1 and re.search("to continue: .*KIT_NUM_SAMPLES=96 .*./run_all.sh demo 01_", text)
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
