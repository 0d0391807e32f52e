#!/usr/bin/env python3
"""Let the target answer the chosen questions through vLLM's server, and keep the exact token ids.

    ./01b_generate_synthetic.py                       # the server at SERVER_URL; resumes when rerun
    ./01b_generate_synthetic.py --server-url http://a:8000,http://b:8000 --concurrency 512
    VLLM_API_KEY=... ./01b_generate_synthetic.py      # a server that wants a key

Reads 01_generate/questions.jsonl and heldout.jsonl; the tokenizer of the target.
Writes below $DATA/01b_generate_synthetic, JSON lines, appended as answers arrive:
  samples.jsonl          one answer to a user turn a line: id, source, turn (from 0), token_ids
                         (prompt and answer as the engine saw them), prompt_len (tokens),
                         finish_reason (stop, length), made_by (served model), prompt (the user
                         turn), text, reasoning (null when there is none)
  heldout_samples.jsonl  the same for heldout.jsonl, answered greedily
  rejected.jsonl         answers not to be trained on, with `reason`; they are not asked again
  errors.jsonl           id, turn and reason of questions that failed; the next run asks them again
  lengths.png            histogram of the answers' lengths
  manifest.json          counts, tokens, length percentiles, served model, checksums
Each user turn of a conversation is asked in order, with the target's own earlier answers (without
their reasoning) in the history. A conversation ends early where an answer cannot be built on; its
other turns are then rejected as `no history`.
Costs 12 to 13 hours for 25,000 answers of Kimi-K2.5 on 8 GPUs (1,536 tokens/s); 0.6 GB of disk.
Prints progress (answers, tokens/s, requests in flight, errors, time left), and at the end
  01b_generate_synthetic: 25,181 answers, 61,022,114 tokens; length p50 2,210, p90 4,096, ...
"""
import argparse
import asyncio
import atexit
import fcntl
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

# ---- settings: the file, then KIT_NAME, then --name ---------------------------------------------
DATA = "/data"  # directory of all results
# server
SERVER_URL = "http://127.0.0.1:8000"  # vLLM server, or several, comma separated, of one model
TARGET = "moonshotai/Kimi-K2.5"  # hub id or directory of the model that the server must serve
TRUST_REMOTE_CODE = False  # run the Python code that comes with the target's tokenizer
CONCURRENCY = 256  # requests in flight, over all servers [1..]
READ_TIMEOUT_SEC = 3600.0  # for one whole answer; 4,096 tokens at 5 tokens/s take 820 s [0.1..]
GIVE_UP_MIN = 60.0  # minutes without any server until the stage ends; 0 = do not wait [0..]
# answers
MAX_TOKENS = 4096  # tokens of an answer; less where the server's context has no room [1..]
TEMPERATURE = 1.0  # of sampling, as the target is served; a small model does better at 0.6 [0..2]
TOP_P = 0.95  # of sampling; the held-out questions are answered greedily all the same [0..1]
THINKING = ""  # chat_template_kwargs thinking off or on; "" = what the template does by itself [|0|1]
EXTRA_BODY = "{}"  # more fields of the request, as JSON, such as {"top_k": 20}
KEEP_CUT = True  # keep answers cut by MAX_TOKENS, which are good training data
# ---- fixed facts --------------------------------------------------------------------------------
STAGE = "01b_generate_synthetic"
ATTEMPTS = 6  # of a request that the server got, before its question counts as failed
MAX_PAUSE_SEC = 60.0  # between attempts, growing from 1 s
SYNC_SEC = 2.0  # between fsyncs of what was appended
HEALTH_SEC = 15.0  # between health checks; two in a row that fail take a server out
MAX_BAD_SHARE = 0.2  # of degenerate answers, beyond which the run stops
MIN_JUDGED = 20  # answers before that share means something
MAX_FAILED_SHARE = 0.01  # of questions, up to which the stage is done without them
DEGENERATE = ("repetition", "empty", "not printable", "no </think>")  # reasons it counts
GREEDY_DROPS = {"top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty",
                "repetition_penalty"}  # sampling fields of EXTRA_BODY, left out when greedy


class Stop(Exception):
    """Ends the run with a message and a status; everything answered is kept."""


