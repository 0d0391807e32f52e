"""report.html of 04_eval in a real browser: no errors, every picture loads, nothing scrolls sideways."""
import argparse
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
         "--disable-background-networking --disable-component-update --disable-sync").split()


def made_up_results(ev):
    """(results, examples) of a made-up evaluation with every section filled, long words included."""
    def record(name, k, rate):
        shares = [0.6 / (p + 1) for p in range(k or 0)]
        length = 1 + sum(shares) if k else None
        return {
            "name": name, "k": k, "load_sec": 30.0, "steps": [(2 ** (5 + i % 5), i % ((k or 0) + 1))
                                                              for i in range(400)],
            "answers": {str(i): [1, 2] for i in range(40)}, "itself": [True] * 18 + [False],
            "partings": [{"id": "x", "position": 7, "gap_nats": 0.02}] if k else [],
            "drafts": 900, "draft_tokens": 900 * (k or 0), "wasted": 0.6 if k else None,
            "acceptance_length": length, "acceptance_by_position": shares,
            "by_category": {c: {"acceptance_length": length} for c in (
                "arithmetic", "code", "a_rather_long_name_of_a_kind_of_question", "letters")},
            "passes": [{"temperature": t, "concurrency": c, "tokens_per_sec": rate * c * (1 + 0.01 * i),
                        "ttft_p50_ms": 71.2, "ttft_p99_ms": 1234.5, "tpot_p50_ms": 1000 / rate,
                        "tpot_p99_ms": 2000 / rate, "acceptance_length": length}
                       for i in range(3) for t in (0.0, 0.6) for c in (1, 8, 32)]}
    s = argparse.Namespace(NUM_SPECULATIVE_TOKENS=3, QUESTIONS="")
    facts = {"target": "moonshotai/Kimi-K2.5", "drafter": "/data/03_train/n25000/drafter", "dtype": "bfloat16",
             "questions": 40, "serve_command": "vllm serve moonshotai/Kimi-K2.5 --tensor-parallel-size 8 "
             """--speculative-config '{"method": "eagle3", "model": "/data/03_train/n25000/drafter"}'"""}
    results = ev.build_results(s, facts, [record("plain", None, 20), record("k1", 1, 23), record("k3", 3, 26)],
                               {"best": {"acceptance_length": 2.0, "acceptance_by_position": [0.6, 0.3, 0.1]},
                                "num_ttt_steps": 4})
    examples = [{"prompt": "<|im_start|>user\nWhy is <b>the sky</b> blue?", "pieces": [
        ["The sky ", True], ["is", False], [" blue, " * 40, True], ["x" * 300, False]]}]
    return results, examples


@pytest.fixture(scope="module")
def page(load, tmp_path_factory):
    ev = load("04_eval")
    results, examples = made_up_results(ev)
    metrics = [{"step": i, "loss": 5 / i} for i in range(1, 90)] + [
        {"step": i, "heldout": {"acceptance_length": 1 + i / 90}} for i in range(10, 90, 10)]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(ev.report(results, examples, metrics, [("vllm", "0.33.0"), ("long", "y" * 400)]))
    return path


def test_report_is_one_file_and_escapes(page):
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<script" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "&lt;b&gt;the sky" in text and "<b>the sky" not in text
    for words in ("1.30 ×", "39 of 40", "vllm serve moonshotai/Kimi-K2.5", "Advice", "By kind of question",
                  "By tokens of context", "Training", "share wasted"):
        assert words in text, words
    assert text.count("<img") == 5


@pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_report_in_a_browser(page, tmp_path, width):
    # A page of our own holds the report in a frame of the wanted width, as a phone would, asks what
    # the browser made of it, and leaves the answer in its own DOM.
    outer = tmp_path / "outer.html"
    outer.write_text(f"""<!doctype html><body><iframe id=f style="width:{width}px;height:900px;border:0"
        src="file://{page}"></iframe><pre id=answer></pre><script>
        const errors = [];
        f.onload = async () => {{
            const d = f.contentDocument, w = f.contentWindow;
            w.onerror = text => errors.push(text);
            await new Promise(done => setTimeout(done, 500));
            const images = [...d.images];
            answer.textContent = JSON.stringify({{
                errors, width: d.documentElement.clientWidth, scroll: d.documentElement.scrollWidth,
                pictures: images.length, loaded: images.filter(i => i.complete && i.naturalWidth).length,
                narrow: images.filter(i => i.clientWidth < 250).length, title: d.title}});
        }};</script>""")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files",
         "--enable-logging=stderr", "--v=0", "--hide-scrollbars", "--window-size=1400,1000", "--virtual-time-budget=8000",
         "--dump-dom", f"file://{outer}"], text=True, timeout=120, capture_output=True)
    found = re.search(r"<pre id=\"answer\">(.*?)</pre>", done.stdout)
    assert found and found[1], done.stderr[-2000:]
    got = json.loads(found[1].replace("&amp;", "&"))
    assert got["width"] == width and got["scroll"] <= width, got
    assert got["pictures"] == got["loaded"] == 5 and got["narrow"] == 0 and not got["errors"], got
    assert got["title"].startswith("Kimi-K2.5 with its drafter is 1.30 times as fast")
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
