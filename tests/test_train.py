"""Stage 03: pure functions against slow obvious references, the stage on tiny data, its faults."""
import hashlib
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

H, V, LAYERS = 64, 300, [2, 4, 5]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # tiny matrices: more threads only fight each other


# ---- data made by hand ---------------------------------------------------------------------------
def stored(x, store):
    """x [..., H] as 02 stores it: {"": values, "_scale": scales}."""
    if store == "bf16":
        return {"": x.bfloat16()}
    if store == "fp8":
        scale = x.abs().amax(-1).clamp_min(1e-12) / 448
        return {"": (x / scale[..., None]).to(torch.float8_e4m3fn), "_scale": scale}
    groups = x.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).half()
    q = (groups / scale[..., None].float()).round().clamp(-8, 7).add(8).flatten(-2).to(torch.uint8)
    return {"": q[..., ::2] | q[..., 1::2] << 4, "_scale": scale}


def make_data(root, store="bf16", train=(12, 12), heldout=6, width=H, seed=0):
    """A target of random embeddings whose answers follow a rule, and its 02_extract."""
    chance = torch.Generator().manual_seed(seed)
    target, out, files = root / "target", root / "data/02_extract", {}
    target.mkdir(parents=True)
    out.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps({
        "hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": V,
        "intermediate_size": 96, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "eos_token_id": 2}))
    embed = torch.randn(V, width, generator=chance)
    save_file({"model.embed_tokens.weight": embed[:, :H].bfloat16().contiguous(),
               "model.norm.weight": torch.ones(H).bfloat16()}, target / "model.safetensors")
    names = [(f"train-{i:05d}.safetensors", "train", n) for i, n in enumerate(train)]
    for name, split, count in names + [("heldout-00000.safetensors", "heldout", heldout)]:
        tokens, start, prompt, g, y = [], [0], [], [], []
        for _ in range(count):
            P, A = (int(torch.randint(*r, (1,), generator=chance)) for r in ((1, 12), (2, 30)))
            x = torch.randint(3, 40, (1,), generator=chance).tolist()
            while len(x) < P + A:
                x.append((x[-1] * 7 + 11) % 37 + 3)
            x[-1] = 2
            g.append(torch.stack([embed[x] * scale for scale in (0.5, 1, 2)], 1)[:-1])
            y.append(embed[x[1:] + [2]][P:-1] * 0.5)
            tokens, start, prompt = tokens + x, start + [len(tokens) + len(x)], prompt + [P]
        tensors = {"token_ids": torch.tensor(tokens, dtype=torch.int32),
                   "sample_start": torch.tensor(start),
                   "prompt_len": torch.tensor(prompt, dtype=torch.int32)}
        for key, value in (("g", g), ("y", y)):
            tensors |= {key + end: t for end, t in stored(torch.cat(value), store).items()}
        save_file(tensors, out / name, {"format": "1", "store": store})
        files[name] = {"bytes": (out / name).stat().st_size, "samples": count,
                       "tokens": len(tokens), "split": split}
    (out / "manifest.json").write_text(json.dumps({
        "stage": "02_extract", "settings": {"STORE": store, "SAMPLES_FROM": "01_generate"}, "inputs": {
            "target": hashlib.sha256((target / "config.json").read_bytes()).hexdigest()[:16]},
        "size": {"samples": sum(train)}, "hidden_size": H, "num_layers": 8, "layer_ids": LAYERS,
        "last_layer": 8, "store": store, "counts": {"samples": sum(train), "heldout_samples": heldout},
        "files": files, "done": True}))
    return root


def flags(root, **more):
    given = {"data": root / "data", "target": root / "target", "drafter": "", "row-tokens": 96,
             "accumulate": 2, "max-steps": 6, "eval-every": 3, "draft-vocab": 200, "keep": 5,
             "device": "cpu"} | more
    return [str(part) for name, value in given.items() for part in ("--" + name, value)]


@pytest.fixture
def run(stage):
    return lambda root, check=True, **more: stage("03_train", *flags(root, **more), env=ONE_THREAD,
                                                  check=check)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def train(load):
    module = load("03_train")
    module.import_torch()
    return module


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory, stage):
    """A run of 6 steps with checkpoints at 0, 3 and 6; read-only."""
    root = tmp_path_factory.mktemp("finished")
    shutil.copytree(data, root, dirs_exist_ok=True)
    stage("03_train", *flags(root), env=ONE_THREAD)
    return root


