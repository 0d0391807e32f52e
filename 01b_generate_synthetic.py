#!/usr/bin/env python3
"""Let the target answer the chosen questions through vLLM's server, and keep its exact token ids.

    ./01b_generate_synthetic.py                       # the server at SERVER_URL; resumes when rerun
    VLLM_API_KEY=... ./01b_generate_synthetic.py --server-url http://a:8000,http://b:8000

Reads 01_generate/questions.jsonl and heldout.jsonl, and the target's config and tokenizer.
Writes below $DATA/01b_generate_synthetic (JSON lines in UTF-8, appended as answers arrive):
  samples.jsonl: the answer to a user turn: id, source, turn (from 0), token_ids (prompt and answer
      as the engine saw them), prompt_len (tokens), finish_reason (stop, length), made_by (served
      model), prompt (the user turn), text, reasoning (null when there is none)
  heldout_samples.jsonl: the same of heldout.jsonl, answered greedily; to measure, not to train
  rejected.jsonl: not to be trained on; errors.jsonl: failed, the next run asks it again: `reason`
  lengths.png; run.json (tokens, seconds); manifest.json: counts, lengths, served model, checksums
Turns are asked in order, with the target's own answers (not their reasoning) in the history. Where
an answer cannot be built on, the later turns are rejected as `no history`.
Costs, as planned, 12 to 13 h for 25,000 answers of Kimi-K2.5 on 8 GPUs (1,536 tokens/s); 1 GB.
Prints answers, tokens/s, errors, requests in flight and time left, and at the end
  01b_generate_synthetic: 25,200 answers of 61,022,114 tokens (lengths {'p50': 2210, ...}) to ...
"""
import argparse, atexit, fcntl, hashlib, json, os, random, re, signal, sys, threading, time
from collections import Counter
from pathlib import Path

# ---- settings: the file, then KIT_NAME, then --name ---------------------------------------------
DATA = "/data"  # directory of all results
# server
SERVER_URL = "http://127.0.0.1:8000"  # vLLM server, or several of one model, comma separated
TARGET = "moonshotai/Kimi-K2.5"  # hub id or directory of the model that the server must serve
TRUST_REMOTE_CODE = False  # run the Python code that comes with the target's tokenizer
CONCURRENCY = 256  # requests in flight, over all servers [1..]
READ_TIMEOUT_SEC = 3600.0  # for a whole answer; 4,096 tokens at 5 tokens/s take 820 s [0.1..]
GIVE_UP_MIN = 60.0  # minutes without any server until the stage ends with status 3 [0..]
# answers
MAX_TOKENS = 4096  # tokens of an answer; less where the server's context leaves no room [1..]
TEMPERATURE = 1.0  # of sampling, as the target is served; a small model does better at 0.6 [0..2]
TOP_P = 0.95  # of sampling; held-out questions are answered greedily all the same [0..1]
THINKING = ""  # "thinking" for the chat template, off or on; "" = the template's default [|0|1]
EXTRA_BODY = "{}"  # more fields of each request, as JSON, such as {"top_k": 20}
KEEP_CUT = True  # keep answers cut by MAX_TOKENS, which are good training data
# ---- fixed facts --------------------------------------------------------------------------------
STAGE = "01b_generate_synthetic"
ATTEMPTS = 6  # of a request that the server got, with pauses of 1 to 16 s, until it has failed
CONNECT_SEC, SYNC_SEC = 10.0, 2.0  # to connect; between fsyncs of new answers
MAX_BAD_SHARE, MIN_JUDGED = 0.2, 100  # degenerate or failed, that stop the run; of how many
MAX_FAILED_SHARE = 0.01  # of questions that failed, up to which the stage is done
DEGENERATE = ("empty", "not printable", "repetition", "no </think>")
SAMPLES, HELDOUT, REJECTED, ERRORS = "samples", "heldout_samples", "rejected", "errors"  # files
Stop = SystemExit  # raised in threads with a message for the user; everything answered is kept

