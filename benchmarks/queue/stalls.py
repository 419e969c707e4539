"""Run `zoo` with a watch on the event loop, and say what its threads did while it stalled.

    python -m benchmarks.queue.stalls REPORT serve …

The loop notes the time every 2 ms. Each note that is more than `_LATE` overdue is a stall, written to REPORT as a line
of JSON:

- `at`, `ms`: its end on the monotonic clock in seconds, and how late the note was.
- `loop_cpu_ms`, `loop_queued_ms`: what the loop's thread ran meanwhile, and waited for a processor; for the rest of the
  time it waited for the interpreter's lock, or in a system call.
- `cpu_ms`: what every thread ran in about that time, by name.
- `stacks`: what each thread was at when the note was `_LATE` overdue. They are taken without the interpreter's lock,
  so that a thread that keeps it is seen. That may end the process (it did once within a minute): it is for finding
  causes only.

A garbage collection of more than a millisecond is a line of its own: `collected` its generation, `at`, the `thread`'s
processor time in `ms`, and how many objects were `freed`. The interpreter's lock is not given away within one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_BEAT = 0.002
#: Seconds by which a note has to be late to be a stall.
_LATE = 0.010
#: Seconds between two looks at what threads have run.
_LOOK = 0.01
_FRAMES = 8
_TASKS = Path("/proc/self/task")


def watched(report: Path) -> str:
    """Return the Python code that runs `zoo` with the arguments of its process, watched."""
    return f"import sys; sys.argv.insert(1, {str(report)!r}); from benchmarks.queue.stalls import main; main()"


def spent() -> dict[int, tuple[float, float]]:
    """Return by kernel thread the milliseconds that it has run and has waited for a processor."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            ran, queued, _ = (task / "schedstat").read_text().split()
        except OSError:  # it has ended
            continue
        found[int(task.name)] = int(ran) / 1e6, int(queued) / 1e6
    return found


class LoopWatch:
    """Watch the loop on which `run` runs. `report`: where stalls are written."""

    def __init__(self, report: Path) -> None:
        self._report = report.open("w", buffering=1)
        self._dump = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the server)
        self._noted, self._own = time.monotonic(), threading.get_native_id()
        self._before = spent()
        self._collecting = 0.0
        gc.callbacks.append(self._collect)
        threading.Thread(target=self._look, name="stall-watch", daemon=True).start()

    async def run(self) -> None:
        """Note the time for ever."""
        while True:
            faulthandler.dump_traceback_later(_BEAT + _LATE, file=self._dump)
            due = time.monotonic() + _BEAT
            await asyncio.sleep(_BEAT)
            now = time.monotonic()
            faulthandler.cancel_dump_traceback_later()
            if now - due > _LATE:
                self._write(now, now - due)
            self._noted = time.monotonic()

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK)
            if time.monotonic() - self._noted < 2 * _BEAT:
                self._before = spent()

    def _write(self, now: float, late: float) -> None:
        before, after = self._before, spent()
        threads = threading.enumerate()
        names = {each.native_id: each.name for each in threads}
        ran: dict[str, float] = {}
        for task, (cpu, _) in after.items():
            name = names.get(task, "native")
            ran[name] = ran.get(name, 0.0) + cpu - before.get(task, (0.0, 0.0))[0]
        loop, begun = after[self._own], before.get(self._own, (0.0, 0.0))
        stall: dict[str, Any] = {
            "at": round(now, 3),
            "ms": round(1000 * late, 1),
            "loop_cpu_ms": round(loop[0] - begun[0], 1),
            "loop_queued_ms": round(loop[1] - begun[1], 1),
            "cpu_ms": {name: round(ms, 1) for name, ms in sorted(ran.items(), key=lambda it: -it[1]) if ms > 0.3},
            "stacks": self._stacks({each.ident: each.name for each in threads}),
        }
        self._report.write(json.dumps(stall) + "\n")

    def _stacks(self, names: dict[int | None, str]) -> dict[str, list[str]]:
        """Return the innermost frames of the threads that were dumped, and forget the dump."""
        self._dump.seek(0)
        found: dict[str, list[str]] = {}
        for part in self._dump.read().split("\n\n"):
            head, *frames = part.strip().splitlines()[-100:] or [""]
            if (ident := re.search(r"hread 0x([0-9a-f]+)", part)) is None:
                continue
            lines = [line for line in (head, *frames) if line.lstrip().startswith("File")]
            places = [re.sub(r'File ".*?([^/"]+/[^/"]+)", line (\d+) in ', r"\1:\2 ", line.strip()) for line in lines]
            found[names.get(int(ident[1], 16), ident[1])] = places[:_FRAMES]
        self._dump.seek(0)
        self._dump.truncate()
        return found

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
            return
        taken = round(1000 * (time.thread_time() - self._collecting), 1)
        if taken >= 1:
            of = {"collected": info["generation"], "at": round(time.monotonic(), 3), "ms": taken}
            self._report.write(
                json.dumps({**of, "thread": threading.current_thread().name, "freed": info["collected"]}) + "\n"
            )


def main() -> None:
    from cli.app import main as run
    from runtime.server.http_server import HttpServer

    report = Path(sys.argv.pop(1))
    start = HttpServer.startup
    watching: set[asyncio.Task[None]] = set()

    async def startup(self: HttpServer, sockets: Any = None) -> None:
        await start(self, sockets)
        watching.add(asyncio.create_task(LoopWatch(report).run()))

    HttpServer.startup = startup  # type: ignore[method-assign]
    run()


if __name__ == "__main__":
    main()
