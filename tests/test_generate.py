"""01_generate: rows good and bad, the choice of questions, boundaries of recorded answers."""
import gzip
import hashlib
import http.server
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading

import pytest


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chat(*texts, system=None):
    turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
    return [{"from": "system", "value": system}] * (system is not None) + turns


def write_jsonl(path, rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n"
                              for row in rows))
    return path


@pytest.fixture(scope="session")
def module(load):
    return load("01_generate")


@pytest.fixture(scope="session")
def light(tmp_path_factory):
    """Environment in which transformers finds no torch: a start costs 1 s instead of 4 s."""
    path = tmp_path_factory.mktemp("light")
    (path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    return {"PYTHONPATH": str(path)}


@pytest.fixture
def generate(stage, target, tmp_path, light):
    """generate(dataset, flags...) runs 01 into tmp_path/data; returns (process, directory)."""
    def run(dataset, *flags, check=True, data=tmp_path / "data"):
        done = stage("01_generate", "--data", data, "--target", target, "--dataset", dataset, *flags,
                     check=check, env=light)
        assert "Traceback" not in done.stdout
        return done, data / "01_generate"
    return run


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(kilobytes) mounts a tmpfs of that size and returns its path."""
    mounted = []

    def mount(kilobytes):
        mounted.append(tmp_path / f"disk{len(mounted)}")
        mounted[-1].mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs",
                           mounted[-1]], capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        return mounted[-1]
    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], capture_output=True)


@pytest.fixture
def dataset(tmp_path):
    """300 conversations, a fifth of them with two turns, from three sources."""
    return write_jsonl(tmp_path / "rows.jsonl", [
        {"conversations": chat(*[f"Question {i}?", f"Answer {i}.", "And then?", f"More of {i}."][
            :4 if i % 5 == 0 else 2], system="Be brief." if i % 7 == 0 else None),
         "source": "abc"[i % 3]} for i in range(300)])


# ---- one row ------------------------------------------------------------------------------------
@pytest.mark.parametrize("row, roles", [
    ({"conversations": chat("a", "b", "c")}, "uau"),
    ({"conversations": chat("a", "b", system="s")}, "sua"),
    ({"conversations": [{"from": "Human ", "value": "a"}, {"from": "chatgpt", "value": "b"}]}, "ua"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "ua"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                {"type": "text", "text": "b"}]}]}, "u"),
    ({"prompt": "a"}, "u"), ({"question": "a", "answer": "unused"}, "u"),
    ({"prompt": [{"role": "user", "content": "a"}]}, "u"),
    ({"conversations": None, "messages": [{"role": "user", "content": "a"}]}, "u"),
    ({"conversations": chat("a", "b", system="  ")}, "ua"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "call"},
                   {"role": "tool", "content": "42"}, {"role": "assistant", "content": "b"}]}, "u"),
    ({"messages": [{"role": "user", "content": "a"},
                   {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}]}, "u"),
])
def test_forms_of_conversations(module, row, roles):
    assert "".join(turn["role"][0] for turn in module.conversation(row)) == roles


def test_ids_fold_white_space_and_ignore_what_is_around(module):
    def ids(*turns):
        return module.make_turn_ids([{"role": role, "content": text} for role, text in turns])
    base = ids(("system", "s"), ("user", "a  b"), ("assistant", "x"), ("user", "c"))
    assert base == ids(("system", "s"), ("user", " a\nb "), ("assistant", "y"), ("user", "c"))
    assert base[:1] == ids(("system", "s"), ("user", "a b"))
    assert base[0] != ids(("user", "a b"))[0] and base[0] != ids(("user", "s"), ("user", "a b"))[1]
    assert len(set(ids(("user", "a"), ("user", "a")))) == 2
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in base)


BAD_ROWS = [b"\n" * 0 + b"{\n", b"not json\n", b"{'a': 1}\n", b"\xff\xfe\x00\x01\n", b"\x00\x01\x02\n",
            b'{"conversations": [{"from": "human", "value": "caf\xe9"}]}\n',  # Latin-1
            "{\"prompt\": \"x\"}\n".encode("utf-16"), b"[" * 100000 + b"\n", b"1e999999\n", b"NaN\n",
            b'{"prompt": "a"} {"prompt": "b"}\n', b'"text"\n', b"null\n", b"[]\n", b"{}\n", b"7\n",
            b"[[{}]]\n", b'{"prompt": 1' + b"0" * 5000 + b"}\n",
            b'{"prompt": "' + b"x" * (17 << 20) + b'"}\n',  # longer than a line may be
            {"conversations": None}, {"conversations": []}, {"conversations": "text"},
            {"conversations": {"from": "human", "value": "a"}}, {"conversations": [None]},
            {"conversations": ["a", "b"]}, {"conversations": [[]]}, {"conversations": [{}]},
            {"conversations": [{"from": "human"}]}, {"conversations": [{"value": "a"}]},
            {"conversations": [{"from": "human", "value": None}]},
            {"conversations": [{"from": "human", "value": ""}]},
            {"conversations": [{"from": "human", "value": " \n\t"}]},
            {"conversations": [{"from": "human", "value": 7}]},
            {"conversations": [{"from": "human", "value": ["a", 3]}]},
            {"conversations": [{"from": "human", "value": {"text": "a"}}]},
            {"conversations": [{"from": 3, "value": "a"}]},
            {"conversations": [{"from": "alien", "value": "a"}]},
            {"conversations": [{"from": "gpt", "value": "a"}]},
            {"conversations": [{"from": "system", "value": "a"}]},
            {"conversations": chat("a") + chat("b")},  # two questions in a row
            {"conversations": chat("a", "b") + [{"from": "gpt", "value": "c"}]},
            {"conversations": chat("a", "b") + [{"from": "system", "value": "c"}]},
            {"conversations": [{"from": "tool", "value": "a"}]},
            {"conversations": chat("nul \0 inside", "b")}, {"conversations": chat("lone \ud800", "b")},
            {"conversations": chat("a", "lone \udfff")},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            {"messages": [{"role": "user", "content": [None]}]}, {"prompt": 5}, {"prompt": ["a"]},
            {"text": "no such column"}, {"prompt": "word " * 60000}]


ODD_SOURCES = [{"source": source, "prompt": f"odd {i}"} for i, source in enumerate(
    ["\ud800", "line\nbreak", 5, None, {"a": 1}, ["a"], "", "\0", "x" * 100000])]


def test_odd_sources_are_no_reason_to_stop(generate, dataset):
    with dataset.open("ab") as file:
        file.write(write_jsonl(dataset.with_name("odd"), ODD_SOURCES).read_bytes())
    _, out = generate(dataset, "--num-samples", "500", "--heldout", "5")
    assert len(lines(out / "questions.jsonl")) == 295 + len(ODD_SOURCES)


@pytest.mark.parametrize("kind", ["fifo", "loop", "dangling", "folder of them", "empty name", "device"])
def test_what_is_no_file_is_refused_and_never_waited_for(generate, tmp_path, dataset, kind, monkeypatch):
    path = tmp_path / "odd/rows.jsonl"
    path.parent.mkdir()
    os.mkfifo(path) if kind in ("fifo", "folder of them") else path.symlink_to(
        {"loop": path, "device": "/dev/zero"}.get(kind, tmp_path / "gone"))
    name = {"folder of them": path.parent, "empty name": ""}.get(kind, path)
    monkeypatch.chdir(tmp_path)  # which holds a good data set
    done, _ = generate(name, check=False)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("01_generate: no ") and "; to fix: " in last


def test_a_folder_of_unlike_files(generate, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(parquet_with("prompt", [f"a {i}" for i in range(30)]))
    (folder / "b.parquet").write_bytes(parquet_with("conversations", [chat(f"b {i}", "c") for i in range(30)]))
    (folder / "c.parquet").write_bytes(parquet_with("x", [1, 2]))
    _, out = generate(folder, "--num-samples", "500", "--heldout", "5")
    assert len(lines(out / "questions.jsonl")) == 55
    assert json.loads((out / "manifest.json").read_text())["rows"]["unusable"]["no conversation"]["count"] == 2


def test_bad_rows_are_skipped_and_counted_with_an_example(generate, dataset):
    assert len(BAD_ROWS) >= 40
    with dataset.open("ab") as file:
        file.write(write_jsonl(dataset.with_name("bad"), BAD_ROWS).read_bytes())
    done, out = generate(dataset, "--num-samples", "500", "--heldout", "5")
    assert "only 295 questions, 500 were wanted" in done.stdout
    unusable = json.loads((out / "manifest.json").read_text())["rows"]["unusable"]
    # the UTF-16 row is two lines for a reader of bytes, and one of them is not blank
    assert sum(facts["count"] for facts in unusable.values()) in (len(BAD_ROWS), len(BAD_ROWS) + 1)
    for reason in ("not JSON", "not UTF-8", "not an object", "no conversation", "wrong roles", "empty",
                   "not text", "lone surrogate", "no user turn", "line too long", "too long"):
        facts = unusable[reason]
        assert facts["count"] >= 1 and facts["example"].startswith("rows.jsonl, row ")
        assert len(facts["example"]) < 300 and facts["example"].isascii()
    assert len(lines(out / "questions.jsonl")) == 295


def parquet_with(column, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({column: rows}), sink)
    return sink.getvalue().to_pybytes()


class NoBar:
    def update(self):
        pass


GOOD = b'{"prompt": "a"}\n{"prompt": "b"}\n'
BAD_FILES = {
    "empty.jsonl": b"", "blank.jsonl": b"\n\n \n", "empty.parquet": b"", "empty.json": b"",
    "gzip.jsonl": gzip.compress(GOOD), "zip.jsonl": b"PK\x03\x04rest", "zstd.jsonl": b"\x28\xb5\x2f\xfdx",
    "gzip.parquet": gzip.compress(GOOD), "binary.jsonl": random.Random(0).randbytes(100000),
    "utf16.jsonl": GOOD.decode().encode("utf-16"), "utf16.json": b"\xfe\xff" + GOOD.decode().encode("utf-16-be"),
    "utf32.jsonl": GOOD.decode().encode("utf-32"), "utf16-no-bom.jsonl": GOOD.decode().encode("utf-16-le"),
    "lfs.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n", "cr.jsonl": GOOD.replace(b"\n", b"\r"),
    "pretty.json": b'{\n"prompt": "a"\n}\n{\n"prompt": "b"\n}\n', "null.json": b"null", "deep.json": b'{"a":' * 50000,
    "zero.parquet": parquet_with("prompt", []), "binary.parquet": parquet_with("prompt", [b"a", b"b"]),
    "struct.parquet": parquet_with("messages", [[{"role": "user", "content": {"parts": ["a"]}}]] * 5),
    "map.parquet": parquet_with("conversations", [{"a": {"from": "human", "value": "x"}}] * 5),
    "names.json": b'{"1": {"prompt": "a"}, "2": {"prompt": "b"}}', "html.jsonl": b"<html>\n" * 9, "text.parquet": GOOD * 20, "text.jsonl": b"hello\n" * 9,
    "list.json": b"[1, 2, 3]", "broken.json": b'[{"prompt": "a"}, {"prom', "object.json": b'{"a": 1}',
    "csv.jsonl": b"prompt,answer\na,b\n", "half.jsonl": b'{"prompt": "one long li',
    "nested.json": b"[" * 200000, "ints.parquet": parquet_with("prompt", [1, 2, 3]),
    "column.parquet": parquet_with("text", ["a", "b"]),
    "cut.parquet": parquet_with("prompt", ["a"] * 5000)[:-300],
    "holed.parquet": parquet_with("prompt", [os.urandom(50).hex() for _ in range(3000)]).replace(b"a", b"\xff"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_end_with_one_clear_line(module, name, tmp_path, monkeypatch, capsys):
    """As main does it, but in this process: 22 starts of Python would cost a minute."""
    path = tmp_path / name
    path.write_bytes(BAD_FILES[name])
    with pytest.raises(SystemExit) as end:
        _, tally = module.choose(module.find_files(str(path), None), 10, 0, set(), lambda turns: True, NoBar())
        module.check_rows(tally, str(path))
    assert end.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("01_generate: ") and "; to fix: " in last and len(last) < 700, last


@pytest.mark.parametrize("name, content, count", [
    ("bom.jsonl", b"\xef\xbb\xbf" + GOOD, 2), ("crlf.jsonl", GOOD.replace(b"\n", b"\r\n"), 2),
    ("no-newline.jsonl", GOOD[:-1], 2), ("list.json", b"[" + GOOD.replace(b"}\n{", b"},\n{") + b"]", 2),
    ("lines.json", GOOD, 2), ("wrapped.json", b'{"version": 1, "data": [{"prompt": "a"}]}', 1),
    ("one.json", b'{"prompt": "a"}', 1), ("good.parquet", parquet_with("prompt", ["a", "b", "c"]), 3),
    ("parquet.jsonl", parquet_with("prompt", ["a", "b"]), 2),
    ("latin.parquet", parquet_with("prompt", ["a", "b", "cafe", "d"]).replace(b"cafe", b"caf\xe9"), 3),
])
def test_odd_files_that_are_read(module, name, content, count, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    chosen, tally = module.choose([path], 10, 0, set(), lambda turns: True, NoBar())
    assert len(chosen) == count
    assert sum(facts["count"] for facts in tally["unusable"].values()) == tally["rows"] - count


def test_a_folder_prefers_parquet_and_skips_hidden_files(module, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    for name in ("b.jsonl", "sub/a.parquet", ".hidden.parquet", "z.parquet", ".cache/huggingface/c.parquet"):
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in module.find_files(str(tmp_path), None)] == ["a.parquet", "z.parquet"]


# ---- the choice ---------------------------------------------------------------------------------
def test_smaller_is_a_prefix_and_growing_keeps_the_heldout_apart(generate, dataset):
    seen, held = [], None
    for number in (10, 60, 200):
        _, out = generate(dataset, "--num-samples", number, "--heldout", "20")
        ids = [row["id"] for row in lines(out / "questions.jsonl")]
        heldout = [row["id"] for row in lines(out / "heldout.jsonl")]
        assert len(ids) == number == len(set(ids)) and ids[:len(seen)] == seen
        assert not set(ids) & set(heldout) and held in (None, heldout) and len(heldout) == 20
        seen, held = ids, heldout
        done, _ = generate(dataset, "--num-samples", number, "--heldout", "20")
        assert "already done" in done.stdout
    done, _ = generate(dataset, "--num-samples", "10", "--heldout", "20", check=False)
    assert done.returncode == 1 and "NUM_SAMPLES (there 200, now 10)" in done.stdout
    done, _ = generate(dataset, "--num-samples", "200", "--heldout", "30", check=False)
    assert done.returncode == 1 and "HELDOUT (there 20, now 30)" in done.stdout  # it would take from train
    done, out = generate(dataset, "--num-samples", "9999", "--heldout", "20")
    ids = [row["id"] for row in lines(out / "questions.jsonl")]
    assert len(ids) == 280 and ids[:200] == seen and not set(ids) & set(held)
    done, _ = generate(dataset, "--num-samples", "9999", "--heldout", "20", "--seed", "1", check=False)
    assert done.returncode == 1 and "SEED" in done.stdout and "mv " in done.stdout


def test_files_hold_what_the_docstring_says(generate, dataset):
    _, out = generate(dataset, "--num-samples", "100", "--heldout", "10")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["done"] and set(manifest["inputs"]) == {"dataset", "target"}
    for name, facts in manifest["files"].items():
        raw = (out / name).read_bytes()
        assert facts == {"bytes": len(raw), "lines": raw.count(b"\n"),
                         "sha256": hashlib.sha256(raw).hexdigest()}
    questions, samples = lines(out / "questions.jsonl"), lines(out / "samples.jsonl")
    assert all(set(q) == {"id", "source", "messages", "turn_ids"} and q["id"] == q["turn_ids"][-1]
               and {m["role"] for m in q["messages"]} <= {"system", "user"} for q in questions)
    assert [s["id"] for s in samples] == [i for q in questions for i in q["turn_ids"]]
    assert set(samples[0]) == {"id", "source", "turn", "token_ids", "prompt_len", "finish_reason",
                               "made_by", "prompt", "text", "reasoning"}
    assert manifest["tokens"]["prompt"] == sum(
        s["prompt_len"] for s in samples + lines(out / "heldout_samples.jsonl"))
    assert sum(manifest["sources"].values()) == 100
    assert str(out) not in (out / "manifest.json").read_text()  # relative: the data may move


def test_boundaries_of_recorded_answers(generate, dataset, target):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(target)
    _, out = generate(dataset, "--num-samples", "100", "--heldout", "10")
    for sample in lines(out / "samples.jsonl"):
        prompt, answer = (sample["token_ids"][:sample["prompt_len"]],
                          sample["token_ids"][sample["prompt_len"]:])
        assert tokenizer.decode(answer) == sample["text"] + "<|im_end|>"
        assert tokenizer.decode(prompt).endswith(
            f"<|im_start|>user\n{sample['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.decode(prompt).count("<|im_start|>assistant") == sample["turn"] + 1


@pytest.mark.parametrize("template, status, words", [
    ("{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' }}", 0,
     "10 rows unusable: the target's template takes no system"), (None, 1, "no chat template")])
def test_a_template_that_refuses_drops_the_rows_or_is_named(generate, target, tmp_path, template, status, words):
    """As Gemma 2 and older Mistrals do; and a base model has none at all."""
    shutil.copytree(target, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "target/chat_template.jinja").unlink(missing_ok=True)
    config = tmp_path / "target/tokenizer_config.json"
    facts = json.loads(config.read_text())
    whole = facts.pop("chat_template", None) or (target / "chat_template.jinja").read_text()
    config.write_text(json.dumps(facts | ({"chat_template": template + whole} if template else {})))
    rows = [{"conversations": [{"from": "system", "value": "Be brief."}] * (i < 10) + [
        {"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "Yes."}]} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, out = generate(tmp_path / "rows.jsonl", "--num-samples", "40", "--heldout", "5", "--target",
                         tmp_path / "target", check=False)
    assert done.returncode == status and words in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert status or len(lines(out / "questions.jsonl")) == 25


def test_last_turn_only_and_sources(generate, dataset):
    done, out = generate(dataset, "--num-samples", "60", "--heldout", "5", "--last-turn-only", "1",
                         "--sources", "a, b")
    questions, samples = lines(out / "questions.jsonl"), lines(out / "samples.jsonl")
    assert [s["id"] for s in samples] == [q["id"] for q in questions]
    assert {q["source"] for q in questions} == {"a", "b"} and "sources: " in done.stdout
    assert json.loads((out / "manifest.json").read_text())["rows"]["other_source"] == 100
    done, _ = generate(dataset, "--sources", "none", check=False, data=out / "elsewhere")
    assert done.returncode == 1 and "choose from a, b, c" in done.stdout


def test_duplicates_collapse_and_openings_never_stand_on_both_sides(generate, tmp_path):
    rows = [{"conversations": chat(f"Q {i % 40}", "A", *[f"then {i}", "B"][:2 * (i // 40)])}
            for i in range(80)] + [{"conversations": chat(f"  Q\n{i} ", "A")} for i in range(40)]
    _, out = generate(write_jsonl(tmp_path / "rows.jsonl", rows), "--num-samples", "30", "--heldout", "10")
    firsts = [[row["turn_ids"][0] for row in lines(out / name)] for name in ("questions.jsonl", "heldout.jsonl")]
    assert len(set(firsts[0] + firsts[1])) == 40
    assert json.loads((out / "manifest.json").read_text())["rows"]["duplicates"] == 80


def test_too_few_rows_are_a_clear_error(generate, tmp_path):
    done, out = generate(write_jsonl(tmp_path / "few.jsonl", [{"prompt": "a"}]), check=False)
    assert done.returncode == 1 and "lower HELDOUT" in done.stdout
    assert not list(out.glob("*.jsonl")) and not json.loads((out / "manifest.json").read_text())["done"]


# ---- sources elsewhere --------------------------------------------------------------------------
@pytest.mark.parametrize("name, want", [("/no/such/file.jsonl", "no data set at"), ("no-such", "no data set at"),
                                        ("a/b.parquet", "no data set at"), ("nobody/nothing", "hub")])
def test_a_data_set_that_is_not_there(generate, name, want):
    done, _ = generate(name, check=False)
    assert done.returncode == 1 and want in done.stdout.splitlines()[-1] and "; to fix: " in done.stdout


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub of one data set, {name: content} in server.files; server.asked are the files it sent."""

    def do_GET(self):
        server, path, sha = self.server, self.path.split("?")[0], "c" * 40
        facts = {"id": "some/set", "sha": sha, "siblings": [{"rfilename": n} for n in server.files]}
        name = path.removeprefix(f"/datasets/some/set/resolve/{sha}/")
        if path in ("/api/datasets/some/set", "/api/datasets/some/set/revision/main",
                    f"/api/datasets/some/set/revision/{sha}"):
            body = json.dumps(facts).encode()
        elif path.startswith("/api/datasets/some/set/tree/"):
            body = json.dumps([{"type": "file", "path": n, "size": len(c),
                                "oid": hashlib.sha1(c).hexdigest()} for n, c in server.files.items()]).encode()
        elif name in server.files:
            body = server.files[name]
            server.asked += [name] if self.command == "GET" else []
        else:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", len(body))
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", hashlib.sha1(body).hexdigest())
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:len(body) // 2 if name == server.cut else None])

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked, server.cut = {}, [], None
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def from_hub(stage, target, tmp_path, light, hub):
    """from_hub() runs 01 on the hub's some/set; returns (process, directory)."""
    def run(number):
        env = light | {"HF_HUB_OFFLINE": "0", "HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1",
                       "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
        done = stage("01_generate", "--data", tmp_path / "data", "--target", target, "--dataset", "some/set",
                     "--heldout", 2, "--num-samples", number, check=False, env=env)
        assert "Traceback" not in done.stdout
        return done, tmp_path / "data/01_generate"
    return run


def test_a_hub_data_set_is_copied_once(from_hub, hub):
    """Only the train split; a copy that broke off is finished; a second run needs no hub."""
    parts = {f"data/train-{i}.parquet": parquet_with("prompt", [f"{i} {j}" for j in range(9)]) for i in range(2)}
    hub.files = {"README.md": b"x", "data/test-0.parquet": parquet_with("prompt", ["t"]), "x.json": b"{}"} | parts
    hub.cut = "data/train-1.parquet"
    done, out = from_hub(5)
    assert done.returncode == 1 and "cannot copy some/set from the hub" in done.stdout.splitlines()[-1]
    hub.cut, hub.asked = None, []
    done, out = from_hub(5)
    assert done.returncode == 0 and hub.asked == ["data/train-1.parquet"], done.stdout
    hub.files, hub.asked = {}, []
    done, out = from_hub(16)
    assert done.returncode == 0 and hub.asked == [] and len(lines(out / "questions.jsonl")) == 16
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["inputs"]["dataset"] == "some/set" and manifest["rows"]["rows"] == 18
    run = json.loads((out / "run.json").read_text())
    assert run["rows"] == 18 and run["seconds"] > 0


def test_a_hub_data_set_of_json_files(from_hub, hub):
    """The hub client's own JSON files beside the copy are no part of the data."""
    hub.files = {"rows.json": json.dumps([{"prompt": f"{i}"} for i in range(9)]).encode()}
    for number in (3, 7):
        done, out = from_hub(number)
        assert done.returncode == 0, done.stdout
        rows = json.loads((out / "manifest.json").read_text())["rows"]
        assert rows["rows"] == 9 and rows["unusable"] == {}


def test_a_hub_data_set_without_rows_is_named(from_hub, hub):
    hub.files = {"README.md": b"x", "pictures.zip": b"PK"}
    done, _ = from_hub(5)
    assert done.returncode == 1 and "no .parquet, .jsonl or .json file" in done.stdout.splitlines()[-1]


def test_a_data_set_is_known_by_content_not_by_path(module, dataset, tmp_path):
    there = tmp_path / "moved" / dataset.name
    there.parent.mkdir()
    there.write_bytes(dataset.read_bytes())
    assert module.dataset_id(str(dataset), [dataset]) == module.dataset_id(str(there), [there])
    there.write_bytes(dataset.read_bytes()[:-1] + b" ")
    assert module.dataset_id(str(dataset), [dataset]) != module.dataset_id(str(there), [there])


def test_a_full_disk_ends_with_one_line(generate, dataset, small_disk):
    done, out = generate(dataset, "--num-samples", "280", "--heldout", "10", check=False,
                         data=small_disk(100) / "data")
    assert done.returncode == 1 and "No space left" in done.stdout.splitlines()[-1]
    assert not list(out.glob(".*.tmp"))


@pytest.mark.slow  # a minute: as many rows as open-perfectblend has, in a process of its own
def test_streams_1_4_million_rows_in_under_2_gb(kit, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    path, words = tmp_path / "big.parquet", ["lorem", "ipsum", "dolor", "sit", "amet"] * 40
    writer = None
    for part in range(142):
        table = pa.Table.from_pylist([
            {"conversations": chat(f"Question {part} {i}", " ".join(words)), "source": "x"}
            for i in range(10000)])
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()
    code = ("import importlib, sys; from pathlib import Path; m = importlib.import_module('01_generate');"
            "chosen, tally = m.choose([Path(sys.argv[1])], 25200, 0, set(), lambda turns: True, m.progress(None, 'rows'));"
            "assert tally['rows'] == 1420000 and len(chosen) == 25200")
    subprocess.run([sys.executable, "-c", code, path], cwd=kit, check=True, stderr=subprocess.DEVNULL)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20  # kB
