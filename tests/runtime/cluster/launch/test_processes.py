"""The process launcher: a failed start is reported as the agent's end with the reason.

No lock is held while a child is written to or waited for.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.launch import processes
from runtime.cluster.launch.launcher import AgentDied
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher

LIMIT = 60.0
ENDS = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline(); sys.exit(3)")
#: A program that does not read its input.
SLEEPS = (sys.executable, "-c", "import time; time.sleep(60)")
Deaths = queue.SimpleQueue[AgentDied]


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[ProcessLauncher, Deaths]]]:
    with ExitStack() as stack:

        def make(
            program: tuple[str, ...], settings: dict[str, object] | None = None, warm: bool = False
        ) -> tuple[ProcessLauncher, Deaths]:
            launcher, deaths = (
                ProcessLauncher(ProcessConfig(Preparation("none", settings or {}), program=program, warm=warm)),
                Deaths(),
            )
            launcher.attach(deaths.put, "ipc:///nowhere")
            stack.callback(launcher.shutdown, LIMIT)
            return launcher, deaths

        yield make


def test_what_cannot_be_started_is_told_and_the_next_one_starts(
    made: Callable[..., tuple[ProcessLauncher, Deaths]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, deaths = made(ENDS)

    def fail(child: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(processes._Child, "begin", fail)
        launcher.start("a", 1)
        assert deaths.get(timeout=LIMIT) == AgentDied(
            "a", 1, None, "its process cannot be started: can't start new thread"
        )
    launcher.start("a", 2)
    assert deaths.get(timeout=LIMIT) == AgentDied("a", 2, 3, "its process ended with code 3")


def test_a_program_that_is_not_there_is_the_reason(made: Callable[..., tuple[ProcessLauncher, Deaths]]) -> None:
    launcher, deaths = made(("/no/such/program",), warm=True)
    for life in (1, 2):
        launcher.start("a", life)
        assert "cannot be started: No such file" in deaths.get(timeout=LIMIT).reason


def test_a_child_that_does_not_listen_holds_nobody_up(made: Callable[..., tuple[ProcessLauncher, Deaths]]) -> None:
    """More than a pipe's capacity is being written to the child meanwhile."""
    launcher, _ = made(SLEEPS, {"much": "x" * (1 << 20)})
    launcher.start("a", 1)
    end = time.monotonic() + LIMIT
    while not launcher._all and time.monotonic() < end:
        time.sleep(0.01)
    began = time.monotonic()
    assert launcher.pid("a", 1) is None
    launcher.kill("a", 1)
    launcher.shutdown(LIMIT)
    assert time.monotonic() - began < LIMIT / 2 and not launcher._all


def test_standbys_that_end_unused_are_made_again_a_few_times_for_each_start(
    made: Callable[..., tuple[ProcessLauncher, Deaths]],
) -> None:
    launcher, deaths = made((sys.executable, "-c", "import sys; sys.exit(4)"), warm=True)
    made_so_far: list[int] = []
    spawn = launcher._spawn

    def counted() -> processes._Child:
        made_so_far.append(1)
        return spawn()

    launcher._spawn = counted  # type: ignore[method-assign]
    for life in (1, 2):
        before = len(made_so_far)
        launcher.start("a", life)
        assert deaths.get(timeout=LIMIT).device == "a"
        end = time.monotonic() + LIMIT
        while launcher._spoiled < processes._MAX_SPOILED and time.monotonic() < end:
            time.sleep(0.01)
        assert (
            launcher._spoiled == processes._MAX_SPOILED and 2 <= len(made_so_far) - before <= processes._MAX_SPOILED + 2
        )


#: A program that reports that it is warm after its first input line, and stays alive.
WARMS = (
    sys.executable,
    "-c",
    "import sys\nsys.stdin.readline()\nprint('{\"warm\": true}', flush=True)\nsys.stdin.read()",
)


def test_one_stands_by_once_those_that_are_waited_for_are_warm(
    made: Callable[..., tuple[ProcessLauncher, Deaths]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = made(WARMS, warm=True)
    held: list[Callable[[], None]] = []
    tell = processes._Child.write_line
    monkeypatch.setattr(processes._Child, "write_line", lambda child, line: held.append(lambda: tell(child, line)))
    for device in ("a", "b"):
        launcher.start(device, 1)
    end = time.monotonic() + LIMIT
    while len(held) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(launcher._all) == 2 and launcher._spare is None
    monkeypatch.setattr(processes._Child, "write_line", tell)
    for say in held:
        say()
    while launcher._spare is None and time.monotonic() < end:
        time.sleep(0.01)
    assert len(launcher._all) == 3 and launcher._spare is not None


def test_a_process_sets_its_agents_variables_before_it_makes_its_engine() -> None:
    """A process that stood by, and so was started before it had a name, has them too."""
    program = (
        "import os, sys\nfrom runtime.cluster.agent_process.main import main\nfrom zoo.errors import NotServable\n"
        "def made(settings):\n    def make(device):\n        raise NotServable(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    return make\nsys.exit(main({'none': made}))"
    )
    config = ProcessConfig(
        Preparation("none"),
        program=(sys.executable, "-c", program),
        environments={"a": {"CUDA_VISIBLE_DEVICES": "5"}, "b": {"CUDA_VISIBLE_DEVICES": "6"}},
    )
    launcher, deaths = ProcessLauncher(config), Deaths()
    launcher.attach(deaths.put, "ipc:///nowhere")
    try:
        for name, number in (("a", "5"), ("b", "6")):
            launcher.start(name, 1)
            died = deaths.get(timeout=LIMIT)
            assert died.device == name and f"cannot be made: {number}" in died.reason
    finally:
        launcher.shutdown(LIMIT)
