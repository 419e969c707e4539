"""What all verbs have in common: the options that every verb must take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import cli.app


@pytest.mark.parametrize("verb", cli.app.VERBS)
def test_every_verb_takes_a_store_and_json(verb: str) -> None:
    command = typer.main.get_command(cli.app.build()).commands[verb]  # type: ignore[attr-defined]
    options = {name: parameter for parameter in command.params for name in parameter.opts}
    assert {"--store", "--json"} <= options.keys()
    assert options["--store"].envvar in ("ZOO_STORE", ["ZOO_STORE"]) and not options["--store"].required
    assert options["--json"].is_flag


def test_simulate_takes_a_store_and_leaves_it_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app.main(["simulate", "--store", str(tmp_path / "none"), "--requests", "3", "--policy", "blocks", "--json"])
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    assert json.loads(printed.out)["preset"] == "blockllm"
    assert not (tmp_path / "none").exists()


def test_serve_says_where_it_is_as_one_document(store: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import cli.app; cli.app.main()",
        "serve",
        "base",
        "--store",
        str(store),
        "--port",
        "0",
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--kv-cache-memory-bytes", "4MiB"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            rest = process.stdout.read()
        finally:
            process.kill()
    assert said["address"].startswith("http://127.0.0.1:") and said["models"] == ["org/base"]
    assert rest == ""
