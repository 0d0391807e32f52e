#!/usr/bin/env python3
"""Tell what tests/rehearse.sh rehearsed, what it did not and why, and the plan of the real constants.

    KIT_DATA=rehearsal-data tests/tell_rehearsal.py [DIRECTORY_OF_THE_REAL_TARGET]

Reads the manifests of a rehearsal and the stages' settings with and without the KIT_* that it was run
with; asks 00_preflight.sh for the plan, which stands in $DATA/plan/logs/preflight.json afterwards.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

from make_tiny import KIMI, write_json

STAGES = "01_generate", "01b_generate_synthetic", "02_extract", "03_train", "04_eval"
CHOSEN = {key: value for key, value in os.environ.items() if key[:4] == "KIT_"}
PLAIN = {key: value for key, value in os.environ.items() if key not in CHOSEN}


def settings(environ):
    """What the stages answer to --settings, together."""
    found = {}
    for stage in STAGES:
        found |= json.loads(subprocess.check_output([sys.executable, f"{stage}.py", "--settings"], env=environ))
    return found


def last_line(path):
    return path.read_text().rstrip().rpartition("\n")[2] if path.exists() else ""


def rehearsed(data):
    """A line for each stage that is done."""
    made = {path.parent.relative_to(data).parts[0]: json.loads(path.read_text())
            for path in sorted(data.glob("0*/**/manifest.json"))}
    made = {stage: facts for stage, facts in made.items() if facts["done"]}
    if facts := made.get("01_generate"):
        yield (f"01_generate: {facts['counts']['questions']} questions, {facts['counts']['samples']} recorded "
               "answers, their borders found with the target's template")
    if facts := made.get("01b_generate_synthetic"):
        rows = [json.loads(line) for line in open(data / "01b_generate_synthetic/samples.jsonl")]
        yield (f"01b_generate_synthetic: {len(rows)} answers of vLLM's server, {sum(row['reasoning'] is not None for row in rows)} "
               f"begin inside the reasoning, {sum(row['finish_reason'] == 'length' for row in rows)} are cut by MAX_TOKENS")
    if facts := made.get("02_extract"):
        proof = facts["proof"]
        yield (f"02_extract: layers {facts['layer_ids']} and {facts['last_layer']} in {facts['store']}; the proof: "
               f"{proof['tokens']} tokens, logprobs within {proof['logprob_gap_max']:.2g} nats of the engine's")
    if facts := made.get("03_train"):
        yield (f"03_train: {facts['steps']} steps from the drafter in {data / 'drafter'}, its draft vocabulary of "
               f"{facts['draft_vocab_size']:,} kept; acceptance length {facts['best']['acceptance_length']:.2f}")
    if "04_eval" in made:
        facts = json.loads(next(data.glob("04_eval/*/results.json")).read_text())
        yield (f"04_eval: vLLM served the drafter; acceptance length {facts['acceptance_length']:.2f}, greedy "
               f"answers the same: {facts['identical_outputs']} of {facts['compared_outputs']}")


def missing(now, real, whole):
    """What was not rehearsed, and why."""
    if whole:
        return ["the length of the run: nothing shows only after hours, but heat, leaks and full disks"]
    found = ["the weights: random ones answer gibberish, so speeds and acceptance mean nothing here, and neither "
             f"loading nor quantised kernels ran ({real['TARGET']} is not at hand with a GPU)",
             f"the published drafter's own weights: {real['DRAFTER']} was not fetched"]
    if real["TENSOR_PARALLEL"] * real["PIPELINE_PARALLEL"] > 1:
        found.append(f"{real['TENSOR_PARALLEL']} GPUs for each layer: the tiny model runs in one process")
    if now["DEVICE"] == "cpu":
        found.append("04_eval with MLA: it served the same weights by plain attention (VLLM_MLA_DISABLE=1), since on "
                     "a CPU vLLM finds 'No common block size for 16' between MLA and a drafter's attention")
    return found


def plan(data, target):
    """preflight's report for the real constants; what a rehearsal of the real target measured counts."""
    environ = PLAIN | {"KIT_DATA": str(data), "KIT_TARGET": target, "KIT_WRITE_TEST_GB": "0"}
    if data.name == "plan":
        environ["KIT_DRAFTER"] = ""  # it is not to be downloaded here
    subprocess.run(["./00_preflight.sh"], env=environ, stdout=subprocess.DEVNULL)
    return json.loads((data / "logs/preflight.json").read_text())


def main():
    data, target = Path(CHOSEN["KIT_DATA"]), sys.argv[1]
    now, real = settings(os.environ), settings(PLAIN)
    whole = Path(now["TARGET"]) != data / "target"
    print("\nrehearsed, with " + ("the target itself:" if whole else "a tiny model of the target's kind:"))
    for line in rehearsed(data):
        print(f"  {line}")
    print("not rehearsed:")
    for line in missing(now, real, whole):
        print(f"  {line}")
    print("constants that were others here, to take minutes, one process and no network (real ones in brackets):")
    print("  " + ", ".join(f"{key}={now[key]} ({real[key]})" for key in real if now[key] != real[key]))
    if not target:
        (data / "plan/config").mkdir(parents=True, exist_ok=True)
        write_json(data / "plan/config/config.json", KIMI)
    found = plan(data if whole else data / "plan", target or str(data / "plan/config"))
    planned = found["plan"]
    print(f"the real plan, by preflight: {planned['samples']:,.0f} answers of {planned['tokens_per_sample']:,.0f} tokens")
    for stage in STAGES:
        print(f"  {stage:24}{planned['bytes'].get(stage, 0) / 1e9:10,.1f} GB{planned['hours'].get(stage, 0):8.1f} h")
    print(f"  together{sum(planned['bytes'].values()) / 1e9:26,.1f} GB{sum(planned['hours'].values()):8.1f} h; at most "
          f"NUM_SAMPLES={planned['largest_num_samples']} in {planned['store']} on this disk")
    for row in found["checks"]:
        if row["level"] == "FAIL":
            print(f"  on this box: {row['check']}: {row['message'][:150]}")


if __name__ == "__main__":
    main()