# ---- judging answers ----------------------------------------------------------------------------
def repeated_share(text):
    """Share of `text` that its end covers by saying one phrase (up to 200 characters) over and
    over, four times at least; 0 when it does not."""
    import numpy as np
    codes = np.frombuffer(text.strip().encode("utf-32-le", "replace"), dtype=np.uint32)
    most = 0
    for period in range(1, min(200, len(codes) // 4) + 1):
        if codes[-1] != codes[-1 - period]:
            continue
        differ = np.flatnonzero(codes[period:] != codes[:-period])
        run = len(codes) - (differ[-1] + 1 if len(differ) else 0)
        if run >= max(4 * period, 16):
            most = max(most, run)
    return most / max(1, len(codes))


def split_thinking(message, opens_thinking):
    """(text, reasoning) of a reply's message; reasoning is None when there is none. Without a
    reasoning parser on the server the thinking stands in the content."""
    text, reasoning = message.get("content") or "", message.get("reasoning")
    if reasoning is None and "</think>" in text:
        reasoning, text = text.split("</think>", 1)
    elif reasoning is None and (opens_thinking or text.lstrip().startswith("<think>")):
        reasoning, text = text, ""
    return text.strip(), reasoning and reasoning.strip().removeprefix("<think>").strip()


def verdict(sample, keep_cut, thinking):
    """Why an answer must not be trained on, or None. `thinking`: it was asked for."""
    text, reasoning = sample["text"], sample["reasoning"] or ""
    ended = sample["finish_reason"] == "stop"
    if not text and not reasoning:
        return "empty"
    if not any(char.isprintable() and not char.isspace() for char in reasoning + text):
        return "not printable"
    if sample["finish_reason"] == "repetition" or repeated_share(reasoning + text) > 0.5:
        return "repetition"
    if thinking and ended and not (text and sample["reasoning"] is not None):
        return "no </think>"
    if ended and not text:
        return "empty"
    return None if ended or keep_cut else "cut"


def check_reply(reply, vocab_size):
    """(prompt ids, answer ids, message, finish_reason) of the server's JSON reply. ValueError when
    it is not what a whole and consistent reply is."""
    try:
        choice, usage = reply["choices"][0], reply["usage"]
        prompt, answer = reply["prompt_token_ids"], choice["token_ids"]
        message, counts = choice["message"], (usage["prompt_tokens"], usage["completion_tokens"])
        reason = choice["finish_reason"]
        if (len(prompt), len(answer)) != counts:
            raise ValueError(f"{len(prompt)} + {len(answer)} token ids, usage says {counts}")
        if not all(type(i) is int and 0 <= i < vocab_size for i in (*prompt, *answer)):
            raise ValueError(f"a token id outside the vocabulary of {vocab_size}")
        if not isinstance(message, dict) or reason not in ("stop", "length", "repetition"):
            raise ValueError(f"finish_reason {reason!r}")
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no whole reply ({type(error).__name__}: {error})") from None
    return prompt, answer, message, reason


def load_tokenizer(directory, trust):
    """The tokenizer of a model's directory. Exits 1 where it needs its own code and may not."""
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust)
    except (OSError, ValueError, ImportError) as error:
        code = "trust_remote_code" in str(error)
        fail(f"no usable tokenizer in {directory} ({str(error).strip().splitlines()[0]}); to fix: "
             f"{'set TRUST_REMOTE_CODE to 1' if code else 'copy it again'}")


# ---- files that are appended to -----------------------------------------------------------------
def read_back(path):
    """Yield the rows of an append-only file. A torn last line (the run was killed, or the disk full,
    while it was written) is cut off and reported; damage elsewhere ends the stage."""
    size = path.stat().st_size if path.exists() else 0
    good = 0
    with open(path, "ab+") as file:
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.endswith(b"\n") else {}
                row["id"]
            except (ValueError, KeyError, TypeError):
                if good + len(line) < size:
                    fail(f"{path}, line {number} is damaged; to fix: sed -i {number}d {path}")
                print(f"{STAGE}: dropped 1 torn line ({len(line):,} bytes) at the end of {path}")
                break
            good += len(line)
            yield row
        file.truncate(good)


class Book:
    """What is answered: the append-only files, and what is known of each turn.

    known: {id: the answer's text for the history, or None where the conversation ends there}.
    """

    def __init__(self, out, questions):
        self.out, self.files, self.dirty = out, {}, set()
        self.known, self.counts, self.tokens = {}, Counter(), Counter()
        self.reasons, self.lengths, self.example = Counter(), [], None
        self.later = {i for question in questions for i in question["turn_ids"][:-1]}
        for name in ("samples", "heldout_samples", "rejected"):
            for row in read_back(out / f"{name}.jsonl"):
                self.take(name, row)
            self.files[name] = open(out / f"{name}.jsonl", "ab", buffering=0)
        self.files["errors"] = open(out / "errors.jsonl", "wb", buffering=0)

    def take(self, name, row):
        """Count a row, and remember its text where a later turn needs it."""
        self.counts[name] += 1
        if name == "errors":
            return
        self.known[row["id"]] = row["text"] if row["id"] in self.later else None
        if name == "rejected":
            self.known[row["id"]] = None
            self.reasons[row["reason"]] += 1
            self.example = row if row["reason"] in DEGENERATE else self.example
        else:
            self.tokens["prompt"] += row["prompt_len"]
            self.tokens["answer"] += len(row["token_ids"]) - row["prompt_len"]
            self.lengths.append(len(row["token_ids"]) - row["prompt_len"])

    def add(self, name, row):
        """Append a row; it is on the disk within SYNC_SEC."""
        line = memoryview(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        while line:
            line = line[self.files[name].write(line):]
        self.dirty.add(name)
        self.take(name, row)

    def judge(self, at_least):
        """Raise Stop when too many answers are degenerate."""
        bad = sum(self.reasons[reason] for reason in DEGENERATE)
        among = bad + self.counts["samples"]
        if among >= at_least and bad > MAX_BAD_SHARE * among:
            text = (self.example["reasoning"] or "") + self.example["text"]
            raise Stop(f"{bad:,} of {among:,} answers are degenerate, such as ({self.example['reason']}"
                       f") {text[-200:]!r}; to fix: see rejected.jsonl, mend the server or the "
                       f"sampling constants, then mv {self.out} aside")

    async def keep_synced(self):
        """fsync what was appended, every SYNC_SEC, for ever."""
        while True:
            await asyncio.sleep(SYNC_SEC)
            await asyncio.to_thread(self.sync)

    def sync(self):
        while self.dirty:
            os.fsync(self.files[self.dirty.pop()].fileno())


# ---- servers ------------------------------------------------------------------------------------
class Fleet:
    """The servers of SERVER_URL: which of them answer, what they serve, how busy they are."""

    def __init__(self, s, tokenizer):
        self.s, self.tokenizer = s, tokenizer
        self.urls = [url.strip().rstrip("/") for url in s.SERVER_URL.split(",") if url.strip()]
        self.busy = dict.fromkeys(self.urls, 0)  # requests in flight
        self.up, self.sessions, self.strikes = {}, {}, Counter()  # up: {url: (model, context)}
        self.away_sec, self.changed = time.monotonic(), asyncio.Event()
        self.fields = json.loads(s.EXTRA_BODY)
        if s.THINKING:
            self.fields.setdefault("chat_template_kwargs", {})["thinking"] = s.THINKING == "1"
        self.template = self.fields.get("chat_template_kwargs", {})
        self.overhead, self.opens_thinking, self.vocab_size, self.model = 0, False, 0, None

    def open(self, url):
        """A fresh session; the API key goes out as a header and nowhere else."""
        import aiohttp
        key = os.environ.get("VLLM_API_KEY")
        self.sessions[url] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=self.s.READ_TIMEOUT_SEC, sock_connect=10))

    async def call(self, url, path, body=None, timeout_sec=None):
        """The JSON of a reply. Raises Stop on a 4xx, ValueError on any other fault of the reply,
        OSError, aiohttp.ClientError or TimeoutError on one of the connection."""
        async with asyncio.timeout(timeout_sec), self.sessions[url].request(
                "POST" if body else "GET", url + path, json=body) as reply:
            raw = await reply.read()
        if 400 <= reply.status < 500 and reply.status not in (408, 425, 429):
            raise Stop(f"{url}{path} refuses with {reply.status}: {raw[:500].decode(errors='replace')}"
                       "; to fix: see its message" + " and set VLLM_API_KEY" *
                       (reply.status in (401, 403)))
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {raw[:200].decode(errors='replace')}")
        return json.loads(raw or "null")  # /health has no body

    async def greet(self, url):
        """Take a server in once it proves to be vLLM, to serve TARGET and to return token ids."""
        try:
            cards = (await self.call(url, "/v1/models", timeout_sec=30))["data"]
            cards = [(card["id"], card.get("root") or "", card.get("max_model_len"))
                     for card in cards]
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
            raise Stop(f"{url} is no vLLM server (/v1/models gives no list of models); to fix: "
                       f"vllm serve {self.s.TARGET}, or set SERVER_URL") from None
        wanted = {self.s.TARGET, Path(self.s.TARGET).name, self.s.TARGET.replace("/", "--")}
        mine = [card for card in cards if wanted & {
            part.removeprefix("models--") for name in card[:2] for part in (name, *Path(name).parts)}]
        if not mine:
            raise Stop(f"{url} serves {', '.join(c[0] for c in cards)}, TARGET is {self.s.TARGET}; "
                       "to fix: serve TARGET, or set TARGET")
        model, _, context = mine[0]
        await self.probe(url, model)
        self.up[url], self.model = (model, context or 1 << 62), self.model or (model, context)
        self.changed.set()

    async def probe(self, url, model):
        """Ask one small question, and compare the ids with what the tokenizer renders."""
        question = [{"role": "user", "content": "What is 2 + 3?"}]
        reply = await self.call(url, "/v1/chat/completions", self.body(model, question, 1, True),
                                min(300, self.s.READ_TIMEOUT_SEC))
        if not (isinstance(reply, dict) and reply.get("prompt_token_ids")):
            try:
                version = (await self.call(url, "/version", timeout_sec=30))["version"]
            except (Stop, ValueError, KeyError, TypeError):
                version = "no vLLM, /version does not answer"
            raise Stop(f"{url} returns no token ids (version: {version}); to fix: serve with vLLM "
                       "0.11 or later, without a proxy that drops return_token_ids")
        prompt = check_reply(reply, self.vocab_size)[0]
        rendered = render(self.tokenizer, question, False, self.template)
        if prompt[:len(rendered)] != rendered:
            raise Stop(f"{url} renders a question as {prompt}, the tokenizer of {self.s.TARGET} as "
                       f"{rendered}; to fix: serve TARGET with its own chat template")
        self.overhead = len(prompt)
        self.opens_thinking = self.tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")

    def body(self, model, messages, max_tokens, greedy):
        """The fields of a chat request."""
        extra = {k: v for k, v in self.fields.items() if not (greedy and k in GREEDY_DROPS)}
        return {"top_p": 1.0 if greedy else self.s.TOP_P} | extra | {
            "model": model, "messages": messages, "max_tokens": max_tokens,
            "temperature": 0.0 if greedy else self.s.TEMPERATURE, "return_token_ids": True}

    def room(self, messages, context):
        """Tokens that an answer to `messages` may have. The bytes bound the prompt; it is rendered
        only where they leave it open."""
        size = sum(len(m["content"].encode()) + self.overhead for m in messages)
        if size + self.s.MAX_TOKENS > context:
            size = len(render(self.tokenizer, messages, True, self.template))
        return min(self.s.MAX_TOKENS, context - size)

    async def lose(self, url, why):
        """Leave a server out; what was asked of it fails at once and is asked elsewhere."""
        if self.up.pop(url, None):
            print(f"\n{STAGE}: {url} is away ({why})", flush=True)
            self.away_sec = time.monotonic()
            self.changed.clear()
            session = self.sessions[url]
            self.open(url)
            await session.close()

    async def watch(self):
        """Greet servers that are away, check those that are not; for ever. Raises Stop when none
        has been there for GIVE_UP_MIN."""
        said_sec = checked_sec = time.monotonic() - 50
        for url in self.urls:
            self.open(url)
        while True:
            now, why = time.monotonic(), {}
            check, checked_sec = (True, now) if now - checked_sec > HEALTH_SEC else (False, checked_sec)
            for url in self.urls:
                try:
                    if url not in self.up:
                        await self.greet(url)
                    elif check:
                        await self.call(url, "/health", timeout_sec=30)
                    self.strikes[url] = 0
                except TRANSIENT() as error:
                    why[url] = str(error) or type(error).__name__
                    self.strikes[url] += 1
                    if self.strikes[url] > 1:
                        await self.lose(url, why[url])
            waited_sec = time.monotonic() - self.away_sec
            if not self.up and waited_sec >= 60 * self.s.GIVE_UP_MIN:
                raise Stop(f"no server for {waited_sec / 60:.0f} minutes ({why}); to fix: vllm serve "
                           f"{self.s.TARGET}, or set SERVER_URL, and run it again to continue")
            if not self.up and now - said_sec >= 60:
                print(f"\n{STAGE}: waiting for a server ({why})", flush=True)
                said_sec = now
            await asyncio.sleep(1)

    async def ask(self, messages, greedy):
        """(sample fields, None), or (None, reason): `too long`, or what the last attempt met."""
        why = ""
        attempt = 0
        while attempt < ATTEMPTS:
            if attempt:
                await asyncio.sleep(min(MAX_PAUSE_SEC, 2 ** attempt / 2) * (0.5 + random.random()))
            while not self.up:
                self.changed.clear()
                await self.changed.wait()
            url = min(self.up, key=self.busy.get)
            model, context = self.up[url]
            room = self.room(messages, context)
            if room < min(16, self.s.MAX_TOKENS):
                return None, "too long"
            attempt += 1
            self.busy[url] += 1
            try:
                reply = await self.call(url, "/v1/chat/completions",
                                        self.body(model, messages, room, greedy))
                prompt, answer, message, reason = check_reply(reply, self.vocab_size)
                text, reasoning = split_thinking(message, self.opens_thinking)
                return {"token_ids": prompt + answer, "prompt_len": len(prompt),
                        "finish_reason": reason, "made_by": model,
                        "prompt": messages[-1]["content"], "text": text,
                        "reasoning": reasoning}, None
            except TRANSIENT() as error:
                why = f"{type(error).__name__}: {error}"[:300]
                if type(error).__name__ == "ClientConnectorError":
                    attempt -= 1  # refused: the question never got there
                    await self.lose(url, why)
            finally:
                self.busy[url] -= 1
        return None, why


