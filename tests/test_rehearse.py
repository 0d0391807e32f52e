"""`./run_all.sh rehearse` on the CPU, and what is particular about Kimi-K2.5, with a tiny model like it."""
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import KIT, clean_environ, free_port, serving
from make_tiny import DEEPSEEK, KIMI, make_target, write_json
from safetensors.torch import load_file
from test_generate_synthetic import NAME, Data, Server, light, lines  # noqa: F401 (light: a fixture)

STAGES = ("01_generate", NAME, "02_extract", "03_train/n*", "04_eval/n*")
PARSERS = "--reasoning-parser kimi_k2 --tool-call-parser kimi_k2 --enable-auto-tool-choice"
CPU_MLA = "--enforce-eager --max-model-len 2048 --dtype float32 --attention-config '{\"backend\":\"CPU_MLA\"}'"


# ---- the rehearsal ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """The environment of a rehearsal in a directory of its own, on a free port."""
    return clean_environ(KIT_DATA=str(tmp_path_factory.mktemp("rehearsal")), KIT_STORE="int4",
                         KIT_SERVER_URL=f"http://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def rehearsal(environ):
    """(data, output) of `./run_all.sh rehearse`, run once."""
    done = subprocess.run(["./run_all.sh", "rehearse"], cwd=KIT, env=environ, text=True, timeout=900,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-5000:]
    return Path(environ["KIT_DATA"]) / "rehearsal", done.stdout


def manifest(data, stage):
    return json.loads(next(data.glob(f"{stage}/manifest.json")).read_text())


@pytest.mark.engine
def test_every_stage_ran_with_the_real_constants(rehearsal):
    data, _ = rehearsal
    assert all(manifest(data, stage)["done"] for stage in STAGES)
    config = json.loads((data / "target/config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["kv_lora_rank"] == 512 and config["text_config"]["n_routed_experts"] == 8
    names = load_file(data / "target/model.safetensors").keys()
    assert all(name.startswith("language_model.") for name in names)
    asked = manifest(data, NAME)["settings"]  # real: temperature, top_p, thinking; fewer: MAX_TOKENS
    assert (asked["TEMPERATURE"], asked["TOP_P"], asked["THINKING"], asked["MAX_TOKENS"]) == (1.0, 0.95, "", 64)
    trained = manifest(data, "03_train/n*")
    assert trained["settings"]["TTT_STEPS"] == 4 and trained["settings"]["ROW_TOKENS"] == 8192
    results = json.loads(next(data.glob("04_eval/n*/results.json")).read_text())
    assert results["num_speculative_tokens"] == 3 and results["concurrencies"] == [1, 8]


@pytest.mark.engine
def test_answers_begin_inside_the_reasoning(rehearsal):
    from transformers import AutoTokenizer
    data, _ = rehearsal
    tokenizer = AutoTokenizer.from_pretrained(data / "target")
    opens, closes, calls = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|tool_calls_section_begin|>"])
    rows = lines(data / NAME / "samples.jsonl")
    assert len(rows) >= 20
    for row in rows:
        answer = row["token_ids"][row["prompt_len"]:]
        assert row["token_ids"][row["prompt_len"] - 1] == opens and row["reasoning"] is not None
        said = tokenizer.decode(answer[answer.index(closes) + 1:], skip_special_tokens=True) if closes in answer else ""
        assert calls in answer or bool(row["text"]) == bool(said.replace("</think>", "").strip())


@pytest.mark.engine
def test_the_published_drafter_is_what_was_trained(rehearsal):
    data, _ = rehearsal
    assert manifest(data, "02_extract")["layer_ids"] == [2, 4, 5]  # from eagle_config, and only there
    given, config = load_file(data / "drafter/model.safetensors"), json.loads((data / "drafter/config.json").read_text())
    assert "eagle_aux_hidden_state_layer_ids" not in config and (data / "drafter/training_state.pt").exists()
    out = next(data.glob("03_train/n*/drafter"))
    made, exported = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert made.keys() == given.keys() and made["d2t"].equal(given["d2t"]) and made["t2d"].equal(given["t2d"])
    assert exported["rope_theta"] == config["rope_theta"] and exported["num_attention_heads"] == 8
    assert exported["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


@pytest.mark.engine
def test_vllm_served_the_drafter_and_the_answers_are_the_same(rehearsal):
    results = json.loads(next(rehearsal[0].glob("04_eval/n*/results.json")).read_text())
    assert results["compared_outputs"] >= 6 and results["faults"] == 0
    assert results["drafts"] > 50 and len(results["acceptance_by_position"]) == 3
    assert "--reasoning-parser kimi_k2" in results["serve_command"]


@pytest.mark.engine
def test_it_tells_what_was_rehearsed_what_not_and_the_real_plan(rehearsal):
    data, text = rehearsal
    end = text[text.index("\nrehearsed, with a tiny model"):]
    for stage in ("01_generate", NAME, "02_extract", "03_train", "04_eval"):
        assert f"\n  {stage}: " in end
    assert "not rehearsed:" in end and "No common block size for 16" in end and "was not fetched" in end
    assert "NUM_SAMPLES = 24 (really 25000)" in end and "MAX_TOKENS = 64 (really 4096)" in end
    assert "TTT_STEPS" not in end and "STORE = " not in end  # int4 was asked for, and will be again
    plan = json.loads((data / "plan/logs/preflight.json").read_text())["plan"]
    assert plan["samples"] == 25200 and plan["bytes_per_token"]["int4"] == 16128
    assert f"{plan['bytes']['02_extract'] / 1e9:,.1f} GB" in end and f"{plan['hours']['02_extract']:.1f} h" in end
    assert not list(data.rglob("*.tmp")) and not list(data.rglob(".lock"))


def test_a_real_config_and_tokenizer_shrink_in_sizes_only(kimi, tmp_path):
    """A directory with Kimi-K2.5's files but weights: nested, quantised, with code of its own."""
    real, tiny = tmp_path / "Kimi-K2.5", tmp_path / "tiny"
    shutil.copytree(kimi, real, ignore=shutil.ignore_patterns("*.safetensors"))
    config = KIMI | {"quantization_config": {}, "text_config": DEEPSEEK | {
        "model_type": "kimi_k2", "vocab_size": 4096, "quantization_config": {"quant_method": "compressed-tensors"},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}}
    write_json(real / "config.json", config)
    (real / "configuration_deepseek.py").write_text("raise RuntimeError('nobody trusts this')\n")
    make_target(tiny, str(real))
    made = json.loads((tiny / "config.json").read_text())
    same = ("vocab_size", "max_position_embeddings", "kv_lora_rank", "scoring_func", "routed_scaling_factor")
    assert all(made["text_config"][key] == config["text_config"][key] for key in same)
    assert made["text_config"]["hidden_size"] == 128 and made["text_config"]["num_hidden_layers"] == 8
    assert "quantization_config" not in str(made) and made["architectures"] == config["architectures"]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "configuration_deepseek.py"):
        assert (tiny / name).read_bytes() == (real / name).read_bytes()
    head = load_file(tiny / "model.safetensors")["language_model.lm_head.weight"]
    assert head.shape == (4096, 128)
    with pytest.raises(SystemExit, match="was made of .*Kimi-K2.5, not of kimi; to fix: mv"):
        make_target(tiny, "kimi")  # not taken for what it is not


@pytest.mark.engine
def test_moved_elsewhere_everything_is_recognised(rehearsal, environ, tmp_path):
    """DATA and the target under other paths: a second run finds all done, and tells it all again."""
    data = tmp_path / "moved" / "rehearsal"
    shutil.copytree(rehearsal[0], data)
    done = subprocess.run(["./run_all.sh", "rehearse"], cwd=KIT, env=environ | {"KIT_DATA": str(data.parent)},
                          text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and done.stdout.count("already done") == 5, done.stdout[-3000:]
    assert "the server loads" not in done.stdout and "rehearsed, with a tiny model" in done.stdout


@pytest.mark.slow  # three minutes: three starts of vLLM
@pytest.mark.engine
def test_growing_asks_nothing_twice_and_trains_on_from_the_last_best(rehearsal, environ, tmp_path):
    data = tmp_path / "rehearsal"
    shutil.copytree(rehearsal[0], data)
    before = lines(data / NAME / "samples.jsonl")
    shards = {path.name: path.stat().st_mtime_ns for path in (data / "02_extract").glob("*.safetensors")}
    old = manifest(data, "03_train/n*")["best"]["acceptance_length"]
    best = shutil.copytree(next(data.glob("03_train/n*/drafter")), data / "best")
    done = subprocess.run(
        ["./run_all.sh", "rehearse", "01_generate", NAME, "02_extract", "03_train"], cwd=KIT, text=True, timeout=600,
        env=environ | {"KIT_DATA": str(tmp_path), "KIT_NUM_SAMPLES": "32", "KIT_DRAFTER": str(best)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    after = lines(data / NAME / "samples.jsonl")
    assert after[:len(before)] == before and len(after) > len(before)
    assert all((data / "02_extract" / name).stat().st_mtime_ns == then for name, then in shards.items())
    trained = json.loads((data / f"03_train/n{len(after)}/manifest.json").read_text())
    first = json.loads((data / f"03_train/n{len(after)}/metrics.jsonl").read_text().split("\n")[0])
    assert first["heldout"]["acceptance_length"] == pytest.approx(old, abs=0.01)  # it begins where that ended
    assert trained["best"]["acceptance_length"] >= first["heldout"]["acceptance_length"]


@pytest.mark.slow  # a minute: a start of the server that must fail
@pytest.mark.engine
def test_why_04_is_rehearsed_without_mla(rehearsal, environ, stage, tmp_path):
    """vLLM's own words, when MLA and a drafter meet on a CPU; the day this fails, rehearse it."""
    data = tmp_path / "data"
    shutil.copytree(rehearsal[0], data)
    for name in ("configs/k3.json", "results.json"):
        next(data.glob(f"04_eval/n*/{name}")).unlink()
    done = stage("04_eval", check=False, env={
        "KIT_DATA": str(data), "KIT_TARGET": str(data / "target"), "KIT_DEVICE": "cpu", "KIT_TENSOR_PARALLEL": "1",
        "KIT_ENGINE_ARGS": f"--language-model-only {CPU_MLA}", "KIT_CONCURRENCIES": "1,8", "KIT_REPEATS": "1",
        "KIT_QUESTIONS_PER_LEVEL": "4"})
    assert done.returncode == 1 and "No common block size for 16" in done.stdout, done.stdout


# ---- Kimi's particulars, with a server of our own -----------------------------------------------
@pytest.fixture(scope="session")
def kimi(tmp_path_factory):
    """Directory of a tiny Kimi-K2.5 with its tokenizer and template."""
    directory = tmp_path_factory.mktemp("kimi") / "target"
    make_target(directory, "kimi")
    return directory


@pytest.fixture(scope="session")
def kimi_tokenizer(kimi):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(kimi)


@pytest.fixture
def data(stage, kimi, tmp_path, light):  # noqa: F811
    return Data(stage, kimi, tmp_path, light)


@pytest.fixture
def server(kimi, kimi_tokenizer):
    """A fake vLLM with a reasoning parser: answer(messages) gives (content, reasoning, finish_reason)."""
    server = Server(kimi_tokenizer, kimi)
    yield server
    server.stop()


def test_the_answer_begins_inside_the_reasoning_and_its_end_token_is_trained(data, server, kimi_tokenizer, load, tmp_path):
    """From the reply to the rows that 03 trains on: </think> is one token, <|im_end|> the last one."""
    server.answer = lambda messages: ("Four.", "Two and two.", "stop")
    data.choose(8).run(server)
    opens, closes, end = kimi_tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    extract, train = load("02_extract"), load("03_train")
    train.import_torch()
    samples, _ = extract.read_samples(data.out, "", 4096, len(kimi_tokenizer))
    sample = next(each for each in samples if each["split"] == "train")
    P, ids = sample["prompt_len"], sample["token_ids"].tolist()
    assert ids[P - 1] == opens and ids[P:].count(closes) == 1 and ids[-1] == end
    row = data.rows_of("samples")[0]
    assert row["text"] == "Four." and row["reasoning"] == "Two and two."
    states, name = torch.randn(len(ids), 4, 64), "train-00000.safetensors"
    facts = extract.write_shard(tmp_path / name, {sample["id"]: extract.pack(sample, states, "bf16")}, {
        "format": "1", "store": "bf16", "layer_ids": "2,4,5", "last_layer": "8", "run": "0"})
    found = train.read_shards(tmp_path, {"hidden_size": 64, "store": "bf16", "files": {name: facts}}, "train", 4096)
    rows = train.load_row(found, 1)
    assert rows["next"][:, 0].tolist() == ids[P + 1:]  # all that is drafted, the end token last


def test_thinking_that_max_tokens_cuts_is_kept_and_ends_the_conversation(data, server):
    data.write(10, two_turns=True)
    server.answer = lambda messages: (None, "and so on and on, without any end to it", "length")
    data.choose(5).run(server)
    rows = data.rows_of("samples")
    assert len(rows) == 5 and {(row["text"], row["finish_reason"]) for row in rows} == {("", "length")}
    assert all(row["reasoning"].startswith("and so on") for row in rows)
    assert {(row["reason"], row["turn"]) for row in data.rows_of("rejected")} == {("no history", 1)}


def test_a_thought_that_is_empty_leaves_the_answer_and_the_conversation(data, server):
    data.write(10, two_turns=True)
    server.answer = lambda messages: ("Four.", "", "stop")
    data.choose(5).run(server)
    rows = data.rows_of("samples")
    assert {row["turn"] for row in rows} == {0, 1} and {(row["text"], row["reasoning"]) for row in rows} == {("Four.", "")}


def test_instant_mode_asks_for_it_and_has_no_reasoning(data, server, kimi_tokenizer):
    server.answer = lambda messages: ("Four.", None, "stop")
    data.choose(5).run(server, "--thinking", 0)
    ids = kimi_tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    for row in data.rows_of("samples"):
        assert row["token_ids"][row["prompt_len"] - 2:row["prompt_len"]] == ids
        assert row["reasoning"] is None and row["text"] == "Four."
    assert len(data.rows_of("samples")) == 5
    assert all(body["chat_template_kwargs"] == {"thinking": False} for body in server.bodies)


def test_the_history_holds_answers_without_their_reasoning(data, server):
    data.write(10, two_turns=True)
    server.answer = lambda messages: ("Four.", "Two and two.", "stop")
    data.choose(5).run(server)
    later = [body["messages"] for body in server.bodies if len(body["messages"]) == 3]
    assert later and all(messages[1] == {"role": "assistant", "content": "Four."} for messages in later)


def test_media_placeholders_in_a_question_are_tokens_like_others(data, server, kimi_tokenizer, load):
    pad = kimi_tokenizer.convert_tokens_to_ids("<|media_pad|>")
    data.rows.write_text("".join(json.dumps({"prompt": f"{i}: what is <|media_pad|>?"}) + "\n" for i in range(10)))
    server.answer = lambda messages: ("A picture.", "What is it?", "stop")
    data.choose(5).run(server)
    assert all(row["token_ids"].count(pad) >= 1 for row in data.rows_of("samples"))
    samples, _ = load("02_extract").read_samples(data.out, "", 4096, len(kimi_tokenizer))
    assert len(samples) == 10 and all(pad in each["token_ids"] for each in samples)


def test_recorded_answers_have_their_border_after_the_opened_reasoning(data, kimi_tokenizer):
    data.write(10, two_turns=True)
    data.choose(5)
    opens, closes, end = kimi_tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    rows = lines(data.path / "01_generate/samples.jsonl")
    assert rows
    for row in rows:
        prompt, answer = row["token_ids"][:row["prompt_len"]], row["token_ids"][row["prompt_len"]:]
        assert (prompt[-1], answer[0], answer[-1]) == (opens, closes, end)


REMOTE = '''
from transformers import PreTrainedTokenizer
class TinyTokenizer(PreTrainedTokenizer):
    """A byte is a token; 256 and 257 begin and end a turn."""
    def __init__(self, **kwargs):
        super().__init__(eos_token="<end>", bos_token="<begin>", **kwargs)
    vocab_size = 256
    def get_vocab(self):
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder
    def _tokenize(self, text):
        return [chr(i) for i in text.encode()]
    def _convert_token_to_id(self, token):
        return ord(token)
    def _convert_id_to_token(self, index):
        return chr(index)
'''


@pytest.mark.parametrize("name", ["01_generate", NAME])
def test_a_tokenizer_with_code_of_its_own_needs_trust_remote_code(name, stage, tmp_path, light):  # noqa: F811
    """Off by default; the message names the constant; with it the code is run."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({
        "model_type": "tiny_remote", "vocab_size": 300, "auto_map": {"AutoConfig": "code_of_its_own.TinyConfig"}}))
    (target / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "TinyTokenizer", "auto_map": {"AutoTokenizer": ["code_of_its_own.TinyTokenizer", None]},
        "chat_template": "{% for m in messages %}<begin>{{ m.content }}<end>{% endfor %}"
                         "{% if add_generation_prompt %}<begin>{% endif %}"}))
    (target / "code_of_its_own.py").write_text(
        "from transformers import PreTrainedConfig\nclass TinyConfig(PreTrainedConfig):\n"
        "    model_type = 'tiny_remote'\n" + REMOTE)
    env = light | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    data = Data(stage, target, tmp_path, env)
    data.write(20, two_turns=True)
    trusting = env | {"KIT_TRUST_REMOTE_CODE": "1"}
    if name == NAME:
        data.light = trusting
        data.choose(5)
    flags = ["--data", data.path, "--target", target, "--dataset", data.rows, "--num-samples", 5, "--heldout", 2]
    flags = flags if name == "01_generate" else data.flags("http://127.0.0.1:9", "--give-up-min", 0)
    done = stage(name, *flags, check=False, env=env)
    assert done.returncode == 1 and "set TRUST_REMOTE_CODE to 1" in done.stdout and "Traceback" not in done.stdout
    done = stage(name, *flags, check=False, env=trusting)
    assert done.returncode == (0 if name == "01_generate" else 3), done.stdout  # 3: no server there
    if name == "01_generate":
        row = lines(data.path / name / "samples.jsonl")[0]
        assert bytes(row["token_ids"][1:9]) == b"Question"


# ---- the same with vLLM's own server and Kimi's parsers -----------------------------------------
@pytest.fixture(scope="module")
def vllm_server(kimi, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server") / "log", "--model", kimi, *shlex.split(CPU_MLA),
                 "--language-model-only", *PARSERS.split()) as url:
        yield url


@pytest.mark.engine
@pytest.mark.parametrize("thinking", ["", "0"])
def test_vllm_with_kimis_parsers_thinking_and_instant(vllm_server, data, kimi_tokenizer, thinking):
    """Media placeholders too: they go in as tokens, no picture is looked for."""
    rows = [{"prompt": f"{i}: what is <|media_pad|>, and <|media_begin|>?"} for i in range(20)]
    data.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data.choose(10).run(vllm_server, "--thinking", thinking, "--read-timeout-sec", 60, "--max-tokens", 24)
    rows = data.rows_of("samples") + data.rows_of("heldout_samples")
    opens, closes, pad = kimi_tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|media_pad|>"])
    assert len(rows) >= 12
    for row in rows:
        prompt, answer = row["token_ids"][:row["prompt_len"]], row["token_ids"][row["prompt_len"]:]
        assert prompt[-1] == (closes if thinking else opens) and prompt.count(pad) == 1
        if thinking:
            assert row["reasoning"] is None or closes in answer
        else:  # what stands before </think>, if it came
            thought = answer[:answer.index(closes)] if closes in answer else answer
            want = kimi_tokenizer.decode(thought, skip_special_tokens=True).strip()
            broken = "\ufffd" in want or "tool_call" in kimi_tokenizer.decode(answer)  # by chance
            assert row["reasoning"] == want or broken and row["reasoning"] is not None


@pytest.mark.engine
def test_vllm_with_kimis_parsers_and_a_tool_call(vllm_server, kimi, kimi_tokenizer, load):
    """A call that nobody asked for: every token id is there, its own tokens too."""
    import requests
    ids = kimi_tokenizer.convert_tokens_to_ids([
        "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
        "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"])
    reply = requests.post(f"{vllm_server}/v1/chat/completions", json={
        "model": str(kimi), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40,
        "return_token_ids": True, "allowed_token_ids": ids, "temperature": 1.0}, timeout=60).json()
    row = load(NAME).read_reply(reply, len(kimi_tokenizer), True)
    answer = row["token_ids"][row["prompt_len"]:]
    assert set(answer) <= set(ids) and row["finish_reason"] in ("stop", "length")
    assert answer[-1] == ids[-1] or row["finish_reason"] == "length"


# ---- constants for more than one GPU ------------------------------------------------------------
PARALLEL = {"KIT_TENSOR_PARALLEL": "4", "KIT_PIPELINE_PARALLEL": "2", "KIT_DATA_PARALLEL": "3",
            "KIT_ENGINE_ARGS": "--distributed-executor-backend ray --max-num-seqs 77", "KIT_TRUST_REMOTE_CODE": "1"}


def test_parallel_constants_reach_the_servers_flags(tmp_path, kimi):
    """The command that run_all.sh starts the server with, taken down by an interpreter that notes it."""
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
[[ "$*" != *api_server* ]] || {{ printf '%s\\n' "$@" >'{tmp_path}/flags'; exit 1; }}
[[ "$1" != *01b* ]] || [[ "$2" == --settings ]] || exit 3   # it misses a server
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    done = subprocess.run(["./run_all.sh", NAME], cwd=KIT, text=True, capture_output=True, env=clean_environ(
        KIT_PYTHON=str(python), KIT_DATA=str(tmp_path / "data"), KIT_TARGET=str(kimi), KIT_SKIP_PREFLIGHT="1",
        KIT_SERVER_URL=f"http://127.0.0.1:{free_port()}", KIT_WRITE_TEST_GB="0", KIT_DRAFTER="", **PARALLEL))
    assert done.returncode == 1 and "the server died" in done.stderr
    flags = (tmp_path / "flags").read_text().split("\n")
    for name, value in (("--model", str(kimi)), ("--tensor-parallel-size", "4"), ("--pipeline-parallel-size", "2"),
                        ("--data-parallel-size", "3"), ("--distributed-executor-backend", "ray"),
                        ("--max-num-seqs", "77"), ("--reasoning-parser", "kimi_k2")):
        assert flags[flags.index(name) + 1] == value
    assert "--trust-remote-code" in flags


def test_parallel_constants_reach_04s_server_and_02s_engine(load, kimi, monkeypatch):
    import vllm
    for name, value in (PARALLEL | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}).items():
        monkeypatch.setenv(name, value)
    flags = shlex.join(load("04_eval").serve_flags(load("04_eval").settings([]), "/drafter", 3))
    assert "--tensor-parallel-size 4 --pipeline-parallel-size 2 --data-parallel-size 3" in flags
    assert "--distributed-executor-backend ray --max-num-seqs 77" in flags and "--trust-remote-code" in flags
    extract, taken = load("02_extract"), []
    monkeypatch.setattr(vllm.LLMEngine, "from_engine_args", taken.append)  # nothing is started
    s = extract.settings(["--target", str(kimi)])
    extract.start_engine(s, 100, [2, 4, 5, 8], "/nowhere")
    args = taken[0]
    assert (args.tensor_parallel_size, args.pipeline_parallel_size, args.max_num_seqs) == (4, 2, 77)
    assert args.distributed_executor_backend == "ray" and args.trust_remote_code
    assert args.speculative_config["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}
