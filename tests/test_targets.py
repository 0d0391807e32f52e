"""Other targets as tiny random models through the whole kit: nothing but TARGET differs from the demo.

The README's table says what came of it. A run is cut down as the tests' demo is (fewer questions, one K).
"""
import json
import subprocess

import pytest
from conftest import KIT, clean_environ, free_port
from make_tiny import make_target

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # four minutes and four starts of vLLM each
CUT = {"KIT_NUM_SAMPLES": "24", "KIT_HELDOUT": "8", "KIT_MAX_TOKENS": "32", "KIT_DRAFT_TOKENS": "3",
       "KIT_CONCURRENCIES": "8", "KIT_EPOCHS": "2", "KIT_DRAFT_VOCAB": "1024"}
ASKED = ["01_generate", "01b_generate_synthetic", "02_extract", "03_train"]
RECORDED = ["01_generate", "02_extract", "03_train"]


@pytest.mark.parametrize("kind, stages, env, env04", [
    ("qwen3", ASKED, {}, {}),
    ("qwen3_moe", ASKED, {}, {}),
    ("llama", ASKED, {}, {}),
    # vLLM asks gpt-oss in OpenAI's harmony format, whose vocabulary no tiny model has: recorded answers
    ("gpt_oss", RECORDED, {"KIT_SAMPLES_FROM": "01_generate"}, {}),
    # on a CPU MLA and a drafter have no block size in common: 04 serves it by plain attention
    ("deepseek_v3", ASKED, {}, {"VLLM_MLA_DISABLE": "1"})])
def test_target(tmp_path, kind, stages, env, env04):
    data, target = tmp_path / "data", tmp_path / "target"
    make_target(target, kind)
    env = clean_environ(KIT_DATA=str(data), KIT_TARGET=str(target), **CUT,
                        KIT_SERVER_URL=f"http://127.0.0.1:{free_port()}", **env)
    for some, more in ((stages, {}), (["04_eval"], env04)):
        done = subprocess.run(["./run_all.sh", "demo", *some], cwd=KIT, env=env | more, text=True, timeout=900,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-4000:]
    extract = json.loads((data / "02_extract/manifest.json").read_text())
    results = json.loads(next(data.glob("04_eval/*/results.json")).read_text())
    print(kind, extract["proof"], {key: results[key] for key in (
        "acceptance_length", "offline_acceptance_length", "parity_gap_by_position", "identical_outputs",
        "compared_outputs", "near_ties", "faults")})
    assert extract["layer_ids"] == [2, 4, 5] and extract["proof"]["logprob_gap_max"] < 0.5
    assert results["compared_outputs"] >= 8 and results["faults"] == 0
    assert max(map(abs, results["parity_gap_by_position"])) < 0.05
