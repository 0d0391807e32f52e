#!/usr/bin/env python3
"""Run the target over every sample once and keep its hidden states, proven right before the start.

    ./02_extract.py               # all samples of 01b; run it again to continue, or to grow
    ./02_extract.py --part 1/4    # one of four boxes on one directory; at the end without --part

L tokens of a sample, T of a shard; H hidden size; P planes; V vocabulary; n layers. Layer ids are
vLLM's: id k is the residual stream before layer k, n the one after the last, before the final norm.
Reads   $DATA/01b_generate_synthetic (or SAMPLES_FROM)/{samples,heldout_samples}.jsonl
Writes  $DATA/02_extract/{train,heldout}-00000.safetensors, samples laid end to end:
  token_ids int32 [T]; sample_start int64 [samples+1]; prompt_len int32 [samples]
  g [Tg,3,H]: the auxiliary layers in ascending id, tokens 0 .. L-2 of each sample
  y [Ty,H]: layer n, tokens prompt_len .. L-2 of each sample
    bf16: bfloat16. fp8: float8_e4m3fn, g_scale float32 [Tg,3], y_scale float32 [Ty].
    int4: uint8 [..,H/2], value 2j in the low half of byte j, 2j+1 in the high, 0..15 for -8..7,
    scales float16 [..,H/32], one for 32 values. A value is stored * scale.
  metadata: ids (JSON list), format, store, layer_ids, last_layer, max_len, target, samples
  manifest.json: files (bytes, xxh3_64, samples, tokens, answer_tokens, split), counts, proof
vLLM's extract_hidden_states keeps the planes in its cache, its connector writes them to STAGING, a
tmpfs, off the engine's path; threads here check, quantise and remove them. So STAGING_GB and two
shards are the most in memory. MEASURED
"""
import argparse, atexit, fcntl, hashlib, json, os, re, sys, time
import random, shlex, shutil, signal
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

# ---- settings: edit here, or KIT_NAME in the environment, or --name -----------------------------
# data
DATA = "/data"  # directory of all stages
TARGET = "moonshotai/Kimi-K2.5"  # target: hub id or model directory
SAMPLES_FROM = "01b_generate_synthetic"  # stage to read [01b_generate_synthetic|01_generate]
PART = ""  # "1/4": the first of four disjoint parts; "": all there is, parts merged
# hidden states
LAYER_IDS = ""  # auxiliary layers "2,30,58"; "": the published drafter's, else 2, n // 2, n - 3
MAX_LEN = 8192  # tokens of a sample; longer ones are cut at the end, and counted [8..]
STORE = "auto"  # format on disk; auto: the widest that fits, decided once [auto|bf16|fp8|int4]
SHARD_GB = 2.0  # size of a shard in 1e9 bytes: what a kill can lose [0.0001..]
MIN_FREE_GB = 10.0  # 1e9 bytes to leave free; it stops in good order there [0..]
VERIFY_SEC = 1.0  # seconds for checksums of a result that is done (unfinished: all) [0..]
# engine
DEVICE = "auto"  # where vLLM must run [auto|cuda|cpu]
TENSOR_PARALLEL = 8  # GPUs that share each layer [1..]
PIPELINE_PARALLEL = 1  # groups of GPUs that share the layers [1..]
DATA_PARALLEL = 1  # copies of the target: one here; several engines each take a PART [1..1]
ENGINE_ARGS = "--language-model-only"  # further vLLM engine flags, as on its command line
TRUST_REMOTE_CODE = False  # run Python code that comes with the target
MAX_BATCHED_TOKENS = 8192  # tokens of an engine step [32..]
STAGING = "/dev/shm"  # tmpfs that the states pass through
STAGING_GB = 8.0  # its bound in 1e9 bytes; three engine steps keep the engine busy [0.001..]
# ---- end of settings ----------------------------------------------------------------------------
STAGE = "02_extract"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
PROBES, PROBE_TOKENS = 8, 256  # the proof: samples, and tokens of each
MAX_LOGPROB_GAP = 0.25  # nats, of any token
MAX_BATCH_GAP = 0.05  # median relative difference of a row, alone against in a batch