def tiny_drafter(train, s=SimpleNamespace(MLP_WIDTH=0, SEED=1), dtype=torch.float32, V_draft=200):
    """A random drafter in f32 as main() makes it."""
    config = {"hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": V,
              "intermediate_size": 96}
    chance = torch.Generator().manual_seed(3)
    embed, vocab = torch.randn(V, H, generator=chance), torch.arange(V_draft) + 2
    config, w, _ = train.new_drafter(config, s, vocab, embed)
    for name, p in w.items():
        w[name] = (p + 0.1 * torch.randn(p.shape, generator=chance)).requires_grad_()
    lm_head = w.pop("lm_head.weight").detach()
    return SimpleNamespace(
        config=config, device=torch.device("cpu"), dtype=dtype, w=w, lm_head=lm_head, vocab=vocab, embed=embed,
        head=embed[vocab], norm=torch.rand(H, generator=chance) + 0.5, eps=1e-5, max_len=512)


def read(train, root, split="train", row_tokens=96):
    extract = json.loads((root / "data/02_extract/manifest.json").read_text())
    return train.read_shards(root / "data/02_extract", extract, split, row_tokens)


# ---- pure functions ------------------------------------------------------------------------------
def test_reader_gives_back_the_numbers(train, tmp_path):
    """All three stores: the values of every row, sample by sample, to their precision."""
    d = tiny_drafter(train)
    exact = None
    for store, error in (("bf16", 0.005), ("fp8", 0.04), ("int4", 0.08)):
        root = make_data(tmp_path / store, store)
        samples = read(train, root)
        row = train.to_device(train.load_row(samples[:5], 3), d)
        assert row["g"].shape[1] == 3 * H and len(row["g"]) == sum(one.n - 2 for one in samples[:5])
        assert len(row["y"]) == sum(one.n - 1 - one.P for one in samples[:5])
        exact = exact or (row["g"], row["y"])
        for got, want in zip((row["g"], row["y"]), exact):
            assert (got - want).abs().max() < error * want.abs().max()


def test_int4_by_hand(train):
    d = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    values = torch.arange(-8, 8).repeat(2)  # 32 values
    packed = (values[::2] + 8 | values[1::2] + 8 << 4).to(torch.uint8)[None]
    row = {"g": packed[:, None].repeat(1, 3, 1), "g_scale": torch.tensor([[[1.0], [2], [0.5]]]).half(),
           "y": packed, "y_scale": torch.tensor([[0.25]]).half(), "names": set()}
    got = train.to_device(row, d)
    assert got["y"].tolist() == [(values * 0.25).tolist()]
    assert got["g"][0].tolist() == torch.cat([values, values * 2.0, values * 0.5]).tolist()


