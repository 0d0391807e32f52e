#!/usr/bin/env python3
"""Tell what tests/rehearse.sh rehearsed, what it did not and why, and the plan of the real constants.

    KIT_DATA=rehearsal-data tests/tell_rehearsal.py DIRECTORY_OF_THE_REAL_TARGET KIT_STORE=int4    # or ""

The further arguments are the KIT_* that the rehearsal was called with, and that the real run will have.

Reads the manifests of a rehearsal, and the stages' settings with and without the KIT_* that it was
run with; asks 00_preflight.sh for the plan, which then stands in $DATA/plan/logs/preflight.json.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

from make_tiny import KIMI, write_json

STAGES = "01_generate", "01b_generate_synthetic", "02_extract", "03_train", "04_eval"
PLAIN = {key: value for key, value in os.environ.items() if key[:4] != "KIT_"} | dict(
    given.split("=", 1) for given in sys.argv[2:] if "=" in given)


def settings(environ):
    """What the stages answer to --settings, together."""
    found = {}
    for stage in STAGES:
        command = [sys.executable, f"{stage}.py", "--settings"]
        found |= json.loads(subprocess.check_output(command, env=environ))
    return found


def rehearsed(data):
    """A line for each stage that is done."""
    made = {path.parent.relative_to(data).parts[0]: json.loads(path.read_text())
            for path in sorted(data.glob("0*/**/manifest.json"))}
    made = {stage: facts for stage, facts in made.items() if facts["done"]}
    if facts := made.get("01_generate"):
        yield ("01_generate: {questions} questions, and {samples} recorded answers whose borders the "
               "target's template gives".format(**facts["counts"]))
    if "01b_generate_synthetic" in made:
        path = data / "01b_generate_synthetic/samples.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        yield (f"01b_generate_synthetic: {len(rows)} answers of vLLM's server, "
               f"{sum(row['reasoning'] is not None for row in rows)} begin inside the reasoning, "
               f"{sum(row['finish_reason'] == 'length' for row in rows)} are cut by MAX_TOKENS")
    if facts := made.get("02_extract"):
        yield ("02_extract: layers {layer_ids} and {last_layer} in {store}; proof: over {tokens} tokens "
               "within {logprob_gap_max:.2g} nats of the engine".format(**facts, **facts["proof"]))
    if facts := made.get("03_train"):
        yield (f"03_train: {facts['steps']} steps from the drafter in {data / 'drafter'}, whose "
               f"{facts['draft_vocab_size']:,} tokens are kept")
    if "04_eval" in made:
        facts = json.loads(next(data.glob("04_eval/*/results.json")).read_text())
        yield ("04_eval: vLLM served the drafter, acceptance length {acceptance_length:.2f}; greedy "
               "answers the same: {identical_outputs} of {compared_outputs}".format(**facts))


def missing(now, real, target, whole):
    """What was not rehearsed, and why."""
    if whole:
        yield "the length of the run: what shows only after hours"
        return
    yield (f"the weights, their loading and kernels: {target or real['TARGET']} is not whole here, or no GPU; "
           "random ones answer gibberish, so neither speeds nor acceptance mean anything")
    yield f"the weights of the published drafter: {real['DRAFTER']} was not fetched"
    if real["TENSOR_PARALLEL"] * real["PIPELINE_PARALLEL"] * real["DATA_PARALLEL"] > 1:
        yield "several GPUs: the tiny model runs in one process"
    if now["DEVICE"] == "cpu":
        yield ("MLA in 04_eval: the same weights were served by plain attention (VLLM_MLA_DISABLE=1), "
               "as vLLM on a CPU has 'No common block size for 16' of MLA and of a drafter")


def report(data, target, whole):
    """preflight's report for the real constants; what the real target measured counts."""
    more = {"KIT_DATA": str(data), "KIT_TARGET": target, "KIT_WRITE_TEST_GB": "0"}
    if not whole:
        more["KIT_DRAFTER"] = ""  # it is not to be downloaded here
    subprocess.run(["./00_preflight.sh"], env=PLAIN | more, stdout=subprocess.DEVNULL)
    return json.loads((data / "logs/preflight.json").read_text())


def main():
    data, target = Path(os.environ["KIT_DATA"]), sys.argv[1]
    now, real = settings(os.environ), settings(PLAIN)
    whole = Path(now["TARGET"]) != data / "target"
    print("\nrehearsed, with", "the target itself:" if whole else "a tiny model of the target's kind:")
    for line in rehearsed(data):
        print(f"  {line}")
    print("\nnot rehearsed:", *missing(now, real, target, whole), sep="\n  ")
    print("\nconstants that differ, so that it takes minutes, one process and no network:")
    for key in real:
        if now[key] != real[key]:
            print(f"  {key} = {now[key]!r} (really {real[key]!r})")
    if not target:
        target = data / "plan/config"
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / "config.json", KIMI)
    found = report(data if whole else data / "plan", str(target), whole)
    plan = found["plan"]
    print("\nthe real plan, by preflight: {samples:,.0f} answers of {tokens_per_sample:,.0f} tokens, "
          "{store}".format(**plan))
    for stage in STAGES:
        hours = f"{hours:8.1f} h" if (hours := plan["hours"].get(stage)) else ""
        print(f"  {stage:24}{plan['bytes'][stage] / 1e9:10,.1f} GB{hours}")
    print(f"  {'together':24}{sum(plan['bytes'].values()) / 1e9:10,.1f} GB"
          f"{sum(plan['hours'].values()):8.1f} h")
    for row in found["checks"]:
        if row["level"] == "FAIL":
            print(f"  on this box: {row['check']}: {row['message'][:150]}")


if __name__ == "__main__":
    main()
