"""What a start does while the weights are read: on another thread, once, and without hiding what the start reports."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import cli.serving.source as source_module
from cli.app import main
from cli.serving.beside import beside
from tests.checkpoints import make
from zoo.api import Zoo

PATIENCE = 30


def test_work_runs_beside_the_block_and_is_done_at_its_end() -> None:
    here, there, done = threading.Event(), threading.Event(), []

    def work() -> None:
        there.set()
        assert here.wait(PATIENCE)
        done.append(threading.current_thread() is not threading.main_thread())

    with beside(work):
        assert there.wait(PATIENCE)
        here.set()
    assert done == [True]


def test_an_error_is_left_to_whoever_meets_it_again() -> None:
    with beside(lambda: 1 / 0):
        pass
    with pytest.raises(KeyError), beside(lambda: 1 / 0):
        raise KeyError


def test_a_tokenizer_is_read_once_and_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make("llama", tmp_path / "m"), "m")
    threads, read = [], source_module.tokenizer_of
    monkeypatch.setattr(
        source_module, "tokenizer_of", lambda model: (threads.append(threading.current_thread().name), read(model))[1]
    )
    command = ["generate", "m", "hello", "--max-tokens", "2", "--store", str(tmp_path / "store")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--kv-cache-memory-bytes", "4MiB"])
    assert not ended.value.code and capsys.readouterr().out
    assert threads == ["zoo-start"]


def test_a_port_is_bound_before_the_server_is_imported() -> None:
    program = "import sys, cli.serving.source, runtime.server.run_server; print('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