# ---- answers ------------------------------------------------------------------------------------
def repeats(text):
    """Whether the second half of `text` is one phrase of up to 200 characters over and over."""
    half = text[len(text) // 2:]
    return len(half) >= 8 and any(half[period:] == half[:-period]
                                  for period in range(1, min(200, len(half) // 2) + 1))

def verdict(sample, thinking, keep_cut):
    """Why an answer must not be trained on, or None; `thinking` was asked for."""
    said, ended = (sample["reasoning"] or "") + sample["text"], sample["finish_reason"] == "stop"
    if said and not any(char.isprintable() and char not in " \ufffd" for char in said):
        return "not printable"
    if said and (sample["finish_reason"] == "repetition" or repeats(said)):
        return "repetition"
    if not said or ended and (not sample["text"] or thinking and sample["reasoning"] is None):
        return "no </think>" if said and thinking else "empty"
    return None if ended or keep_cut else "cut"

def read_reply(reply, vocab_size, thinking, closes=None):
    """Fields of a sample from a chat reply, ValueError unless whole; closes: </think>'s id."""
    try:
        choice, prompt, usage = reply["choices"][0], reply["prompt_token_ids"], reply["usage"]
        answer, message, reason = (choice[key] for key in ("token_ids", "message", "finish_reason"))
        if [len(prompt), len(answer)] != [usage["prompt_tokens"], usage["completion_tokens"]]:
            raise ValueError(f"{len(prompt)} + {len(answer)} token ids, usage says {usage}")
        if not all(type(i) is int and 0 <= i < vocab_size for i in prompt + answer):
            raise ValueError(f"a token id outside the vocabulary of {vocab_size:,}")
        text, reasoning = message.get("content") or "", message.get("reasoning")
        if reasoning is None and (thinking or re.search("^\\s*<think>|</think>", text)):
            parsed = closes in answer and "</think>" not in text  # null is an empty thought then
            reasoning, _, text = ("", "", text) if parsed else text.partition("</think>")
        reasoning = reasoning and re.sub(r"^\s*<think>", "", reasoning).strip()
        if reason not in ("stop", "length", "repetition"):
            raise ValueError(f"finish_reason {reason}")
        return {"token_ids": prompt + answer, "prompt_len": len(prompt), "finish_reason": reason,
                "text": text.strip(), "reasoning": reasoning}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no whole reply ({type(error).__name__}: {error})") from None

def read_back(path):
    """Yield the rows of an append-only file; cut off a torn last line. Exits 1 on other damage."""
    good, size = 0, path.stat().st_size if path.exists() else 0
    with open(path, "ab+") as file:
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line[:-1] if line.endswith(b"\n") else b"")
                row["id"]
            except (ValueError, KeyError, TypeError):
                if good + len(line) < size:
                    fail(f"{path} is damaged in line {number}; to fix: sed -i {number}d {path}")
                print(f"{STAGE}: dropped 1 torn line ({len(line):,} bytes) at the end of {path}")
                file.truncate(good)
                return
            good += len(line)
            yield row

class Book:
    """The append-only files; known = {id: text of the answer if a later turn needs it}."""
    def __init__(self, out, questions):
        self.out, self.files, self.known, self.last_bad, self.lengths = out, {}, {}, "", []
        self.counts, self.reasons, self.tokens = Counter(), Counter(), Counter(prompt=0, answer=0)
        self.later, self.lock = {i for q in questions for i in q["turn_ids"][:-1]}, threading.Lock()
        for name in (SAMPLES, HELDOUT, REJECTED):
            for row in read_back(out / f"{name}.jsonl"):
                self.take(name, row)
            self.files[name] = open(out / f"{name}.jsonl", "ab", buffering=0)
        self.files[ERRORS] = open(out / f"{ERRORS}.jsonl", "wb", buffering=0)

    def take(self, name, row):
        """Count a row of a file."""
        self.counts[name] += 1
        if name == ERRORS or row.get("reason") in DEGENERATE:
            self.last_bad = f"{row['reason']}: {row.get('text') or row.get('reasoning')!a:.200}"
        if name in (SAMPLES, HELDOUT):
            self.lengths.append(len(row["token_ids"]) - row["prompt_len"])
            self.tokens.update(prompt=row["prompt_len"], answer=self.lengths[-1])
            self.known[row["id"]] = row["text"] if row["id"] in self.later else None
        elif name == REJECTED:
            self.reasons[row["reason"]] += 1
            self.known[row["id"]] = None

    def add(self, name, row):
        """Append a row, which is on the disk within SYNC_SEC."""
        line = memoryview(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.lock.acquire()  # kept for ever when the disk is full: nothing follows a torn line
        while line:
            line = line[self.files[name].write(line):]
        self.take(name, row)
        self.lock.release()

    def sync(self):
        """Bring what was appended to the disk."""
        for file in self.files.values():
            os.fsync(file.fileno())

    def judge(self, at_least):
        """Raise Stop when too many answers failed or are degenerate."""
        bad = sum(self.reasons[reason] for reason in DEGENERATE) + self.counts[ERRORS]
        among = bad + self.counts[SAMPLES] + self.counts[HELDOUT]
        if among >= at_least and bad > MAX_BAD_SHARE * among:
            raise Stop(f"{bad:,} of {among:,} answers are degenerate or failed, the last one: "
                       f"{self.last_bad}; to fix: mend the server or sampling, mv {self.out} aside")

# ---- servers ------------------------------------------------------------------------------------
class Fleet:
    """The servers: up = {url: (served model, context in tokens)}, busy = {url: its threads}."""
    def __init__(self, s, tokenizer, vocab_size):
        import requests
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy between here and a server, no .netrc
        self.session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=s.CONCURRENCY))
        self.key = os.environ.get("VLLM_API_KEY", "").strip()  # goes out in a header, nowhere else
        if not re.fullmatch("[!-~]*", self.key):  # an error of the client would show it
            raise Stop("VLLM_API_KEY has a character that no key has; to fix: export it again")
        self.session.headers.update({"Authorization": f"Bearer {self.key}"} if self.key else {})
        self.s, self.tokenizer, self.vocab_size = s, tokenizer, vocab_size
        self.fields = {"top_p": s.TOP_P, "chat_template_kwargs": {}} | json.loads(s.EXTRA_BODY)
        self.fields["chat_template_kwargs"] |= {"thinking": s.THINKING == "1"} if s.THINKING else {}
        self.closes = tokenizer.get_vocab().get("</think>")
        self.overhead, self.thinks, self.model = 0, s.THINKING == "1", None  # the probe tells more
        self.up, self.busy = {}, {u.strip().rstrip("/"): set() for u in s.SERVER_URL.split(",")}

    def call(self, url, body=None):
        """The JSON of a reply. Raises Stop on a 4xx, OSError or ValueError on any other fault."""
        quick = body is None or body["max_tokens"] == 1
        reply = self.session.request("POST" if body else "GET", url, json=body, timeout=(
            CONNECT_SEC, min(120 if quick else 1e9, self.s.READ_TIMEOUT_SEC)))
        if reply.status_code == 200:
            return json.loads(reply.content)
        status, text = reply.status_code, reply.text.replace(self.key or "\0", "***")[:500]
        if 400 <= status < 500 and status not in (408, 425, 429):
            raise Stop(f"{url} refuses: {status} {text}; to fix: see there (vLLM? VLLM_API_KEY?)")
        raise ValueError(f"status {status}: {text}")

    def chat(self, url, model, messages, max_tokens, greedy):
        """The JSON reply to one chat request."""
        fields = {key: value for key, value in self.fields.items()
                  if not greedy or not re.match("top_|min_p|seed|.+_penalty", key)}
        return self.call(url + "/v1/chat/completions", fields | {
            "model": model, "messages": messages, "max_tokens": max_tokens,
            "temperature": 0.0 if greedy else self.s.TEMPERATURE, "return_token_ids": True})

    def render(self, messages, ask):
        """The tokenizer's ids for `messages`; `ask` adds the start of the assistant's turn."""
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=ask,
            return_dict=False, **self.fields["chat_template_kwargs"]))

    def greet(self, url):
        """Take a server in once it proves to be vLLM, to serve TARGET and to return token ids."""
        target, question = self.s.TARGET, [{"role": "user", "content": "What is 2 + 3?"}]
        try:
            cards = {card["id"]: card for card in self.call(url + "/v1/models")["data"]}
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            raise Stop(f"{url} is no vLLM server; to fix: set SERVER_URL to one") from None
        model = next((name for name, card in cards.items() if Path(target).name in (
            Path(name).name, Path(card.get("root") or "").name)), None)
        if model is None:
            raise Stop(f"{url} serves {', '.join(cards)}, not TARGET ({target}); to fix: set it")
        reply = self.chat(url, model, question, 1, True)
        if not (isinstance(reply, dict) and reply.get("prompt_token_ids")):
            try:
                version = self.call(url + "/version")["version"]
            except (Stop, KeyError, TypeError, OSError, ValueError):
                version = "unknown, perhaps not vLLM"
            raise Stop(f"{url} returns no token ids (version {version}); to fix: use vLLM >= 0.11")
        read_reply(reply, self.vocab_size, False)  # raises
        prompt, rendered = reply["prompt_token_ids"], self.render(question, False)
        if prompt[:len(rendered)] != rendered:
            raise Stop(f"{url} renders a question as {prompt}, the tokenizer of {target} as "
                       f"{rendered}; to fix: serve TARGET with its own chat template")
        self.overhead = len(prompt)
        self.thinks |= self.tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
        self.up[url] = model, cards[model].get("max_model_len") or 1 << 62
        self.model = self.model or dict(zip(("model", "max_model_len"), self.up[url]))

    def watch(self):
        """For ever: greet the servers that are away. Raises Stop after GIVE_UP_MIN without one."""
        here_sec, said_sec = time.monotonic(), time.monotonic() - 55
        while True:
            why = {}
            for url in self.busy.keys() - self.up.keys():
                try:
                    self.greet(url)
                except (OSError, ValueError) as error:
                    why[url] = str(error)
            now = time.monotonic()
            here_sec = now if self.up else here_sec
            if not self.up and now - here_sec >= 60 * self.s.GIVE_UP_MIN:
                raise Stop(f"no server for {self.s.GIVE_UP_MIN:g} minutes {why}; to fix: vllm "
                           f"serve {self.s.TARGET}, or set SERVER_URL; run it again to continue", 3)
            if not self.up and now - said_sec >= 60:
                print(f"\n{STAGE}: no server, waiting {why}", flush=True)
                said_sec = now
            time.sleep(1)

    def ask(self, messages, greedy):
        """(fields of a sample, None); or ({}, why there is none)."""
        attempt, why = 0, None
        while attempt < ATTEMPTS:
            time.sleep(2 ** max(0, attempt - 1) * random.uniform(0.5, 1) if why else 0)
            while not (up := self.up.copy()):
                time.sleep(0.5)
            url = min(up, key=lambda url: len(self.busy[url]))
            (model, context), room = up[url], self.s.MAX_TOKENS
            if room + sum(len(m["content"].encode()) + self.overhead for m in messages) > context:
                room = min(room, context - len(self.render(messages, True)))  # bytes left it open
            if room < min(16, self.s.MAX_TOKENS):
                return {}, "too long"
            attempt += 1
            self.busy[url].add(threading.get_ident())
            try:
                return read_reply(self.chat(url, model, messages, room, greedy), self.vocab_size,
                                  self.thinks, self.closes) | {"made_by": model}, None
            except (OSError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"[:300]
                unreached = re.search("NewConnection|NameResolution|ConnectTimeout", why)
                attempt -= bool(unreached)  # the question never got there
                if (unreached or re.search("status 5|Read timed", why)) and self.up.pop(url, None):
                    print(f"\n{STAGE}: {url} is away ({why})", flush=True)  # until greeted again
            finally:
                self.busy[url].discard(threading.get_ident())
        return {}, why

# ---- the run ------------------------------------------------------------------------------------
def converse(question, greedy, book, fleet):
    """Ask the user turns of a question in order; write a row for each that is not known yet."""
    history, ids, ended = [], enumerate(question["turn_ids"]), None  # ended: why not to ask on
    for message in question["messages"]:
        history.append(message)
        if message["role"] != "user":
            continue
        turn, turn_id = next(ids)
        if turn_id not in book.known:
            row, why = ({}, ended) if ended else fleet.ask(history, greedy)
            name = HELDOUT if greedy else SAMPLES
            if row:
                why = verdict(row, fleet.thinks, fleet.s.KEEP_CUT)
                why = None if greedy and why != "empty" else why  # nothing is trained on it
            if why:
                name = REJECTED if row or why in ("too long", "no history") else ERRORS
                row, ended = row | {"reason": why}, why if name == ERRORS else ended
            book.add(name, {"id": turn_id, "source": question["source"], "turn": turn,
                            "prompt": message["content"]} | row)
        history.append({"role": "assistant", "content": book.known.get(turn_id)})
        ended = ended or (None if history[-1]["content"] else "no history")

def run(questions, heldout, book, fleet):
    """Answer what is not answered, in threads; all is synced when it ends or raises."""
    todo = [(question, greedy) for those, greedy in ((heldout, True), (questions, False))
            for question in those if not book.known.keys() >= set(question["turn_ids"])]
    bar = progress(sum(len(q["turn_ids"]) for q in heldout + questions), "answers", len(book.known))
    start_sec, before, queue, raised = time.monotonic(), book.tokens.copy(), iter(todo), []

    def answer():
        while not raised and (one := next(queue, None)):
            converse(*one, book, fleet)
            book.judge(MIN_JUDGED)
    threading.excepthook = lambda hook: raised.append(hook.exc_value)  # for the main thread
    threads = [threading.Thread(target=job, daemon=True) for job in
               [fleet.watch] + [answer] * min(fleet.s.CONCURRENCY, len(todo))]
    try:
        for thread in threads:
            thread.start()
        while not raised and (working := [t for t in threads[1:] if t.is_alive()]):
            working[0].join(SYNC_SEC)
            book.sync()
            new, sec = book.tokens - before, time.monotonic() - start_sec
            bar.set_postfix_str(refresh=False, s=(
                f"{new['answer'] / sec:,.0f} tokens/s out, {new['prompt'] / sec:,.0f} in, "
                f"{sum(map(len, fleet.busy.values()))} in flight, {book.counts[ERRORS]} errors"))
            bar.update(len(book.known) - bar.n)
    finally:
        bar.close()
        book.sync()
    for error in raised[:1]:
        raise error
    book.judge(1)
    if n := book.tokens["answer"] - before["answer"]:  # preflight reckons with it
        write_whole(book.out / "run.json", {"tokens": n, "seconds": time.monotonic() - start_sec})

def finish(out, manifest, book, number):
    """Write the histogram and the manifest for `number` questions; print the summary."""
    import matplotlib.figure
    lengths = sorted(book.lengths) or [0]
    cuts = {f"p{p}": lengths[(len(lengths) - 1) * p // 100] for p in (50, 90, 99)}
    figure = matplotlib.figure.Figure(figsize=(7, 3.5), layout="constrained")
    figure.subplots(subplot_kw={"title": f"tokens of answers {cuts}"}).hist(lengths, 40)
    write_whole(out / "lengths.png", lambda tmp: figure.savefig(tmp, format="png", dpi=120))
    files = {path.name: {
        "bytes": path.stat().st_size, "lines": book.counts[path.stem],
        "sha256": hashlib.file_digest(open(path, "rb"), "sha256").hexdigest()}
        for path in sorted(out.glob("*.jsonl"))}
    write_whole(out / "manifest.json", manifest | {
        "counts": {name: book.counts[name] for name in book.files} | {"reasons": book.reasons},
        "tokens": book.tokens, "lengths": cuts, "files": files, "done": True,
        "size": {"questions": number - book.counts[ERRORS]}})  # so the next run asks them again
    print(f"{STAGE}: {len(book.lengths):,} answers of {book.tokens['answer']:,} tokens (lengths "
          f"{cuts}) to {out}; rejected: {dict(book.reasons)}; failed: {book.counts[ERRORS]:,}")

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
    s = settings()
    out, source = Path(s.DATA) / STAGE, Path(s.DATA) / "01_generate"
    made, (directory, target_id) = read_manifest(source), find_model(s.TARGET)
    if made["inputs"]["target"] != target_id:
        fail(f"{source} is of another target (got {made['inputs']['target']}, want {target_id}); "
             "to fix: set TARGET or DATA")
    try:
        json.loads(s.EXTRA_BODY).items()
    except (ValueError, AttributeError):
        fail(f"EXTRA_BODY is no JSON object (got {s.EXTRA_BODY}); to fix: give {{...}}", 2)
    questions, heldout = ([json.loads(line) for line in open(source / name, encoding="utf-8")]
                          for name in ("questions.jsonl", "heldout.jsonl"))
    number = len(questions) + len(heldout)
    manifest = open_stage(
        out, settings={key: getattr(s, key) for key in (
            "MAX_TOKENS", "TEMPERATURE", "TOP_P", "THINKING", "EXTRA_BODY", "KEEP_CUT")},
        inputs={"target": target_id, "01_generate": made["id"]}, size={"questions": number})
    try:
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=s.TRUST_REMOTE_CODE)
    except (OSError, ValueError, ImportError) as error:
        fail(f"no tokenizer in {directory} ({str(error).strip().partition(chr(10))[0]}); to fix: "
             "set TRUST_REMOTE_CODE to 1 if it needs its own code, else copy it again")
    config = json.loads((directory / "config.json").read_text())
    manifest["vocab_size"] = config.get("text_config", config)["vocab_size"]
    book = Book(out, questions + heldout)
    run(questions, heldout, book, fleet := Fleet(s, tokenizer, manifest["vocab_size"]))
    if book.counts[ERRORS] > MAX_FAILED_SHARE * number:
        fail(f"{book.counts[ERRORS]:,} of {number:,} questions failed, the last one: "
             f"{book.last_bad}; to fix: run it again")
    finish(out, manifest | ({"server": fleet.model} if fleet.model else {}), book, number)

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: sys.exit(("stopped; to go on: run it again", 128 + n)))
    try:
        main()
    except Stop as ended:
        fail(*ended.args) if isinstance(ended.code, str | tuple) else sys.exit(ended.code)
    except OSError as error:
        fail(f"{error}; to fix: make room or access, and run it again to continue")
