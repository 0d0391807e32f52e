"""Fixtures that the tests share: the kit, one target model, one finished demo, one vLLM server.

KIT_TEST_CACHE (default .cache in the kit, ignored by git) keeps the target between runs.
"""
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(KIT))


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # off in a background job, which children inherit
    config.addinivalue_line("markers", "engine: starts a vLLM engine or server (30 s and more)")
    config.addinivalue_line("markers", "slow: only in `tests/run.sh drill`; the reason stands beside it")


def clean_environ(**env):
    """The environment without the caller's KIT_* settings, and what makes vLLM fast on a CPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KIT_")}
    openmp = KIT / ".venv/lib/libiomp5.so"
    return kept | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                   "HF_HUB_OFFLINE": "1"} | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}) | env


@pytest.fixture(scope="session")
def kit():
    """Path of the kit."""
    return KIT


@pytest.fixture(scope="session")
def load():
    """load("02_extract"): a stage as a module."""
    return importlib.import_module


@pytest.fixture(scope="session")
def stage():
    """stage("01_generate", "--data", d, env={}, check=True): run it; stdout holds stderr too."""
    def run(name, *flags, env=None, check=True, timeout=600):
        done = subprocess.run([sys.executable, "-u", KIT / f"{name}.py", *map(str, flags)],
                              env=clean_environ(**(env or {})), text=True, timeout=timeout,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert not check or done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}"
        return done
    return run


@pytest.fixture(scope="session")
def target():
    """Directory of SmolLM2-135M-Instruct, made once and kept."""
    directory = Path(os.environ.get("KIT_TEST_CACHE", KIT / ".cache")) / "target"
    subprocess.run([sys.executable, KIT / "tests/make_target.py", directory], check=True)
    return directory


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until_ready(url, process, log):
    """Return when the server of `process` answers; its log is the error when it ends or takes 5 minutes."""
    import requests
    deadline = time.monotonic() + 300
    while True:
        try:
            if requests.get(url + "/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            pass
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"the server is not ready after 5 minutes\n{log.read_text()[-3000:]}"
        time.sleep(1)


@contextlib.contextmanager
def serving(log, *flags, **env):
    """URL of a vLLM server on a free port, started with these flags; ended by its pid."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
         "--enforce-eager", "--max-model-len", "2048", *map(str, flags)], env=clean_environ(**env),
        stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def server(target, tmp_path_factory):
    """URL of a vLLM server with the target, started once."""
    with serving(tmp_path_factory.mktemp("server") / "log", "--model", target, "--dtype", "bfloat16") as url:
        yield url


def demo_environ(data, **env):
    """The environment of the cut-down demo in `data`."""
    target = os.environ.get("KIT_TEST_CACHE", KIT / ".cache")
    return clean_environ(KIT_DATA=str(data), KIT_TARGET=str(Path(target) / "target"), **DEMO, **env)


DEMO = {"KIT_NUM_SAMPLES": "96", "KIT_HELDOUT": "24", "KIT_MAX_TOKENS": "96", "KIT_DRAFT_TOKENS": "3",
        "KIT_SOURCES": "advice,dialogue,explain,howto"}  # 04 asks one kind after the other


@pytest.fixture(scope="session")
def demo(kit, target, tmp_path_factory):
    """$DATA in which `./run_all.sh demo`, cut down, ran to its end. Read only: copy what you change.

    run_all.log in it holds all that the run printed.
    """
    data = tmp_path_factory.mktemp("demo") / "data"
    data.mkdir()
    with (data / "run_all.log").open("w") as log:
        done = subprocess.run(["./run_all.sh", "demo"], cwd=kit, env=demo_environ(data), stdout=log,
                              stderr=subprocess.STDOUT, timeout=1500)
    assert done.returncode == 0, (data / "run_all.log").read_text()[-5000:]
    return data
