#!/usr/bin/env python3
"""Train an EAGLE-3 drafter on the target's hidden states, from scratch or from a published one.

    ./03_train.py                                  one process; run it again to continue
    torchrun --nproc-per-node=8 03_train.py        one process a GPU
    ./03_train.py --run wide --mlp-width 36864     another experiment beside the first

Reads   $DATA/02_extract/ (its docstring has the format); of TARGET config.json, embedding, head
        and final norm; DRAFTER, a hub id from where preflight downloads it, $DATA/drafter/.
Writes  $DATA/03_train/RUN/: drafter/ (the best so far, for vLLM: config.json, README.md and
        model.safetensors in bf16), metrics.jsonl, curves.png, checkpoints/ (f32 weights, moments).
Costs   Kimi-K2.5, published drafter (1.19B parameters, 0.23B of them a frozen head), ROW_TOKENS
        8192: f32 weights 4.8 GB, gradients 3.9, moments 3.9, bf16 weights and gradients 4.3,
        embedding and head 2.8, four TTT steps 16, logits 1: 37 GB of a GPU.
Shapes  of a packed row: R keys, C rows that drafts start from, K steps; hidden H, head D, draft
        vocabulary V. Training-time test (TTT) as in DESIGN's "The drafter" (arXiv 2503.01840).
"""
import argparse, atexit, bisect, collections, fcntl, functools, hashlib, itertools, json, math, os
import re, resource, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

# ---- settings: edit here, or KIT_NAME=value in the environment, or --name value -----------------
DATA = "/data"  # directory of the whole run
TARGET = "moonshotai/Kimi-K2.5"  # target model: hub id or directory
DRAFTER = "AQ-MedAI/Kimi-K25-eagle3"  # published drafter to start from: hub id, directory, "" none
RUN = ""  # name of this experiment; "" means n<number of training samples>
DEVICE = "auto"  # where to compute [auto|cuda|cpu]
SEED = 0  # of the order of samples and of new weights [0..]
DRAFT_VOCAB = 32000  # from scratch: tokens it can draft, special ones and the most frequent [1..]
MLP_WIDTH = 0  # from scratch: intermediate size; 0 means the target's [0..]
TRAIN_HEAD = False  # train the head too; else it stays the target's rows, or the drafter's own
TTT_STEPS = 4  # training-time test steps; at least as many as serving drafts [1..16]
STEP_WEIGHT = 1.0  # TTT step k weighs this to the power k; 0.8 is usual, equal did better [0..1]
NUM_SPECULATIVE_TOKENS = 3  # tokens drafted at a time, as acceptance is measured [1..16]
LEARNING_RATE = 0.0  # peak; 0 means 1e-2 from scratch, 5e-5 from a published drafter [0..]
OPTIMIZER = "muon"  # of the matrices; norms and head have AdamW [muon|adamw]
WARMUP = 0.02  # share of the steps in which the rate rises; then it falls as a cosine [0..1]
CLIP = 1.0  # largest norm of the gradient [0..]
ROW_TOKENS = 8192  # tokens in a packed row, longer samples are cut; sets the memory in use [16..]
ACCUMULATE = 2  # rows that a process adds up to an optimizer step [1..]
EPOCHS = 3  # passes over the samples; more can lower acceptance [1..]
MAX_STEPS = 0  # optimizer steps, however many epochs they make; 0 means those of EPOCHS [0..]
EVAL_EVERY = 200  # steps between evaluations on held-out answers, each with a checkpoint [1..]
PATIENCE = 5  # evaluations in a row without a better one that end the run [1..]
KEEP = 2  # checkpoints kept to continue from [1..]
# ---- end of settings ----------------------------------------------------------------------------
STAGE = "03_train"
IDS = "eagle_aux_hidden_state_layer_ids"
CHUNK = 512  # rows whose logits are in memory at once
EDGES = [1024, 4096, 16384]  # context lengths by which acceptance is told apart
BAD_STEPS = 10  # steps in a row without a finite gradient that end the run

def import_torch():
    """Bind torch and F for all that follows: late, so that --help and "already done" are quick."""
    global torch, F
    import torch, torch.nn.functional as F

