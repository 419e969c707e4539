"""Plain families are generated and served without importing transformers, which takes longer than loading a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make
from zoo.api import Zoo

HEAVY = ("transformers", "sklearn", "scipy", "pandas", "peft", "accelerate", "sentencepiece")

GENERATE = """
import cli.app
cli.app.VERBS = {"generate": "cli.generate", "serve": "cli.serve"}
try:
    cli.app.main(["generate", "m", "hello", "--max-tokens", "2", "--store", STORE, "--kv-cache-memory-bytes", "4MiB"])
except SystemExit as ended:
    assert not ended.code, ended.code
"""

SERVE = """
import threading, httpx, cli.app, cli.serve
cli.app.VERBS = {"generate": "cli.generate", "serve": "cli.serve"}
answers = []
def ask(address):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    answers.append(httpx.post(address + "/v1/chat/completions", json=body, timeout=60).status_code)
    signal.raise_signal(signal.SIGTERM)
import signal
cli.serve._announce = lambda address, names, as_json: threading.Thread(target=ask, args=(address,)).start()
try:
    cli.app.main(["serve", "m", "--port", "0", "--store", STORE, "--kv-cache-memory-bytes", "4MiB"])
except SystemExit as ended:
    assert not ended.code, ended.code
assert answers == [200], answers
"""


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("program", [GENERATE, SERVE], ids=["generate", "serve"])
def test_what_is_not_imported(tmp_path: Path, family: str, program: str) -> None:
    own = {"use_sliding_window": False} if family == "qwen2" else {}
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make(family, tmp_path / "m", **own), name="m")
    shown = (
        f"\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "*"}
    command = [sys.executable, "-c", f"STORE = {str(tmp_path / 'store')!r}\n{program}{shown}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stderr.splitlines()[-1]) == []
