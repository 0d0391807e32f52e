#!/usr/bin/env python3
"""Choose clean questions out of a data set of conversations, and render its recorded answers.

    ./01_generate.py                                       # the data set DATASET, 25,000 questions
    ./01_generate.py --dataset my.jsonl --num-samples 1000 --target /models/my-model

Reads a parquet, JSONL or JSON file, a folder of them, or a hub id (copied once, below source/); a
row holds `conversations` [{from, value}] or `messages` [{role, content}], or only a `prompt` or
`question`; and its `source`, if it has one. Of the target only config, tokenizer, chat template.
Writes below $DATA/01_generate (JSON lines in UTF-8):
  questions.jsonl, heldout.jsonl: id, source, messages [{role, content}] (system and user turns),
      turn_ids (one id a user turn, that of its sample; the last one is `id`)
  samples.jsonl, heldout_samples.jsonl: the recorded answers, for training without a server: id,
      source, turn (from 0), token_ids (prompt and answer), prompt_len (tokens), finish_reason,
      made_by ("dataset"), prompt (the last user turn), text, reasoning (null)
  manifest.json: counts, tokens, unusable rows by reason with an example each, sources, checksums;
      run.json: rows and seconds
The order is that of hash(SEED, opening); the opening is the system and first user turn, white space
folded; of conversations with one opening the first stays. The first HELDOUT are held out, the next
NUM_SAMPLES train: a smaller number is a prefix of a larger, and no opening is on both sides.
Costs a core 2 minutes and 1 GB of memory for 1.42 million rows of 2 kB: 20,000 rows/s, then 600
conversations/s of 480 tokens are rendered (measured on an EPYC with SmolLM2's tokenizer).
Prints what was dropped, the mix of sources, and
  01_generate: wrote 25,000 questions, 200 held out, 43,120 recorded answers to ... in 252 s
"""
import argparse, atexit, fcntl, hashlib, heapq, json, os, re, signal, sys, time
from collections import Counter
from pathlib import Path

# ---- settings: the file, then KIT_NAME, then --name ---------------------------------------------
# data
DATA = "/data"  # directory of all results
DATASET = "mlabonne/open-perfectblend"  # file, folder or hub id of a data set of conversations
SOURCES = ""  # names in the `source` column to choose from, comma separated; "" = all
# how much
NUM_SAMPLES = 25000  # questions (conversations) to train on; more keeps the earlier ones [1..]
HELDOUT = 200  # questions set apart for evaluation, on top of NUM_SAMPLES [1..]
SEED = 0  # of the order in which questions are chosen
LAST_TURN_ONLY = False  # of the recorded answers only each conversation's last
# target
TARGET = "moonshotai/Kimi-K2.5"  # hub id or directory; its chat template renders the answers
TRUST_REMOTE_CODE = False  # run the Python code that comes with the target's tokenizer
# ---- fixed facts --------------------------------------------------------------------------------
STAGE = "01_generate"
FORMS = ("conversations", "messages", "prompt", "question")  # columns; the first that is filled
ROLES = {"system": "system", "human": "user", "user": "user"} | dict.fromkeys(
    ("gpt", "assistant", "chatgpt", "bot", "model"), "assistant") | dict.fromkeys(
    ("tool", "function", "function_call", "tool_call", "tool_response", "observation"), "tool")
KINDS = (".parquet", ".jsonl", ".json")  # of files, the first kind that a folder holds
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")  # gzip ... zstd
MAX_LINE_BYTES = 16 << 20  # a longer JSON line is no conversation
MAX_JSON_BYTES = 1 << 30  # a JSON file up to this size is read whole, a larger one line by line