def TRANSIENT():
    """What a request may meet that passes: faults of the connection and broken replies."""
    import aiohttp
    return aiohttp.ClientError, asyncio.TimeoutError, ValueError, OSError


def render(tokenizer, messages, ask, template):
    """Token ids of the chat template; `ask` adds the start of the assistant's turn."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=True,
                                              return_dict=False, **template))


# ---- the run ------------------------------------------------------------------------------------
async def converse(question, greedy, book, fleet, s):
    """Ask the user turns of a question in order, and write a row for each that is not known yet."""
    history, turn, ended = [], -1, None  # ended: (file, reason) of the turns that cannot be asked
    for message in question["messages"]:
        history.append(message)
        if message["role"] != "user":
            continue
        turn += 1
        row = {"id": question["turn_ids"][turn], "source": question["source"], "turn": turn}
        if row["id"] not in book.known:
            fields, why = (None, ended[1]) if ended else await fleet.ask(history, greedy)
            row |= fields or {"token_ids": [], "prompt_len": 0, "finish_reason": None,
                              "made_by": fleet.model[0], "prompt": message["content"], "text": "",
                              "reasoning": None}
            name = "heldout_samples" if greedy else "samples"
            if fields:
                why = verdict(row, s.KEEP_CUT, fleet.opens_thinking or s.THINKING == "1")
            elif why not in ("too long", "no history"):
                name, ended, row = "errors", ("errors", why), {"id": row["id"], "turn": turn,
                                                               "reason": why}
            if why and name != "errors":
                name, row["reason"] = "rejected", why
            book.add(name, row)
        text = book.known.get(row["id"])
        ended = ended or (None if text else ("rejected", "no history"))
        history.append({"role": "assistant", "content": text})


async def run(questions, heldout, book, fleet, s):
    """Answer everything that is not answered. Raises Stop when it cannot go on."""
    todo = [(q, greedy) for greedy, those in ((True, heldout), (False, questions)) for q in those
            if not book.known.keys() >= set(q["turn_ids"])]
    total = sum(len(q["turn_ids"]) for q in heldout + questions)
    bar = progress(total, "answers", len(book.known))
    start_sec, before = time.monotonic(), book.tokens.copy()
    queue, loop, stopped = iter(todo), asyncio.get_running_loop(), asyncio.Event()
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda n=number: (signals.append(n), stopped.set()))

    async def work():
        for question, greedy in queue:
            await converse(question, greedy, book, fleet, s)
            book.judge(MIN_JUDGED)
            sec = time.monotonic() - start_sec
            out, read = ((book.tokens[k] - before[k]) / sec for k in ("answer", "prompt"))
            bar.set_postfix_str(f"{out:,.0f} tokens/s out, {read:,.0f} in, {sum(fleet.busy.values())}"
                                f" in flight, {book.counts['errors']} errors", refresh=False)
            bar.update(len(book.known) - bar.n)

    async def workers():
        await asyncio.gather(*(work() for _ in range(min(s.CONCURRENCY, len(todo)))))
    tasks = [asyncio.ensure_future(job) for job in (
        workers(), fleet.watch(), book.keep_synced(), stopped.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if signals:
            raise Stop("stopped; to continue: run it again", 128 + signals[0])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in fleet.sessions.values():
            await session.close()
        book.sync()
        bar.close()


def draw_lengths(path, lengths, max_tokens):
    """A histogram of the answers' lengths in tokens."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.hist(lengths, bins=40, range=(0, max(max_tokens, max(lengths))))
    axes.set(xlabel="tokens of an answer", ylabel="answers", title="Lengths of the answers")
    write_whole(path, lambda tmp: figure.savefig(tmp, format="png", dpi=120))


