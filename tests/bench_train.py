#!/usr/bin/env python3
"""Train the same drafter with 03_train.py's step and with the public `speculators` package, in turns.

    .venv/bin/python tests/bench_train.py demo-data/02_extract demo-data/target --seconds 300

Same samples, packed rows, geometry, draft vocabulary and TTT steps, both in bf16, in slices of 20
seconds, so that a busy machine slows both. speculators 0.9.0 brings its own model, loss and optimizer
(Muon at 1e-3, its CPU attention `eager`); it is installed with what it imports, and nothing else, into
.cache/speculators. Prints tokens/s of both, the ratio, and the held-out acceptance length of each.
"""
import argparse
import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

KIT = Path(__file__).resolve().parent.parent
PACKAGES = ["speculators==0.9.0", "hs-connectors==0.9.0", "datasets==4.0.0", "loguru==0.7.3",
            "multiprocess", "dill", "pandas"]


def ours(train, s, d):
    """(step, finished): our training step on a row; learning rate as a share of its peak."""
    optimizers = train.make_optimizers(d.w)

    def step(samples, share):
        rows = [train.load_row(samples, s.TTT_STEPS)]
        train.train_step(d, optimizers, rows, s.LEARNING_RATE * share, s, 1)
    return step, lambda: d


def theirs(train, s, d, directory):
    """The same with speculators: its model and loss under bf16 autocast, its optimizers."""
    import torch
    from speculators.losses.utils import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.optimizers import build_optimizers
    from transformers import AutoConfig
    verifier = AutoConfig.from_pretrained(directory)
    verifier.num_hidden_layers, verifier.tie_word_embeddings = 1, False
    t2d = torch.zeros(d.config["vocab_size"], dtype=torch.bool).index_fill(0, d.vocab, True)
    model = Eagle3DraftModel.from_training_args(
        verifier, t2d=t2d, d2t=d.vocab - torch.arange(len(d.vocab)), draft_vocab_size=len(d.vocab),
        norm_before_residual=False, ttt_steps=s.TTT_STEPS, verifier_name_or_path=str(directory),
        target_layer_ids=[2, 15, 27], draft_attn_impl="eager", num_layers=1)
    optimizers = build_optimizers(model, SimpleNamespace(
        optimizer="muon", lr=1e-3, weight_decay=0.01, muon_lr=1e-3, muon_momentum=0.95,
        muon_weight_decay=0.1, muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw"))
    loss_config = resolve_loss_config("kl_div", "eager")  # the fused one is for GPUs
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def step(samples, share):
        row = train.to_device(train.load_row(samples, s.TTT_STEPS), d)
        R = len(row["token"])
        y, mask = torch.zeros(R, row["y"].shape[1], dtype=d.dtype), torch.zeros(R)
        y[row["chain"]], mask[row["chain"]] = row["y"], 1.0
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = model(
                hidden_states=row["g"][None], input_ids=row["token"][None],
                document_ids=row["owner"][None], loss_mask=mask[None],
                position_ids=row["position"][None] + 1, verifier_last_hidden_states=y[None],
                ttt_steps=s.TTT_STEPS, ttt_step_loss_decay=1.0, loss_config=loss_config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rates in zip(optimizers, peaks):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()

    def finished():
        got = {name.replace("layers.0.", "midlayer."): p for name, p in model.state_dict().items()}
        theta = getattr(verifier, "rope_parameters", {}).get("rope_theta", 1e4)
        config = d.config | {"rope_theta": theta, "rms_norm_eps": verifier.rms_norm_eps}
        return SimpleNamespace(**vars(d) | {
            "w": {name: got[name].detach() for name in d.w}, "config": config,
            "lm_head": got["lm_head.weight"].detach().to(d.dtype)})
    return step, finished


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extract", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="of training, each")
    parser.add_argument("--slice", type=float, default=20)
    parser.add_argument("--ttt-steps", type=int, default=3)
    a = parser.parse_args()
    site = KIT / ".cache/speculators"
    if not (site / "speculators").exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site,
                        *PACKAGES], check=True)
    sys.path[:0] = [str(KIT)]
    sys.path.append(str(site))
    train = importlib.import_module("03_train")
    train.import_torch()
    import torch
    s = SimpleNamespace(**{name: value for name, value in vars(train).items() if name.isupper()} | {
        "TTT_STEPS": a.ttt_steps, "ROW_TOKENS": 1024, "LEARNING_RATE": 1e-2, "DRAFT_VOCAB": 4096})
    extract = json.loads((a.extract / "manifest.json").read_text())
    samples, heldout = (train.read_shards(a.extract, extract, split, s.ROW_TOKENS)
                        for split in ("train", "heldout"))
    d = train.make_drafter(s, None, extract["layer_ids"], a.target, samples, torch.device("cpu"), torch.bfloat16)
    sides = {}
    for name, (step, finished) in (("speculators", theirs(train, s, d, a.target)), ("03_train", ours(train, s, d))):
        sides[name] = SimpleNamespace(step=step, finished=finished, seconds=0.0, tokens=0, losses=[],
                                      plan=train.batches(samples, s, 1))
        step(next(train.batches(samples, s, 1))[0], 0.0)  # warm, nothing learnt
    while any(side.seconds < a.seconds for side in sides.values()):
        for side in sides.values():
            end = min(side.seconds + a.slice, a.seconds)
            while side.seconds < end:
                start, row = time.monotonic(), next(side.plan)[0]
                share = min(side.seconds / a.seconds / 0.02 + 0.05,
                            0.5 + 0.5 * math.cos(math.pi * side.seconds / a.seconds))
                side.step(row, share)
                side.seconds += time.monotonic() - start
                side.tokens += sum(one.n for one in row)
    speed, length = {}, {}
    for name, side in sides.items():
        speed[name] = side.tokens / side.seconds
        length[name] = train.evaluate(side.finished(), heldout, s)["acceptance_length"]
        print(f"{name:12} {speed[name]:7,.0f} tokens/s, acceptance length {length[name]:.3f} after "
              f"{side.seconds:.0f} s", flush=True)
    print(f"ratio {speed['03_train'] / speed['speculators']:.2f}, acceptance length "
          f"{length['03_train'] - length['speculators']:+.3f}")


if __name__ == "__main__":
    main()
