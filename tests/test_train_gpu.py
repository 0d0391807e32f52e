"""Stage 03 on a CUDA device: the same loss and gradients as on the CPU; speed and memory at Kimi's
shape. Skips itself where there is none. Run with -s to see the figures."""
import time
from types import SimpleNamespace

import pytest
import torch
from test_train import data, read, tiny_drafter, train  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_cuda(d, dtype):
    move = lambda value: value.cuda() if torch.is_tensor(value) else value
    moved = SimpleNamespace(**{name: move(value) for name, value in vars(d).items()})
    for name in ("embed", "head", "norm"):
        setattr(moved, name, getattr(moved, name).to(dtype))
    moved.device, moved.dtype = torch.device("cuda"), dtype
    moved.w = {name: p.detach().cuda().requires_grad_() for name, p in d.w.items()}
    return moved


def test_cuda_equals_cpu(train, data):  # noqa: F811
    d, samples = tiny_drafter(train), read(train, data)[:8]
    sums = {}
    for side in (d, on_cuda(d, torch.bfloat16)):
        row = train.to_device(train.load_row(samples, 4), side)
        sums[side.device.type] = train.loss_and_gradient(
            side, row, train.drafter_states(side, row, 4), [0.25] * 4).cpu()
        if side is d:
            want = {name: p.grad.clone() for name, p in d.w.items()}
    assert torch.allclose(sums["cuda"][0], sums["cpu"][0], rtol=2e-2)
    for name, p in side.w.items():
        cosine = torch.nn.functional.cosine_similarity(p.grad.cpu().flatten(), want[name].flatten(), 0)
        assert cosine > 0.99, (name, float(cosine))


def test_speed_and_memory_at_kimis_shape(train):  # noqa: F811
    """One step of 8,192 tokens from a drafter as wide as Kimi-K2.5's: under 80 GB."""
    H, V, tokens, prompt = 7168, 32000, 2048, 256
    config = {"hidden_size": H, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
              "intermediate_size": 18432, "vocab_size": 163840, "draft_vocab_size": V,
              "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    w = {name: torch.ones(shape, device="cuda") if len(shape) == 1 else
         torch.randn(shape, device="cuda") * shape[1] ** -0.5
         for name, shape in train.drafter_shapes(config).items()}
    half = dict(device="cuda", dtype=torch.bfloat16)
    d = SimpleNamespace(
        config=config, device=torch.device("cuda"), dtype=torch.bfloat16, eps=1e-5,
        vocab=torch.arange(V, device="cuda"),
        embed=torch.randn(163840, H, **half), head=torch.randn(V, H, **half) * 0.02, norm=torch.ones(H, **half),
        w={name: p.requires_grad_(name != "lm_head.weight") for name, p in w.items()})
    s = SimpleNamespace(TTT_STEPS=4, STEP_WEIGHT=1.0)
    tensors = {"token_ids": torch.randint(0, V, (tokens,), dtype=torch.int32),
               "g": (torch.randn(tokens - 1, 3, H) * 50).to(torch.float8_e4m3fn),
               "g_scale": torch.full((tokens - 1, 3), 0.02),
               "y": (torch.randn(tokens - 1 - prompt, H) * 50).to(torch.float8_e4m3fn),
               "y_scale": torch.full((tokens - 1 - prompt,), 0.02)}
    file = SimpleNamespace(keys=tensors.keys, get_slice=tensors.get)
    samples = [SimpleNamespace(file=file, name="", t=0, n=tokens, P=prompt, g=0, y=0)] * 4
    optimizers = train.make_optimizers(d.w, s)
    torch.cuda.reset_peak_memory_stats()
    for step in range(4):
        torch.cuda.synchronize()
        start = time.monotonic()
        loaded = [train.load_row(samples, 4)]
        assert train.train_step(d, optimizers, loaded, [4 * (tokens - 1 - prompt - k) for k in range(4)], 1e-5, s, 1)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"{4 * tokens / seconds:,.0f} tokens/s, {peak:.1f} GB at H {H} on {torch.cuda.get_device_name()}")
    assert peak < 80
