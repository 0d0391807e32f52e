"""Stage 03 at Kimi's shape: its memory, by a run on the meta device. On a CUDA device, skipped where
there is none: the CPU's loss and gradients, speed and memory. Run with -s to see the figures."""
import re
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_train import data, read, tiny_drafter, train  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KIMI = {"hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
        "intermediate_size": 18432, "vocab_size": 163840, "draft_vocab_size": 32000,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6}  # AQ-MedAI/Kimi-K25-eagle3


class Memory(TorchDispatchMode):
    """Bytes of the tensors that are alive: now, and at most since it began."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0

    def drop(self, key):
        self.now -= self.alive.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, storage._cdata)
        self.most = max(self.most, self.now)
        return made


def test_memory_sees_what_is_alive():
    with Memory() as memory:
        a = torch.zeros(1000, dtype=torch.float64, device="meta")
        a[:10].add_(1)
        del a
        b = torch.zeros(10, device="meta") + 1
    assert (memory.most, memory.now, b.nbytes) == (8000, 40, 40)


def test_the_sum_of_the_docstring(train):  # noqa: F811
    """Two rows of 8,192 tokens and a step, without computing: 1.19B parameters, under 80 GB, and
    what the docstring says, to 1 GB. Attention is the flash kernel, which keeps what flex keeps."""
    H, V, R, K = KIMI["hidden_size"], KIMI["draft_vocab_size"], 8192, 4
    ids, half = dict(dtype=torch.int64), dict(dtype=torch.bfloat16)

    def flash(q, k, v):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out, lse
    with Memory() as memory, torch.device("meta"):
        w = {name: torch.empty(shape, requires_grad=True)
             for name, shape in train.drafter_shapes(KIMI).items()}
        assert sum(p.numel() for p in w.values()) == pytest.approx(1.19e9, rel=0.005)
        lm_head = w.pop("lm_head.weight").detach().to(torch.bfloat16)
        d = SimpleNamespace(config=KIMI, w=w, lm_head=lm_head, device=torch.device("meta"), dtype=torch.bfloat16,
                            embed=torch.empty(163840, H, **half), head=torch.empty(V, H, **half),
                            norm=torch.empty(H, **half), eps=1e-5, vocab=torch.empty(V, **ids))
        adamw, muon = train.make_optimizers(w)
        for _ in range(2):  # the second adds to the gradients of the first
            row = {"token": torch.empty(R, **ids), "position": torch.empty(R, **ids), "flex": flash,
                   "chain": torch.empty(R, **ids), "next": torch.empty(R, K, **ids),
                   "g": torch.empty(R, 3 * H, **half), "y": torch.empty(R, H, **half)}
            train.loss_and_gradient(d, row, [1 / K] * K)
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        muon.step()
    said = int(re.search(r": (\d+) GB of a GPU", " ".join(train.__doc__.split()))[1])
    print(f"{memory.most / 1e9:.1f} GB at most, the docstring says {said}")
    assert abs(memory.most / 1e9 - said) < 1 and said < 80


def on_cuda(d, dtype):
    move = lambda value: value.cuda() if torch.is_tensor(value) else value
    moved = SimpleNamespace(**{name: move(value) for name, value in vars(d).items()})
    for name in ("embed", "head", "norm", "lm_head"):
        setattr(moved, name, getattr(moved, name).to(dtype))
    moved.device, moved.dtype = torch.device("cuda"), dtype
    moved.w = {name: p.detach().cuda().requires_grad_() for name, p in d.w.items()}
    return moved


@cuda
def test_cuda_equals_cpu(train, data):  # noqa: F811
    d, samples = tiny_drafter(train), read(train, data)[:8]
    sums = {}
    for side in (d, on_cuda(d, torch.bfloat16)):
        row = train.to_device(train.load_row(samples, 4), side)
        sums[side.device.type] = train.loss_and_gradient(side, row, [0.25] * 4).cpu()
        if side is d:
            want = {name: p.grad.clone() for name, p in d.w.items()}
    assert torch.allclose(sums["cuda"][0], sums["cpu"][0], rtol=2e-2)
    for name, grad in want.items():
        cosine = torch.nn.functional.cosine_similarity(side.w[name].grad.cpu().flatten(), grad.flatten(), 0)
        assert cosine > 0.99, (name, float(cosine))


@cuda
def test_speed_and_memory_at_kimis_shape(train):  # noqa: F811
    """One step of 8,192 tokens from a drafter as wide as Kimi-K2.5's: under 80 GB."""
    H, V, tokens, prompt = 7168, 32000, 2048, 256
    w = {name: torch.ones(shape, device="cuda") if len(shape) == 1 else
         torch.randn(shape, device="cuda") * shape[1] ** -0.5
         for name, shape in train.drafter_shapes(KIMI).items()}
    half = dict(device="cuda", dtype=torch.bfloat16)
    d = SimpleNamespace(
        config=KIMI, device=torch.device("cuda"), dtype=torch.bfloat16, eps=1e-5,
        vocab=torch.arange(V, device="cuda"),
        embed=torch.randn(163840, H, **half), head=torch.randn(V, H, **half) * 0.02, norm=torch.ones(H, **half),
        lm_head=w.pop("lm_head.weight").to(torch.bfloat16),
        w={name: p.requires_grad_() for name, p in w.items()})
    s = SimpleNamespace(TTT_STEPS=4, STEP_WEIGHT=1.0)
    tensors = {"token_ids": torch.randint(0, V, (tokens,), dtype=torch.int32),
               "g": (torch.randn(tokens - 1, 3, H) * 50).to(torch.float8_e4m3fn),
               "g_scale": torch.full((tokens - 1, 3), 0.02),
               "y": (torch.randn(tokens - 1 - prompt, H) * 50).to(torch.float8_e4m3fn),
               "y_scale": torch.full((tokens - 1 - prompt,), 0.02)}
    file = SimpleNamespace(keys=tensors.keys, get_slice=tensors.get)
    samples = [SimpleNamespace(file=file, name="", t=0, n=tokens, P=prompt, g=0, y=0)] * 4
    optimizers = train.make_optimizers(d.w)
    torch.cuda.reset_peak_memory_stats()
    for step in range(4):
        torch.cuda.synchronize()
        start = time.monotonic()
        loaded = [train.load_row(samples, 4)]
        assert train.train_step(d, optimizers, loaded, 1e-5, s, 1)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"{4 * tokens / seconds:,.0f} tokens/s, {peak:.1f} GB at H {H} on {torch.cuda.get_device_name()}")
    assert peak < 80
