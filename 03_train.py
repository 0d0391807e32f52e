#!/usr/bin/env python3
"""Train an EAGLE-3 drafter on the target's hidden states, from scratch or from a published one.

    ./03_train.py                                  one process; run it again to continue
    torchrun --shutdown-timeout=600 --nproc-per-node=8 03_train.py     one process a GPU

Reads   $DATA/02_extract/; of TARGET config.json, embedding, head and final norm; DRAFTER.
Writes  $DATA/03_train/RUN/: drafter/ (the best so far, bf16, for vLLM), metrics.jsonl (a line a
        step and an evaluation), curves.png, checkpoints/ (f32 weights and moments).
Costs   Kimi-K2.5, 1.19B parameters, ROW_TOKENS 8192: f32 weights 3.8 GB, gradients and moments 7.7,
        bf16 copies 3.8, embedding and heads 3.3, four TTT steps 16, logits 1: 36 GB of a GPU.
Prints  03_train: step 200, held out: acceptance length 1.712, by position 0.441 0.189 0.082
Shapes  R keys, C drafting rows of a packed row, K steps of training-time test (TTT, arXiv
        2503.01840), hidden size H, size of a head D, draft vocabulary V.
"""
import argparse, atexit, bisect, fcntl, hashlib, itertools, json, math, os, random
import re, resource, shlex, signal, subprocess, sys, time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# ---- settings: edit here, or KIT_NAME=value in the environment, or --name value -----------------
DATA = "/data"  # directory of the whole run
TARGET = "moonshotai/Kimi-K2.5"  # target model: hub id or directory
DRAFTER = "AQ-MedAI/Kimi-K25-eagle3"  # published drafter to start from: hub id, directory, "" none
RUN = ""  # name of this experiment; "" means n<number of training samples>
DEVICE = "auto"  # where to compute [auto|cuda|cpu]
SEED = 0  # of the order of samples and of new weights [0..]
DRAFT_VOCAB = 32000  # from scratch: tokens it can draft, special ones and the most frequent [1..]
MLP_WIDTH = 0  # from scratch: intermediate size; 0 means the target's [0..]
TTT_STEPS = 4  # training-time test steps; at least as many as serving drafts [1..16]
STEP_WEIGHT = 1.0  # TTT step k weighs this to the power k; 0.8 is usual, equal did better [0..1]
NUM_SPECULATIVE_TOKENS = 3  # tokens drafted at a time, as acceptance is measured [1..16]
LEARNING_RATE = 0.0  # peak; 0 means 1e-2 from scratch, 5e-5 from a published drafter [0..]
WARMUP = 0.02  # share of the steps in which the rate rises; then it falls as a cosine [0..1]
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
CHUNK, EDGES = 512, [1024, 4096, 16384]  # rows of logits at once; context lengths told apart

def import_torch():
    """Bind what is slow to import, for all that follows: so --help and "already done" are quick."""
    global torch, F, SafetensorError, safe_open, load_file, save_file
    import torch, torch.nn.functional as F
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save_file

