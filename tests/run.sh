#!/usr/bin/env bash
# Run the tests, with a real vLLM on the CPU; makes .venv where it is missing.
#   tests/run.sh                       everything but the slow ones, under 30 minutes on 2 cores
#   tests/run.sh drill                 the slow ones too: fault drills, many targets, long runs
#   tests/run.sh -k settings -x        flags go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tests/setup_cpu.sh
marks=(-m "not slow")
if [[ "${1:-}" == drill ]]; then
    marks=()
    shift
fi
exec .venv/bin/python -m pytest tests -ra -p no:cacheprovider "${marks[@]}" "$@"
