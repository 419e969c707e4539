"""Measure the first token of a fresh process: seconds from its start, and the memory that it then has.

    python -m benchmarks.serving.first_token STORE MODEL [--starts 5] [--prompt TEXT] [--kv-cache 256MiB]
        [--device-memory SIZE] [--output FILE]

Two commands take turns, each in new processes: `zoo generate MODEL PROMPT --max-tokens 1`, and `zoo serve MODEL` with
one streamed request, sent once it prints its address. Files are in the page cache after the first start, which is not
counted. That one also writes the compiled modules: PYTHONDONTWRITEBYTECODE is unset for the commands, since with it
each start of an editable install compiles Block Zoo again, which is some tenths of a second.

- `first_token_seconds`: from the start of the process to the first text of the answer at its reader.
- `ready_seconds`: to the address of `zoo serve`.
- `peak_bytes`: the most resident memory of the process (`VmHWM`) up to then, mapped files included.
- `beside_weights`: that without the bytes of the model's tensors. Pages of the KV cache count once they are written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.reports import deliver
from benchmarks.serving.shared_family import spread
from zoo.api import Zoo

_ZOO = (sys.executable, "-c", "from cli.app import main; main()")
_PATIENCE = 300
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True, slots=True)
class FreshProcess:
    """One fresh process. `ready_seconds`: None for `zoo generate`."""

    first_token_seconds: float
    ready_seconds: float | None
    peak_bytes: int


def generate(store: Path, model: str, prompt: str, pages: str) -> FreshProcess:
    """Run `zoo generate` for one token. Raises RuntimeError if it ends without one."""
    command = [*_ZOO, "generate", model, prompt, "--max-tokens", "1", "--store", str(store)]
    begin = time.monotonic()
    process = subprocess.Popen([*command, "--kv-cache-memory-bytes", pages], stdout=subprocess.PIPE, env=_ENVIRONMENT)
    text = b"" if process.stdout is None else os.read(process.stdout.fileno(), 1)
    seconds = time.monotonic() - begin
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not text or process.returncode:
        raise RuntimeError(f"zoo generate ended with {process.returncode}")
    return FreshProcess(seconds, None, usage.ru_maxrss * 1024)


def serve(store: Path, model: str, prompt: str, options: Sequence[str]) -> FreshProcess:
    """Start `zoo serve` and stream one answer. Raises RuntimeError if it ends before, httpx.HTTPError if it refuses."""
    log = store.with_name(f"{store.name}-serve.log")
    command = [*_ZOO, "serve", model, "--store", str(store), "--port", "0", *options]
    begin = time.monotonic()
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=_ENVIRONMENT)
    try:
        address = "" if process.stdout is None else process.stdout.readline().strip()
        ready = time.monotonic() - begin
        if not address:
            raise RuntimeError(f"zoo serve ended with {process.wait()}: {log.read_text()[-2000:]}")
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=_PATIENCE) as answer:
            answer.raise_for_status()
            next(line for line in answer.iter_lines() if line.startswith("data: {"))
            seconds = time.monotonic() - begin
            peak = _peak_bytes(process.pid)
        return FreshProcess(seconds, ready, peak)
    finally:
        process.terminate()
        process.wait(timeout=_PATIENCE)


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def row_of(side: str, starts: Sequence[FreshProcess], weights: int) -> dict[str, Any]:
    """Return the row of a command; the first start is left out, unless it is the only one."""
    counted = starts[1:] or starts
    peak = max(start.peak_bytes for start in counted)
    row: dict[str, Any] = {"side": side, "first_token_seconds": spread([each.first_token_seconds for each in counted])}
    if ready := [each.ready_seconds for each in counted if each.ready_seconds is not None]:
        row["ready_seconds"] = spread(ready)
    return row | {"peak_bytes": peak, "weights": weights, "beside_weights": peak - weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--kv-cache", default="256MiB")
    parser.add_argument("--device-memory", help="serve on demand within this budget")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with Zoo(given.store, create=False) as zoo:
        weights = sum(tensor.nbytes for tensor in zoo.model(given.model).manifest.tensors)
    options = ["--kv-cache-memory-bytes", given.kv_cache]
    options += ["--device-memory", given.device_memory] if given.device_memory else []
    sides: dict[str, list[FreshProcess]] = {"generate": [], "serve": []}
    for _ in range(given.starts + 1):
        sides["generate"].append(generate(given.store, given.model, given.prompt, given.kv_cache))
        sides["serve"].append(serve(given.store, given.model, given.prompt, options))
    rows = [row_of(side, starts, weights) for side, starts in sides.items()]
    deliver({"benchmark": "first_token", "model": given.model, "rows": rows}, given.output)


if __name__ == "__main__":
    main()