def file_facts(path):
    """Bytes, lines and sha256 of a file."""
    digest, lines = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            lines += chunk.count(b"\n")
    return {"bytes": path.stat().st_size, "lines": lines, "sha256": digest.hexdigest()}


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
    out, source = Path(s.DATA) / STAGE, Path(s.DATA) / "01_generate"
    made = read_manifest(source)
    directory, target_id = find_model(s.TARGET)
    if made["inputs"]["target"] != target_id:
        fail(f"{source} was made for another target (got {made['inputs']['target']}, want "
             f"{target_id}); to fix: set TARGET to that, or DATA to another directory")
    questions, heldout = ([json.loads(line) for line in open(source / name, encoding="utf-8")]
                          for name in ("questions.jsonl", "heldout.jsonl"))
    number = len(questions) + len(heldout)
    manifest = open_stage(
        out, settings={key: getattr(s, key) for key in (
            "MAX_TOKENS", "TEMPERATURE", "TOP_P", "THINKING", "EXTRA_BODY", "KEEP_CUT")},
        inputs={"target": target_id, "01_generate": made["id"]}, size={"questions": number})
    config = json.loads((directory / "config.json").read_text())
    fleet = Fleet(s, load_tokenizer(directory, s.TRUST_REMOTE_CODE))
    fleet.vocab_size = config.get("text_config", config)["vocab_size"]
    book = Book(out, questions + heldout)
    try:
        asyncio.run(run(questions, heldout, book, fleet, s))
        book.judge(1)
    except Stop as stop:
        fail(stop.args[0], *stop.args[1:])
    failed = book.counts["errors"]
    if failed > MAX_FAILED_SHARE * number:
        fail(f"{failed:,} questions failed, see {out / 'errors.jsonl'}; to fix: run it again")
    lengths = sorted(book.lengths) or [0]
    percentiles = {f"p{p}": lengths[min(len(lengths) - 1, len(lengths) * p // 100)]
                   for p in (50, 90, 99)}
    draw_lengths(out / "lengths.png", lengths, s.MAX_TOKENS)
    names = ["samples.jsonl", "heldout_samples.jsonl", "rejected.jsonl", "errors.jsonl"]
    write_whole(out / "manifest.json", manifest | {
        "counts": {name: book.counts[name] for name in (
            "samples", "heldout_samples", "rejected", "errors")} | {"reasons": book.reasons},
        "tokens": book.tokens, "lengths": percentiles, "vocab_size": fleet.vocab_size,
        "server": dict(zip(("model", "max_model_len"), fleet.model or (None, None))),
        "files": {name: file_facts(out / name) for name in names},
        "size": {"questions": number - failed}, "done": True})  # so the next run asks these again
    print(f"{STAGE}: rejected:", ", ".join(f"{k} {v:,}" for k, v in book.reasons.most_common()) or 0)
    sec = int(time.monotonic() - start_sec)
    print(f"{STAGE}: {len(lengths):,} answers, {book.tokens['answer']:,} tokens (length "
          f"{', '.join(f'{k} {v:,}' for k, v in percentiles.items())}), {failed:,} failed, to {out} "
          f"in {sec // 3600}h {sec // 60 % 60:02d}m {sec % 60:02d}s")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(f"{error}; to fix: make room or access, and run it again to continue")
