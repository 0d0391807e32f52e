#!/usr/bin/env bash
# The demo: nothing but settings for the whole kit on a CPU with a small real model, in ./demo-data.
#   ./run_all.sh demo                     calls this, which makes .venv and the model, and calls it back
#   ./run_all.sh demo 03_train 04_eval    only these stages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
setting() { export "KIT_$1=$(printenv "KIT_$1" || printf '%s' "$2")"; }

setting DATA demo-data
setting TARGET "$KIT_DATA/target"
setting DATASET tests/demo_questions.parquet
setting NUM_SAMPLES 660; setting HELDOUT 40; setting MAX_TOKENS 192; setting TEMPERATURE 0.6
setting TOP_P 1  # sorting for a smaller one costs a CPU 1.7 times the time
setting DEVICE cpu; setting TENSOR_PARALLEL 1; setting CONCURRENCY 96
setting ENGINE_ARGS "--dtype bfloat16 --enforce-eager --max-model-len 2048"
setting SERVE_ARGS ""; setting WRITE_TEST_GB 0.1
setting SHARD_GB 0.1; setting STAGING_GB 1; setting MAX_BATCHED_TOKENS 4096; setting MAX_LEN 2048
setting DRAFTER ""; setting DRAFT_VOCAB 4096; setting ROW_TOKENS 1024; setting ACCUMULATE 1
setting EPOCHS 3; setting EVAL_EVERY 150; setting DRAFT_TOKENS 1,3; setting CONCURRENCIES 1,8
setting TEMPERATURES 0; setting REPEATS 1; setting QUESTIONS_PER_LEVEL 2
tests/setup_cpu.sh
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" VLLM_CPU_NUM_OF_RESERVED_CPU=0
[[ ! -e .venv/lib/libiomp5.so ]] || export LD_PRELOAD="$PWD/.venv/lib/libiomp5.so"  # 1.6 times
.venv/bin/python tests/make_target.py "$KIT_TARGET"
exec ./run_all.sh "$@"