def read_shards(directory, manifest, split, row_tokens):
    """The samples of a split: file (open safetensors), name, t and n (first token, tokens), P
    (prompt_len), g and y (first rows). Exits on a shard with another dtype, shape or count."""
    from safetensors import SafetensorError, safe_open
    H, samples = manifest["hidden_size"], []
    kind, width = {"bf16": ("BF16", H), "fp8": ("F8_E4M3", H), "int4": ("U8", H // 2)}[
        manifest["store"]]
    for name in sorted(n for n, facts in manifest["files"].items() if facts.get("split") == split):
        try:
            size = (directory / name).stat().st_size
            assert size == manifest["files"][name]["bytes"], f"{size} bytes"
            file, g, y = safe_open(directory / name, "pt"), 0, 0
            start, prompt = (file.get_tensor(k).tolist() for k in ("sample_start", "prompt_len"))
            assert len(start) == len(prompt) + 1 > 1, "its index is empty"
            for t, end, P in zip(start, start[1:], prompt):
                if (n := min(end - t, row_tokens)) - 1 > P:  # at least one position to train
                    samples.append(SimpleNamespace(file=file, name=name, t=t, n=n, P=P, g=g, y=y))
                g, y = g + end - t - 1, y + max(end - t - 1 - P, 0)
            for key, shape in (("g", [g, 3, width]), ("y", [y, width])):
                got = [file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()]
                assert got == [kind, shape], f"{key} is {got}, want {[kind, shape]}"
        except (AssertionError, OSError, SafetensorError, TypeError) as error:
            fail(f"shard {directory / name}: {error}; to fix: rm it, run 02_extract.py again")
    return samples or fail(f"no {split} sample in {directory}; to fix: run the stages before it")

def pack_rows(samples, order, row_tokens):
    """Samples in that order laid into rows of at most row_tokens: lists of sample numbers."""
    rows, used = [], row_tokens
    for number in order:
        if used + samples[number].n > row_tokens:
            rows, used = rows + [[]], 0
        rows[-1].append(number)
        used += samples[number].n
    return rows

def load_row(samples, steps):
    """One packed row on the CPU, states as stored. Of a sample with n tokens x, P of the prompt,
    i = 0..n-3 are keys and the last n-1-P of them drafting rows, those that serving drafts from.
    x; token, position, owner [R]: x[i+1], i, sample; chain [C]: number of a drafting row's key;
    after [C]: x[after + k] is its token at step k, x[after + k + 1] the right draft; left [C]:
    drafting rows behind it (step k has a teacher where left >= k); sizes: [keys], [rows]."""
    parts, T, R = collections.defaultdict(list), 0, 0
    for number, one in enumerate(samples):
        x = one.file.get_slice("token_ids")[one.t:one.t + one.n].long()
        i, a = torch.arange(one.n - 2), torch.arange(one.n - 1 - one.P)
        row = {"x": x, "token": x[1:-1], "position": i, "owner": torch.full_like(i, number),
               "chain": a + (R + one.P - 1), "after": a + (T + one.P), "left": a.flip(0)}
        for key, first, rows in (("g", one.g, i), ("y", one.y, a)):
            for name in {key, key + "_scale"} & set(one.file.keys()):
                row[name] = one.file.get_slice(name)[first:first + len(rows)]
        for name, value in row.items():
            parts[name].append(value)
        T, R = T + one.n, R + one.n - 2
    sizes = [[len(t) for t in parts[name]] for name in ("token", "left")]
    parts["x"].append(torch.zeros(steps + 1, dtype=torch.int64))  # read past the end, never used
    return {name: torch.cat(value) for name, value in parts.items()} | {
        "sizes": sizes, "names": sorted({one.name for one in samples})}

def to_device(row, d):
    """The row on d.device; g [R, 3H] and y [C, H] as values: fp8 times a scale a row, int4 (two a
    byte, low half first, 0..15 meaning -8..7) times one a group of 32. Exits on NaN."""
    row = {name: t.to(d.device) if torch.is_tensor(t) else t for name, t in row.items()}
    for key in "gy":
        value, scale = row[key], row.pop(key + "_scale", None)
        if value.dtype == torch.uint8:
            value = torch.stack([value & 15, value >> 4], -1).flatten(-2).float() - 8  # [..., H]
            value = value.unflatten(-1, (-1, 32))  # [..., H / 32, 32]
        if scale is not None:
            value = value.float().mul_(scale[..., None].float())
        row[key] = value.to(d.dtype).flatten(1)
        if not row[key].sum(dtype=torch.float32).isfinite():
            fail(f"states not finite in {row['names']}; to fix: rm it, run 02_extract.py again")
    return row | {"flex": flex_attention(row) if d.device.type == "cuda" else None}

def flex_attention(row):
    """The CUDA path's kernel (q, k, v) -> (out, log-sum-exp), no attention across samples."""
    from torch.nn.attention import flex_attention as flex
    owner, chain = row["owner"], row["chain"]
    seen = lambda b, h, i, j: (owner[chain[i]] == owner[j]) & (j <= chain[i])
    mask = flex.create_block_mask(seen, None, None, len(chain), len(owner), device=owner.device)
    kernel = torch.compile(flex.flex_attention, dynamic=True) if owner.is_cuda else \
        flex.flex_attention
    return functools.partial(kernel, block_mask=mask, enable_gqa=True,
                             return_aux=flex.AuxRequest(lse=True))

def attend(q, k, v, own_k, own_v, row):
    """Attention of the drafting rows q [C, heads, D] over the step-0 keys k, v [R, KV, D] of
    their sample, merged by log-sum-exp with the diagonal: their own keys of steps 1..K (own_k,
    own_v [K, C, KV, D], or None). So no mask of T x KT is ever made."""
    (C, heads, D), KV = q.shape, k.shape[1]
    if row["flex"]:
        out, aux = row["flex"](*(t.transpose(0, 1)[None] for t in (q, k, v)))
        out, lse = out[0].transpose(0, 1), aux.lse[0].t()  # [C, heads, D], [C, heads]
    else:  # sample by sample
        (keys, rows), out, lse = row["sizes"], [], []
        for qs, ks, vs in zip(q.split(rows), k.split(keys), v.split(keys)):
            A, N = len(qs), len(ks)
            qs = qs.view(A, KV, -1, D).permute(1, 2, 0, 3).flatten(1, 2)  # [KV, heads/KV * A, D]
            score = (qs @ ks.permute(1, 2, 0)).float().mul(D ** -0.5).unflatten(1, (-1, A))
            later = torch.ones(A, N, dtype=torch.bool).triu(N - A + 1)
            score = score.masked_fill(later, -math.inf)  # [KV, heads / KV, A, N]
            total = score.logsumexp(-1, keepdim=True)
            p = (score - total).exp().to(q.dtype).flatten(1, 2)
            out.append((p @ vs.transpose(0, 1)).view(heads, A, D).transpose(0, 1))
            lse.append(total.view(heads, A).t())
        out, lse = torch.cat(out), torch.cat(lse)
    if own_k is None:
        return out
    own_k, own_v = (t.repeat_interleave(heads // KV, 2) for t in (own_k, own_v))  # [K, C, heads, D]
    score = (q * own_k).sum(-1).float() * D ** -0.5
    total = torch.cat([lse[None], score]).logsumexp(0)  # [C, heads]
    share = lambda part: (part - total).exp().to(q.dtype)[..., None]
    return out * share(lse) + (own_v * share(score)).sum(0)

def drafter_shapes(config):
    """The tensors that vLLM wants, name: shape (it reports neither a missing nor a wrong one)."""
    H, M, V = (config[key] for key in ("hidden_size", "intermediate_size", "draft_vocab_size"))
    q, kv = (config[f"num_{k}_heads"] * config["head_dim"] for k in ("attention", "key_value"))
    layer = {"self_attn.q_proj": [q, 2 * H], "self_attn.k_proj": [kv, 2 * H],
             "self_attn.v_proj": [kv, 2 * H], "self_attn.o_proj": [H, q], "mlp.gate_proj": [M, H],
             "mlp.up_proj": [M, H], "mlp.down_proj": [H, M], "input_layernorm": [H],
             "hidden_norm": [H], "post_attention_layernorm": [H]}
    return {"fc.weight": [H, 3 * H], "norm.weight": [H], "lm_head.weight": [V, H],
            **{f"midlayer.{name}.weight": shape for name, shape in layer.items()}}

def drafter_states(d, row, steps):
    """The drafter over a row, as vLLM computes it: per TTT step the normed states [C, H] that the
    head reads. Step k has the true token k further on, its own last state, position + k."""
    w = {name: p.to(d.dtype) for name, p in d.w.items() if name != "lm_head.weight"}
    eps, D = d.config["rms_norm_eps"], d.config["head_dim"]
    linear = lambda x, name: F.linear(x, w[f"midlayer.{name}_proj.weight"])
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)
    rate = d.config["rope_theta"] ** (torch.arange(D // 2, device=d.device).float() * -2 / D)
    def turned(x, position):  # [rows, heads, D], rotary position as Llama has it
        angle = (position[:, None].float() * rate)[:, None]  # [rows, 1, D / 2]
        cos, sin, (a, b) = angle.cos().to(d.dtype), angle.sin().to(d.dtype), x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    token, position, own, states = row["token"], row["position"], [], []
    hidden = F.linear(row["g"], w["fc.weight"])  # [R, H]
    for step in range(steps):
        both = torch.cat([norm(F.embedding(token, d.embed), "midlayer.input_layernorm"),
                          norm(hidden, "midlayer.hidden_norm")], -1)  # [R or C, 2H]
        k, v = (linear(both, f"self_attn.{name}").unflatten(1, (-1, D)) for name in "kv")
        own.append((turned(k, position), v))
        if step == 0:  # every position is a key, but only drafting rows go on
            both, hidden, position = (t[row["chain"]] for t in (both, hidden, position))
        q = turned(linear(both, "self_attn.q").unflatten(1, (-1, D)), position)
        more = [torch.stack(t) for t in zip(*own[1:])] or [None, None]
        hidden = hidden + linear(attend(q, *own[0], *more, row).flatten(1), "self_attn.o")
        x = norm(hidden, "midlayer.post_attention_layernorm")
        hidden = hidden + linear(F.silu(linear(x, "mlp.gate")) * linear(x, "mlp.up"), "mlp.down")
        states.append(norm(hidden, "norm"))
        token, position = row["x"][row["after"] + step + 1], position + 1
    return states

def loss_and_gradient(d, row, states, weights):
    """Sums over a row's trained positions [2, K]: soft cross-entropy against the target's
    distribution over the draft vocabulary; drafts that are the answer's token. The gradient of
    `weights` times the loss goes into d.w's .grad. In chunks: logits are never all in memory."""
    head, K = d.w["lm_head.weight"], len(states)
    rows, gradient = head.detach().to(d.dtype), [torch.empty_like(state) for state in states]
    label = d.to_draft[row["x"][row["after"] + 1]]  # -1 outside the draft vocabulary
    label, y = F.pad(label, (0, K), value=-1), F.pad(row["y"], (0, 0, 0, K))
    sums = torch.zeros(2, K, dtype=torch.float64, device=d.device)
    with torch.no_grad():
        for first in range(0, len(row["y"]), CHUNK):
            teacher = F.rms_norm(y[first:first + CHUNK + K - 1], y.shape[-1:], d.norm, d.eps)
            teacher = F.linear(teacher, d.head).float().softmax(-1)  # [chunk + K - 1, V]
            left = row["left"][first:first + CHUNK]
            for k, state in enumerate(states):  # row a is taught at step k by teacher a + k
                x, p = state[first:first + CHUNK], teacher[k:k + len(left)]
                z, inside = F.linear(x, rows).float(), left >= k
                q, (most, drafted) = z.softmax(-1), z.max(-1)
                total = most - q.gather(-1, drafted[:, None])[:, 0].log()  # log-sum-exp of z
                sums[0, k] += ((total - torch.linalg.vecdot(p, z)) * inside).sum()
                sums[1, k] += ((drafted == label[first + k:][:len(left)]) & inside).sum()
                dz, share = q.sub_(p).to(d.dtype), (inside * weights[k]).to(d.dtype)[:, None]
                gradient[k][first:first + CHUNK] = (dz @ rows).mul_(share)
                if head.requires_grad:
                    step = (dz.t() @ (x * share)).float()
                    head.grad = step if head.grad is None else head.grad.add_(step)
    torch.autograd.backward(states, gradient)
    return sums

def count_accepted(hits):
    """The steps (row, accepted) in which vLLM serves one answer; hits[k][a]: draft k made at row a
    is the answer's token. A draft past the end is a miss (the target judges it, we cannot)."""
    steps, row = [], 0
    while row < len(hits[0]):
        accepted = next((k for k, hit in enumerate(hits) if not hit[row]), len(hits))
        steps.append((row, accepted))
        row += accepted + 1
    return steps

def evaluate(d, samples, s, rank=0, world=1):
    """Offline acceptance: the ratios of vLLM's counters, overall and by context length. Every
    process counts its share of the samples."""
    K, head = s.NUM_SPECULATIVE_TOKENS, d.w["lm_head.weight"].detach().to(d.dtype)
    counts = [[0] * (K + 1) for _ in range(len(EDGES) + 1)]  # drafts, accepted at each position
    order = sorted(range(len(samples)), key=lambda i: samples[i].n)[rank::world]
    for numbers in pack_rows(samples, order, s.ROW_TOKENS):
        row, hits = to_device(load_row([samples[i] for i in numbers], K), d), []
        with torch.no_grad():
            for k, state in enumerate(drafter_states(d, row, K)):
                draft = torch.cat([F.linear(x, head).argmax(-1) for x in state.split(CHUNK)])
                right = d.vocab[draft] == row["x"][row["after"] + k + 1]
                hits.append(right & (row["left"] >= k))
        context = row["position"][row["chain"]].split(row["sizes"][1])
        for hit, at in zip(torch.stack(hits).split(row["sizes"][1], 1), context):
            for a, accepted in count_accepted(hit.tolist()):
                for k in range(accepted + 1):
                    counts[bisect.bisect(EDGES, int(at[a]))][k] += 1
    counts = sum_over_ranks(torch.tensor(counts, device=d.device), world).tolist()
    ratios = lambda row: {"acceptance_length": sum(row) / row[0], "drafts": row[0],
                          "acceptance_by_position": [n / row[0] for n in row[1:]]}
    names = [f"below {edge}" for edge in EDGES] + [f"from {EDGES[-1]}"]
    return ratios([sum(column) for column in zip(*counts)]) | {"by_context_length": {
        name: ratios(row) for name, row in zip(names, counts) if row[0]}}

def read_target(directory, ending):
    """The target's tensor whose name ends so, nested or not, alone out of its safetensors; None
    where there is none."""
    from safetensors import safe_open
    one, index = "model.safetensors", directory / "model.safetensors.index.json"
    try:
        where = json.loads(index.read_text())["weight_map"] if index.exists() else dict.fromkeys(
            safe_open(directory / one, "pt").keys(), one)
        name = min((name for name in where if name.endswith(ending)), key=len, default=None)
        return name and safe_open(directory / where[name], "pt").get_tensor(name)
    except OSError as error:
        fail(f"no weights of TARGET in {directory} ({error}); to fix: download the whole model")

def find_drafter(name, data):
    """Directory of the drafter to start from, None without one; waits for preflight's download."""
    directory = Path(name) if not name or Path(name).is_dir() else data / "drafter"
    pid, log = directory / ".download.pid", data / "logs/drafter_download.log"
    while name and pid.exists() and Path("/proc", pid.read_text().strip() or "?").exists():
        print(f"{STAGE}: waiting for the download of {name}, see {log}", flush=True)
        time.sleep(10)
    if name and not (any(directory.glob("*.safetensors")) and (directory / "config.json").exists()):
        fail(f"no config.json and *.safetensors of drafter {name} in {directory} (its download: "
             f"{log}); to fix: ./00_preflight.sh again, or set DRAFTER (\"\" trains from scratch)")
    return directory if name else None

def read_drafter(directory, H, vocab_size):
    """A published drafter, checked: (config, {name: f32 tensor}, target ids of its vocabulary)."""
    from safetensors.torch import load_file
    given, w = json.loads((directory / "config.json").read_text()), {}
    turn = given.get("rope_parameters") or given.get("rope_scaling") or {}
    config = {"head_dim": given["hidden_size"] // given["num_attention_heads"],
              "rope_theta": turn.get("rope_theta", 1e4), "draft_vocab_size": vocab_size,
              **{key: value for key, value in given.items() if value is not None}}
    odd = [key for key in ("attention_bias", "mlp_bias", "fc_norm", "norm_before_fc",
                           "norm_output", "norm_before_residual") if config.get(key)]
    odd += ["scaled rope"] * (turn.get("rope_type", turn.get("type", "default")) != "default")
    if odd or [config["hidden_size"], config["vocab_size"]] != [H, vocab_size]:
        fail(f"drafter {directory} does not fit (got H {config['hidden_size']}, vocabulary "
             f"{config['vocab_size']}, {odd}, want {H}, {vocab_size}, []); to fix: set DRAFTER")
    for file in directory.glob("*.safetensors"):
        w |= {name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
              for name, tensor in load_file(file).items() if "embed_tokens" not in name}
    d2t, t2d = w.pop("d2t", torch.zeros(config["draft_vocab_size"])), w.pop("t2d", None)
    vocab = d2t.long() + torch.arange(len(d2t))
    check_drafter(directory, config, w, vocab, t2d)
    return config, {name: tensor.float() for name, tensor in w.items()}, vocab

def check_drafter(directory, config, w, vocab, t2d=None):
    """Exit unless names, shapes and the vocabulary map are those that vLLM needs."""
    want, got = drafter_shapes(config), {name: list(tensor.shape) for name, tensor in w.items()}
    odd = [f"{name} is {got.get(name)}, want {want.get(name)}"
           for name in sorted(want | got) if got.get(name) != want.get(name)]
    ids, size = set(vocab.tolist()), config["vocab_size"]
    if not (len(ids) == len(vocab) == config["draft_vocab_size"] and ids <= set(range(size))
            and (t2d is None or ids == set(t2d.nonzero().flatten().tolist()))):
        odd.append("d2t and t2d are no map of its vocabulary")
    if odd:
        fail(f"drafter {directory}: {'; '.join(odd)}; to fix: set DRAFTER to a whole one")

def count_tokens(samples, vocab_size):
    """How often each of the target's tokens stands in the answers [vocab_size]."""
    tokens = [one.file.get_slice("token_ids")[one.t + one.P:one.t + one.n] for one in samples]
    counts = torch.cat(tokens).bincount(minlength=vocab_size)
    if len(counts) > vocab_size:
        fail(f"token {len(counts) - 1} is not the target's ({vocab_size}); to fix: set TARGET")
    return counts

def choose_vocab(counts, size, directory):
    """Target ids of a new draft vocabulary, ascending: special and end tokens, most frequent."""
    special = []
    for name in ("config", "generation_config", "tokenizer", "tokenizer_config"):
        path = directory / f"{name}.json"
        facts = json.loads(path.read_text()) if path.exists() else {}
        end = facts.get("eos_token_id") or []
        special += [end] if isinstance(end, int) else end
        special += [token["id"] for token in facts.get("added_tokens", [])]
        special += map(int, facts.get("added_tokens_decoder", []))
    counts = counts.clone()
    counts[[i for i in set(special) if i < len(counts)]] += counts.sum()
    return counts.argsort(descending=True, stable=True)[:size].sort()[0]

def new_drafter(target, s, vocab, head):
    """(config, {name: f32 tensor}) of the target's geometry; the head is the target's own rows."""
    H, heads, mla = target["hidden_size"], target["num_attention_heads"], "kv_lora_rank" in target
    config = {"hidden_size": H, "intermediate_size": s.MLP_WIDTH or target["intermediate_size"],
              "num_hidden_layers": 1, "hidden_act": "silu", "num_attention_heads": heads,
              "num_key_value_heads": (not mla and target.get("num_key_value_heads")) or heads,
              "head_dim": target["v_head_dim"] if mla else target.get("head_dim") or H // heads,
              "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": target["vocab_size"],
              "draft_vocab_size": len(vocab)}
    chance = torch.Generator().manual_seed(s.SEED)
    w = {name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=chance)
         * shape[1] ** -0.5 for name, shape in drafter_shapes(config).items()}
    return config, w | {"lm_head.weight": head.float()}

def export(directory, d, layer_ids, target, figures):
    """Write drafter/ for vLLM, checked before and compared after: bf16, offsets in d2t."""
    from safetensors.torch import load_file, save_file
    vocab, size = d.vocab.cpu(), d.config["vocab_size"]
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in d.w.items()}
    check_drafter(directory, d.config, tensors, vocab)
    if len(vocab) < size:
        tensors |= {"d2t": vocab - torch.arange(len(vocab)),
                    "t2d": torch.zeros(size, dtype=torch.bool).index_fill(0, vocab, True)}
    directory.mkdir(exist_ok=True)
    write_whole(directory / "model.safetensors", lambda tmp: save_file(tensors, tmp))
    write_whole(directory / "config.json", d.config | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": d.config["rope_theta"]},
        "max_position_embeddings": d.max_len, "tie_word_embeddings": False, IDS: layer_ids,
        "eagle_config": {IDS: layer_ids, "use_aux_hidden_state": True}})
    flag = {"method": "eagle3", "model": "THIS DIRECTORY",
            "num_speculative_tokens": len(figures["acceptance_by_position"])}
    write_whole(directory / "README.md", f"# EAGLE-3 drafter for {target}\n\nUse it so:\n\n"
                f"    vllm serve {target} --speculative-config '{json.dumps(flag)}'\n\nOffline, on "
                f"held-out answers:\n\n```json\n{json.dumps(figures, indent=1)}\n```\n")
    back = load_file(directory / "model.safetensors")
    assert back.keys() == tensors.keys() and all(back[n].equal(tensors[n]) for n in back), directory

def start_processes(choice):
    """(number of processes, device, dtype of matrix products), under torchrun or alone. bf16 where
    it is faster than f32: on a CPU with avx512_bf16 twice, with AMX six times as fast."""
    world, cuda = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    if choice == "cuda" and not cuda:
        fail("DEVICE is cuda, but torch sees none; to fix: set DEVICE to auto")
    cuda = cuda and choice != "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    fast = cuda or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return (world, torch.device("cuda" if cuda else "cpu"),
            torch.bfloat16 if fast else torch.float32)