def read_shards(directory, manifest, split, row_tokens):
    """Samples: file, name, t and n (first token, tokens), P (prompt), g and y (first rows)."""
    H, samples, lost = manifest["hidden_size"], [], 0
    kind, width = {"bf16": ("BF16", H), "fp8": ("F8_E4M3", H), "int4": ("U8", H // 2)}[
        manifest["store"]]
    for name in sorted(n for n, facts in manifest["files"].items() if facts["split"] == split):
        try:
            file, g, y = safe_open(directory / name, "pt"), 0, 0
            start, prompt = (file.get_tensor(k).tolist() for k in ("sample_start", "prompt_len"))
            assert len(start) == len(prompt) + 1 > 1, "its index is empty"
            for t, end, P in zip(start, start[1:], prompt):
                if (n := min(end - t, row_tokens)) - 1 > P:  # at least one position to train
                    samples.append(Namespace(file=file, name=name, t=t, n=n, P=P, g=g, y=y))
                g, y, lost = g + end - t - 1, y + max(end - t - 1 - P, 0), lost + end - t - n
            got = [[part.get_dtype(), *part.get_shape()] for part in map(file.get_slice, "gy")]
            want = [[kind, g, 3, width], [kind, y, width]]
            assert got == want, f"g and y are {got}, want {want}"
        except (AssertionError, OSError, SafetensorError) as error:
            fail(f"shard {directory / name}: {error}; to fix: rm it, run 02_extract.py again")
    lost and print(f"{STAGE}: ROW_TOKENS cuts {lost:,} tokens off {split} samples", flush=True)
    return samples or fail(f"no {split} sample in {directory}; to fix: run the stages before it")

def pack_rows(samples, row_tokens):
    """The samples, in their order, laid into rows of at most row_tokens."""
    rows, used = [], row_tokens
    for one in samples:
        used += one.n
        if used > row_tokens:
            rows, used = rows + [[]], one.n
        rows[-1].append(one)
    return rows

def batches(samples, s, rows):
    """Without end the rows of each step: its number alone says which, so continuing is exact."""
    packed = (row for epoch in itertools.count(s.SEED) for row in pack_rows(
        random.Random(epoch).sample(samples, len(samples)), s.ROW_TOKENS))
    return iter(lambda: list(itertools.islice(packed, rows)), [])

def load_row(samples, steps):
    """One packed row on the CPU, states as stored. Of a sample with n tokens x, P of the prompt,
    i = 0..n-3 are keys and the last n-1-P of them drafting rows, those that serving drafts from.
    token, position, owner [R]: x[i+1], i, sample; chain [C]: key of a drafting row; next [C, K]:
    the right draft of each step, -1 past the end; keys, rows: how many of each sample."""
    keys, rows = [one.n - 2 for one in samples], [one.n - 1 - one.P for one in samples]
    parts, R = [], 0
    for number, (one, N, A) in enumerate(zip(samples, keys, rows)):
        i, where = torch.arange(N), {"g": slice(one.g, one.g + N), "y": slice(one.y, one.y + A)}
        x = one.file.get_slice("token_ids")[one.t:one.t + one.n].long()
        following = F.pad(x[one.P + 1:], (0, steps - 1), value=-1)
        parts.append({key: one.file.get_slice(key)[where[key[0]]]  # g, y and their scales
                      for key in one.file.keys() if key[0] in where} | {
            "token": x[1:-1], "position": i, "owner": torch.full_like(i, number),
            "chain": R + i[-A:], "next": following.unfold(0, steps, 1)})
        R += N
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} | {
        "keys": keys, "rows": rows, "names": [one.name for one in samples]}

def to_device(row, d):
    """The row on d.device; g [R, 3H] and y [C, H] as values. Exits where they are not finite."""
    row = {name: t.to(d.device) if torch.is_tensor(t) else t for name, t in row.items()}
    for key in "gy":
        value, scale = row[key], row.pop(key + "_scale", torch.ones(1, device=d.device))
        if value.dtype == torch.uint8:  # two a byte, 32 a scale: [..., H / 32, 32]
            value = (torch.stack([value & 15, value >> 4], -1).float() - 8).view(*scale.shape, 32)
        row[key] = (value.float() * scale[..., None].float()).to(d.dtype).flatten(1)
        if not row[key].sum(dtype=torch.float32).isfinite():
            owner = row["owner"] if key == "g" else row["owner"][row["chain"]]
            bad = {row["names"][i] for i in owner[~row[key].isfinite().all(1)].tolist()}
            fail(f"states not finite in {bad}; to fix: rm it, run 02_extract.py again")
    return row | {"flex": flex_attention(row) if d.device.type == "cuda" else None}

