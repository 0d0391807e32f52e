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
  y [Ty,H]: layer n, tokens prompt_len .. L-2 of each sample; a value is stored * scale
    bf16: bfloat16. fp8: float8_e4m3fn, g_scale float32 [Tg,3], y_scale float32 [Ty].
    int4: uint8 [..,H/2], value 2j in the low half of byte j, 2j+1 in the high, 0..15 for -8..7,
    scales float16 [..,H/32], one for 32 values.
  metadata: ids (a JSON list), format, store, layer_ids, last_layer, run (hash of the settings)
  manifest.json: files (bytes, xxh3_64, samples, tokens, answer_tokens, split), counts, proof
vLLM's connector passes the states through STAGING, a tmpfs, off the engine's path; threads here
check, quantise and remove them, so STAGING_GB and one shard are the most in memory. Measured on 2
cores (SmolLM2-135M): 2,381 tokens/s with it, 2,021 with plain prefill; tests/bench_extract.py.
Prints  02_extract: wrote 25,000 samples, 1,610.000 GB are in ..., in 2h 41m (9,870 tokens/s)
"""
import argparse, atexit, fcntl, hashlib, json, os, re, sys, time
import random, shlex, shutil, signal
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
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
# engine
DEVICE = "auto"  # where vLLM must run [auto|cuda|cpu]
TENSOR_PARALLEL = 8  # GPUs that share each layer [1..]
PIPELINE_PARALLEL = 1  # groups of GPUs that share the layers [1..]
DATA_PARALLEL = 1  # copies of the target: one here; several engines each take a PART [1..1]
ENGINE_ARGS = "--language-model-only"  # further vLLM engine flags, as on its command line
TRUST_REMOTE_CODE = False  # run Python code that comes with the target
MAX_BATCHED_TOKENS = 8192  # tokens of an engine step [32..]
STAGING = "/dev/shm"  # tmpfs that the states pass through
STAGING_GB = 8.0  # its bound in 1e9 bytes: what the engine does while a shard is written [0.001..]
# ---- end of settings ----------------------------------------------------------------------------
STAGE = "02_extract"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
PROBES, PROBE_TOKENS = 8, 256  # the proof: samples, and tokens of each
MAX_LOGPROB_GAP, MAX_MEAN_GAP = 0.5, 0.1  # nats: a token's, and their mean (bf16: 0.2, 0.03)
MAX_BATCH_GAP = 0.05  # median relative difference of a row, alone against in a batch

# ---- the engine
def __getattr__(name):
    """StagingConnector, where vLLM looks it up: its own connector, which then runs on a CPU too."""
    if name != "StagingConnector":
        raise AttributeError(name)
    import torch
    base = import_module(CONNECTOR)
    class StagingConnector(base.ExampleHiddenStatesConnector):
        def _submit_async_write(self, save):
            if torch.cuda.is_available() or not self._is_tp_rank_zero:
                return super()._submit_async_write(save)
            slots = (torch.tensor(save.block_ids)[:, None] * self._block_size
                     + torch.arange(self._block_size)).flatten()
            tensors = {"token_ids": save.token_ids, "hidden_states": base.extract_from_kv_cache(
                self._kv_cache, slots, len(save.token_ids))}
            done = SimpleNamespace(query=lambda: True, synchronize=lambda: None)  # a CUDA event's
            self._req_copy_events[save.req_id] = done
            self._executor.submit(self._write_tensors, tensors, done, save.filename,
                                  self._lock_fds.pop(save.req_id))
    return globals().setdefault(name, StagingConnector)

def die_with_parent():
    """For vLLM's processes: a stage that is killed with -9 leaves nothing on the GPUs."""
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