# ---- the engine
def __getattr__(name):
    """StagingConnector, where vLLM looks it up: its own connector, which then runs on a CPU too, in
    an engine that dies with its parent, so that a killed stage leaves nothing on the GPUs."""
    if name != "StagingConnector":
        raise AttributeError(name)
    import ctypes, torch
    base = import_module(CONNECTOR)
    class StagingConnector(base.ExampleHiddenStatesConnector):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        def _submit_async_write(self, pending):
            if torch.cuda.is_available() or not self._is_tp_rank_zero:
                return super()._submit_async_write(pending)
            slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size
                     + torch.arange(self._block_size)).flatten()
            states = base.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
            done = SimpleNamespace(query=lambda: True, synchronize=lambda: None)  # a CUDA event's
            self._req_copy_events[pending.req_id] = done
            try:
                self._write_tensors({"hidden_states": states, "token_ids": pending.token_ids},
                                    done, pending.filename, self._lock_fds.pop(pending.req_id))
            except Exception as error:  # as super does: the reader finds the file missing
                base.logger.error("hidden states not written: %r", error)
    globals()[name] = StagingConnector
    return StagingConnector

def start_engine(s, max_len, layers, staging):
    """vLLM's LLMEngine, extracting the planes `layers`, or only prefilling where there are none."""
    here = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.pathsep.join(here)}
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1200")
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine
    if s.DEVICE != "auto" and (s.DEVICE == "cuda") != torch.cuda.is_available():
        fail(f"DEVICE is {s.DEVICE}, but torch sees another; to fix: --device auto", 2)
    flags = ["--no-enable-prefix-caching", "--max-num-seqs", "256", *shlex.split(s.ENGINE_ARGS),
             "--model", s.TARGET, "--max-model-len", str(max_len + 1), "--skip-tokenizer-init",
             "--max-num-batched-tokens", str(s.MAX_BATCHED_TOKENS), "--disable-log-stats",
             "--tensor-parallel-size", str(s.TENSOR_PARALLEL),
             "--pipeline-parallel-size", str(s.PIPELINE_PARALLEL)]
    flags += ["--trust-remote-code"] * s.TRUST_REMOTE_CODE
    if layers:
        flags += ["--speculative-config", json.dumps({
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}})]
        flags += ["--kv-transfer-config", json.dumps({
            "kv_connector": "StagingConnector", "kv_connector_module_path": STAGE, "kv_role":
            "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(staging)}})]
    args, unknown = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(flags)
    if unknown:
        fail(f"ENGINE_ARGS: vLLM's engine has no {shlex.join(unknown)}; to fix: remove it", 2)
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    except (RuntimeError, ValueError, OSError) as error:
        fail(f"vLLM did not start: {error}; to fix: see above, ENGINE_ARGS, and TENSOR_PARALLEL"
             + "; or --trust-remote-code 1" * ("trust_remote_code" in str(error)))

def prefill(engine, samples, window_tokens, load, logprobs=None):
    """Yields (sample, load(sample, output)) in the order of `samples` (dicts), of which at most
    `window_tokens` tokens (or one sample) are between engine and caller; `load` runs in threads."""
    from vllm import SamplingParams
    params = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=logprobs)
    waiting, fed, loads, held_tokens = iter(samples), {}, {}, 0
    sample = next(waiting, None)
    with ThreadPoolExecutor(4) as pool:
        while sample or fed:
            while sample and (not fed or held_tokens + len(sample["token_ids"]) <= window_tokens):
                prompt = {"prompt_token_ids": sample["token_ids"].tolist()}
                engine.add_request(sample["id"], prompt, params)
                fed[sample["id"]] = sample
                held_tokens += len(sample["token_ids"])
                sample = next(waiting, None)
            if engine.has_unfinished_requests():
                for output in filter(lambda output: output.finished, engine.step()):
                    loads[output.request_id] = pool.submit(load, fed[output.request_id], output)
            while (first := next(iter(fed), None)) in loads and (
                    loads[first].done() or not engine.has_unfinished_requests()):
                yield fed[first], loads.pop(first).result()
                held_tokens -= len(fed.pop(first)["token_ids"])

def take_states(sample, output):
    """(states [L,P,H], what is wrong with them or "") of a finished request; its file is removed."""
    import torch
    base, want = import_module(CONNECTOR), sample["token_ids"].tolist()
    try:
        path = output.kv_transfer_params["hidden_states_path"]
        found = base.load_hidden_states(path)
        base.cleanup_hidden_states(path)
    except Exception as error:  # of many kinds: vLLM only logs what its writers raise
        return None, f"no states: {error!r}"
    states, (low, high) = found["hidden_states"], found["hidden_states"].aminmax(dim=-1)  # [L,P]
    if len(states) != len(want) or found["token_ids"].tolist() != want:
        return states, f"{len(states)} rows for {len(want)} tokens, or of other tokens"
    if not (low.isfinite() & high.isfinite()).all():
        return states, "values that are not finite"
    if (low == high).any() or len(set(want)) > 1 and (states == states[0]).all(2).all(0).any():
        return states, "a plane that is zero or constant"
    if any(torch.equal(states[:, p], states[:, p - 1]) for p in range(1, states.shape[1])):
        return states, "two planes that are equal"
    return states, ""

# ---- states to files
def quantise(states, store):
    """(values, scales or None) of states [..,H], as the module's docstring says."""
    import torch
    if store == "bf16":
        return states.to(torch.bfloat16), None
    values = states.float()
    if store == "fp8":
        scale = values.abs().amax(-1) / 448  # [..]; no row is zero
        return (values / scale[..., None]).to(torch.float8_e4m3fn), scale
    values = values.unflatten(-1, (-1, 32))  # [..,H/32,32]
    low, high = values.aminmax(dim=-1)
    scale = (torch.where(-low > high, low, high) / -8).clamp(-65504, 65504).half()
    codes = (values / torch.where(scale == 0, 1, scale.float())[..., None]).round().clamp(-8, 7)
    codes = (codes + 8).to(torch.uint8).flatten(-2)  # [..,H]
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale

def pack(sample, states, store):
    """The rows that a sample adds to each tensor of a shard, from its states [L,4,H]."""
    import torch
    rows = {"token_ids": torch.from_numpy(sample["token_ids"]),
            "prompt_len": torch.tensor([sample["prompt_len"]], dtype=torch.int32)}
    rows["g"], rows["g_scale"] = quantise(states[:-1, :3], store)
    rows["y"], rows["y_scale"] = quantise(states[sample["prompt_len"]:-1, 3], store)
    return {name: values for name, values in rows.items() if values is not None}

def sample_bytes(sample, store, hidden_size):
    """Bytes that a sample takes in a shard, its id included."""
    row = {"bf16": 2 * hidden_size, "fp8": hidden_size + 4, "int4": hidden_size * 9 // 16}[store]
    length = len(sample["token_ids"])
    rows = 3 * (length - 1) + length - 1 - sample["prompt_len"]
    return rows * row + 4 * length + 12 + len(sample["id"]) + 6

def write_shard(path, packed, metadata):
    """Write {id: rows} end to end as one safetensors file; returns what the manifest says of it."""
    import torch
    from safetensors.torch import save_file
    parts = list(packed.values())
    columns = {name: torch.cat([rows[name] for rows in parts]) for name in parts[0]}
    lengths = torch.tensor([0] + [len(rows["token_ids"]) for rows in parts])
    columns["sample_start"] = lengths.cumsum(0)
    metadata = metadata | {"ids": json.dumps(list(packed))}
    write_whole(path, lambda tmp: save_file(columns, tmp, metadata))
    return read_shard(path)[1]

def read_shard(path):
    """(metadata, what the manifest says) of a shard; (None, None) where it is damaged."""
    import xxhash
    from safetensors import SafetensorError, safe_open
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    try:
        with safe_open(path, "pt") as file:
            rows = {name: file.get_slice(name).get_shape()[0] for name in file.keys()}
            return file.metadata(), {
                "bytes": path.stat().st_size, "xxh3_64": digest.hexdigest(),
                "samples": rows["prompt_len"], "tokens": rows["token_ids"], "answer_tokens":
                rows["y"] + rows["prompt_len"], "split": re.search("train|heldout", path.name)[0]}
    except (SafetensorError, KeyError):
        return None, None

# ---- the plan
def choose_layers(given, drafter, num_layers):
    """Three auxiliary ids in ascending order: those given, else those of the published drafter's
    config.json where there is one (both key places), else the default."""
    ids = default = [2, num_layers // 2, num_layers - 3]
    if given:
        ids = [int(i) if i.strip().isdecimal() else -1 for i in given.split(",")]
    elif drafter.exists():
        config, key = json.loads(drafter.read_text()), "eagle_aux_hidden_state_layer_ids"
        ids = config.get(key) or (config.get("eagle_config") or {}).get(key) or default
    if not len(ids) == len({i for i in ids if 0 <= i < num_layers}) == 3:
        fail(f"LAYER_IDS are {ids} (want three different ones of 0 .. {num_layers - 1}); to fix: "
             f"--layer-ids {str(default)[1:-1].replace(' ', '')}")
    return sorted(ids)

def read_samples(directory, part, max_len, vocab_size):
    """({"heldout": samples, "train": samples}, counts) of a part. A sample: id, token_ids (int32,
    cut to max_len), prompt_len; skipped where fewer than two tokens of the answer are left."""
    import numpy
    index, parts = map(int, (part or "1/1").split("/"))
    splits, counts = {"heldout": [], "train": []}, {"skipped": 0, "cut": 0}
    for split, name in ("heldout", "heldout_samples.jsonl"), ("train", "samples.jsonl"):
        for number, line in enumerate(open(directory / name), 1):
            try:
                row = json.loads(line)
                id, prompt_len, token_ids = row["id"], row["prompt_len"], row["token_ids"]
                token_ids = numpy.array(token_ids, "int32")
                assert 0 <= token_ids.min() <= token_ids.max() < vocab_size and prompt_len > 0
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                fail(f"{directory / name}:{number} is no sample of this target ({error!r}); to "
                     f"fix: make {directory.name} again")
            if int(hashlib.sha256(id.encode()).hexdigest(), 16) % parts == index - 1:
                counts["cut"] += len(token_ids) > max_len
                token_ids = token_ids[:max_len]
                if len(token_ids) < prompt_len + 2:
                    counts["skipped"] += 1
                else:
                    splits[split] += [dict(id=id, token_ids=token_ids, prompt_len=prompt_len)]
    return splits, counts

def choose_store(given, samples, hidden_size, disk, min_free_gb):
    """The store given, or with "auto" the widest that fits the disk. Exits 1 where it does not."""
    free = shutil.disk_usage(disk).free
    room = min(free * 0.95, free - min_free_gb * 1e9)
    need = {store: sum(sample_bytes(sample, store, hidden_size) for sample in samples)
            for store in ("bf16", "fp8", "int4") if store != "int4" or hidden_size % 32 == 0}
    fitting = [store for store in need if need[store] <= room]
    choice = (fitting or list(need)[-1:])[0] if given == "auto" else given
    text = (f"store {choice}: {len(samples):,} samples need " + ", ".join(
            f"{size / 1e9:,.2f} GB in {store}" for store, size in need.items())
            + f"; {free / 1e9:,.2f} GB are free")
    if choice not in fitting:
        some = int(len(samples) * max(room, 0) / need.get(choice, 1e18))
        fail(f"{text}, of which 5 % and {min_free_gb:g} GB stay; to fix: make room, take {some:,} "
             "samples" + f", or put {disk} aside and set STORE={'/'.join(fitting)}" * bool(fitting))
    print(f"{STAGE}: {text}", flush=True)
    return choice

def take_stock(out, prefix, known, want):
    """({path: facts}, {(split, id)}) of the whole shards in `out`. One that differs from `known`,
    the manifest's, is removed; one that is not there (a kill came between) is taken up."""
    for path in out.glob(f".{prefix}*.tmp"):
        print(f"{STAGE}: removes {path.name}, left by a run that was killed")
        path.unlink()
    files, done = {}, set()
    paths = [path for path in sorted(out.glob("*.safetensors"))
             if path.name.startswith(prefix) or not path.name.startswith("part")]
    with ThreadPoolExecutor(8) as pool:
        for path, (metadata, facts) in zip(paths, pool.map(read_shard, paths)):
            if not facts or facts != known.get(path.name, facts):
                print(f"{STAGE}: {path.name} is damaged; its samples are made again", flush=True)
                path.unlink()
            elif differ := [key for key in want if metadata.get(key) != want[key]]:
                fail(f"{path} is of another run ({differ}); to fix: mv {path} {path}.aside")
            else:
                done |= {(facts["split"], id) for id in json.loads(metadata["ids"])}
                files |= {path: facts} if path.name.startswith(prefix) else {}
    return files, done

def make_plan(out, prefix, splits, done, shard_bytes, size_of):
    """[(path, samples)], a shard each, of the samples that are not done."""
    plan = []
    for split, samples in splits.items():
        names = (out / f"{prefix}{split}-{number:05}.safetensors" for number in range(10 ** 5))
        size = shard_bytes
        for sample in samples:
            if (split, sample["id"]) not in done:
                if size >= shard_bytes:
                    plan.append((next(path for path in names if not path.exists()), []))
                    size = 0
                plan[-1][1].append(sample)
                size += size_of(sample)
    return plan

def read_parts(out):
    """The manifests of the parts in `out`; exits 1 where one is missing or not done."""
    parts = {path.parent.name: json.loads(path.read_text())
             for path in sorted(out.glob("part*/manifest.json"))}
    numbers = {int(name.split("of")[1]) for name in parts}
    wanted = [f"part{i + 1}of{n}" for n in numbers for i in range(n)]
    if missing := [name for name in wanted if not parts.get(name, {}).get("done")]:
        fail(f"{', '.join(missing)} in {out} not done; to fix: run them with --part to the end")
    return parts

# ---- the proof
def read_norm_and_head(directory):
    """[weight of the final norm [H], weight of the head [V,H]] of a target, nested or not."""
    from safetensors import safe_open
    index, found = directory / "model.safetensors.index.json", []
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(directory / "model.safetensors", "pt") as file:
            where = dict.fromkeys(file.keys(), "model.safetensors")
    for wanted in r"norm\.weight", r"lm_head\.weight", r"embed_tokens\.weight":  # tied: the last
        for name in where:
            if len(found) < 2 and re.fullmatch(r"((language_model|model)\.)*" + wanted, name):
                with safe_open(directory / where[name], "pt") as file:
                    found.append(file.get_tensor(name))
    if len(found) < 2:
        fail(f"{directory} has no plain norm.weight and lm_head.weight; proof and training need it")
    return found

def prove(engine, samples, norm, head, eps, window_tokens):
    """(figures, what is wrong or "") of the proof: the last plane through norm and head against the
    engine's own logprobs; the same sample alone and in a batch; the planes' norms."""
    import torch
    load = lambda sample, output: (*take_states(sample, output), output.prompt_logprobs)
    cut = [sample | {"token_ids": sample["token_ids"][:PROBE_TOKENS]} for sample in samples]
    probes = [sample | {"id": f"probe-{sample['id']}"} for sample in cut[:PROBES]]
    alone = [got for _, got in prefill(engine, probes, 0, load, 0)]
    batch = [got for _, got in prefill(engine, probes + cut[PROBES:], window_tokens, load)]
    if faults := [fault for _, fault, _ in alone + batch if fault]:
        return {}, f"{faults[0]}: vLLM's extraction does not work for this target"
    logprob_gaps, batch_gaps, sizes = [], [], []
    for probe, (states, _, theirs), (again, _, _) in zip(probes, alone, batch):
        x = states[:-1, -1].float()
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(states.dtype)
        mine = ((x * norm.to(x.dtype)) @ head.to(x.dtype).T).float().log_softmax(-1)  # [L-1,V]
        logprob_gaps += [abs(mine[i, id].item() - theirs[i + 1][id].logprob)
                         for i, id in enumerate(probe["token_ids"][1:].tolist())]
        sizes.append(states.float().norm(dim=-1))  # [L,P]
        batch_gaps.append((states.float() - again.float()).norm(dim=-1) / sizes[-1])
    gap, batch_gap = max(logprob_gaps), torch.cat(batch_gaps).median(0).values.max().item()
    sizes = torch.cat(sizes).median(0).values.tolist()
    proof = {"tokens": len(logprob_gaps), "logprob_gap_max": gap, "logprob_gap_mean":
             sum(logprob_gaps) / len(logprob_gaps), "batch_gap_median": batch_gap,
             "batch_gap_max": torch.cat(batch_gaps).max().item(), "plane_norms": sizes}
    if not gap <= MAX_LOGPROB_GAP:
        return proof, (f"the last plane's logprobs are {gap:.3f} from the engine's (want "
                       f"{MAX_LOGPROB_GAP}): it is of another layer, or of other tokens")
    if not batch_gap <= MAX_BATCH_GAP:
        return proof, (f"states in a batch are {batch_gap:.3f} from the same alone (want "
                       f"{MAX_BATCH_GAP}): rows are swapped, or cached blocks used again")
    if not sizes[0] < sizes[-1] or any(a > 2 * b for a, b in zip(sizes, sizes[1:])):
        return proof, f"the planes' norms do not grow ({sizes}): a layer is missing or twice there"
    return proof, ""

# ---- the run
def extract(engine, plan, s, where, manifest, metadata, window_tokens):
    """Fill the shards of `plan`; manifest["files"] grows with each. Returns (the seconds spent
    waiting for the disk, why it stopped early or "")."""
    samples = [sample for _, batch in plan for sample in batch]
    bar = progress(sum(len(sample["token_ids"]) for sample in samples), "tokens")
    aside, writing, waits, why = manifest["put_aside"], {}, [], ""
    def load(sample, output):
        states, fault = take_states(sample, output)
        return fault, None if fault else pack(sample, states, metadata["store"])
    def settle():
        begin = time.time()
        for path in list(writing):
            manifest["files"][os.path.relpath(path, where)] = writing.pop(path).result()
            write_whole(where / "manifest.json", manifest)
        waits.append(time.time() - begin)
    stream = prefill(engine, samples, window_tokens, load)
    with ThreadPoolExecutor(1) as writer:
        for path, batch in plan:
            packed, size = {}, 0
            for sample, (fault, rows) in islice(stream, len(batch)):
                bar.update(len(sample["token_ids"]))
                if fault:
                    aside[sample["id"]] = fault
                else:
                    packed[sample["id"]] = rows
                    size += sum(values.nbytes for values in rows.values())
            settle()
            if packed:
                writing[path] = writer.submit(write_shard, path, packed, metadata)
            if len(aside) > 0.01 * len(samples):
                why = f"{len(aside)} of {len(samples)} samples have bad states: {aside}"
            elif shutil.disk_usage(where).free - 2 * size < s.MIN_FREE_GB * 1e9:
                why = f"less than MIN_FREE_GB = {s.MIN_FREE_GB:g} is about to be free in {where}"
            if why:
                break
        settle()
    bar.close()
    return sum(waits), why

def run_engine(s, directory, config, layers, plan, where, manifest, metadata):
    """Start the engine, prove its hidden states, extract `plan`; returns facts for run.json."""
    from safetensors import SafetensorError
    samples = [sample for _, batch in plan for sample in batch]
    staging = Path(s.STAGING) / f"{STAGE}-{hashlib.sha256(str(where.resolve()).encode()).hexdigest()[:8]}"
    shutil.rmtree(staging, ignore_errors=True)  # what a killed run left
    staging.mkdir(parents=True)
    atexit.register(shutil.rmtree, staging, ignore_errors=True)
    longest = max(len(sample["token_ids"]) for sample in samples)
    engine = start_engine(s, longest, layers, staging)
    row_bytes = len(layers) * config["hidden_size"] * engine.model_config.dtype.itemsize
    window_tokens = int(min(s.STAGING_GB * 1e9, 0.8 * shutil.disk_usage(staging).free) / row_bytes)
    if longest > window_tokens:
        fail(f"{staging} has room for {window_tokens:,} tokens, a sample has {longest:,}; to fix: "
             "--staging-gb, more room there (docker run --shm-size), or another --staging")
    norm, head = read_norm_and_head(directory)
    few = samples[:PROBES * 4]
    proof, why = prove(engine, few, norm, head, config.get("rms_norm_eps", 1e-6), window_tokens)
    print(f"{STAGE}: proof {json.dumps(proof)}", flush=True)
    if why:
        fail(f"the proof failed: {why}")
    manifest["proof"], begin = proof, time.time()
    try:
        waited_sec, why = extract(engine, plan, s, where, manifest, metadata, window_tokens)
    except (OSError, SafetensorError) as error:
        fail(f"cannot write {where}: {error}; to fix: make room, and run it again to continue")
    if why:
        fail(f"{why}; to fix: see there, and run it again to continue")
    return {"seconds": time.time() - begin, "waited_sec": waited_sec,
            "tokens": sum(len(sample["token_ids"]) for sample in samples)}

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
    s, begin = settings(), time.time()
    signal.signal(signal.SIGTERM, lambda *_: fail("stopped; to continue: run it again", 143))
    if s.PART and not re.fullmatch(r"[1-9]\d*/[1-9]\d*", s.PART):
        fail(f"PART is {s.PART!r}; to fix: write it as 1/4", 2)
    data, (directory, target) = Path(s.DATA), find_model(s.TARGET)
    out, source, part = data / STAGE, data / s.SAMPLES_FROM, "part" + s.PART.replace("/", "of")
    where, prefix = (out / part, part + "-") if s.PART else (out, "")
    earlier = read_manifest(source)
    if earlier["inputs"]["target"] != target:
        fail(f"{source} is of target {earlier['inputs']['target']}, TARGET is {target}; to fix: set "
             "TARGET to the one that made it")
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config") or config
    hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    layers = choose_layers(s.LAYER_IDS, data / "drafter/config.json", num_layers)
    max_len = min(s.MAX_LEN, config.get("max_position_embeddings", s.MAX_LEN + 1) - 1)
    read = lambda part: read_samples(source, part, max_len, config["vocab_size"])
    kept = [json.loads(path.read_text()) for path in [
        where / "manifest.json", out / "manifest.json", *out.glob("part*/manifest.json")]
        if path.exists()]
    store = s.STORE
    if kept:
        store = kept[0]["settings"]["STORE"] if store == "auto" else store
        for name, facts in random.sample(list(kept[0]["files"].items()), len(kept[0]["files"])):
            if time.time() < begin + s.VERIFY_SEC and (where / name).exists() and read_shard(where / name)[1] != facts:
                print(f"{STAGE}: {name} is damaged; its samples are made again", flush=True)
                (where / name).unlink()
    elif store == "auto":
        every = sum(read("")[0].values(), [])
        store = choose_store(store, every, hidden_size, data, s.MIN_FREE_GB)
    metadata = {"format": "1", "store": store, "layer_ids": ",".join(map(str, layers)), "last_layer":
                str(num_layers), "max_len": str(max_len), "target": target, "samples": earlier["id"]}
    counted = {key: earlier["counts"][key] for key in ("samples", "heldout_samples")}
    manifest = open_stage(where, settings={
        "STORE": store, "MAX_LEN": s.MAX_LEN, "LAYER_IDS": layers, "SAMPLES_FROM": s.SAMPLES_FROM},
        inputs={"target": target, s.SAMPLES_FROM: earlier["id"]}, size=counted)
    parts = {} if s.PART else read_parts(out)
    known = {Path(name).name: facts for each in [*parts.values(), manifest]
             for name, facts in each["files"].items()}
    files, done = take_stock(out, prefix, known, metadata)
    splits, counts = read(s.PART)
    plan = make_plan(out, prefix, splits, done, s.SHARD_GB * 1e9,
                     lambda sample: sample_bytes(sample, store, hidden_size))
    manifest |= {"files": {os.path.relpath(path, where): facts for path, facts in files.items()},
                 "put_aside": {}}
    if parts:
        manifest["proof"] = {name: each["proof"] for name, each in parts.items()}
    todo = [sample for _, batch in plan for sample in batch]
    print(f"{STAGE}: {len(todo):,} samples to do, {len(done):,} done", flush=True)
    facts = {}
    if todo:
        choose_store(store, todo, hidden_size, out, s.MIN_FREE_GB)
        facts = run_engine(s, directory, config, layers + [num_layers], plan, where, manifest, metadata)
    total = lambda key, *splits: sum(each[key] for each in manifest["files"].values() if each["split"] in splits)
    both, size = ("train", "heldout"), total("bytes", "train", "heldout")
    manifest |= {
        "hidden_size": hidden_size, "num_layers": num_layers, "layer_ids": layers, "last_layer":
        num_layers, "store": store, "counts": {
            "samples": total("samples", "train"), "heldout_samples": total("samples", "heldout"),
            "tokens": total("tokens", *both), "answer_tokens": total("answer_tokens", *both),
            **counts, "put_aside": len(manifest["put_aside"])},
        "bytes_per_token": size / max(1, total("tokens", *both)), "done": True}
    write_whole(where / "manifest.json", manifest)
    write_whole(where / "run.json", facts)
    seconds = time.time() - begin
    print(f"{STAGE}: wrote {len(todo):,} samples, {size / 1e9:,.2f} GB to {where} in "
          f"{seconds // 3600:.0f}h {seconds % 3600 / 60:.0f}m "
          f"({facts.get('tokens', 0) / facts.get('seconds', 1):,.0f} tokens/s)")

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("stopped; to continue: run it again", 130)