def flex_attention(row):
    """The CUDA path's kernel (q, k, v) -> (out, log-sum-exp), no attention across samples."""
    from torch.nn.attention import flex_attention as flex
    size = max(128, 1 << (len(row["owner"]) - 1).bit_length())  # few shapes, compiled once each
    owner = F.pad(row["owner"], (0, size - len(row["owner"])), value=-1)
    chain = F.pad(row["chain"], (0, size - len(row["chain"])), value=size - 1)
    seen = lambda b, h, i, j: (owner[chain[i]] == owner[j]) & (j <= chain[i])
    mask = flex.create_block_mask(seen, None, None, size, size, device=owner.device)
    kernel = torch.compile(flex.flex_attention, dynamic=False, disable=not owner.is_cuda)
    def attention(q, k, v):
        out, aux = kernel(*(F.pad(x, (0, 0, 0, size - x.shape[2])) for x in (q, k, v)), scale=1.0,
                          block_mask=mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
        return out[:, :, :q.shape[2]], aux.lse[:, :, :q.shape[2]]
    return attention

def attend(q, k, v, own, row):
    """Attention of scaled drafting rows q [heads, C, D] over their sample's step-0 keys k, v
    [KV, R, D] and the diagonal: own, the row's keys, values [KV, C, D] since."""
    (heads, _, D), KV = q.shape, len(k)
    near = q.new_empty(2, 0, *q.shape) if not own else torch.stack(
        [torch.stack(t).repeat_interleave(heads // KV, 1) for t in zip(*own)])
    score = (q * near[0]).sum(-1)  # [K, heads, C]
    if row["flex"]:
        out, lse = row["flex"](q[None], k[None], v[None])
        share = torch.cat([lse, score]).softmax(0).to(q.dtype)[..., None]
        return out[0] * share[0] + (near[1] * share[1:]).sum(0)
    parts, (k, v) = [], (t.split(row["keys"], 1) for t in (k, v))
    for q, k, v, s in zip(q.split(row["rows"], 1), k, v, score.split(row["rows"], 2)):
        A, N = q.shape[1], k.shape[1]  # rows and keys of a sample; later ones are not seen
        later = q.new_full((A, N), -math.inf).triu(N - A + 1)
        far = (q.reshape(KV, -1, D) @ k.transpose(1, 2)).view(heads, A, N) + later
        share = torch.cat([far, s.movedim(0, -1)], -1).softmax(-1)  # [heads, A, N + K]
        out = share[..., :N].reshape(KV, -1, N) @ v
        parts.append((out.view(heads, A, D), share[..., N:]))
    out, share = (torch.cat(part, 1) for part in zip(*parts))
    return out + (near[1] * share.movedim(-1, 0)[..., None]).sum(0)

def drafter_shapes(config):
    """The weights that vLLM wants, name: shape (it reports neither a missing nor a wrong one)."""
    H, M, V = (config[key] for key in ("hidden_size", "intermediate_size", "draft_vocab_size"))
    q, kv = (config[f"num_{k}_heads"] * config["head_dim"] for k in ("attention", "key_value"))
    shapes = {"self_attn.q_proj": [q, 2 * H], "self_attn.k_proj": [kv, 2 * H],
              "self_attn.v_proj": [kv, 2 * H], "self_attn.o_proj": [H, q],
              "mlp.gate_proj": [M, H], "mlp.up_proj": [M, H], "mlp.down_proj": [H, M],
              "input_layernorm": [H], "hidden_norm": [H], "post_attention_layernorm": [H]}
    return {"fc.weight": [H, 3 * H], "norm.weight": [H], "lm_head.weight": [V, H],
            **{f"midlayer.{name}.weight": shape for name, shape in shapes.items()}}

def drafter_states(d, row, steps):
    """The drafter over a row, as vLLM computes it: per TTT step the normed states [C, H] that the
    head reads. Step k has the true token k further on, its own last state, position + k."""
    w = {name.split(".")[-2]: p.to(d.dtype) for name, p in d.w.items()}
    D, eps = d.config["head_dim"], d.config["rms_norm_eps"]
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], w[name], eps)
    heads = lambda x, name: F.linear(x, w[name]).unflatten(1, (-1, D)).transpose(0, 1)
    rate = d.config["rope_theta"] ** (torch.arange(D // 2, device=d.device).float() * -2 / D)
    def turned(x, position):  # [heads, rows, D], rotary position as Llama has it
        angle, (a, b) = position[:, None].float() * rate, x.chunk(2, -1)
        cos, sin = angle.cos().to(d.dtype), angle.sin().to(d.dtype)  # [rows, D / 2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    token, position, own, states = row["token"], row["position"], [], []
    hidden = F.linear(row["g"], w["fc"])  # [R, H]
    for step in range(steps):
        both = torch.cat([norm(F.embedding(token, d.embed), "input_layernorm"),
                          norm(hidden, "hidden_norm")], -1)  # [R or C, 2H]
        own.append((turned(heads(both, "k_proj"), position), heads(both, "v_proj")))
        if step == 0:  # every position is a key, but only drafting rows go on
            both, hidden, position = (t[row["chain"]] for t in (both, hidden, position))
        out = attend(turned(heads(both, "q_proj"), position) * D ** -0.5, *own[0], own[1:], row)
        hidden = hidden + F.linear(out.transpose(0, 1).flatten(1), w["o_proj"])
        x = norm(hidden, "post_attention_layernorm")
        x = F.silu(F.linear(x, w["gate_proj"])) * F.linear(x, w["up_proj"])
        hidden = hidden + F.linear(x, w["down_proj"])
        states.append(norm(hidden, "norm"))
        token, position = row["next"][:, step].clamp(0), position + 1
    return states

def loss_and_gradient(d, row, weights):
    """Sums over a row's trained positions [2, K]: soft cross-entropy with the target over the draft
    vocabulary; right drafts. Adds the gradient of weights times the loss to d.w's, by chunks."""
    K, y = len(weights), F.pad(row["y"], (0, 0, 0, len(weights)))
    states, sums = drafter_states(d, row, K), torch.zeros(2, K, dtype=torch.double, device=d.device)
    grads = [torch.empty_like(state) for state in states]
    for first, right in zip(range(0, len(y), CHUNK), row["next"].split(CHUNK)):
        teacher = F.rms_norm(y[first:first + len(right) + K - 1], d.norm.shape, d.norm, d.eps)
        teacher = F.linear(teacher, d.head).float().softmax(-1)  # [chunk + K - 1, V]
        for k, state in enumerate(states):
            z = F.linear(state.detach()[first:first + CHUNK], d.lm_head).float()  # [chunk, V]
            p, inside, (most, drafted) = teacher[k:k + len(z)], right[:, k] >= 0, z.max(-1)
            q = z.softmax(-1)
            loss = most - q.amax(-1).log() - torch.linalg.vecdot(p, z)  # lse(z) - p z
            sums[:, k] += torch.stack([loss * inside, d.vocab[drafted] == right[:, k]]).sum(1)
            share = (inside * weights[k]).to(d.dtype)[:, None]
            grads[k][first:first + CHUNK] = (q.sub_(p).to(d.dtype) @ d.lm_head) * share
    torch.autograd.backward(states, grads)
    return sums

def count_accepted(hits):
    """The steps (row, accepted) of serving an answer; hits[a][k]: draft k of row a is right."""
    row = 0
    while row < len(hits):
        yield row, (accepted := (hits[row] + [False]).index(False))
        row += accepted + 1

def evaluate(d, samples, s, rank=0, world=1):
    """Offline acceptance: the ratios of vLLM's counters, overall and by context length."""
    tally = torch.zeros(len(EDGES) + 1, 1 + (K := s.NUM_SPECULATIVE_TOKENS))
    for packed in pack_rows(sorted(samples[rank::world], key=lambda one: one.n), s.ROW_TOKENS):
        row = to_device(load_row(packed, K), d)
        with torch.no_grad():
            drafts = [torch.cat([F.linear(x, d.lm_head).argmax(-1) for x in state.split(CHUNK)])
                      for state in drafter_states(d, row, K)]
        hits = d.vocab[torch.stack(drafts, 1)] == row["next"]  # [C, K]
        parts = (t.cpu().split(row["rows"]) for t in (hits, row["position"][row["chain"]]))
        for hit, context in zip(*parts):
            for a, accepted in count_accepted(hit.tolist()):
                tally[bisect.bisect(EDGES, int(context[a])), :accepted + 1] += 1  # and the draft
    world > 1 and torch.distributed.all_reduce(tally := tally.to(d.device))
    ratios = lambda n: {"acceptance_length": sum(n) / n[0], "drafts": int(n[0]),
                        "acceptance_by_position": [accepted / n[0] for accepted in n[1:]]}
    return ratios(tally.sum(0).tolist()) | {"by_context_length": {
        f"from {edge}": ratios(n) for edge, n in zip([0, *EDGES], tally.tolist()) if n[0]}}

def read_target(directory):
    """Embedding, final norm and head (the embedding where tied) of the target, each read alone."""
    pattern = r"(?:(?:language_model|model)\.)*(norm|lm_head|embed_tokens)\.weight"
    files = [safe_open(path, "pt") for path in directory.glob("*.safetensors")]
    found = {match[1]: file.get_tensor(match[0]) for file in files for name in file.keys()
             if (match := re.fullmatch(pattern, name))}
    len(found) > 1 or fail(f"no weights of TARGET in {directory}; to fix: download the whole model")
    return [found.get(name, found["embed_tokens"]) for name in ("embed_tokens", "norm", "lm_head")]

def find_drafter(name, data):
    """Directory of the published drafter. Waits while 00_preflight.sh's download of it holds the
    lock of its pid file; exits with the download's error where it is not whole then."""
    if (Path(name) / "config.json").exists():
        return Path(name)
    here, log = data / "drafter", data / "logs/drafter_download.log"
    pid, note = here / ".download.pid", here / ".download.json"
    note = json.loads(note.read_text()) if note.exists() else {"repo": name, "files": {"": 1}}
    print(f"{STAGE}: {name} from {here}, when its download has ended ({log})", flush=True)
    pid.exists() and subprocess.call(["flock", "-s", pid, "true"])
    have = sum(path.stat().st_size for path in here.glob("[!.]*"))
    if have < sum(note["files"].values()) or note["repo"] != name:
        said = re.findall(".*rror.*", log.read_text()) if log.exists() else []
        fail(f"no drafter {name}, nor is it whole in {here} ({['not begun, or killed', *said][-1]})"
             "; to fix: ./00_preflight.sh goes on with its download")
    return here

def check_drafter(config, tensors):
    """Target ids of the draft vocabulary; asserts that names, shapes and map are as vLLM wants."""
    V, size = config["draft_vocab_size"], config["vocab_size"]
    want = drafter_shapes(config) | ({"d2t": [V], "t2d": [size]} if V < size else {})
    got = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(want | got):
        assert got.get(name) == want.get(name), f"{name} is {got.get(name)}, want {want.get(name)}"
    vocab = torch.arange(V) + tensors.get("d2t", torch.zeros(V)).long()
    assert 0 <= vocab.min() <= vocab.max() < size, f"d2t leads out of the {size} ids of the target"
    chosen = torch.zeros(size, dtype=torch.bool).index_fill(0, vocab, True)
    assert chosen.sum() == V, "d2t leads to a token twice"
    assert chosen.equal(tensors.get("t2d", chosen).bool()), "t2d names other tokens than d2t"
    return vocab

def read_drafter(directory, target, layer_ids):
    """A published drafter, checked: (config, {name: f32 tensor}, target ids of its vocabulary)."""
    try:
        given = json.loads((directory / "config.json").read_text())
        given = {key: value for key, value in given.items() if value is not None}
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        config = {"head_dim": given["hidden_size"] // given["num_attention_heads"], "rope_theta":
                  rope.get("rope_theta", 1e4), "draft_vocab_size": given["vocab_size"]} | given
        for key in ("hidden_size", "vocab_size"):
            assert given[key] == target[key], f"{key} is {given[key]}, want {target[key]}"
        odd = [key for key in ("norm_output", "norm_before_residual") if given.get(key)]
        odd += [rope] * (rope.get("factor", 1) != 1)  # names of tensors do not tell these
        assert not odd, f"it has {odd}"
        ids = sorted(given.get(IDS) or given.get("eagle_config", {}).get(IDS) or layer_ids)
        assert layer_ids in (ids, [i + 1 for i in ids]), f"it reads layers {ids}, not {layer_ids}"
        w = {name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor for path in
             directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
        w.pop("embed_tokens.weight", None)  # the target's is shared
        vocab = check_drafter(config, w)
        return config, {name: t.float() for name, t in w.items() if "weight" in name}, vocab
    except (AssertionError, KeyError, OSError, ValueError, SafetensorError) as error:
        fail(f"drafter {directory}: {'no key ' * isinstance(error, KeyError)}{error}; to fix: set "
             "DRAFTER to one that is whole and fits")

def choose_vocab(counts, size, directory):
    """Target ids of a new draft vocabulary, ascending: special and end tokens, most frequent."""
    special = []
    for path in (*directory.glob("*config.json"), *directory.glob("tokenizer.json")):
        facts = json.loads(path.read_text())
        end = facts.get("eos_token_id") or []
        special += [*([end] if isinstance(end, int) else end), *map(int, facts.get(
            "added_tokens_decoder", [])), *(one["id"] for one in facts.get("added_tokens", []))]
    counts[[i for i in special if i < len(counts)]] += counts.sum()  # first of all
    return counts.argsort(descending=True, stable=True)[:size].sort()[0]

def new_drafter(target, s, vocab, head):
    """The same of the target's geometry, with random weights; the head is the target's own rows."""
    H, heads, size = (target[k] for k in ("hidden_size", "num_attention_heads", "vocab_size"))
    config = {"hidden_size": H, "intermediate_size": s.MLP_WIDTH or target["intermediate_size"],
              "num_key_value_heads": target.get("num_key_value_heads") or heads,
              "head_dim": target.get("v_head_dim") or target.get("head_dim") or H // heads,
              "num_attention_heads": heads, "vocab_size": size, "draft_vocab_size": len(vocab),
              "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    chance = torch.Generator().manual_seed(s.SEED)
    w = {name: torch.randn(shape, generator=chance) * shape[1] ** -0.5 if shape[1:]
         else torch.ones(shape) for name, shape in drafter_shapes(config).items()}
    return config, w | {"lm_head.weight": head[vocab]}, vocab

def make_drafter(s, start, layer_ids, directory, samples, device, dtype):
    """The drafter before the first step: config, w (f32), lm_head, vocab; facts of the target."""
    target = json.loads((directory / "config.json").read_text())
    target, (embed, norm, head) = target.get("text_config", target), read_target(directory)
    answers = (one.file.get_slice("token_ids")[one.t + one.P:one.t + one.n] for one in samples)
    counts = torch.cat([*answers]).bincount(minlength=target["vocab_size"])
    config, w, vocab = read_drafter(start, target, layer_ids) if start else new_drafter(
        target, s, choose_vocab(counts.clone(), s.DRAFT_VOCAB, directory), head)
    coverage = float(counts[vocab].sum() / counts.sum())
    print(f"{STAGE}: {len(samples):,} samples; a draft vocabulary of {len(vocab):,} covers "
          f"{coverage:.2%} of the tokens in their answers; {dtype} on {device}", flush=True)
    lm_head = w.pop("lm_head.weight").to(device, dtype)  # frozen, so without a master in f32
    w = {name: tensor.to(device).requires_grad_() for name, tensor in w.items()}
    embed, norm, head = (t.to(device, dtype) for t in (embed, norm, head[vocab]))
    return Namespace(
        config=config, w=w, lm_head=lm_head, vocab=vocab.to(device), coverage=coverage, embed=embed,
        norm=norm, head=head, device=device, dtype=dtype, eps=target["rms_norm_eps"],
        max_len=target["max_position_embeddings"])

def export(directory, d, layer_ids, target, figures):
    """Write drafter/ for vLLM, checked before and compared after: bf16, offsets in d2t."""
    vocab, size, K = d.vocab.cpu(), d.config["vocab_size"], len(figures["acceptance_by_position"])
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16)
               for name, tensor in (d.w | {"lm_head.weight": d.lm_head}).items()}
    if len(vocab) < size:
        tensors |= {"d2t": vocab - torch.arange(len(vocab)),
                    "t2d": torch.zeros(size, dtype=torch.bool).index_fill(0, vocab, True)}
    assert check_drafter(d.config, tensors).equal(vocab)
    directory.mkdir(exist_ok=True)
    write_whole(directory / "model.safetensors", lambda tmp: save_file(tensors, tmp))
    write_whole(directory / "config.json", d.config | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": d.config["rope_theta"]},
        "max_position_embeddings": d.max_len, "tie_word_embeddings": False, IDS: layer_ids,
        "eagle_config": {IDS: layer_ids, "use_aux_hidden_state": True}})
    write_whole(directory / "README.md", f"""# EAGLE-3 drafter for {target}\n
    vllm serve {target} --speculative-config \\
        '{{"method": "eagle3", "model": "THIS DIRECTORY", "num_speculative_tokens": {K}}}'\n
Offline, on held-out answers:\n\n```json\n{json.dumps(figures, indent=1)}\n```\n""")
    back = load_file(directory / "model.safetensors")
    assert back.keys() == tensors.keys() and all(back[n].equal(tensors[n]) for n in back), directory

def make_optimizers(w):
    """AdamW for the norms, Muon for the layer's matrices, with their moments made."""
    norms, matrices = ([p for p in w.values() if p.ndim == n] for n in (1, 2))
    made = [torch.optim.AdamW(norms, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
            torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")]
    made[0].state |= {p: {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p),
                          "exp_avg_sq": torch.zeros_like(p)} for p in norms}
    made[1].state |= {p: {"momentum_buffer": torch.zeros_like(p)} for p in matrices}
    return made

def train_step(d, optimizers, loaded, lr, s, world):
    """One optimizer step over the rows of all processes, sums divided by the trained positions.
    What metrics.jsonl says of it, or None where loss or gradient is not finite: nothing changes."""
    share = torch.tensor([s.STEP_WEIGHT ** k for k in range(s.TTT_STEPS)], dtype=torch.float64)
    counts = sum((row["next"] >= 0).sum(0) for row in loaded).to(d.device)  # [K]
    world > 1 and torch.distributed.all_reduce(counts)
    share, counts, sums = share / share.sum(), counts.cpu(), 0
    assert counts.min() > 0, f"a batch without a trained position: {counts}"
    for row in (to_device(row, d) for row in loaded):
        sums += loss_and_gradient(d, row, (share / counts).tolist())
    for tensor in [sums, *(p.grad for p in d.w.values())] if world > 1 else []:
        wire = tensor.bfloat16() if tensor.is_cuda and tensor is not sums else tensor
        torch.distributed.all_reduce(wire)
        tensor.copy_(wire)
    loss, hits = sums.cpu() / counts
    norm = float(torch.nn.utils.clip_grad_norm_(d.w.values(), 1.0))
    finite = math.isfinite(float(loss.sum()) + norm)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = lr
        finite and optimizer.step()
        optimizer.zero_grad()
    return {"loss": float(loss @ share), "loss_by_ttt_step": loss.tolist(), "gradient_norm": norm,
            "acceptance_by_ttt_step": hits.tolist(), "lr": lr} if finite else None

def save_checkpoint(directory, tensors, state, keep):
    """step-N.safetensors, `state` as JSON in its header; `keep` of them and nothing half stay."""
    directory.mkdir(exist_ok=True)
    write_whole(directory / f"step-{state['step']:08d}.safetensors",
                lambda tmp: save_file(tensors, tmp, {"state": json.dumps(state)}))
    for old in [*sorted(directory.glob("step-*"))[:-keep], *directory.parent.glob("**/.*.tmp")]:
        old.unlink()

def load_checkpoint(directory, tensors):
    """`state` of the newest checkpoint that can be read, copied into tensors; or a new one."""
    for path in sorted(directory.glob("step-*"), reverse=True):
        try:
            file = safe_open(path, "pt")
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
            return json.loads(file.metadata()["state"])
        except (OSError, SafetensorError) as error:
            print(f"{STAGE}: cannot read {path} ({error}), taking the one before", flush=True)
    [*directory.glob("step-*")] and fail(f"no checkpoint is whole; to fix: mv {directory} aside")
    return {"step": 0, "best": None, "stale": 0, "skipped": 0, "bad": 0}

def draw_curves(out):
    """curves.png: loss and right drafts by TTT step, acceptance length on held-out answers."""
    from matplotlib.figure import Figure
    figure, lines = Figure((15, 4), layout="constrained"), open(out / "metrics.jsonl")
    rows = [row | row.get("heldout", {}) for row in map(json.loads, lines)]
    for axis, name in zip(figure.subplots(1, 3), (
            "loss_by_ttt_step", "acceptance_by_ttt_step", "acceptance_length")):
        lines = axis.plot(*zip(*((row["step"], row[name]) for row in rows if name in row)), lw=0.8)
        axis.set(xlabel="training step", title=name.replace("_", " "))
        axis.legend(lines, range(len(lines)) if "ttt" in name else ["held out"])
    write_whole(out / "curves.png", lambda tmp: figure.savefig(tmp, format="png", dpi=70))

def judge(run, state, heldout):
    """Evaluate, tell, draw, save; export the drafter if none was better."""
    result, step = evaluate(run.d, heldout, run.s, run.rank, run.world), state["step"]
    length, state["stale"] = result["acceptance_length"], state["stale"] + 1
    if better := not state["best"] or length > state["best"]["acceptance_length"]:
        state |= {"best": {"step": step} | result, "stale": 0}
    if run.rank:
        return
    run.note({"step": step, "heldout": result})
    print(f"{STAGE}: step {step}, held out: acceptance length {length:.3f}, by position",
          *(f"{share:.3f}" for share in result["acceptance_by_position"]), flush=True)
    draw_curves(run.out)
    better and export(run.out / "drafter", run.d, run.extract["layer_ids"], run.s.TARGET, result)
    run.save()
    if run.start and step == 0 and length < 1.1:
        print(f"{STAGE}: useless: layer ids in SGLang's numbering? On 100 samples with ids one "
              f"higher: {other_numbering(run)}", flush=True)

def other_numbering(run):
    """The shell command that extracts 100 samples with layer ids one higher and evaluates there."""
    old = Path(run.s.DATA).resolve() / run.extract["settings"]["SAMPLES_FROM"]
    new, ids = old.parent / "shifted" / old.name, (str(i + 1) for i in run.extract["layer_ids"])
    env = {name: value for name, value in os.environ.items() if name.startswith("KIT_")} | {
        "KIT_DATA": new.parent, "KIT_TARGET": run.s.TARGET, "KIT_DRAFTER": run.start, "KIT_RUN": "",
        "KIT_LAYER_IDS": ",".join(ids), "KIT_PART": "", "KIT_MAX_STEPS": 1}
    python = shlex.join(["env", *(f"{name}={env[name]}" for name in env), sys.executable])
    return (f"mkdir -p {new} && cp {old}/manifest.json {new} && for f in heldout_samples samples; "
            f"do head -n 100 {old}/$f.jsonl > {new}/$f.jsonl; done && {python} 02_extract.py && "
            f"{python} 03_train.py")

def train(run, samples, heldout):
    """From the newest checkpoint to the last step, or until acceptance stops growing; the state."""
    s, d, rank, world, stop = run.s, run.d, run.rank, run.world, []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    optimizers, log = make_optimizers(d.w), run.out / "metrics.jsonl"
    moments = {p: facts for optimizer in optimizers for p, facts in optimizer.state.items()}
    tensors = {f"{key} {name}": t for name, p in d.w.items()  # all that changes
               for key, t in {"weight": p.detach(), **moments[p]}.items()}
    state = load_checkpoint(run.out / "checkpoints", tensors)
    if rank == 0:  # drop a torn last line, and what came after the checkpoint
        old = open(log).readlines() if log.exists() and state["best"] else []
        write_whole(log, "".join(line for line in old if line.endswith("\n") and
                                 json.loads(line)["step"] <= state["step"]))
        file = open(log, "a")
    run.note = lambda row: rank or print(json.dumps(row), file=file, flush=True)
    run.save = lambda: rank or all(t.isfinite().all() for t in tensors.values()) and \
        save_checkpoint(run.out / "checkpoints", tensors, state, s.KEEP)
    state["best"] or judge(run, state, heldout)
    rows, packed = s.ACCUMULATE * world, len(pack_rows(samples, s.ROW_TOKENS))
    total = s.MAX_STEPS or math.ceil(s.EPOCHS * packed / rows)
    plan = itertools.islice(batches(samples, s, rows), state["step"], total)
    fetch = lambda batch: (sum(one.n for row in batch for one in row), [
        load_row(row, s.TTT_STEPS) for row in batch[rank::world]])
    with ThreadPoolExecutor(1) as pool, progress(total, "steps", state["step"]) as bar:
        ahead = [pool.submit(fetch, batch) for batch in itertools.islice(plan, 2)]
        bar.disable = rank > 0
        while ahead and state["stale"] < s.PATIENCE:
            start, step = time.monotonic(), state["step"] + 1
            tokens, loaded = ahead.pop(0).result()
            ahead += (pool.submit(fetch, batch) for batch in itertools.islice(plan, 1))
            lr = s.LEARNING_RATE * min(step / max(1, s.WARMUP * total),
                                       0.5 + 0.5 * math.cos(math.pi * (step - 1) / total))
            result = train_step(d, optimizers, loaded, lr, s, world)
            state |= {"step": step, "bad": 0 if result else state["bad"] + 1,
                      "skipped": state["skipped"] + (not result)}
            if result:
                used = torch.cuda.max_memory_allocated() or 1024 * resource.getrusage(0).ru_maxrss
                speed = tokens / (time.monotonic() - start)
                run.note({"step": step, **result, "tokens_per_sec": speed, "memory_gb": used / 1e9})
                bar.set_postfix_str(f"loss {result['loss']:.3f}, {speed:,.0f} tokens/s, "
                                    f"{used / 1e9:.1f} GB", refresh=False)
            bar.update()
            state["bad"] < 10 or fail("no finite gradient in 10 steps; to fix: lower LEARNING_RATE")
            if step % s.EVAL_EVERY == 0 or step == total:
                judge(run, state, heldout)
            stopped = torch.tensor(len(stop), device=d.device)
            world > 1 and torch.distributed.all_reduce(stopped)
            if stopped:
                run.save()
                bar.close()
                fail(f"stopped at step {step}; to continue: run it again", 128 + (*stop, 15)[0])
    return state

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

def main():
    s = settings()
    data, rank = Path(s.DATA), int(os.environ.get("RANK", 0))
    extract, (directory, target_id) = read_manifest(data / "02_extract"), find_model(s.TARGET)
    if extract["inputs"]["target"] != target_id:
        fail(f"02_extract is of another target than TARGET, {target_id}; to fix: set TARGET to it")
    start = s.DRAFTER and find_drafter(s.DRAFTER, data)
    s.LEARNING_RATE = s.LEARNING_RATE or (5e-5 if start else 1e-2)
    out = data / STAGE / (s.RUN or f"n{extract['counts']['samples']}")
    if rank == 0:
        shaping = {name: value for name, value in vars(s).items() if name not in (
            "DATA", "TARGET", "DRAFTER", "RUN", "DEVICE", "KEEP", "ACCUMULATE")}
        shaping["rows_a_step"] = s.ACCUMULATE * int(os.environ.get("WORLD_SIZE", 1))
        digest = start and hashlib.sha256(b"".join(open(path, "rb").read(2**20) for path in (
            start / "config.json", *sorted(start.glob("*.safetensors"))))).hexdigest()[:16]
        manifest = open_stage(out, settings=shaping | extract["counts"], size={}, inputs={
            "target": target_id, "02_extract": extract["id"], "drafter": digest})
    elif (path := out / "manifest.json").exists() and json.loads(path.read_text())["done"]:
        return  # rank 0 says so
    import_torch()
    world, cuda = int(os.getenv("WORLD_SIZE", 1)), s.DEVICE != "cpu" and torch.cuda.is_available()
    cuda or s.DEVICE != "cuda" or fail("torch sees no cuda device; to fix: set DEVICE to auto")
    cuda and torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    world > 1 and torch.distributed.init_process_group("nccl" if cuda else "gloo")
    fast = cuda or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    device, dtype = torch.device(["cpu", "cuda"][cuda]), torch.bfloat16 if fast else torch.float32
    samples, heldout = (read_shards(data / "02_extract", extract, split, s.ROW_TOKENS)
                        for split in ("train", "heldout"))
    d = make_drafter(s, start, extract["layer_ids"], directory, samples, device, dtype)
    run = Namespace(s=s, d=d, out=out, extract=extract, start=start, rank=rank, world=world)
    try:
        state = train(run, samples, heldout)
    except (OSError, SafetensorError, torch.OutOfMemoryError) as error:
        fail(f"{error}; checkpoints are whole; to fix: make room in {out}, or lower ROW_TOKENS")
    if rank == 0:
        best, files = state["best"], {f"drafter/{path.name}": {
            "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in (out / "drafter").glob("[!.]*")}
        write_whole(out / "manifest.json", manifest | {
            "best": best, "steps": state["step"], "skipped_steps": state["skipped"], "files": files,
            "draft_vocab_size": len(d.vocab), "vocab_coverage": d.coverage,
            "num_ttt_steps": s.TTT_STEPS, "done": True})
        print(f"{STAGE}: wrote {out}/drafter, acceptance length {best['acceptance_length']:.3f}")

if __name__ == "__main__":
    main()