def start_engine(s, max_len, layers, staging):
    """vLLM's LLMEngine, extracting the planes `layers`, or only prefilling where there are none."""
    here = str(Path(__file__).resolve().parent) + os.pathsep + os.environ.get("PYTHONPATH", "")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": here}
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1200")
    os.register_at_fork(after_in_child=die_with_parent)
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine
    if s.DEVICE != "auto" and (s.DEVICE == "cuda") != torch.cuda.is_available():
        fail(f"DEVICE is {s.DEVICE}, but torch sees another; to fix: --device auto", 2)
    flags = shlex.split(
        f"--no-enable-prefix-caching --max-num-seqs 256 {s.ENGINE_ARGS} --skip-tokenizer-init "
        f"--max-model-len {max_len + 1} --max-num-batched-tokens {s.MAX_BATCHED_TOKENS} "
        f"--tensor-parallel-size {s.TENSOR_PARALLEL} --pipeline-parallel-size "
        f"{s.PIPELINE_PARALLEL} --disable-log-stats {'--trust-remote-code' * s.TRUST_REMOTE_CODE}")
    if layers:
        flags += ["--speculative-config", json.dumps({
            "method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}}),
            "--kv-transfer-config", json.dumps({
                "kv_connector": "StagingConnector", "kv_connector_module_path": STAGE, "kv_role":
                "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(staging)}})]
    args, unknown = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(
        [*flags, "--model", s.TARGET])
    if unknown:
        fail(f"ENGINE_ARGS: vLLM's engine has no {shlex.join(unknown)}; to fix: remove it", 2)
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    except (RuntimeError, ValueError, OSError) as error:
        fail(f"vLLM did not start ({error}); to fix: see its lines above, and set ENGINE_ARGS, "
             "TENSOR_PARALLEL, or TRUST_REMOTE_CODE where it asks for trust_remote_code")

def prefill(engine, samples, window_tokens, load, logprobs=None):
    """Yields (sample, load(sample, output)) in the order of `samples` (dicts), of which at most
    `window_tokens` tokens (or one sample) are between engine and caller; `load` runs in threads."""
    import torch
    from vllm import SamplingParams
    params = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=logprobs)
    waiting, fed, loads, held_tokens = deque(samples), {}, {}, 0
    threads = max(1, min(16, os.cpu_count() // 4))  # of one core each: the engine needs the others
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while waiting or fed:
            while waiting and (
                    not fed or held_tokens + len(waiting[0]["token_ids"]) <= window_tokens):
                sample = waiting.popleft()
                fed[sample["id"]] = sample
                held_tokens += len(sample["token_ids"])
                prompt = {"prompt_token_ids": sample["token_ids"].tolist()}
                engine.add_request(sample["id"], prompt, params)
            for output in engine.step() if engine.has_unfinished_requests() else []:
                if output.finished:
                    loads[output.request_id] = pool.submit(load, fed[output.request_id], output)
            while (first := next(iter(fed), None)) in loads and (
                    loads[first].done() or not engine.has_unfinished_requests()):
                yield fed[first], loads.pop(first).result()
                held_tokens -= len(fed.pop(first)["token_ids"])

def take_states(sample, output):
    """(states [L,P,H], what is wrong with them or "") of a finished request; frees the staging."""
    base, want = import_module(CONNECTOR), sample["token_ids"].tolist()
    try:
        path = output.kv_transfer_params["hidden_states_path"]
        found = base.load_hidden_states(path)
        base.cleanup_hidden_states(path)
    except Exception as error:  # of many kinds: vLLM only logs what its writers raise
        return None, f"no states: {error!r}"
    states = found["hidden_states"]
    low, high = states.aminmax(dim=-1)  # [L,P]
    rows_equal = (states == states[0]).all(2).all(0).any() and len(set(want)) > 1
    planes = states.unbind(1)
    faults = {f"{len(states)} rows for {len(want)} tokens": len(states) != len(want),
              "rows of other tokens": found["token_ids"].tolist() != want,
              "values that are not finite": not (low.isfinite() & high.isfinite()).all(),
              "a plane that is zero or constant": (low == high).any() or rows_equal,
              "two planes that are equal": any(map(lambda a, b: a.equal(b), planes, planes[1:]))}
    return states, next((fault for fault, bad in faults.items() if bad), "")

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
    return (4 * (length - 1) - sample["prompt_len"]) * row + 4 * length + 18 + len(sample["id"])

def write_shard(path, packed, metadata):
    """Write {id: rows of each tensor} as one safetensors file; what the manifest says of it."""
    import torch
    from safetensors.torch import save_file
    rows = list(packed.values())
    tensors = {name: torch.cat([each[name] for each in rows]) for name in rows[0]}
    lengths = torch.tensor([0] + [len(each["token_ids"]) for each in rows])
    tensors["sample_start"] = lengths.cumsum(0)
    metadata = metadata | {"ids": json.dumps(list(packed))}
    write_whole(path, lambda tmp: save_file(tensors, tmp, metadata) or tmp.chmod(0o644))
    return read_shard(path)[1]

def read_shard(path):
    """(metadata, what the manifest says) of a shard; ({}, {}) where it is damaged."""
    import xxhash
    from safetensors import SafetensorError, safe_open
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    try:
        with safe_open(path, "np") as file:
            rows = {name: file.get_slice(name).get_shape()[0] for name in file.keys()}
            return file.metadata(), {
                "bytes": path.stat().st_size, "xxh3_64": digest.hexdigest(), "samples":
                rows["prompt_len"], "tokens": rows["token_ids"], "answer_tokens": rows["y"] +
                rows["prompt_len"], "split": re.search("train|heldout", path.name)[0]}
    except (SafetensorError, KeyError):
        return {}, {}

# ---- the plan
def choose_layers(given, drafter, num_layers):
    """Three auxiliary ids in ascending order: those given, else those of the published drafter's
    config.json where there is one (both key places), else the default."""
    ids, key = [2, num_layers // 2, num_layers - 3], "eagle_aux_hidden_state_layer_ids"
    if given:
        ids = [int(i) if i.strip().isdecimal() else -1 for i in given.split(",")]
    elif drafter.exists():
        config = json.loads(drafter.read_text())
        ids = config.get(key) or (config.get("eagle_config") or {}).get(key) or ids
    if not len(ids) == len({i for i in ids if 0 <= i < num_layers}) == 3:
        fail(f"LAYER_IDS are {ids}; to fix: --layer-ids 2,{num_layers // 2},{num_layers - 3}, or "
             f"three others of 0 .. {num_layers - 1}")
    return sorted(ids)

def read_samples(directory, part, max_len, vocab_size):
    """(samples, counts) of a part, held-out ones first. A sample: id, split, prompt_len, token_ids
    (int32, cut to max_len); skipped where fewer than two tokens of the answer are left."""
    import numpy
    index, parts = map(int, (part or "1/1").split("/"))
    samples, num_cut = [], 0
    for split, name in ("heldout", "heldout_samples.jsonl"), ("train", "samples.jsonl"):
        for number, line in enumerate(open(directory / name), 1):
            try:
                row = json.loads(line)
                id, prompt_len = row["id"], int(row["prompt_len"])
                token_ids = numpy.array(row["token_ids"], "int32")
                assert 0 <= token_ids.min() <= token_ids.max() < vocab_size and prompt_len > 0
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                fail(f"{directory / name}:{number} is no sample of this target ({error!r}); to "
                     f"fix: make {directory.name} again")
            if int(hashlib.sha256(id.encode()).hexdigest(), 16) % parts == index - 1:
                num_cut += len(token_ids) > max_len
                samples.append({"id": id, "split": split, "prompt_len": prompt_len,
                                "token_ids": token_ids[:max_len]})
    whole = [sample for sample in samples if len(sample["token_ids"]) >= sample["prompt_len"] + 2]
    return whole, {"cut": num_cut, "skipped": len(samples) - len(whole)}

def choose_store(given, samples, hidden_size, disk, min_free_gb):
    """The store given, or with "auto" the widest that fits the disk. Exits 1 where it does not."""
    free = shutil.disk_usage(disk).free / 1e9
    room = min(free * 0.95, free - min_free_gb)
    need = {store: sum(sample_bytes(sample, store, hidden_size) for sample in samples) / 1e9
            for store in ("bf16", "fp8", "int4") if store != "int4" or hidden_size % 32 == 0}
    fitting = [store for store in need if need[store] <= room]
    choice = given if given != "auto" else next(iter(fitting), "int4")
    text = f"store {choice}; {len(samples):,} samples need " + ", ".join(
        f"{size:,.3f} GB in {store}" for store, size in need.items()) + f"; {free:,.3f} GB are free"
    if choice not in fitting:
        some = int(len(samples) * max(room, 0) / need.get(choice, 1e18))
        fail(f"{text}, and 5 % and MIN_FREE_GB must stay so; to fix: make room, or take {some:,} "
             f"samples" + f", or set {disk} aside and STORE={'/'.join(fitting)}" * bool(fitting))
    print(f"{STAGE}: {text}", flush=True)
    return choice

def keep_shard(path, facts, known):
    """Whether a shard is whole, and as the manifests (known) say; else it is removed."""
    if not (good := facts and facts == known.get(path.name, facts)):
        print(f"{STAGE}: removes {path.name}, damaged; its samples are made again", flush=True)
        path.unlink()
    return good

def check_some(out, known, until):
    """Check shards in random order until that time: what a done result gets, of all its bytes."""
    for path in random.sample([out / name for name in sorted(known)], len(known)):
        if time.time() < until and path.exists():
            keep_shard(path, read_shard(path)[1], known)

def take_stock(out, prefix, known, run_id):
    """({path: facts}, {(split, id)}) of the whole shards in `out`. One that differs from `known`,
    the manifests', is removed; one that is not there (a kill came between) is taken up."""
    for path in out.glob(f".{prefix}*.tmp"):
        print(f"{STAGE}: removes {path.name}, left by a run that was killed")
        path.unlink()
    files, done = {}, set()
    paths = [path for path in sorted(out.glob("*.safetensors"))
             if path.name.startswith(prefix) or not path.name.startswith("part")]
    with ThreadPoolExecutor(8) as pool:
        for path, (metadata, facts) in zip(paths, pool.map(read_shard, paths)):
            if keep_shard(path, facts, known):
                if metadata.get("run") != run_id:
                    fail(f"{path} is of another run; to fix: mv {path} {path}.aside")
                done |= {(facts["split"], id) for id in json.loads(metadata["ids"])}
                files |= {path: facts} if path.name.startswith(prefix) else {}
    return files, done

def make_plan(out, prefix, samples, shard_bytes, size_of):
    """[(path, samples)], a shard each, named by the lowest free numbers."""
    plan, size, numbers = [], 0, {"heldout": iter(range(10**5)), "train": iter(range(10**5))}
    for sample in samples:
        split = sample["split"]
        if not plan or size >= shard_bytes or plan[-1][1][0]["split"] != split:
            paths = (out / f"{prefix}{split}-{i:05}.safetensors" for i in numbers[split])
            plan.append((next(path for path in paths if not path.exists()), []))
            size = 0
        plan[-1][1].append(sample)
        size += size_of(sample)
    return plan

# ---- the proof
def read_norm_and_head(directory):
    """Weights of the final norm [H] and of the head [V,H] of a target, by name, nested or not."""
    from safetensors import safe_open
    where, pattern = {}, r"(?:(?:language_model|model)\.)*(norm|lm_head|embed_tokens)\.weight"
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found = [re.fullmatch(pattern, name) for name in file.keys()]
        where |= {match[1]: (path, match[0]) for match in found if match}
    if "norm" not in where or len(where) < 2:
        fail(f"{directory} has no plain norm.weight and lm_head.weight; proof and training need it")
    for path, name in where["norm"], where.get("lm_head") or where["embed_tokens"]:
        with safe_open(path, "pt") as file:
            yield file.get_tensor(name).float()

def prove(engine, samples, norm, head, eps, window_tokens):
    """(figures, what is wrong or "") of the proof: the last plane through norm and head against the
    engine's own logprobs; the same sample alone and in a batch; the planes' norms."""
    import torch
    load = lambda sample, output: (*take_states(sample, output), output.prompt_logprobs)
    cut = [sample | {"token_ids": sample["token_ids"][:PROBE_TOKENS]} for sample in samples]
    probes = [sample | {"id": f"probe-{sample['id']}"} for sample in cut[:PROBES]]
    alone = [got for _, got in prefill(engine, probes, 0, load, 0)]
    engine.reset_prefix_cache()
    batch = [got for _, got in prefill(engine, probes + cut[PROBES:], window_tokens, load)]
    if faults := [fault for _, fault, _ in alone + batch if fault]:
        return {}, f"{faults[0]}: vLLM's extraction does not work for this target"
    gaps, batch_gaps, sizes = [], [], []
    for probe, (states, _, theirs), (again, _, _) in zip(probes, alone, batch):
        states, again = states.float(), again.float()
        x = states[:-1, -1]  # [L-1,H]
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
        mine = (x @ head.T).log_softmax(-1)  # [L-1,V]
        gaps += [abs(mine[i, id].item() - theirs[i + 1][id].logprob)
                 for i, id in enumerate(probe["token_ids"][1:].tolist())]
        sizes.append(states.norm(dim=-1))  # [L,P]
        batch_gaps.append((states - again).norm(dim=-1) / sizes[-1])
    gap, mean_gap = max(gaps), sum(gaps) / len(gaps)
    sizes = torch.cat(sizes).median(0).values.tolist()
    batch_gap = torch.cat(batch_gaps).median(0).values.max().item()
    fault = ""
    if not (gap <= MAX_LOGPROB_GAP and mean_gap <= MAX_MEAN_GAP):
        fault = "the last plane's logprobs are not the engine's: another layer, or other tokens"
    elif not batch_gap <= MAX_BATCH_GAP:
        fault = "states in a batch are not those alone: rows swapped, or cached blocks used again"
    elif not sizes[0] < sizes[-1] or any(a > 2 * b for a, b in zip(sizes, sizes[1:])):
        fault = "the planes' norms do not grow: a layer is missing, or there twice"
    return {"tokens": len(gaps), "logprob_gap_max": gap, "logprob_gap_mean": mean_gap,
            "batch_gap_median": batch_gap, "plane_norms": sizes}, fault

# ---- the run
def extract(engine, plan, s, where, manifest, metadata, window_tokens):
    """Fill the shards of `plan`; manifest["files"] grows with each. Returns (facts for run.json,
    why it stopped early or "")."""
    from safetensors import SafetensorError
    lengths = [len(sample["token_ids"]) for _, batch in plan for sample in batch]
    run, begin = {"tokens": sum(lengths), "seconds": 0.0, "writing_sec": 0.0}, time.time()
    bar, aside = progress(sum(lengths), "tokens"), manifest["put_aside"]
    def load(sample, output):
        states, fault = take_states(sample, output)
        return fault, {} if fault else pack(sample, states, metadata["store"])
    stream = prefill(engine, [sample for _, batch in plan for sample in batch], window_tokens, load)
    for path, batch in plan:
        packed = {}
        for sample, (fault, rows) in (next(stream) for _ in batch):
            bar.update(len(sample["token_ids"]))
            (aside if fault else packed)[sample["id"]] = fault or rows
        writing = time.time()
        try:
            if packed:
                facts = write_shard(path, packed, metadata)
                manifest["files"][os.path.relpath(path, where)] = facts
            write_whole(where / "manifest.json", manifest)
        except (OSError, SafetensorError) as error:
            return run, f"cannot write {path} ({error})"
        run["writing_sec"] += time.time() - writing
        run["seconds"] = time.time() - begin
        if len(aside) > 0.01 * len(lengths):
            return run, f"{len(aside)} of {len(lengths)} samples have bad states: {aside}"[:500]
        free_gb = shutil.disk_usage(where).free / 1e9
        if path != plan[-1][0] and free_gb < s.MIN_FREE_GB + s.SHARD_GB:
            return run, f"MIN_FREE_GB = {s.MIN_FREE_GB:g} comes near: {free_gb:.2f} GB are free"
    bar.close()
    return run, ""

def run_engine(s, directory, config, layers, plan, where, manifest, metadata):
    """Start the engine, prove its states, extract `plan`; returns the facts for run.json."""
    samples, begin = [sample for _, batch in plan for sample in batch], time.time()
    own = hashlib.sha256(str(where.resolve()).encode()).hexdigest()[:8]
    staging = Path(s.STAGING) / f"{STAGE}-{own}"
    shutil.rmtree(staging, ignore_errors=True)  # what a killed run left
    staging.mkdir(parents=True)
    atexit.register(shutil.rmtree, staging, ignore_errors=True)
    longest = max(len(sample["token_ids"]) for sample in samples)
    from vllm.v1.engine.exceptions import EngineDeadError
    engine = start_engine(s, longest, layers, staging)
    room = min(s.STAGING_GB * 1e9, shutil.disk_usage(staging).free * 0.8)
    window_tokens = int(room / (len(layers) * config["hidden_size"]
                                * engine.model_config.dtype.itemsize))
    if longest > window_tokens:
        fail(f"{staging} takes {window_tokens:,} tokens, a sample has {longest:,}; to fix: "
             "--staging-gb, more room there (docker run --shm-size), or another --staging")
    try:
        manifest["proof"], why = prove(
            engine, samples[:PROBES * 4], *read_norm_and_head(directory),
            config.get("rms_norm_eps", 1e-6), window_tokens)
        ready = f"{STAGE}: ready in {time.time() - begin:.0f} s, {json.dumps(manifest['proof'])}"
        print(ready, flush=True)
        if why:
            fail(f"the proof failed, nothing was extracted: {why}")
        run, why = extract(engine, plan, s, where, manifest, metadata, window_tokens)
    except EngineDeadError as error:
        fail(f"vLLM's engine died ({error}); to fix: see its lines above, and run it again")
    if why:
        fail(f"{why}; what is written stays; to fix: see to that, and run it again to continue")
    return run

def finish(where, manifest, counts, run, num_samples):
    """Write run.json and the manifest of all that is there, as done; returns the bytes."""
    def total(key, split=""):
        return sum(each[key] for each in manifest["files"].values() if split in each["split"])
    counts |= {"samples": total("samples", "train"), "heldout_samples": total("samples", "heldout"),
               "tokens": total("tokens"), "answer_tokens": total("answer_tokens"),
               "put_aside": len(manifest["put_aside"])}
    assert total("samples") + counts["put_aside"] == num_samples, (counts, num_samples)
    write_whole(where / "run.json", run | {"host": os.uname().nodename, "ended": time.ctime()})
    manifest["bytes_per_token"] = total("bytes") / max(1, total("tokens"))
    write_whole(where / "manifest.json", manifest | {"counts": counts, "done": True})
    return total("bytes")

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
    for number, status in (signal.SIGINT, 130), (signal.SIGTERM, 143):
        signal.signal(number, lambda *_, status=status: fail("stopped; run it to continue", status))
    if s.PART and not re.fullmatch(r"[1-9]\d*/[1-9]\d*", s.PART):
        fail(f"PART is {s.PART!r}; to fix: write it as 1/4", 2)
    (directory, target), part = find_model(s.TARGET), "part" + s.PART.replace("/", "of")
    out, source = Path(s.DATA) / STAGE, Path(s.DATA) / s.SAMPLES_FROM
    where, prefix = (out / part, part + "-") if s.PART else (out, "")
    earlier = read_manifest(source)
    if earlier["inputs"]["target"] != target:
        fail(f"{source} is of target {earlier['inputs']['target']}, TARGET is {target}; to fix: "
             "set TARGET to the one that made it")
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config") or config
    hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    layers = choose_layers(s.LAYER_IDS, Path(s.DATA) / "drafter/config.json", num_layers)
    max_len = min(s.MAX_LEN, config.get("max_position_embeddings", s.MAX_LEN + 1) - 1)
    read = lambda part: read_samples(source, part, max_len, config["vocab_size"])
    homes = [where, out, *sorted(out.glob("part*of*/"))]
    kept = {home: json.loads((home / "manifest.json").read_text()) for home in homes
            if (home / "manifest.json").exists()}
    known = {Path(name).name: facts for each in kept.values()
             for name, facts in each["files"].items()}
    check_some(out, known, begin + 1)
    store = s.STORE
    if store == "auto":
        store = (next(iter(kept.values()))["settings"]["STORE"] if kept else
                 choose_store(store, read("")[0], hidden_size, s.DATA, s.MIN_FREE_GB))
    facts = {"settings": {"STORE": store, "MAX_LEN": max_len, "LAYER_IDS": layers,
                          "SAMPLES_FROM": s.SAMPLES_FROM},
             "inputs": {"target": target, s.SAMPLES_FROM: earlier["id"]}}
    manifest = open_stage(where, **facts, size={
        key: earlier["counts"][key] for key in ("samples", "heldout_samples")})
    if unfinished := [home for home in kept if not (s.PART or home == out or kept[home]["done"])]:
        fail(f"{unfinished[0]} is not done; to fix: run that part to its end first")
    run_id = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    metadata = {"format": "1", "store": store, "layer_ids": ",".join(map(str, layers)),
                "last_layer": str(num_layers), "run": run_id}
    files, done = take_stock(out, prefix, known, run_id)
    samples, counts = read(s.PART)
    todo = [sample for sample in samples if (sample["split"], sample["id"]) not in done]
    print(f"{STAGE}: {len(todo):,} samples to do, {len(samples) - len(todo):,} done", flush=True)
    manifest |= {
        "files": {os.path.relpath(path, where): files[path] for path in files}, "put_aside": {},
        "proof": manifest.get("proof") or [each.get("proof") for each in kept.values()],
        "store": store, "hidden_size": hidden_size, "num_layers": num_layers,
        "layer_ids": layers, "last_layer": num_layers}
    run = {"tokens": 0, "seconds": 1}
    if todo:
        choose_store(store, todo, hidden_size, out, s.MIN_FREE_GB)
        plan = make_plan(out, prefix, todo, s.SHARD_GB * 1e9,
                         lambda sample: sample_bytes(sample, store, hidden_size))
        planes = layers + [num_layers]
        run = run_engine(s, directory, config, planes, plan, where, manifest, metadata)
    size = finish(where, manifest, counts, run, len(samples))
    minutes, rate = divmod(int(time.time() - begin) // 60, 60), run["tokens"] / run["seconds"]
    print(f"{STAGE}: wrote {len(todo):,} samples, {size / 1e9:,.3f} GB are in {where}, in "
          f"{minutes[0]}h {minutes[1]}m ({rate:,.0f} tokens/s)")

if __name__ == "__mp_main__":  # a process that vLLM spawned instead of forking it
    die_with_parent()
if __name__ == "__main__":
    main()