def reference(d, x, P, g, y, steps, weights):
    """Loss sums per step by loops over rows, straight from DESIGN's text and vLLM's forward."""
    w, c, (n, D) = d.w, d.config, (len(x), d.config["head_dim"])
    norm = lambda t, name: F.rms_norm(t, t.shape[-1:], w[name + ".weight"], c["rms_norm_eps"])

    def turn(t, position):
        angle = position * c["rope_theta"] ** (-torch.arange(D // 2) / (D // 2))
        a, b = t[..., :D // 2], t[..., D // 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def qkv(token, hidden, position):
        both = torch.cat([norm(d.embed[token], "midlayer.input_layernorm"),
                          norm(hidden, "midlayer.hidden_norm")])
        q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ both).view(-1, D) for n in "qkv")
        return turn(q, position), turn(k, position), v
    first = [qkv(x[i + 1], w["fc.weight"] @ g[i], i) for i in range(n - 2)]
    sums, states = [0.0] * steps, {}
    for i in range(P - 1, n - 2):
        hidden, keys, values = w["fc.weight"] @ g[i], [], []
        for step in range(steps):
            if i + 1 + step > n - 2:
                break
            q, k, v = qkv(x[i + 1 + step], hidden, i + step)
            if step == 0:
                keys, values = [[f[m] for f in first[:i + 1]] for m in (1, 2)]
            else:
                keys, values = keys + [k], values + [v]
            out = []
            for head in range(len(q)):
                kv = head // (len(q) // len(k))
                score = torch.stack([key[kv] @ q[head] for key in keys]) / math.sqrt(D)
                out.append(score.softmax(0) @ torch.stack([value[kv] for value in values]))
            hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
            m = norm(hidden, "midlayer.post_attention_layernorm")
            hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ (
                F.silu(w["midlayer.mlp.gate_proj.weight"] @ m) * (w["midlayer.mlp.up_proj.weight"] @ m))
            states[step, i] = norm(hidden, "norm")
            teacher = (d.head @ F.rms_norm(y[i + 1 + step - P], (H,), d.norm, d.eps)).softmax(0)
            sums[step] = sums[step] - (teacher * (d.lm_head @ states[step, i]).log_softmax(0)).sum()
    return sums, states


def test_forward_loss_and_gradients_equal_loops(train, data):
    """Packed rows with prompts from 1 token on: states, sums and every gradient, four steps deep."""
    steps, weights = 4, [0.4, 0.3, 0.2, 0.1]
    samples = [one for one in read(train, data) if one.n < 22][:5]
    samples.append(min(read(train, data), key=lambda one: one.P))
    train.CHUNK, chunk = 8, train.CHUNK  # several chunks, also inside a sample
    try:
        d = tiny_drafter(train)
        row = train.to_device(train.load_row(samples, steps), d)
        states = train.drafter_states(d, row, steps)
        sums = train.loss_and_gradient(d, row, weights)
    finally:
        train.CHUNK = chunk
    grads = {name: p.grad.clone() for name, p in d.w.items()}
    for p in d.w.values():
        p.grad = None
    total, at, key = [0.0] * steps, 0, 0
    for one in samples:
        x = one.file.get_slice("token_ids")[one.t:one.t + one.n].long()
        g = row["g"][key:key + one.n - 2]
        A = one.n - 1 - one.P
        want, by_row = reference(d, x, one.P, g, row["y"][at:at + A], steps, weights)
        for (step, i), state in by_row.items():
            assert torch.allclose(states[step][at + i - one.P + 1], state, atol=2e-4)
        total = [a + b for a, b in zip(total, want)]
        at, key = at + A, key + one.n - 2
    sum(a * b for a, b in zip(total, weights)).backward()
    assert torch.allclose(sums[0].float(), torch.stack(total), rtol=1e-4)
    for name, grad in grads.items():
        want = d.w[name].grad
        assert torch.allclose(grad, want, rtol=1e-3, atol=1e-4 * float(want.abs().max())), name


def test_cuda_attention_path_equals_sample_by_sample(train, data):
    """The block-masked kernel of the CUDA path, unfused on the CPU, against the CPU's own path."""
    d, samples = tiny_drafter(train), read(train, data)[:6]
    row = train.to_device(train.load_row(samples, 3), d)
    with torch.no_grad():
        plain = train.drafter_states(d, row, 3)
        blocked = train.drafter_states(d, row | {"flex": train.flex_attention(row)}, 3)
    for a, b in zip(plain, blocked):
        assert torch.allclose(a, b, atol=1e-4)


def test_count_accepted_is_what_serving_counts(train):
    """Against a loop that serves: draft K tokens, verify them, keep the right ones and one more."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(200):
        K, n, P = 3, int(torch.randint(6, 20, (1,), generator=chance)), 3
        right = torch.rand(K, n, generator=chance) < 0.6  # right[k][i]: draft k made at row i
        hits = [[bool(right[k, i]) and i + 2 + k <= n - 1 for k in range(K)] for i in range(P - 1, n - 2)]
        known, drafts, accepted = P + 1, 0, [0] * K  # the first answer token comes from the prompt
        while known < n:  # vLLM drafts after every token until the last one is out
            drafts, i, new = drafts + 1, known - 2, 0
            while new < K and known + new < n and right[new, i]:
                accepted[new] += 1
                new += 1
            known += new + 1
        got = [*train.count_accepted(hits)]
        assert len(got) == drafts
        assert [sum(a > k for _, a in got) for k in range(K)] == accepted


def test_evaluate_of_a_perfect_and_a_hopeless_drafter(train, data, monkeypatch):
    d, samples = tiny_drafter(train), read(train, data, "heldout")
    s = SimpleNamespace(NUM_SPECULATIVE_TOKENS=3, ROW_TOKENS=96)
    d.vocab, d.lm_head = torch.arange(V), torch.eye(V)
    right = lambda d, row, K: [F.one_hot(row["next"][:, k].clamp(0), V).float() for k in range(K)]
    monkeypatch.setattr(train, "drafter_states", right)
    got = train.evaluate(d, samples, s)
    assert got["drafts"] == sum(math.ceil((one.n - 1 - one.P) / 4) for one in samples)
    assert got["acceptance_length"] == pytest.approx(1 + sum(got["acceptance_by_position"]))
    assert got["acceptance_length"] > 3 and got["acceptance_by_position"][0] == 1
    monkeypatch.setattr(train, "drafter_states", lambda d, row, K: [
        F.one_hot(torch.full_like(row["chain"], V - 1), V).float()] * K)
    got = train.evaluate(d, samples, s)
    assert got["acceptance_length"] == 1 and got["drafts"] == sum(one.n - 1 - one.P for one in samples)


def test_vocab_has_specials_ends_and_the_most_frequent(train, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": {}, "999": {}}}')
    counts = torch.tensor([5, 0, 9, 1, 9, 0, 3, 0, 0, 0, 0, 0])
    assert train.choose_vocab(counts, 6, tmp_path).tolist() == [0, 2, 4, 7, 9, 11]


def test_pack_rows_never_overfills_and_keeps_all(train):
    samples = [SimpleNamespace(n=n) for n in (50, 60, 40, 96, 10, 20, 70)]
    rows = train.pack_rows(samples, 96)
    assert sum(rows, []) == samples and all(sum(one.n for one in row) <= 96 for row in rows)
    assert [len(row) for row in rows] == [1, 1, 1, 1, 2, 1]