def sum_over_ranks(tensor, world):
    """The tensor, summed over all processes."""
    if world > 1:
        torch.distributed.all_reduce(tensor)
    return tensor

def batches(samples, s, rows):
    """Without end the rows of each step. SEED and the epoch alone make the order, so a step's
    number is its place in the data, and continuing is exact."""
    ready = []
    for epoch in itertools.count(s.SEED):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch))
        ready += pack_rows(samples, order.tolist(), s.ROW_TOKENS)
        while len(ready) >= rows:
            yield ready[:rows]
            del ready[:rows]

def make_optimizers(w, s):
    """AdamW for norms and a trained head, Muon for the layer's matrices; or AdamW for all."""
    muon = [name for name, p in w.items() if p.ndim == 2 and name != "lm_head.weight"
            and s.OPTIMIZER == "muon"]
    rest = [p for name, p in w.items() if name not in muon and p.requires_grad]
    made = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    return made + [torch.optim.Muon([w[name] for name in muon], weight_decay=0.0,
                                    adjust_lr_fn="match_rms_adamw")] * bool(muon)

def train_step(d, optimizers, loaded, counts, lr, s, world):
    """One optimizer step over the rows of all processes; counts: trained positions by TTT step.
    What metrics.jsonl says of it, or None where loss or gradient is not finite: nothing changes."""
    share = torch.tensor([s.STEP_WEIGHT ** k for k in range(s.TTT_STEPS)], dtype=torch.float64)
    share, counts = share / share.sum(), torch.tensor(counts)
    assert counts.min() > 0, f"a batch without a trained position: {counts}"
    sums = torch.zeros(2, s.TTT_STEPS, dtype=torch.float64, device=d.device)
    for row in loaded:
        row = to_device(row, d)
        states = drafter_states(d, row, s.TTT_STEPS)
        sums += loss_and_gradient(d, row, states, (share / counts).tolist())
    params = [p for p in d.w.values() if p.requires_grad]
    for p in params if world > 1 else []:  # bf16 on the wire between GPUs
        p.grad.copy_(sum_over_ranks(p.grad.to(d.dtype if p.is_cuda else p.dtype), world))
    loss, hits = sum_over_ranks(sums, world).cpu() / counts
    norm = float(torch.nn.utils.clip_grad_norm_(params, s.CLIP))
    finite = math.isfinite(float(loss.sum()) + norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    return {"loss": float(loss @ share), "loss_by_ttt_step": loss.tolist(), "gradient_norm": norm,
            "acceptance_by_ttt_step": hits.tolist(), "lr": lr} if finite else None

def save_checkpoint(directory, d, optimizers, state, keep):
    """checkpoints/step-N.safetensors: weights, moments, and `state` as JSON in its header."""
    from safetensors.torch import save_file
    directory.mkdir(exist_ok=True)
    tensors = {f"weight {name}": p.detach() for name, p in d.w.items() if p.requires_grad}
    tensors |= {f"{key} {name}": t for name, p in d.w.items() for optimizer in optimizers
                for key, t in optimizer.state.get(p, {}).items()}
    write_whole(directory / f"step-{state['step']:08d}.safetensors",
                lambda tmp: save_file(tensors, tmp, {"state": json.dumps(state)}))
    for old in sorted(directory.glob("step-*"))[:-keep]:
        old.unlink()

def load_checkpoint(directory, d, optimizers):
    """`state` of the newest checkpoint that can be read, its tensors put in place; None without."""
    from safetensors import SafetensorError, safe_open
    for path in sorted(directory.glob("step-*"), reverse=True):
        try:
            with safe_open(path, "pt") as file:
                state = json.loads(file.metadata()["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            assert all(t.isfinite().all() for t in tensors.values()), "values are not finite"
        except (AssertionError, KeyError, OSError, SafetensorError, TypeError, ValueError) as error:
            print(f"{STAGE}: cannot read {path} ({error}), taking the one before", flush=True)
            continue
        owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
        for (key, name), t in ((full.split(), t) for full, t in tensors.items()):
            if key == "weight":
                d.w[name].data.copy_(t)
            else:
                owner[d.w[name]].state[d.w[name]][key] = t.to(d.device)
        return state
    return None

def draw_curves(path, rows):
    """curves.png: loss and right drafts by TTT step, acceptance length on held-out answers."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4))
    for axis, key in zip(axes, ("loss_by_ttt_step", "acceptance_by_ttt_step", "acceptance_length")):
        known = [(row["step"], (row | row.get("heldout", {})).get(key)) for row in rows]
        axis.plot(*zip(*((step, value) for step, value in known if value)) or ([], []))
        axis.set(xlabel="step", title=key.replace("_", " "))
    write_whole(path, lambda tmp: figure.savefig(tmp, format="png", dpi=70))
    pyplot.close(figure)

# ---- plumbing: identical in every stage, compared by tests/test_contracts.py --------------------
def fail(message, status=1):
    """End the stage with a line like `stage: what is wrong (got X, want Y); to fix: command`."""
    sys.exit(print(f"{STAGE}: {message}", file=sys.stderr, flush=True) or status)

def settings(argv=None):
    """The settings block as a namespace: the file, then KIT_NAME, then --name; a bad one exits 2.
    A comment may end in the legal values, ends included: [1..], [0..1], [auto|cuda|cpu]."""
    block = Path(__file__).read_text().split("\n# ---- settings")[1].split("\n# ----")[0]
    parser = argparse.ArgumentParser(STAGE, "%(prog)s [--name value ...]", __doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", action="store_true", help="print them as JSON and exit")
    for name, text, legal in re.findall(r"^([A-Z]\w*) = .*?  # (.*?)(?: \[(\S+)\])?$", block, re.M):
        def convert(given, here=globals()[name], legal=legal):
            value = bool("01".index(given)) if type(here) is bool else type(here)(given)
            low, dots, high = legal.partition("..")
            if (float(low or "-inf") <= value <= float(high or "inf") if dots
                    else not legal or given in legal.split("|")):
                return value
            raise ValueError
        here = globals()[name]
        convert.__name__ = f"{type(here).__name__} {legal}".strip()  # argparse shows it
        parser.add_argument("--" + name.lower().replace("_", "-"), dest=name, metavar="X",
            type=convert, default=os.environ.get("KIT_" + name, str(here * 1)),  # a bool as 0 or 1
            help=f"{text} {legal} (default: {here * 1!r})".replace("%", "%%"))
    result = vars(parser.parse_args(argv))
    if result.pop("settings"):
        sys.exit(print(json.dumps(result)))
    for name in [name for name in result if result[name] != globals()[name]]:
        print(f"{STAGE}: {name} = {result[name]!r} (in the file {globals()[name]!r})", flush=True)
    return argparse.Namespace(**result)

def progress(total, unit, done=0):
    """A tqdm bar on a terminal; in a log one line every 10 seconds."""
    from tqdm import tqdm
    log = {} if sys.stderr.isatty() else {"mininterval": 10, "bar_format": "{desc}: {n_fmt}/"
           "{total_fmt} {unit}, {percentage:.0f}%, {elapsed} + {remaining}, {rate_fmt}{postfix}\n"}
    return tqdm(total=total, unit=unit, initial=done, desc=STAGE, dynamic_ncols=True, **log)

def write_whole(path, content):
    """Write str, dict (as JSON) or content(temporary path): `path` appears whole or not at all."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(content, indent=1) + "\n" if isinstance(content, dict) else content
    try:
        content(tmp) if callable(content) else tmp.write_text(text)
        with open(tmp, "rb") as file:
            os.fsync(file.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)

def open_stage(out, **parts):
    """Lock the directory `out`; compare its manifest.json with parts: settings and inputs (must be
    equal), size (may only grow). Exits 0 where all is done and there, 1 where another run or
    result is; else returns the manifest to continue from, written there as not done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        globals()["LOCK"] = lock = open(out / ".lock", "a+")  # held until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        print("pid", os.getpid(), "on", os.uname().nodename, file=lock, flush=True)
    except BlockingIOError:
        fail(f"{out} is in use by {open(out / '.lock').read().strip()}; to fix: wait, or end it")
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}; to fix: mount it, or set DATA")
    atexit.register((out / ".lock").unlink, missing_ok=True)
    new, path = {"stage": STAGE, **parts, "files": {}, "done": False}, out / "manifest.json"
    old = json.loads(path.read_text()) if path.exists() else new
    differ = [f"{key} (there {old[part].get(key)!r}, now {value!r})" for part in parts
              for key, value in new[part].items() if old[part].get(key) != value
              and not (part == "size" and value > old[part].get(key, 0))]
    if differ:
        fail(f"{out} holds another result: {', '.join(differ)}; to fix: set them back, or put it "
             f"aside: mv {out} {out}.{time.strftime('%Y%m%d-%H%M%S')}")
    whole = all((out / name).is_file() and (out / name).stat().st_size == facts["bytes"]
                for name, facts in old["files"].items())
    if old["done"] and old["size"] == new["size"] and whole:
        sys.exit(print(f"{STAGE}: already done, see {path}"))
    write_whole(path, manifest := old | {"size": new["size"], "done": False})
    return manifest

# ---- readers: the same text in every stage that has them (tests/test_contracts.py) --------------
def read_manifest(directory):
    """manifest.json of a finished earlier stage, plus `id`, what that result is whatever its size:
    16 hex digits of its settings and inputs. Exits 1 when it is missing or not done."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    if not manifest.get("done"):
        fail(f"{directory} is not finished; to fix: run that stage to its end first")
    text = json.dumps([manifest[key] for key in ("stage", "settings", "inputs")], sort_keys=True)
    return manifest | {"id": hashlib.sha256(text.encode()).hexdigest()[:16]}

def find_model(name):
    """(directory, id) of a model: a directory, or a hub id's local copy, whose config and tokenizer
    are fetched when missing. id: 16 hex digits of its config.json and safetensors index."""
    directory = Path(name)
    try:
        if not directory.is_dir():
            from huggingface_hub import snapshot_download
            directory = Path(snapshot_download(name, allow_patterns=[
                "*.json", "*.jinja", "*.model", "*.py", "*.txt"]))
        config = (directory / "config.json").read_bytes()
    except (OSError, ValueError) as error:
        fail(f"no model at {name!r} ({str(error).splitlines()[0]}); to fix: set TARGET to a "
             "model's directory or hub id")
    index = directory / "model.safetensors.index.json"
    config += index.read_bytes() if index.exists() else b""
    return directory, hashlib.sha256(config).hexdigest()[:16]

def train(s, d, samples, heldout, out, keep_best, rank, world):
    """From the newest checkpoint to the last step, or until acceptance has not grown for long."""
    rows, optimizers, stop, old = s.ACCUMULATE * world, make_optimizers(d.w, s), [], []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    packed = len(pack_rows(samples, range(len(samples)), s.ROW_TOKENS))
    total = s.MAX_STEPS or math.ceil(s.EPOCHS * packed / rows)
    log, state = out / "metrics.jsonl", load_checkpoint(out / "checkpoints", d, optimizers)
    if state and log.exists():  # a torn last line is dropped, and what came after the checkpoint
        old = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
        old = [row for row in old if row["step"] <= state["step"]]
    rank or write_whole(log, "".join(json.dumps(row) + "\n" for row in old))
    state = state or {"step": 0, "best": None, "stale": 0, "skipped": 0, "bad": 0, "seconds": 0.0}
    save = lambda: rank or save_checkpoint(out / "checkpoints", d, optimizers, state, s.KEEP)
    def note(row):
        old.append({"step": state["step"]} | row)
        if rank == 0:
            with open(log, "a") as file:
                print(json.dumps(old[-1]), file=file)
    def fetch(batch):
        chosen = [samples[i] for row in batch for i in row]
        counts = [sum(max(one.n - 1 - one.P - k, 0) for one in chosen) for k in range(s.TTT_STEPS)]
        return counts, sum(one.n for one in chosen), [
            load_row([samples[i] for i in row], s.TTT_STEPS) for row in batch[rank::world]]
    if not old:
        judge(s, d, heldout, out, state, old, note, keep_best, rank, world)
        save()
    plan = itertools.islice(batches(samples, s, rows), state["step"], total)
    with ThreadPoolExecutor(1) as pool, progress(total, "steps", state["step"]) as bar:
        ahead = collections.deque(pool.submit(fetch, batch) for batch in itertools.islice(plan, 2))
        bar.disable = rank > 0
        while ahead and state["stale"] < s.PATIENCE:
            start, step = time.monotonic(), state["step"]
            counts, tokens, loaded = ahead.popleft().result()
            ahead.extend(pool.submit(fetch, batch) for batch in itertools.islice(plan, 1))
            fall = 0.5 + 0.5 * math.cos(math.pi * step / total)
            lr = s.LEARNING_RATE * min((step + 1) / max(1, s.WARMUP * total), fall)
            result = train_step(d, optimizers, loaded, counts, lr, s, world)
            seconds, bad = time.monotonic() - start, 0 if result else state["bad"] + 1
            state |= {"step": step + 1, "seconds": state["seconds"] + seconds, "bad": bad,
                      "skipped": state["skipped"] + (bad > 0)}
            if result:
                memory = torch.cuda.max_memory_allocated() if d.device.type == "cuda" else \
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                note(result | {"tokens_per_sec": tokens / seconds, "memory_gb": memory / 1e9,
                               "seconds": state["seconds"]})
                bar.set_postfix_str(f"loss {result['loss']:.3f}, {tokens / seconds:,.0f} tokens/s")
            bar.update()
            if bad >= BAD_STEPS:
                fail(f"no finite gradient in {BAD_STEPS} steps up to {step + 1}; the checkpoint "
                     "before is whole; to fix: lower LEARNING_RATE under another RUN")
            if judged := (step + 1) % s.EVAL_EVERY == 0 or step + 1 == total:
                judge(s, d, heldout, out, state, old, note, keep_best, rank, world)
            stopped = sum_over_ranks(torch.tensor(len(stop), device=d.device), world)
            if judged or stopped:
                save()
            if stopped:
                bar.close()
                fail(f"stopped at step {step + 1}; to continue: run it again", 128 + (*stop, 15)[0])
    return state

def judge(s, d, heldout, out, state, old, note, keep_best, rank, world):
    """Evaluate on the held-out answers, tell, draw; keep the drafter if none was better."""
    result = evaluate(d, heldout, s, rank, world)
    note({"heldout": result})
    length, best = result["acceptance_length"], state["best"]
    better = not best or length > best["acceptance_length"]
    state["stale"] = 0 if better else state["stale"] + 1
    state["best"] = {"step": state["step"]} | result if better else best
    if rank == 0:
        by = " ".join(f"{share:.3f}" for share in result["acceptance_by_position"])
        print(f"{STAGE}: step {state['step']}, held out: acceptance length {length:.3f}, by "
              f"position {by}", flush=True)
        draw_curves(out / "curves.png", old)
        if better:
            keep_best(state["best"])

def make_drafter(s, start, extract, directory, samples, device, dtype):
    """The drafter before the first step: config, w (f32 tensors by name), vocab [V], to_draft (its
    inverse, -1 outside), the target's embed, head [V, H], norm, eps. Prints its coverage."""
    target = json.loads((directory / "config.json").read_text())
    target = target.get("text_config", target)
    embed, norm, head = (read_target(directory, ending) for ending in (
        "embed_tokens.weight", "model.norm.weight", "lm_head.weight"))
    head, counts = embed if head is None else head, count_tokens(samples, target["vocab_size"])
    if start:
        config, w, vocab = read_drafter(start, extract["hidden_size"], target["vocab_size"])
    else:
        vocab = choose_vocab(counts, s.DRAFT_VOCAB, directory)
        config, w = new_drafter(target, s, vocab, head[vocab])
    coverage = float(counts[vocab].sum() / counts.sum())
    print(f"{STAGE}: {len(samples):,} samples; a draft vocabulary of {len(vocab):,} covers "
          f"{coverage:.2%} of the tokens in their answers; {dtype} on {device}", flush=True)
    numbers = torch.full((target["vocab_size"],), -1).index_copy(0, vocab, torch.arange(len(vocab)))
    return SimpleNamespace(
        config=config, device=device, dtype=dtype, eps=target["rms_norm_eps"], coverage=coverage,
        max_len=target["max_position_embeddings"], vocab=vocab.to(device),
        to_draft=numbers.to(device), embed=embed.to(device, dtype), norm=norm.to(device, dtype),
        head=head[vocab].to(device, dtype), w={name: t.to(device).requires_grad_(
            s.TRAIN_HEAD or name != "lm_head.weight") for name, t in w.items()})

def main():
    s = settings()
    data, rank = Path(s.DATA), int(os.environ.get("RANK", 0))
    extract, (directory, target_id) = read_manifest(data / "02_extract"), find_model(s.TARGET)
    if extract["inputs"]["target"] != target_id:
        fail(f"02_extract is of another target (got {extract['inputs']['target']}, want "
             f"{target_id}); to fix: set TARGET to the one it was made with")
    start = find_drafter(s.DRAFTER, data)
    s.LEARNING_RATE = s.LEARNING_RATE or (5e-5 if start else 1e-2)
    out = data / STAGE / (s.RUN or f"n{extract['counts']['samples']}")
    if rank == 0:
        rows = s.ACCUMULATE * int(os.environ.get("WORLD_SIZE", 1))
        manifest = open_stage(out, size={}, settings={
            name: value for name, value in vars(s).items() if name not in (
                "DATA", "TARGET", "DRAFTER", "RUN", "DEVICE", "KEEP", "ACCUMULATE")} | {
            "rows_a_step": rows, **extract["counts"]}, inputs={
            "target": target_id, "02_extract": extract["id"], "drafter": start and hashlib.sha256(
                (start / "config.json").read_bytes()).hexdigest()[:16]})
    elif (path := out / "manifest.json").exists() and json.loads(path.read_text())["done"]:
        return  # rank 0 says so
    import_torch()
    world, device, dtype = start_processes(s.DEVICE)
    samples, heldout = (read_shards(data / "02_extract", extract, split, s.ROW_TOKENS)
                        for split in ("train", "heldout"))
    d = make_drafter(s, start, extract, directory, samples, device, dtype)
    def keep_best(best):
        export(out / "drafter", d, extract["layer_ids"], s.TARGET, best)
        if start and best["step"] == 0 and best["acceptance_length"] < 1.1:
            ids, stage = [i + 1 for i in extract["layer_ids"]], extract["settings"]["SAMPLES_FROM"]
            print(f"{STAGE}: that is next to nothing: the drafter's layer ids may be in SGLang's "
                  f"numbering, one lower. To see with 100 samples: (cd {data} && mkdir -p shifted/"
                  f"{stage} && cp {stage}/manifest.json shifted/{stage} && for f in samples heldout"
                  f"_samples; do head -n 100 {stage}/$f.jsonl > shifted/{stage}/$f.jsonl; done) && "
                  f"./02_extract.py --data {data}/shifted --layer-ids {','.join(map(str, ids))} && "
                  f"./03_train.py --data {data}/shifted --drafter {start} --max-steps 1")
    from safetensors import SafetensorError
    try:
        state = train(s, d, samples, heldout, out, keep_best, rank, world)
    except (OSError, SafetensorError) as error:
        if "No space left" not in str(error):
            raise
        fail(f"no space left in {out}, all up to the last checkpoint is whole; to fix: free some, "
             "and run it again")
    if rank == 0:
        files = {f"drafter/{path.name}": {"bytes": path.stat().st_size, "sha256": hashlib.sha256(
            path.read_bytes()).hexdigest()} for path in (out / "drafter").iterdir()}
        write_whole(out / "manifest.json", manifest | {
            "best": state["best"], "draft_vocab_size": len(d.vocab), "vocab_coverage": d.coverage,
            "num_ttt_steps": s.TTT_STEPS, "steps": state["step"],
            "skipped_steps": state["skipped"], "files": files, "done": True})
        print(f"{STAGE}: wrote {out / 'drafter'}, acceptance length "
              f"{state['best']['acceptance_length']:.3f} at step {state['best']['step']} of "
              f"{state['step']}, in {state['seconds'] / 60:.1f} min", flush=True)

if __name__ == "__main__":
    main()
