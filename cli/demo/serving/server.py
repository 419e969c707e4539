"""Run `zoo serve` as a child process with its own key, on a free port of the loopback interface."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zoo.errors import ZooError

_COMMAND = "import sys; from cli.app import main; main(sys.argv[1:])"
_READY_SECONDS = 180.0
_DRAIN_SECONDS = 60.0


@dataclass
class RunningServer:
    """A server that accepts requests. `exit_code` is set after it has been stopped."""

    url: str
    api_key: str = field(repr=False)
    trace: Path
    start_seconds: float
    exit_code: int | None = None


@contextmanager
def running_server(store: Path, database: str | None, models: Sequence[str], folder: Path) -> Iterator[RunningServer]:
    """Serve `models` of `store` for the duration of the block, then send SIGTERM, on which the server drains.

    The key and the database's URL, which may contain a password, are passed in the environment, since other users can
    read arguments. `folder` gets `serve.log`, `serve.address` and `trace.jsonl`.

    Raises:
        ZooError: The server ended, or was not ready in time; the message has the last line of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, address, trace = (folder / name for name in ("serve.log", "serve.address", "trace.jsonl"))
    trace.unlink(missing_ok=True)
    key = secrets.token_urlsafe(24)
    arguments = [
        "serve",
        *models,
        "--port",
        "0",
        "--store",
        str(store),
        "--trace",
        str(trace),
        "--kv-cache-memory-bytes",
        "256MB",
    ]
    environment = {**os.environ, "ZOO_API_KEY": key} | ({} if database is None else {"ZOO_DATABASE": database})
    started = time.monotonic()
    with log.open("wb") as err, address.open("wb") as out:
        command = [sys.executable, "-c", _COMMAND, *arguments]
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
    try:
        url = _wait(process, address, log)
        server = RunningServer(url, key, trace, time.monotonic() - started)
        yield server
        server.exit_code = _stop(process)
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], address: Path, log: Path) -> str:
    """Wait until the server has printed its address and return it."""
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        line = address.read_text()
        if line.endswith("\n"):
            return line.strip()
        time.sleep(0.05)
    words = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    what = "was not ready in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise ZooError(f"the server {what}: {words[-1]} (all of it in {log})")


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM, kill the process if it does not end, and return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_DRAIN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
