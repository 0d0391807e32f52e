#!/usr/bin/env python3
"""Make a tiny target with random weights and, beside it, a drafter as they are published.

    .venv/bin/python tests/make_tiny.py /tmp/tiny kimi                      # or another of KINDS
    .venv/bin/python tests/make_tiny.py /tmp/tiny /models/Kimi-K2.5 /tmp/tiny-drafter

Of a real model's directory config.json, tokenizer and chat template are taken as they are; only sizes
shrink: hidden 128, 8 layers, 8 experts. Without one, the tokenizer (4,096 tokens, byte-level BPE of
the demo's questions) and Kimi's chat template, tokens and nesting are made here. The drafter has what
AQ-MedAI/Kimi-K25-eagle3 has: layer ids only in eagle_config, `midlayer.` names, d2t and t2d, no
embed_tokens, and a training_state.pt that nothing reads. A directory appears whole; costs 20 s.
"""
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 64, "num_experts": 8,
         "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 64,
         "n_group": 1, "topk_group": 1, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_head_dim": 96}
DEEPSEEK = {  # the language model of Kimi-K2.5, as its config.json has it
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.827, "norm_topk_prob": True, "rms_norm_eps": 1e-5, "vocab_size": 163840,
    "max_position_embeddings": 262144, "hidden_act": "silu", "attention_bias": False,
    "rope_theta": 50000.0, "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}
VISION = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
MEDIA = {"patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4, "in_patch_limit": 64,
         "in_patch_limit_each_frame": 64, "patch_limit_on_one_side": 8, "fixed_output_tokens": None,
         "sample_fps": 2.0, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "tie_word_embeddings": False, "text_config": DEEPSEEK, "vision_config": VISION}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}
KINDS = {"kimi": KIMI, "deepseek_v3": DEEPSEEK, "llama": LLAMA, "qwen3": {"model_type": "qwen3"},
         "qwen3_moe": {"model_type": "qwen3_moe"}, "gpt_oss": {"model_type": "gpt_oss"}}
TOKENS = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
          "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
          "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>",
          "<|media_pad|>", "<|media_end|>", "<think>", "</think>", "[PAD]", "[BOS]", "[EOS]"]
TEMPLATE = """{%- for m in messages -%}
<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.role == 'assistant' -%}<think></think>{%- endif -%}{{ m.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}"""


def write_tokenizer(directory, vocab_size=4096):
    """A byte-level BPE of the demo's questions with Kimi's special tokens and its manner of template:
    an answer begins inside the reasoning, in the history the reasoning is empty."""
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    rows = pyarrow.parquet.read_table(Path(__file__).with_name("demo_questions.parquet")).to_pylist()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        (turn["value"] for row in rows for turn in row["conversations"]), trainers.BpeTrainer(
            vocab_size=vocab_size - len(TOKENS), initial_alphabet=alphabet, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="[PAD]",
                                   chat_template=TEMPLATE)
    fast.add_special_tokens({"additional_special_tokens": [t for t in TOKENS if "think" not in t]})
    fast.add_tokens(["<think>", "</think>"])  # not special, as Kimi has them
    fast.save_pretrained(directory)
    return fast


def write_json(path, content):
    """A JSON file; the directory it lies in appears whole."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def shrink(config):
    """A real model's config with the sizes of SMALL; its quantization goes."""
    config = json.loads(json.dumps(config))
    text = config.get("text_config") or config
    for name, size in SMALL.items():
        if text.get(name):
            text[name] = min(text[name], size)
    if "kv_lora_rank" in text:
        text["num_key_value_heads"] = text["num_attention_heads"]
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:text["num_hidden_layers"]]
    for part in (config, text):
        part.pop("quantization_config", None)
    if "vision_config" in config:
        config["vision_config"] |= VISION
    return config


