"""Plans are solved in a process of their own, so that compiling the search does not hold up serving."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from runtime.cluster.driver.plan_process import PROGRAM, PlanProcess
from runtime.cluster.driver.plan_thread import PlanThread
from runtime.control.scheduler_io import PlanSolved, SolvePlan
from runtime.policy.slo.plan.compiled import PLAIN
from runtime.scheduler.order.plan_solver import solution_of
from tests.runtime.policy.slo.plan.problems import drawn

_SECONDS = 90.0


def command(number: int = 1, groups: int = 12) -> SolvePlan:
    return SolvePlan(number, drawn(groups, 2, 3, models=5, together=True, rounds=300), "search")


def wait_for(happens: object, what: str) -> None:
    assert callable(happens)
    end = time.monotonic() + _SECONDS
    while not happens():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.05)


@pytest.fixture
def process() -> Iterator[PlanProcess]:
    made = PlanProcess()
    yield made
    made.stop()


def test_a_process_gives_the_plans_of_the_plain_search(process: PlanProcess) -> None:
    wait_for(lambda: process.ready, "compiling")
    for number in (1, 2):
        assert process.solve(command(number)) == solution_of(command(number), PLAIN)


def test_a_process_says_why_there_is_no_plan(process: PlanProcess) -> None:
    wait_for(lambda: process.ready, "compiling")
    found = process.solve(SolvePlan(1, command(groups=20).problem, "paper"))
    assert found is not None
    assert found.plan is None
    assert "12 groups" in found.why


def test_plans_are_made_here_where_the_process_has_died() -> None:
    got, answered = list[PlanSolved](), threading.Event()

    def answer(solved: PlanSolved) -> None:
        got.append(solved)
        answered.set()

    thread = PlanThread(answer)
    thread.start()
    process = thread.process
    assert process is not None
    wait_for(lambda: process.ready, "compiling")
    process.process.kill()
    process.process.wait()
    thread.solve(command(7))
    assert answered.wait(_SECONDS)
    assert got[0].number == 7
    assert got[0].plan == solution_of(command(), PLAIN).plan
    thread.stop()


def test_the_process_ends_with_its_server_even_while_it_compiles() -> None:
    """It reads from what started it, so that a server that is killed leaves none behind."""
    start = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({PROGRAM!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    child = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of the process")


def test_the_server_compiles_nothing_itself() -> None:
    program = (
        "import sys, time\n"
        "from runtime.cluster.driver.plan_thread import PlanThread\n"
        "thread = PlanThread(print)\n"
        "thread.start()\n"
        "while not thread.process.ready: time.sleep(0.05)\n"
        "thread.stop()\n"
        "sys.exit('numba' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=_SECONDS).returncode == 0