# ---- reading the data set -----------------------------------------------------------------------
def find_files(name, copies):
    """Files of the data set `name`, sorted: one file, or the parquet (else JSONL, else JSON) files
    of a folder, or of a hub id, copied below `copies` once. Exits 1 when there are none."""
    path = Path(name)
    if path.is_file():
        return [path]
    if not name or not path.is_dir():
        if path.suffix in KINDS or not re.fullmatch(r"[\w-]+/[\w.-]+", name):
            fail(f"no data set at {name!r}; to fix: set DATASET to a file, a folder or a hub id")
        path = copies / name.replace("/", "--")
        if not (path / "copied").exists():
            download(name, path)
    for kind in KINDS:
        if files := sorted(file for file in path.rglob(f"*{kind}") if file.is_file()
                           and "/." not in f"/{file.relative_to(path)}"):  # the hub client's own
            return files
    fail(f"no .parquet, .jsonl or .json file in {path}; to fix: set DATASET to a data set")

def download(hub_id, path):
    """Copy a hub data set's files of one kind (of the train split, if it has splits) to `path`."""
    import huggingface_hub
    try:
        print(f"{STAGE}: copying {hub_id} from the hub to {path}", flush=True)
        names = huggingface_hub.HfApi().list_repo_files(hub_id, repo_type="dataset")
        names = next(filter(None, ([n for n in names if n.endswith(kind)] for kind in KINDS)), [])
        huggingface_hub.snapshot_download(hub_id, repo_type="dataset", local_dir=path,
            allow_patterns=[n for n in names if "train" in n] or names or ["README.md"])
    except Exception as error:  # the hub client raises what its transports raise
        fail(f"cannot copy {hub_id} from the hub ({type(error).__name__}: {line(error)}); to fix: "
             "run it again with network, or set DATASET to a copy of your own")
    (path / "copied").touch()

def dataset_id(name, files):
    """What a data set is, wherever it lies: its hub id, or its name and 16 hex digits of sizes and
    of the first and last 64 kB of its files."""
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            digest.update(b"%d " % path.stat().st_size + file.read(65536))
            file.seek(max(0, path.stat().st_size - 65536))
            digest.update(file.read())
    return f"{Path(name).resolve().name} {digest.hexdigest()[:16]}" if files else name

def read_rows(path):
    """Yield (row, raw) for each row of a file: what json or arrow made of it, or a ValueError that
    says why it could not be read; and the raw thing for an example. Exits 1 on a damaged file."""
    with open(path, "rb") as file:
        head = file.read(6)
    if head.startswith(PACKED):
        fail(f"{path} is compressed (starts with {head!r}); to fix: unpack it")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        fail(f"{path} is in UTF-16 or UTF-32; to fix: iconv -f UTF-16 -t UTF-8 {path} > NEW.jsonl")
    if path.suffix == ".parquet" or head.startswith(b"PAR1"):
        yield from read_parquet(path)
        return
    small = path.suffix == ".json" and path.stat().st_size <= MAX_JSON_BYTES
    whole = parse(path.read_bytes()) if small else ValueError("read by lines")
    if isinstance(whole, dict) and not whole.keys() & set(FORMS):  # such as {"data": [...]}
        whole = next((value for value in whole.values() if isinstance(value, list)), whole)
    if isinstance(whole, ValueError):
        yield from read_lines(path)
    else:
        yield from ((row, row) for row in (whole if isinstance(whole, list) else [whole]))

def read_parquet(path):
    """read_rows of a parquet file, 256 rows at a time."""
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [name for name in (*FORMS, "source") if name in file.schema_arrow.names]
        for batch in file.iter_batches(256, columns=columns):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:  # arrow does not check strings: find the rows one by one
                rows = []
                for index in range(batch.num_rows):
                    try:
                        rows += batch.slice(index, 1).to_pylist()
                    except UnicodeDecodeError:
                        rows.append(ValueError("not UTF-8"))
            yield from zip(rows, rows)
    except (pyarrow.ArrowException, OSError) as error:
        fail(f"{path} is no whole parquet file ({line(error)}); to fix: copy it again")

def read_lines(path):
    """read_rows of a file with one JSON value a line; blank lines are no rows."""
    with open(path, "rb") as file:
        while raw := file.readline(MAX_LINE_BYTES):
            rest = raw
            while len(rest) == MAX_LINE_BYTES and rest[-1:] != b"\n":
                rest = file.readline(MAX_LINE_BYTES)
            if raw.strip():
                yield ValueError("line too long") if rest is not raw else parse(raw), raw

def line(error):
    """The message of an error on one line."""
    return " ".join(str(error).split())[:300]

