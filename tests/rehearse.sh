#!/usr/bin/env bash
# Rehearses the plan on a handful of samples, in minutes: every stage, the real constants but few.
#   ./run_all.sh rehearse                                # calls this
#   KIT_TARGET=/models/Kimi-K2.5 ./run_all.sh rehearse   # another target than the constant TARGET
#   ./run_all.sh rehearse 03_train 04_eval               # only these stages
# With GPUs and the target's weights at hand it takes them, and 10 samples. Else a tiny model with
# random weights takes their place, made of the target's config and tokenizer where they are at hand,
# else of Kimi-K2.5's, with a drafter like the published ones. Results are in ./rehearsal-data, or
# below DATA in rehearsal/. It ends with what was rehearsed, what was not, and the real plan.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mapfile -t GIVEN < <(printenv | grep '^KIT_')  # what the caller set counts as real
setting() { export "KIT_$1=$(printenv "KIT_$1" || printf '%s' "$2")"; }

GPUS=0 WEIGHTS=0 CHILD=""
! command -v nvidia-smi >/dev/null || GPUS=1
((GPUS)) || tests/setup_cpu.sh
[[ -x .venv/bin/vllm ]] || {
    python3 -m venv .venv && .venv/bin/python -m pip install -q -r requirements.txt
}
mapfile -t REAL < <(.venv/bin/python -c '
import json, pathlib, subprocess, sys
asked = subprocess.run([sys.executable, "02_extract.py", "--settings"], stdout=-1).stdout
s = json.loads(asked or sys.exit(2))
name = s["TARGET"]
if not pathlib.Path(name).is_dir():
    from huggingface_hub import snapshot_download
    try:
        name = snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):
        name = ""
print(s["ENGINE_ARGS"], name, s["DATA"], sep="\n")')
((${#REAL[@]} == 3)) || exit 2  # it has said which setting is wrong
[[ -z "${REAL[1]}" ]] || ! compgen -G "${REAL[1]}/*.safetensors" >/dev/null || WEIGHTS=1

[[ -z "${KIT_DATA:-}" ]] || KIT_DATA+=/rehearsal  # beside the real results, never among them
if ((GPUS && WEIGHTS)); then
    setting DATA "${REAL[2]}/rehearsal"
    setting NUM_SAMPLES 10; setting HELDOUT 10
    mkdir -p "$KIT_DATA" "${KIT_DATA%/*}/drafter"  # the real run needs the published drafter too
    [[ -e "$KIT_DATA/drafter" ]] || ln -s ../drafter "$KIT_DATA/drafter"
else
    setting DATA rehearsal-data
    export KIT_TARGET="$KIT_DATA/target"
    # few and short, so that it takes minutes
    setting NUM_SAMPLES 24; setting HELDOUT 8; setting MAX_TOKENS 64; setting REPEATS 1
    setting CONCURRENCIES 1,8; setting QUESTIONS_PER_LEVEL 4
    setting WRITE_TEST_GB 0.1; setting STAGING_GB 1
    # without a network, in one process, without compiling
    setting DATASET tests/demo_questions.parquet; setting TENSOR_PARALLEL 1
    more="--enforce-eager --max-model-len 2048 --dtype bfloat16"
    if ((!GPUS)); then
        setting DEVICE cpu
        more="${more/bfloat16/float32} --attention-config '{\"backend\":\"CPU_MLA\"}'"
        export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" VLLM_CPU_NUM_OF_RESERVED_CPU=0
        [[ ! -e .venv/lib/libiomp5.so ]] || export LD_PRELOAD="$PWD/.venv/lib/libiomp5.so"
    fi
    export KIT_ENGINE_ARGS="${REAL[0]} $more"
    .venv/bin/python tests/make_tiny.py "$KIT_TARGET" "${REAL[1]:-kimi}" "$KIT_DATA/drafter"
fi

run() {  # in the background: bash passes no signal on to a child that it waits for
    ./run_all.sh "$@" &
    CHILD=$!
    wait "$CHILD"
}
trap 'kill -TERM "$CHILD"; wait "$CHILD"; exit 143' INT TERM
[[ $# -gt 0 ]] || set -- 01_generate 01b_generate_synthetic 02_extract 03_train 04_eval
before=()
for stage in "$@"; do
    [[ "$stage" == 04_eval ]] || before+=("$stage")
done
[[ ${#before[@]} == 0 ]] || run "${before[@]}"
if [[ " $* " == *" 04_eval "* ]]; then
    # On a CPU vLLM finds no block size in common for MLA (16) and a drafter's attention (32).
    ((GPUS)) || export VLLM_MLA_DISABLE=1
    run 04_eval
fi
exec .venv/bin/python tests/tell_rehearsal.py "${REAL[1]}" "${GIVEN[@]}"
