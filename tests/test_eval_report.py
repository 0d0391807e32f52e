"""report.html of 04_eval in a real browser: no errors, every picture loads, nothing scrolls sideways."""
import argparse
import io
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
         "--disable-background-networking --disable-component-update --disable-sync").split()


def made_up_results(ev):
    """results.json of a made-up evaluation with every section filled, long words included."""
    def record(name, k, rate):
        shares = [0.6 / (p + 1) for p in range(k or 0)]
        length = 1 + sum(shares) if k else None
        return {
            "name": name, "k": k, "load_sec": 30.0, "answers": {str(i): [1, 2] for i in range(40)},
            "passes": [{"temperature": t, "concurrency": c, "tokens_per_sec": rate * c * (1 + 0.01 * i),
                        "ttft_p50_ms": 71.2, "ttft_p99_ms": 1234.5, "tpot_p50_ms": 1000 / rate,
                        "tpot_p99_ms": 2000 / rate, "acceptance_length": length}
                       for i in range(3) for t in (0.0, 0.6) for c in (1, 8, 32)],
            "results": {
                "drafts": 900, "draft_tokens": 900 * (k or 0), "wasted": 0.6 if k else None,
                "acceptance_length": length, "acceptance_by_position": shares,
                "by_category": dict.fromkeys(("arithmetic", "code", "a_rather_long_name_of_a_kind_of_question",
                                              "letters"), length),
                "by_context_length": {f"{2 ** n} to {2 ** (n + 1) - 1}": length for n in range(5, 12)},
                "compared_outputs": 40, "identical_outputs": 39, "near_ties": 1, "faults": 0,
                "partings": [{"id": "x", "position": 7, "gap_nats": 0.02, "near_tie": True}] if k else [],
                "examples": [{"prompt": "<|im_start|>user\nWhy is <b>the sky</b> blue?", "pieces": [
                    ["The sky ", True], ["is", False], [" blue, " * 40, True], ["x" * 300, False]]}]}}
    s = argparse.Namespace(
        NUM_SPECULATIVE_TOKENS=3, QUESTIONS="", TARGET="moonshotai/Kimi-K2.5", TRUST_REMOTE_CODE=False,
        TENSOR_PARALLEL=8, PIPELINE_PARALLEL=1, DATA_PARALLEL=1, ENGINE_ARGS="", SERVE_ARGS="")
    training = {"num_ttt_steps": 2, "best": {"acceptance_by_position": [0.6, 0.3, 0.1]}}
    records = [record("plain", None, 20), record("k1", 1, 23), record("k3", 3, 26)]
    return ev.build_results(s, {"num_speculative_tokens": 3, "comparable": True}, "/data/03_train/n25000/drafter", records, training)


@pytest.fixture(scope="module")
def page(load, tmp_path_factory):
    from matplotlib.figure import Figure
    ev, curves, figure = load("04_eval"), io.BytesIO(), Figure((15, 4))
    figure.subplots().plot([3, 2, 1])
    figure.savefig(curves, format="png", dpi=70)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(ev.report(made_up_results(ev), curves.getvalue(), {"vllm": "0.33.0", "long": "y" * 400}))
    return path


def test_report_is_one_file_and_escapes(page):
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<script" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "&lt;b&gt;the sky" in text and "<b>the sky" not in text and "<mark>The sky </mark>is<mark>" in text
    for words in ("1.30 ×", "39 of 40", "vllm serve moonshotai/Kimi-K2.5", "Take care", "By kind of question".lower(),
                  "tokens of context", "Training", "wasted", "0.33.0"):
        assert words in text, words
    assert text.count("<figure>") == 5 and text.count("<img") == 1
    positions = text.split("by position")[1].split("</figure>")[0]
    assert re.findall(r"<tr><td>(\d)<td>(.*?)<td><i style=\"width:(\d+)%\"></i>([\d.]+)", positions) == [
        ("1", "K = 1", "75", "0.60"), ("1", "K = 3", "75", "0.60"), ("1", "training", "75", "0.60"),
        ("2", "K = 3", "38", "0.30"), ("2", "training", "38", "0.30"),
        ("3", "K = 3", "25", "0.20"), ("3", "training", "12", "0.10")]


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
                narrow: [...d.querySelectorAll("figure")].filter(f => f.clientWidth < 250).length,
                bars: [...d.querySelectorAll("figure i")].filter(b => b.getBoundingClientRect().width > 3).length,
                broken: [...d.querySelectorAll("section figure")].filter(f => f.scrollWidth > f.clientWidth).length,
                title: d.title}});
        }};</script>""")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files",
         "--enable-logging=stderr", "--v=0", "--hide-scrollbars", "--window-size=1400,1000", "--virtual-time-budget=8000",
         "--dump-dom", f"file://{outer}"], text=True, timeout=120, capture_output=True)
    found = re.search(r"<pre id=\"answer\">(.*?)</pre>", done.stdout)
    assert found and found[1], done.stderr[-2000:]
    got = json.loads(found[1].replace("&amp;", "&"))
    assert got["width"] == width and got["scroll"] <= width, got
    assert got["pictures"] == got["loaded"] == 1 and got["bars"] == 6 + 7 + 2 * 4 + 2 * 7, got
    assert got["narrow"] == got["broken"] == 0 and not got["errors"], got
    assert got["title"].startswith("Kimi-K2.5 with its drafter is 1.30 times as fast")
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
