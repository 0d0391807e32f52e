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
vLLM's connector passes the states through a tmpfs, threads quantise them: STAGING_GB and a few
shards in memory; 1,410 tokens/s in the demo on 2 cores (prefill alone: bench_extract.py). Prints
  02_extract: wrote 25,000 samples, 1,610.000 GB are in ..., in 2h 41m (9,870 tokens/s)
"""
import argparse, array, atexit, contextlib, ctypes, fcntl, fractions, hashlib, json, os, random, re
import shlex, shutil, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

# ---- settings: edit here, or KIT_NAME in the environment, or --name -----------------------------
DATA = "/data"  # directory of all stages
TARGET = "moonshotai/Kimi-K2.5"  # target: hub id or model directory
SAMPLES_FROM = "01b_generate_synthetic"  # stage to read [01b_generate_synthetic|01_generate]
PART = ""  # "1/4": the first of four disjoint parts; "": all there is, parts merged
LAYER_IDS = ""  # auxiliary layers "2,30,58"; "": the published drafter's, else 2, n // 2, n - 3
MAX_LEN = 8192  # tokens of a sample; longer ones are cut at the end, and counted [8..]
STORE = "auto"  # format on disk; auto: the widest that fits, decided once [auto|bf16|fp8|int4]
SHARD_GB = 2.0  # size of a shard in 1e9 bytes: what a kill can lose [0.0001..]
MIN_FREE_GB = 10.0  # 1e9 bytes to leave free; it stops in good order there [0..]
TENSOR_PARALLEL = 8  # GPUs that share each layer [1..]
PIPELINE_PARALLEL = 1  # groups of GPUs that share the layers [1..]
ENGINE_ARGS = "--language-model-only"  # further vLLM engine flags, as on its command line
TRUST_REMOTE_CODE = False  # run Python code that comes with the target
MAX_BATCHED_TOKENS = 8192  # tokens of an engine step [32..]
STAGING_GB = 8.0  # 1e9 bytes of /dev/shm: what the engine does while a shard is written [0.001..]
# ---- end of settings ----------------------------------------------------------------------------
STAGE = "02_extract"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
PROBES, PROBE_TOKENS = 8, 300  # samples of the proof, tokens of each; engine steps cut some
PROOF = {  # bounds of its figures: nats (bf16 has 0.2), relative, times; what is wrong beyond
    "logprob_gap_max": (0.5, "logprobs are not the engine's: another layer, or other tokens"),
    "batch_gap_median": (0.05, "states in a batch are not those alone: rows or blocks mixed up"),
    "norm_fall_max": (2, "norms of the planes do not grow: a layer is missing, or there twice")}
die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

def __getattr__(name):
    """StagingConnector, where vLLM looks it up: its own connector, which then runs on a CPU too."""
    if name != "StagingConnector":
        raise AttributeError(name)
    import torch
    class StagingConnector(import_module(CONNECTOR).ExampleHiddenStatesConnector):
        def _submit_async_write(self, save):
            if torch.cuda.is_available() or not self._is_tp_rank_zero:
                return super()._submit_async_write(save)
            rows = torch.cat([*self._kv_cache[save.block_ids].transpose(1, 2)])  # [tokens,P,H]
            tensors = {"token_ids": save.token_ids, "hidden_states": rows[:len(save.token_ids)]}
            done = argparse.Namespace(query=lambda: True, synchronize=lambda: None)  # as an event
            self._req_copy_events[save.req_id], lock = done, self._lock_fds.pop(save.req_id)
            self._executor.submit(self._write_tensors, tensors, done, save.filename, lock)
    return globals().setdefault(name, StagingConnector)

def start_engine(s, max_len, layers, staging):
    """vLLM's LLMEngine, extracting the planes `layers`, or only prefilling where there are none."""
    from vllm import EngineArgs, LLMEngine
    from vllm.engine.arg_utils import FlexibleArgumentParser, KVTransferConfig
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.getenv('PYTHONPATH', '')}"
    os.register_at_fork(after_in_child=die_with_parent)  # kill -9 leaves nothing on the GPUs
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(f"{STAGE}: ENGINE_ARGS", "see vLLM's"))
    args = parser.parse_args(shlex.split("--max-num-seqs 256 " + s.ENGINE_ARGS))
    vars(args).update(model=s.TARGET, skip_tokenizer_init=True, enable_prefix_caching=False,
                      max_model_len=max_len + 1, max_num_batched_tokens=s.MAX_BATCHED_TOKENS,
                      trust_remote_code=s.TRUST_REMOTE_CODE, tensor_parallel_size=s.TENSOR_PARALLEL,
                      pipeline_parallel_size=s.PIPELINE_PARALLEL)
    if layers:
        args.speculative_config = {
            "method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}}
        args.kv_transfer_config = KVTransferConfig(
            kv_connector="StagingConnector", kv_connector_module_path=STAGE,
            kv_role="kv_producer", kv_connector_extra_config={"shared_storage_path": staging})
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    except (RuntimeError, ValueError, OSError) as error:
        fail(f"vLLM: {error}; to fix: see above, ENGINE_ARGS, TENSOR_PARALLEL, TRUST_REMOTE_CODE")

def prefill(engine, samples, window_tokens, load, logprobs=None):
    """Yields (sample, load(sample, output)) in order; `window_tokens` at most are under way."""
    import torch, vllm
    params = vllm.SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=logprobs)
    fed, loads, held_tokens = {}, {}, 0
    threads = max(1, min(16, os.cpu_count() // 4))  # of one core each: the engine needs the others
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for sample in [*samples, None]:  # at the end there is no more to feed
            ids = sample["token_ids"].tolist() if sample else []
            while fed and (not sample or held_tokens + len(ids) > window_tokens):
                if (first := next(iter(fed))) in loads:
                    yield fed[first], loads.pop(first).result()
                    held_tokens -= len(fed.pop(first)["token_ids"])
                    continue
                loads |= {output.request_id: pool.submit(load, fed[output.request_id], output)
                          for output in engine.step() if output.finished}
            if sample:
                fed[sample["id"]], held_tokens = sample, held_tokens + len(ids)
                engine.add_request(sample["id"], {"prompt_token_ids": ids}, params)

def take_states(sample, output):
    """(states [L,P,H], what is wrong with them or "") of a finished request; frees the staging."""
    base, want = import_module(CONNECTOR), sample["token_ids"].tolist()
    try:
        found = base.load_hidden_states(path := output.kv_transfer_params["hidden_states_path"])
        base.cleanup_hidden_states(path)
    except Exception as error:  # of many kinds: vLLM only logs what its writers raise
        return None, f"no states: {error!r}"
    states = found["hidden_states"]
    (low, high), planes = states.aminmax(dim=-1), states.unbind(1)  # [L,P]
    same = (states == states[0]).all(2).all(0).any() and len(set(want)) > 1
    faults = {f"{len(states)} rows for {len(want)} tokens, or of others":
              len(states) != len(want) or found["token_ids"].tolist() != want,
              "values that are not finite": not (low.isfinite() & high.isfinite()).all(),
              "a plane that is zero or constant": (low == high).any() or same,
              "two planes that are equal": any(a.equal(b) for a, b in zip(planes, planes[1:]))}
    return states, next((fault for fault, bad in faults.items() if bad), "")

def quantise(states, store):
    """(values, scales or None) of states [..,H], as the module's docstring says."""
    import torch
    if store == "bf16":
        return states.bfloat16(), None
    if store == "fp8":
        scale = states.abs().amax(-1).float() / 448  # [..]; no row is zero
        return (states / scale[..., None]).to(torch.float8_e4m3fn), scale
    values = states.float().unflatten(-1, (-1, 32))  # [..,H/32,32]
    low, high = values.aminmax(dim=-1)
    scale = (low.where(-low > high, high) / -8).clamp(-65504, 65504).half()
    codes = (values / scale.float().where(scale != 0, 1)[..., None]).round().clamp(-8, 7)
    codes = (codes + 8).byte().flatten(-2)  # [..,H]
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale

def pack(sample, states, store):
    """The rows that a sample adds to each tensor of a shard, from its states [L,4,H]."""
    import torch
    rows = {"token_ids": torch.tensor(sample["token_ids"], dtype=torch.int32),
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
    import safetensors.torch, torch
    rows, metadata = list(packed.values()), metadata | {"ids": json.dumps(list(packed))}
    tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    tensors["sample_start"] = torch.tensor([0, *(len(row["token_ids"]) for row in rows)]).cumsum(0)
    write_whole(path, lambda tmp: tmp.write_bytes(safetensors.torch.save(tensors, metadata)))
    return read_shard(path)[1]

def read_shard(path, known={}):
    """(metadata, facts) of a shard; one that is damaged or not as `known` is removed: ({}, {})."""
    import xxhash
    from safetensors import SafetensorError, safe_open
    with contextlib.suppress(SafetensorError, KeyError), safe_open(path, "np") as file:
        rows = {name: file.get_slice(name).get_shape()[0] for name in file.keys()}
        facts = {"bytes": path.stat().st_size, "samples": rows["prompt_len"],
                 "xxh3_64": hashlib.file_digest(path.open("rb"), xxhash.xxh3_64).hexdigest(),
                 "tokens": rows["token_ids"], "answer_tokens": rows["y"] + rows["prompt_len"],
                 "split": re.search("train|heldout", path.name)[0]}
        if facts == known.get(path.name, facts):
            return file.metadata(), facts
    print(f"{STAGE}: removes {path.name}, damaged; its samples are made again", flush=True)
    path.unlink()
    return {}, {}

def choose_layers(given, drafter, num_layers):
    """Three auxiliary ids, ascending: those given, the published drafter's, or the default."""
    config = json.loads(drafter.read_text()) if drafter.exists() else {}
    config |= config.get("eagle_config") or {}  # the other place where they stand
    ids = config.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    ids = [int(i) if i.strip().isdecimal() else -1 for i in given.split(",")] if given else ids
    if not len(ids) == len({i for i in ids if 0 <= i < num_layers}) == 3:
        fail(f"LAYER_IDS are {ids}; to fix: three of 0 .. {num_layers - 1}, as --layer-ids 1,2,3")
    return sorted(ids)

def read_samples(directory, part, max_len, vocab_size):
    """(samples, counts) of a part, held-out ones first; skipped where less than 2 tokens answer."""
    index, parts = map(int, (part or "1/1").split("/"))
    samples, num_cut = [], 0
    for split, name in ("heldout", "heldout_samples.jsonl"), ("train", "samples.jsonl"):
        for number, line in enumerate(open(directory / name), 1):
            try:
                id, prompt_len, ids = map(json.loads(line).get, ("id", "prompt_len", "token_ids"))
                assert id and 0 <= min(ids) <= max(ids) < vocab_size and prompt_len > 0
            except (ValueError, AttributeError, TypeError, AssertionError) as error:
                fail(f"{directory / name}:{number} is no sample ({error!r}); to fix: make it again")
            if int(hashlib.sha256(id.encode()).hexdigest(), 16) % parts == index - 1:
                num_cut += len(ids) > max_len
                samples.append({"id": id, "split": split, "prompt_len": prompt_len,
                                "token_ids": array.array("i", ids[:max_len])})
    whole = [sample for sample in samples if len(sample["token_ids"]) >= sample["prompt_len"] + 2]
    return whole, {"cut": num_cut, "skipped": len(samples) - len(whole)}

def choose_store(given, samples, hidden_size, disk, min_free_gb):
    """The store given, or with "auto" the widest that fits the disk. Exits 1 where it does not."""
    free = shutil.disk_usage(disk).free / 1e9
    room = max(0, min(free * 0.95, free - min_free_gb))
    need = {store: sum(sample_bytes(sample, store, hidden_size) for sample in samples) / 1e9
            for store in ("bf16", "fp8", "int4")}
    fitting = [store for store in need if need[store] <= room]
    store = given if given != "auto" else [*fitting, "int4"][0]
    text = f"{len(samples):,} samples need {need[store]:,.3f} GB in {store}, {free:,.3f} are free"
    if store in fitting:
        return print(f"{STAGE}: {text}", flush=True) or store
    fail(f"{text}, of which 5 % and MIN_FREE_GB stay; to fix: make room, or take "
         f"{int(len(samples) * room / need[store]):,} samples, or STORE={'/'.join(fitting)}")

def take_stock(out, prefix, known, run_id):
    """({path: facts}, {(split, id)} done) of whole shards in `out`, other parts' left out."""
    for path in out.glob(f".{prefix}*.tmp"):  # left by a run that was killed
        path.unlink()
    files, done = {}, set()
    paths = sorted({*out.glob(prefix + "*.safetensors"), *out.glob("[ht]*.safetensors")})
    shards = ThreadPoolExecutor(8).map(lambda path: read_shard(path, known), paths)
    for path, (metadata, facts) in zip(paths, shards):
        if metadata.get("run", run_id) != run_id:
            fail(f"{path} is of another run; to fix: mv {path} {path}.aside")
        done |= {(facts["split"], id) for id in json.loads(metadata.get("ids", "[]"))}
        files |= {path: facts} if facts and path.name.startswith(prefix) else {}
    return files, done

def read_norm_and_head(directory):
    """Weights of the final norm [H] and of the head [V,H] of a target, by name, nested or not."""
    from safetensors import safe_open
    pattern = r"(?:(?:language_model|model)\.)*(norm|lm_head|embed_tokens)\.weight"
    files = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
    found = {match[1]: (file, match[0]) for file in files for name in file.keys()
             if (match := re.fullmatch(pattern, name))}
    if "norm" not in found or len(found) < 2:
        fail(f"{directory} has no plain norm.weight and lm_head.weight; proof and training need it")
    return [found[name][0].get_tensor(found[name][1]).float()
            for name in ("norm", "lm_head" if "lm_head" in found else "embed_tokens")]

def prove(engine, samples, norm, head, eps, window_tokens):
    """(figures, what is wrong or "") of the proof; mine: the last plane's logprobs."""
    import torch
    load = lambda sample, output: (*take_states(sample, output), output.prompt_logprobs)
    probes = [sample | {"id": "probe-" + sample["id"], "token_ids":
                        sample["token_ids"][:PROBE_TOKENS]} for sample in samples]
    alone = [got for _, got in prefill(engine, probes[:PROBES], 0, load, 0)]
    batch = [got for _, got in prefill(engine, probes, window_tokens, load)]
    if faults := [fault for _, fault, _ in alone + batch if fault]:
        return {}, f"{faults[0]}: vLLM's extraction does not work for this target"
    figures = []
    for probe, (states, _, theirs), (again, _, _) in zip(probes, alone, batch):
        states, norms = states.float(), states.float().norm(dim=-1)  # [L,P,H], [L,P]
        x = torch.nn.functional.rms_norm(states[:-1, -1], norm.shape, norm, eps)  # [L-1,H]
        mine = (x @ head.T).log_softmax(-1)  # [L-1,V]
        gaps = [abs(mine[i, id].item() - theirs[i + 1][id].logprob)
                for i, id in enumerate(probe["token_ids"][1:].tolist())]
        moved = ((states - again).norm(dim=-1) / norms).median(0).values  # [P], of this probe
        figures.append((torch.tensor(gaps), moved, norms))
    gaps, batch_gaps, norms = map(torch.cat, zip(*figures))
    norms = norms.median(0).values.tolist()
    falls = [a / b for a, b in zip(norms, norms[1:])] + [2 * norms[0] / norms[-1]]
    proof = {"tokens": len(gaps), "logprob_gap_max": gaps.max().item(), "norm_fall_max": max(falls),
             "batch_gap_median": batch_gaps.max().item(), "plane_norms": norms}
    return proof, next((why for name, (most, why) in PROOF.items() if not proof[name] <= most), "")

def extract(engine, samples, s, out, prefix, manifest, metadata, window_tokens):
    """Fill shards with `samples`; manifest["files"] grows with each; returns facts for run.json."""
    run = {"tokens": sum(len(sample["token_ids"]) for sample in samples), "writing_sec": 0.0}
    begin, bar, aside = time.time(), progress(run["tokens"], "tokens"), manifest["put_aside"]
    where, packed, size = out / prefix.rstrip("-"), {}, 0
    def load(sample, output):
        states, fault = take_states(sample, output)
        return fault or pack(sample, states, metadata["store"])
    stream = prefill(engine, samples, window_tokens, load)
    for (sample, rows), after in zip(stream, [*samples[1:], {"split": ""}]):
        bar.update(len(sample["token_ids"]))
        (aside if isinstance(rows, str) else packed)[sample["id"]] = rows
        if len(aside) > 0.01 * (number := sum(manifest["size"].values())):
            fail(f"{len(aside)} of {number} samples have bad states; to fix: {aside}"[:500])
        size += sample_bytes(sample, metadata["store"], manifest["hidden_size"])
        if not packed or size < s.SHARD_GB * 1e9 and after["split"] == sample["split"]:
            continue
        paths = (out / f"{prefix}{sample['split']}-{i:05}.safetensors" for i in range(10**5))
        path, writing = next(path for path in paths if not path.exists()), time.time()
        manifest["files"][os.path.relpath(path, where)] = write_shard(path, packed, metadata)
        write_whole(where / "manifest.json", manifest)
        run["writing_sec"] += time.time() - writing
        packed, size, free_gb = {}, 0, shutil.disk_usage(where).free / 1e9
        if after["split"] and free_gb < s.MIN_FREE_GB + s.SHARD_GB:
            fail(f"{free_gb:.2f} GB free, MIN_FREE_GB is near; to fix: make room, run it again")
    bar.close()
    return run | {"seconds": time.time() - begin}

def run_engine(s, config, directory, samples, out, prefix, manifest, metadata):
    """Start the engine, prove its states, extract `samples`; returns the facts for run.json."""
    begin, layers = time.time(), [*manifest["layer_ids"], manifest["last_layer"]]
    staging = f"/dev/shm/{STAGE}-" + f"{out.resolve()}-{prefix}".replace("/", "-")
    shutil.rmtree(staging, ignore_errors=True)  # what a killed run left
    atexit.register(shutil.rmtree, staging, ignore_errors=True)
    engine = start_engine(s, max(len(sample["token_ids"]) for sample in samples), layers, staging)
    room = min(s.STAGING_GB * 1e9, shutil.disk_usage("/dev/shm").free * 0.8)
    row_bytes = len(layers) * manifest["hidden_size"] * engine.model_config.dtype.itemsize
    manifest["proof"], why = prove(engine, samples[:PROBES * 4], *read_norm_and_head(directory),
                                   config.get("rms_norm_eps", 1e-6), room / row_bytes)
    print(f"{STAGE}: ready in {time.time() - begin:.0f} s, {manifest['proof']}", flush=True)
    if why:
        fail(f"the proof failed, nothing was extracted: {why}")
    return extract(engine, samples, s, out, prefix, manifest, metadata, room / row_bytes)

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
    if not re.fullmatch(r"|[1-9]\d*/[1-9]\d*", s.PART) or fractions.Fraction(s.PART or 1) > 1:
        fail(f"PART is {s.PART!r}; to fix: write it as 1/4", 2)
    prefix, data = s.PART and f"part{s.PART.replace('/', 'of')}-", Path(s.DATA)
    out, source, (directory, target) = data / STAGE, data / s.SAMPLES_FROM, find_model(s.TARGET)
    where, earlier = out / prefix.rstrip("-"), read_manifest(source)
    if earlier["inputs"]["target"] != target:
        fail(f"{source} is of target {earlier['inputs']['target']}; to fix: set TARGET to that one")
    config = (top := json.loads((directory / "config.json").read_text())).get("text_config") or top
    hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    layers = choose_layers(s.LAYER_IDS, data / "drafter/config.json", num_layers)
    max_len = min(s.MAX_LEN, config.get("max_position_embeddings", s.MAX_LEN + 1) - 1)
    read = lambda part: read_samples(source, part, max_len, config["vocab_size"])
    kept = {path.parent: json.loads(path.read_text())  # of the whole, then of its parts
            for path in sorted(out.glob("**/manifest.json")) if not path.parent.suffix}
    known = {Path(path).name: f for each in kept.values() for path, f in each["files"].items()}
    done = kept.get(where, {}).get("done")  # then shards are checked, in random order, for a second
    for path in random.sample([out / name for name in sorted(known)], len(known) if done else 0):
        if time.time() < begin + 1 and path.exists():
            read_shard(path, known)
    stores = [each["settings"]["STORE"] for each in kept.values() if s.STORE == "auto"] or [s.STORE]
    if (store := stores[0]) == "auto":
        store = choose_store(store, read("")[0], hidden_size, data, s.MIN_FREE_GB)
    facts = {"settings": {"STORE": store, "MAX_LEN": max_len, "LAYER_IDS": layers, "SAMPLES_FROM":
             s.SAMPLES_FROM}, "inputs": {"target": target, s.SAMPLES_FROM: earlier["id"]}}
    manifest = open_stage(where, **facts, size={
        key: earlier["counts"][key] for key in ("samples", "heldout_samples")})
    if unfinished := [each for each in kept if where == out != each and not kept[each]["done"]]:
        fail(f"{unfinished[0]} is not done; to fix: run that part to its end first")
    run_id = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    known and print(f"{STAGE}: checks the bytes of {len(known):,} shards", flush=True)
    (files, done), (samples, counts) = take_stock(out, prefix, known, run_id), read(s.PART)
    bad = {id: why for each in kept.values() for id, why in each.get("put_aside", {}).items()}
    todo = [x for x in samples if (x["split"], x["id"]) not in done and x["id"] not in bad]
    print(f"{STAGE}: {len(todo):,} samples to do, {len(samples) - len(todo):,} done", flush=True)
    manifest |= {"put_aside": {i: bad[i] for x in samples if (i := x["id"]) in bad}, "store": store,
                 "hidden_size": hidden_size, "layer_ids": layers, "last_layer": num_layers,
                 "proof": manifest.get("proof") or [each.get("proof") for each in kept.values()],
                 "files": {os.path.relpath(path, where): files[path] for path in files}}
    run = {"tokens": 0, "seconds": 1}
    if todo:
        choose_store(store, todo, hidden_size, out, s.MIN_FREE_GB)
        metadata = {"format": "1", "store": store, "layer_ids": ",".join(map(str, layers)),
                    "last_layer": str(num_layers), "run": run_id}
        run = run_engine(s, config, directory, todo, out, prefix, manifest, metadata)
        write_whole(where / "run.json", run | {"host": os.uname().nodename, "ended": time.ctime()})
    total = lambda key, of="": sum(f[key] for f in manifest["files"].values() if of in f["split"])
    counts |= {"samples": total("samples", "train"), "heldout_samples": total("samples", "heldout"),
               "tokens": total("tokens"), "answer_tokens": total("answer_tokens"),
               "put_aside": len(manifest["put_aside"])}
    assert prefix or total("samples") + counts["put_aside"] == len(samples), counts
    manifest["bytes_per_token"] = total("bytes") / max(1, total("tokens"))
    write_whole(where / "manifest.json", manifest | {"counts": counts, "done": True})
    size, minutes = total("bytes") / 1e9, int(time.time() - begin) // 60
    print(f"{STAGE}: wrote {len(todo):,} samples, {size:,.3f} GB are in {where}, in "
          f"{minutes // 60}h {minutes % 60}m ({run['tokens'] / run['seconds']:,.0f} tokens/s)")

if __name__ == "__mp_main__":  # a process that vLLM spawned instead of forking it
    die_with_parent()
if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(f"{error}; to fix: make room or access, and run it again to continue")
