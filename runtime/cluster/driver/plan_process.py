"""The process that solves a server's plans (`plan_program`), seen from the server.

Compiling the search takes some ten seconds of Python. On a thread of the server that would hold the interpreter's lock,
and everything else would run at a fraction of its speed after each start.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

import msgspec

from runtime.cluster.driver.plan_program import Solved
from runtime.control.scheduler_io import SolvePlan
from runtime.scheduler.order.plan_solver import Solution

#: Starts the process; the arguments contain nothing else.
PROGRAM = (sys.executable, "-m", "runtime.cluster.driver.plan_program")


class PlanProcess:
    """A process that solves plans, one after the other. Not thread-safe, but for `stop`."""

    def __init__(self) -> None:
        """Start it. Raises OSError if that is impossible."""
        self.process = subprocess.Popen(PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._ready = threading.Event()
        threading.Thread(target=self._await_ready, name="zoo-plans-process", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether its kernel is compiled, so that it answers without delay."""
        return self._ready.is_set()

    def solve(self, command: SolvePlan) -> Solution | None:
        """Return the solution of a problem, once the process is ready; None if it has died."""
        said = None
        with suppress(OSError, ValueError):
            pipe = _pipe(self.process.stdin)
            pipe.write(msgspec.json.encode(command) + b"\n")
            pipe.flush()
            said = self._read()
        return None if said is None else Solution(said.plan, said.why)

    def stop(self) -> None:
        """End it at once, whatever it does."""
        self.process.kill()
        self.process.wait()

    def _await_ready(self) -> None:
        said = self._read()
        if said is not None and said.compiled:
            self._ready.set()

    def _read(self) -> Solved | None:
        line = _pipe(self.process.stdout).readline()
        if not line.endswith(b"\n"):
            return None
        return msgspec.json.decode(line, type=Solved)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the process has no pipes")
    return pipe
