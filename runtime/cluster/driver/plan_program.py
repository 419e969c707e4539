"""Solve the plans of a server in a process of their own: the program that `plan_process` starts.

    {"compiled": true}          once the kernel is compiled, or is found not to be there
    SolvePlan  ->  Solved       one after the other, each a line of JSON

It ends when its standard input does, which is also when the server has died. It runs at a lower priority than what
serves.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import BinaryIO

import msgspec

from runtime.control.scheduler_io import SolvePlan
from runtime.policy.slo.plan.compiled import PLAIN, compile_kernel
from runtime.policy.slo.plan.problem import GroupPlan
from runtime.scheduler.order.plan_solver import PLAIN_ROUNDS, Solution, solution_of

#: Added to the process's niceness.
_NICE = 10


class Solved(msgspec.Struct, frozen=True, gc=False):
    """What the program says.

    Fields:
        compiled: The kernel is ready. Otherwise this is the outcome of a problem.
        plan, why: As of `Solution`.
    """

    compiled: bool = False
    plan: GroupPlan | None = None
    why: str = ""


def main(given: BinaryIO, answers: BinaryIO) -> None:
    """Serve the lines of `given` until they end."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    commands: queue.SimpleQueue[SolvePlan] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(given, commands), daemon=True).start()
    try:
        kernel = compile_kernel()
    except Exception as error:  # numba is there and broken
        kernel = None
        print(f"the planner's kernel could not be compiled: {error}", file=sys.stderr, flush=True)
    _write(answers, Solved(compiled=True))
    while True:
        command = commands.get()
        try:
            rounds = None if kernel is not None else min(command.problem.rounds, PLAIN_ROUNDS)
            found = solution_of(command, kernel or PLAIN, rounds)
        except Exception as error:
            found = Solution(None, f"the planner failed: {type(error).__name__}: {error}")
        _write(answers, Solved(plan=found.plan, why=found.why))


def _read(given: BinaryIO, commands: queue.SimpleQueue[SolvePlan]) -> None:
    """Read problems; end the process with the last one, even while it compiles or solves."""
    for line in given:
        commands.put(msgspec.json.decode(line, type=SolvePlan))
    os._exit(0)


def _write(answers: BinaryIO, said: Solved) -> None:
    answers.write(msgspec.json.encode(said) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
