"""`zoo serve` in a process that may be killed, and a client of one stream that comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import httpx

_LIMIT = 600.0
_MAIN = "from cli.app import main; main()"


@dataclass
class KillableServer:
    """A server's process. `ready`: seconds of the monotonic clock at which it took requests."""

    process: subprocess.Popen[str]
    address: str
    ready: float

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=_LIMIT, trust_env=False)

    def counters(self) -> dict[str, int]:
        """Return the engine's counters."""
        with self.http() as http:
            found: dict[str, int] = http.get("/zoo/state").json()["counters"]
            return found

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def serving(
    store: str,
    model: str,
    options: Sequence[str],
    program: Sequence[str] = ("-c", _MAIN),
    log: IO[str] | int = subprocess.DEVNULL,
) -> Iterator[KillableServer]:
    """Serve a model of a store, or several with commas, until the block ends.

    Args:
        program: What Python runs as `zoo`.
        log: Gets what the server logs.
    """
    command = [sys.executable, *program, "serve", "--store", store, "--port", "0", *options, *model.split(",")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"zoo serve ended with {process.wait(60)}")
        yield KillableServer(process, line.strip(), time.monotonic())
    finally:
        process.kill()
        process.wait(60)


@dataclass
class KeyedStream:
    """A client of a keyed stream, over the lives of servers.

    Fields:
        key: "" for a stream that is no durable request.
        numbers: Ids of the events that it has seen, in order.
        arrivals: When the first event after each connection came, in seconds of the monotonic clock.
        refused: Answers 503: nothing was promised.
        gap: Longest time between two events of one connection, in seconds.
        errors: Other answers than 200, and error events.
    """

    key: str
    body: dict[str, Any]
    numbers: list[int] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    refused: int = 0
    gap: float = 0.0
    ended: bool = False

    def follow(self, server: KillableServer) -> None:
        """Read the stream behind the last event seen, until its end or the server's death."""
        headers = {"Idempotency-Key": self.key} if self.key else {}
        if self.numbers:
            headers["Last-Event-ID"] = str(self.numbers[-1])
        try:
            with (
                server.http() as http,
                http.stream("POST", "/v1/completions", json=self.body, headers=headers) as response,
            ):
                if response.status_code == 503:
                    self.refused += 1
                    return
                if response.status_code != 200:
                    self.errors.append(f"{response.status_code}: {response.read().decode()[:200]}")
                    return
                self._read(response.iter_lines())
        except httpx.TransportError:
            pass

    def _read(self, lines: Iterator[str]) -> None:
        latest: float | None = None
        for line in lines:
            if line.startswith("id: "):
                now = time.monotonic()
                self.numbers.append(int(line[4:]))
                if latest is None:
                    self.arrivals.append(now)
                else:
                    self.gap = max(self.gap, now - latest)
                latest = now
            elif line == "data: [DONE]":
                self.ended = True
            elif line.startswith("data: "):
                document = json.loads(line[6:])
                if "error" in document:
                    self.errors.append(document["error"]["message"])
                for choice in document.get("choices", ()):
                    self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
