"""A process that has imported everything once and forks a child per job.

Children start in milliseconds, so that kills hit the work. Protocol, one line each: `verb store argument...` in,
`pid N` out when the child runs; `reap` in, `exit CODE` out when it has ended. Until it is reaped, an ended child is a
zombie: its PID is not reused, so it may be killed at any time. The process has one thread and opens no store, so its
forks are clean.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def ingest(store: str, *arguments: str) -> None:
    """`ingest STORE (FOLDER NAME)...`: ingest checkpoints one after the other."""
    from zoo import Zoo

    with Zoo(store) as zoo:
        for folder, name in zip(arguments[::2], arguments[1::2], strict=True):
            zoo.ingest(folder, name=name)


def churn(store: str, counts: str, rounds: str, *arguments: str) -> None:
    """`churn STORE COUNTS ROUNDS (FOLDER NAME)...`: ingest all and remove all, in rounds, and ingest all in the end.

    After each removal it waits for a collection: a collector gets the lock only when no ingest runs.
    """
    from zoo import Zoo
    from zoo.errors import InUse

    with Zoo(store) as zoo:
        for _ in range(int(rounds)):
            for folder, name in zip(arguments[::2], arguments[1::2], strict=True):
                zoo.ingest(folder, name=name)
            for name in reversed(arguments[1::2]):
                # The other process's models may use this one as their base; then it stays.
                with suppress(InUse):
                    zoo.remove(name)
            _await_collection(Path(counts))
    ingest(store, *arguments)


def _await_collection(counts: Path) -> None:
    """Wait until the collector has written another line, for ten seconds at most."""
    size, deadline = counts.stat().st_size, time.monotonic() + 10
    while counts.stat().st_size == size and time.monotonic() < deadline:
        time.sleep(0.005)


def collect(store: str, until: str, counts: str) -> None:
    """`collect STORE UNTIL COUNTS`: collect garbage until the file UNTIL exists; COUNTS gets a line per collection."""
    from zoo import Zoo
    from zoo.errors import StoreBusy

    with Zoo(store) as zoo, Path(counts).open("w", buffering=1) as lines:
        while not Path(until).exists():
            try:
                lines.write(f"{zoo.gc().objects_removed}\n")
            except StoreBusy:
                lines.write("busy\n")
            time.sleep(0.01)


def pack(store: str, *rounds: str) -> None:
    """`pack STORE (pack|unpack)...`: pack all fine-tunes, or unpack everything, one after the other."""
    from zoo import Zoo

    with Zoo(store) as zoo:
        for what in rounds:
            zoo.pack() if what == "pack" else zoo.unpack()


PRELOADED = (
    "zoo.api",
    "zoo.store",
    "surgery.ingest.ingest",
    "surgery.models.export",
    "surgery.sources.local",
    "zoo.packed.pack",
    "zoo.packed.planes",
)
VERBS: dict[str, Callable[..., None]] = {"ingest": ingest, "churn": churn, "collect": collect, "pack": pack}


def main() -> None:
    """Run jobs as lines on standard input ask for them, until it ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                VERBS[verb](*arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print("pid", pid, flush=True)
        sys.stdin.readline()
        print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