def write_model(directory, config, think_id=None):
    """Random weights in f32 for `config` (nested: below language_model.), and its config.json; the
    language model comes back. think_id is made a likely token, so that some reasoning ends."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    torch.manual_seed(0)
    text = config.get("text_config") or config
    kind = text["model_type"].replace("kimi_k2", "deepseek_v3")
    made = CONFIG_MAPPING[kind](**{key: value for key, value in text.items() if key != "auto_map"})
    made.initializer_range = 0.08
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    if think_id is not None:
        model.lm_head.weight.data[think_id] *= 3
    model.save_pretrained(directory)
    written = text | json.loads((directory / "config.json").read_text())
    if text is not config:
        weights = load_file(directory / "model.safetensors")
        save_file({f"language_model.{name}": weights[name] for name in weights},
                  directory / "model.safetensors", {"format": "pt"})
        written = config | {"text_config": written, "dtype": "float32"}
    write_json(directory / "config.json", written)
    return model


def make_model(directory, kind, vocab_size=4096, token_id=lambda token: None):
    """write_model of one of KINDS, without any real model at hand; token_id(token) of a tokenizer."""
    from transformers import CONFIG_MAPPING
    directory, config = Path(directory), KINDS[kind]
    directory.mkdir(exist_ok=True)
    if kind not in ("kimi", "deepseek_v3"):  # what stands in none of them is transformers' default
        config = CONFIG_MAPPING[kind](**config).to_dict() | {"architectures": None}
    config = shrink(config)
    (config.get("text_config") or config).update(
        vocab_size=vocab_size, eos_token_id=token_id("<|im_end|>"), pad_token_id=None, bos_token_id=None,
        tie_word_embeddings=False)
    if kind == "kimi":
        config["media_placeholder_token_id"] = token_id("<|media_pad|>") or 0
        write_json(directory / "preprocessor_config.json", {"media_proc_cfg": MEDIA})
    return write_model(directory, config, token_id("</think>"))


def write_drafter(directory, config):
    """A drafter for the target of `config` as AQ-MedAI publishes them, with random weights."""
    import torch
    from safetensors.torch import save_file
    text = config.get("text_config") or config
    H, vocab, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    M, heads, D, V = 2 * H, 8, 32, vocab // 4
    torch.manual_seed(1)
    shapes = {"self_attn.q_proj": [heads * D, 2 * H], "self_attn.k_proj": [heads * D, 2 * H],
              "self_attn.v_proj": [heads * D, 2 * H], "self_attn.o_proj": [H, heads * D],
              "mlp.gate_proj": [M, H], "mlp.up_proj": [M, H], "mlp.down_proj": [H, M],
              "input_layernorm": [H], "hidden_norm": [H], "post_attention_layernorm": [H]}
    shapes = {f"midlayer.{name}.weight": shape for name, shape in shapes.items()} | {
        "fc.weight": [H, 3 * H], "norm.weight": [H], "lm_head.weight": [V, H]}
    w = {name: (torch.randn(shape) * shape[1] ** -0.5 if shape[1:] else torch.ones(shape)).bfloat16()
         for name, shape in shapes.items()}
    ids = torch.randperm(vocab)[:V].sort()[0]
    w |= {"d2t": ids - torch.arange(V), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)}
    save_file(w, directory / "model.safetensors")
    torch.save({"optimizer": {}, "epoch": 3}, directory / "training_state.pt")
    write_json(directory / "config.json", {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": H, "intermediate_size": M, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": D, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": None, "max_position_embeddings": text["max_position_embeddings"],
        "vocab_size": vocab, "draft_vocab_size": V, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
                         "use_aux_hidden_state": True}})


def whole(directory, what, write):
    """write(temporary directory), renamed to `directory`; nothing to do where that is there, made of
    `what`. Exits where it was made of something else."""
    note = directory / ".made_of"
    if (directory / "config.json").exists():
        if note.read_text() != what:
            sys.exit(f"make_tiny: {directory} was made of {note.read_text()}, not of {what}; to fix: mv "
                     f"{directory.parent} {directory.parent}.old")
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".tiny.") as tmp:
        (made := Path(tmp) / "made").mkdir()
        write(made)
        (made / note.name).write_text(what)
        os.replace(made, directory)


def make_target(directory, what):
    """A tiny target: of the kind `what`, or of the real model in the directory `what`."""
    def write(made):
        if what in KINDS:
            tokenizer = write_tokenizer(made)
            make_model(made, what, len(tokenizer), tokenizer.convert_tokens_to_ids)
            return
        for path in Path(what).iterdir():  # all but weights
            if path.suffix in (".json", ".jinja", ".model", ".py", ".txt") and "index" not in path.name:
                shutil.copy(path, made)
        write_model(made, shrink(json.loads((made / "config.json").read_text())))
    whole(Path(directory), str(what), write)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: make_tiny.py DIRECTORY KIND_OR_REAL_MODEL [DRAFTER_DIRECTORY]")
    make_target(*sys.argv[1:3])
    if sys.argv[3:]:
        target = json.loads((Path(sys.argv[1]) / "config.json").read_text())
        whole(Path(sys.argv[3]), sys.argv[2], lambda made: write_drafter(made, target))
