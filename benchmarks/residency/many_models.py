"""Start `zoo serve` on a store of very many models: seconds until it listens, and its memory before the first request.

    python -m benchmarks.residency.many_models FOLDER STORE [--models 1000] [--starts 5] [--requests 8]
        [--device-memory 2GiB] [--kv-cache 256MiB] [--output FILE]

The models are a checkpoint and LoRAs of it (`benchmarks.residency.family`); those that STORE lacks are made first. Each
start is a new process. The last one then answers `--requests` requests, each for another model that is not loaded.

- `ready_seconds`: from the start of the process to its address on standard output.
- `resident_bytes`: memory of the process then (`VmRSS`), the engine's own agent being a part of it.
- `first_answer_seconds`: a request of 8 tokens to a model that is loaded for it; one number per request.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.reports import deliver
from benchmarks.residency.family import make
from benchmarks.serving.shared_family import spread

_SERVE = "from cli.app import main; main()"
_PATIENCE = 120


class StartedServer:
    """A `zoo serve` over all models of a store. Raises RuntimeError if it ends before it listens."""

    def __init__(self, store: Path, options: Sequence[str]) -> None:
        log = store.with_name(f"{store.name}-serve.log")
        command = [sys.executable, "-c", _SERVE, "serve", "--store", str(store), "--port", "0", *options]
        begin = time.monotonic()
        with log.open("w") as said:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        self.address = "" if self._process.stdout is None else self._process.stdout.readline().strip()
        self.ready_seconds = time.monotonic() - begin
        if not self.address:
            raise RuntimeError(f"the server ended with {self._process.wait()}: {log.read_text()[-2000:]}")

        self._client = httpx.Client(base_url=self.address, timeout=_PATIENCE)

    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def models(self) -> list[str]:
        return [card["id"] for card in self._client.get("/v1/models").raise_for_status().json()["data"]]

    def answer(self, model: str) -> float:
        """Return the seconds that a request for a few tokens takes. Raises httpx.HTTPStatusError."""
        body = {"model": model, "prompt": "The sea is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        begin = time.monotonic()
        made = self._client.post("/v1/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"]
        if made != body["max_tokens"]:
            raise RuntimeError(f"{model} answered with {made} tokens")
        return time.monotonic() - begin

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(timeout=_PATIENCE)


def measure(store: Path, names: Sequence[str], starts: int, requests: int, options: Sequence[str]) -> dict[str, Any]:
    """Start the server `starts` times, and ask models of the last one, spread over all names."""
    ready: list[float] = []
    resident: list[int] = []
    for number in range(starts):
        server = StartedServer(store, options)
        try:
            ready.append(server.ready_seconds)
            resident.append(server.resident_bytes())
            if number == starts - 1:
                listed = len(server.models())
                answers = [server.answer(name) for name in names[:: max(1, len(names) // requests)][:requests]]
        finally:
            server.close()
    return {
        "models": listed,
        "ready_seconds": spread(ready),
        "resident_bytes": max(resident),
        "first_answer_seconds": [round(seconds, 3) for seconds in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--kv-cache", default="256MiB")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    names = make(given.folder, given.store, 0, given.models - 1)
    options = ("--device-memory", given.device_memory, "--kv-cache-memory-bytes", given.kv_cache)
    deliver(measure(given.store, names, given.starts, given.requests, options), given.output)


if __name__ == "__main__":
    main()