def parse(raw):
    """What the JSON bytes `raw` hold, or (not raised) a ValueError that says why nothing."""
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return ValueError("not UTF-8")
    except (ValueError, RecursionError):
        return ValueError("not JSON")

# ---- conversations ------------------------------------------------------------------------------
def clean_text(content):
    """The text of a turn, stripped; `content` may be a list of text parts. ValueError if none."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "\n".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or "\0" in content:
        raise ValueError("not text")
    if re.search("[\ud800-\udfff]", content):
        raise ValueError("lone surrogate")
    return content.strip()

def conversation(row):
    """Turns [{role, content}] of a row: an optional system turn, then user and assistant in turn.
    It ends before the first use of a tool. Raises ValueError with the reason it is unusable."""
    if not isinstance(row, dict):
        raise row if isinstance(row, ValueError) else ValueError("not an object")
    form = next((form for form in FORMS if row.get(form)), None)
    given, turns = row.get(form), []
    if isinstance(given, str) and form in ("prompt", "question"):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError("no conversation")
    for turn in given:
        name = (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None
        role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
        answered = not turns or turns[-1]["role"] != "user"
        if role == "tool" or role == "assistant" and turn.get("tool_calls"):
            if turns and turns[-1]["role"] == "assistant":
                turns.pop()  # it was the call
            break
        if role != ("user" if answered else "assistant") and (turns or role != "system"):
            raise ValueError("wrong roles")
        text = clean_text(turn["content"] if turn.get("content") is not None else turn.get("value"))
        if role == "user" and not text:
            raise ValueError("empty")
        if text or role == "assistant":
            turns.append({"role": role, "content": text})
    if not any(turn["role"] == "user" for turn in turns):
        raise ValueError("no user turn")
    return turns

def make_turn_ids(turns):
    """The id of each user turn: 16 hex digits of the system and user turns up to it, white space
    folded, and its number; so it stays what it is whatever is added around the turn."""
    said = [[t["role"], " ".join(t["content"].split())] for t in turns if t["role"] != "assistant"]
    ends = [index for index, (role, _) in enumerate(said, 1) if role == "user"]
    return [hashlib.sha256(json.dumps([said[:end], turn]).encode()).hexdigest()[:16]
            for turn, end in enumerate(ends)]

def fits(turns, tokenizer, context):
    """Whether the system and user turns leave room in `context` tokens. Tokenises only where the
    bytes leave it open: a token is at least a byte, and on average less than 16."""
    text = "\n".join(turn["content"] for turn in turns if turn["role"] != "assistant")
    size, margin = len(text.encode()), 64 * len(turns)
    return size + margin < context or (
        size < 16 * context and len(tokenizer.encode(text)) + margin < context)

def takes_system(tokenizer):
    """Whether the chat template takes a system turn; exits where it takes no question at all."""
    from jinja2 import TemplateError
    system, user = ({"role": role, "content": "Hello."} for role in ("system", "user"))
    for turns in [user], [system, user]:
        try:
            tokenizer.apply_chat_template(turns, tokenize=False)
        except (TemplateError, ValueError) as error:
            return turns == [user] and fail(
                f"no chat template ({line(error)}); to fix: set TARGET to a model made for chat")
    return True

def choose(files, number, seed, sources, usable, bar, with_system=True):
    """(chosen, tally): the first `number` conversations in the order of hash(seed, opening), as
    [{turns, source, turn_ids}], in memory that `number` bounds; and what became of the rows, which
    `bar` counts. `usable(turns)` is asked of each; `sources` is a set of names, empty for all."""
    tally = {"rows": 0, "other_source": 0, "duplicates": 0, "unusable": {}, "sources": Counter()}
    best, heap = {}, []  # heap: the negated keys of `best`, the last one on top
    rows = ((path, *pair) for path in files for pair in enumerate(read_rows(path), 1))
    for path, row_number, (row, raw) in rows:
        bar.update()
        tally["rows"] += 1
        source = row.get("source") if isinstance(row, dict) else None
        source = source.encode(errors="replace").decode() if isinstance(source, str) else ""
        tally["sources"][source] += 1
        if sources and source not in sources:
            tally["other_source"] += 1
            continue
        try:
            turns = conversation(row)
            ids = make_turn_ids(turns)
            key = int(hashlib.sha256(f"{seed}:{ids[0]}".encode()).hexdigest()[:16], 16)
            if key in best:
                tally["duplicates"] += 1
            elif (system := turns[0]["role"] == "system" and not with_system) or not usable(turns):
                raise ValueError("the target's template takes no system" if system else "too long")
            elif len(best) < number or key < -heap[0]:
                best[key] = {"turns": turns, "source": source, "turn_ids": ids}
                heapq.heappush(heap, -key)
                if len(best) > number:
                    del best[-heapq.heappop(heap)]
        except ValueError as error:
            facts = tally["unusable"].setdefault(str(error), {"count": 0, "example": ""})
            facts["count"] += 1
            facts["example"] = facts["example"] or f"{path.name}, row {row_number}: " + (
                ascii(raw[:200] if isinstance(raw, bytes) else raw)[:200])
    return [best[key] for key in sorted(best)], tally

def check_rows(tally, dataset):
    """Print what was dropped and why; exit 1 when more than half of the rows are unusable."""
    among = tally["rows"] - tally["other_source"]
    reasons = sorted(tally["unusable"].items(), key=lambda item: -item[1]["count"])
    for reason, facts in reasons:
        print(f"{STAGE}: {facts['count']:,} rows unusable: {reason} ({facts['example']})")
    if not tally["rows"]:
        fail(f"{dataset} has no rows; to fix: set DATASET to a data set of conversations")
    if not among:
        fail(f"SOURCES finds nothing; to fix: choose from {', '.join(list(tally['sources'])[:20])}")
    if 2 * sum(facts["count"] for _, facts in reasons) > among:
        fail(f"more than half of {among:,} rows are no usable conversation, most: {reasons[0][0]} "
             f"({reasons[0][1]['example']}); to fix: give them as one of {', '.join(FORMS)}")

# ---- recorded answers ---------------------------------------------------------------------------
def recorded_samples(question, tokenizer, context, last_only, dropped):
    """Yield the samples of a conversation's recorded answers, their boundaries from rendering with
    and without the answer; `dropped` counts by reason those that have none."""
    def render(count, ask):
        return list(tokenizer.apply_chat_template(turns[:count], add_generation_prompt=ask,
                                                  tokenize=True, return_dict=False))
    special, turns = set(tokenizer.all_special_ids), question["turns"]
    places = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    for turn, index in enumerate(places):
        if not turns[index]["content"]:
            dropped["empty"] += 1
            return  # what follows answers nothing
        if last_only and index != places[-1]:
            continue
        prompt_ids, ids = render(index, True), render(index + 1, False)
        answer = ids[len(prompt_ids):]
        while answer and special & set(answer) and not (
                answer[-1] in special or tokenizer.decode(answer[-1:]).strip()):
            answer.pop()  # white space after the end token: an engine stops before it
        if ids[:len(prompt_ids)] != prompt_ids or not answer:
            dropped["boundary"] += 1
        elif len(prompt_ids) + len(answer) > context:
            dropped["too long"] += 1
        else:
            yield {"id": question["turn_ids"][turn], "source": question["source"], "turn": turn,
                   "token_ids": prompt_ids + answer, "prompt_len": len(prompt_ids),
                   "finish_reason": "stop", "made_by": "dataset", "reasoning": None,
                   "prompt": turns[index - 1]["content"], "text": turns[index]["content"]}

def write_lines(path, rows, tokens):
    """Write rows as JSON lines, whole. Returns bytes, lines, sha256; adds to Counter `tokens`."""
    digest, facts = hashlib.sha256(), {"bytes": 0, "lines": 0}

    def write(tmp):
        with open(tmp, "wb") as file:
            for row in rows:
                data = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                digest.update(data)
                facts["bytes"] += file.write(data)
                facts["lines"] += 1
                tokens["prompt"] += row.get("prompt_len", 0)
                tokens["answer"] += len(row.get("token_ids", ())) - row.get("prompt_len", 0)
    write_whole(path, write)
    return facts | {"sha256": digest.hexdigest()}

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
    s, start_sec = settings(), time.monotonic()
    out, (directory, target_id) = Path(s.DATA) / STAGE, find_model(s.TARGET)
    files = find_files(s.DATASET, out) if Path(s.DATASET).exists() else []
    manifest = open_stage(
        out, settings={key: getattr(s, key) for key in (
            "SOURCES", "HELDOUT", "SEED", "LAST_TURN_ONLY")},
        inputs={"dataset": dataset_id(s.DATASET, files), "target": target_id},
        size={"NUM_SAMPLES": s.NUM_SAMPLES})
    files = files or find_files(s.DATASET, out / "source")
    try:
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=s.TRUST_REMOTE_CODE)
    except (OSError, ValueError, ImportError) as error:
        fail(f"no tokenizer in {directory} ({line(error)}); to fix: "
             "set TRUST_REMOTE_CODE to 1 if it needs its own code, else copy it again")
    config = json.loads((directory / "config.json").read_text())
    context = config.get("text_config", config).get("max_position_embeddings") or 1 << 62
    system = takes_system(tokenizer)
    with progress(None, "rows") as bar:
        chosen, tally = choose(files, s.HELDOUT + s.NUM_SAMPLES, s.SEED,
                               {name.strip() for name in s.SOURCES.split(",")} - {""},
                               lambda turns: fits(turns, tokenizer, context), bar, system)
    check_rows(tally, s.DATASET)
    if len(chosen) <= s.HELDOUT:
        fail(f"{s.DATASET} has only {len(chosen):,} usable questions, {s.HELDOUT:,} are to be held "
             "out; to fix: lower HELDOUT, or take a larger data set")
    splits = {"heldout": chosen[:s.HELDOUT], "questions": chosen[s.HELDOUT:]}
    if len(chosen) < s.HELDOUT + s.NUM_SAMPLES:
        print(f"{STAGE}: only {len(chosen) - s.HELDOUT:,} questions, {s.NUM_SAMPLES:,} were wanted")
    mix = Counter(question["source"] or "(none)" for question in splits["questions"])
    print(f"{STAGE}: sources:", ", ".join(f"{name} {count:,}" for name, count in mix.most_common()))
    facts, tokens, dropped = {}, Counter(), Counter()

    def samples_of(those):
        for question in those:
            yield from recorded_samples(question, tokenizer, context, s.LAST_TURN_ONLY, dropped)
            bar.update()
    with progress(len(chosen), "conversations rendered") as bar:
        for (name, those), samples in zip(splits.items(), ("heldout_samples", "samples")):
            facts[name + ".jsonl"] = write_lines(out / (name + ".jsonl"), (
                {"id": question["turn_ids"][-1], "source": question["source"],
                 "messages": [turn for turn in question["turns"] if turn["role"] != "assistant"],
                 "turn_ids": question["turn_ids"]} for question in those), tokens)
            facts[samples + ".jsonl"] = write_lines(
                out / (samples + ".jsonl"), samples_of(those), tokens)
    for reason, count in dropped.items():
        print(f"{STAGE}: {count:,} recorded answers dropped: {reason}")
    counts = {name.removesuffix(".jsonl"): fact["lines"] for name, fact in facts.items()}
    write_whole(out / "manifest.json", manifest | {
        "counts": counts | {"answers_dropped": dropped}, "tokens": tokens,
        "rows": tally | {"sources": len(tally["sources"])}, "sources": mix, "files": facts,
        "done": True})
    write_whole(out / "run.json", {"rows": tally["rows"], "seconds": time.monotonic() - start_sec})
    print(f"{STAGE}: wrote {counts['questions']:,} questions, {s.HELDOUT:,} held out, "
          f"{counts['samples'] + counts['heldout_samples']:,} recorded answers to {out} in "
          f"{time.monotonic() - start_sec:.0f} s")

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: fail("stopped; to continue: run it again", 128 + n))
    try:
        main()
    except OSError as error:
        fail(f"{error}; to fix: make room or access, and run it again to continue")
