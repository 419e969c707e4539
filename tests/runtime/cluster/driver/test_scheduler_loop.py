"""Changes of roles run on the caller's thread: at once, and in order with what the scheduler's thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from runtime.cluster.agents.lifecycle import AgentLifecycles
from runtime.cluster.agents.pool import AgentWork, Told
from runtime.cluster.driver.scheduler_loop import SchedulerLoop
from runtime.cluster.streams.router import StreamRouter
from runtime.config import ClusterConfig
from runtime.control.agent_io import Send
from runtime.control.scheduler_io import RolesChanged, SchedulerCommand, SetRoles, Tick
from runtime.messages import AgentStats, Message, Shutdown
from runtime.scheduler.scheduler import Scheduler
from tests.runtime.cluster.clusters import CUTS, LIMIT, MODELS, blocks


class NoAgents:
    """Agents that send nothing; what is sent to them is kept, with the thread that sent it."""

    page_bytes = 0

    def __init__(self) -> None:
        self.lifecycles = AgentLifecycles(["a"])
        self.reports: dict[str, AgentStats] = {}
        self.sent: list[tuple[str, str]] = []
        self.rung = threading.Event()

    def wake(self) -> None:
        self.rung.set()

    def receive(self, timeout: float) -> list[Told]:
        self.rung.wait(timeout)
        self.rung.clear()
        return []

    def look(self) -> list[Told]:
        return []

    def send(self, device: str, message: Message) -> None:
        self.sent.append((device, threading.current_thread().name))

    def restart(self, device: str) -> None: ...

    def work(self) -> AgentWork:
        return AgentWork()

    def close(self, patience: float) -> None: ...


class Answers:
    """Stands for a scheduler: answers changes of roles with these commands, or raises."""

    def __init__(self, *commands: SchedulerCommand, error: Exception | None = None) -> None:
        self._commands, self._error = commands, error
        self.handled: list[str] = []

    def handle(self, event: Any, now: int) -> list[SchedulerCommand]:
        if isinstance(event, Tick):
            return []
        self.handled.append(f"{type(event).__name__} on {threading.current_thread().name}")
        if self._error is not None:
            raise self._error
        return list(self._commands) if isinstance(event, SetRoles) else []


def loop_of(
    agents: NoAgents, answers: Answers, died: Callable[[str], None] = lambda why: None
) -> tuple[SchedulerLoop, threading.Condition]:
    scheduler, changed = Scheduler([MODELS[0].chain(*CUTS)], blocks(MODELS[:1]), ClusterConfig()), threading.Condition()
    return SchedulerLoop(scheduler, agents, changed, StreamRouter(), time.monotonic_ns, died, answers), changed


@pytest.mark.parametrize("why", ["", "there is no agent 'z'"])
def test_an_answer_needs_no_turn_of_the_schedulers_thread(why: str) -> None:
    """Also where that thread does not even run."""
    answers = Answers(RolesChanged(why))
    loop, _ = loop_of(NoAgents(), answers)
    assert loop.set_roles({"a": "decode"}) == (why or None)
    assert answers.handled == [f"SetRoles on {threading.current_thread().name}"] and loop.idle


def test_what_follows_from_a_change_is_carried_out_by_the_schedulers_thread_before_all_else() -> None:
    agents = NoAgents()
    loop, _ = loop_of(agents, Answers(RolesChanged(), Send("a", Shutdown())))
    before: list[int] = []
    loop.run_soon(lambda now: before.append(len(agents.sent)))
    assert loop.set_roles({"a": "decode"}) is None and not agents.sent and not loop.idle
    loop.start()
    deadline = time.monotonic() + LIMIT
    while not before and time.monotonic() < deadline:
        time.sleep(0.01)
    loop.stop()
    assert loop.join(LIMIT) and agents.sent == [("a", "zoo-scheduler")] and before == [1]


def test_what_follows_from_several_changes_keeps_their_order() -> None:
    agents = NoAgents()

    class Names(Answers):
        def handle(self, event: Any, now: int) -> list[SchedulerCommand]:
            return [RolesChanged(), Send(event.roles[0][0], Shutdown())] if isinstance(event, SetRoles) else []

    loop, _ = loop_of(agents, Names())
    for name in ("a", "b", "c"):
        assert loop.set_roles({name: "decode"}) is None
    loop.start()
    deadline = time.monotonic() + LIMIT
    while len(agents.sent) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.set_roles({"d": "decode"}) is None
    while len(agents.sent) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    loop.stop()
    assert loop.join(LIMIT) and [name for name, _ in agents.sent] == ["a", "b", "c", "d"]


def test_a_change_waits_for_the_turn_under_way() -> None:
    answers = Answers(RolesChanged())
    loop, changed = loop_of(NoAgents(), answers)
    with changed:
        asked = threading.Thread(target=loop.set_roles, args=({"a": "decode"},), daemon=True)
        asked.start()
        asked.join(0.1)
        assert asked.is_alive() and not answers.handled
    asked.join(LIMIT)
    assert not asked.is_alive() and answers.handled


def test_a_defect_ends_the_loop_with_the_reason() -> None:
    ends: list[str] = []
    loop, _ = loop_of(NoAgents(), Answers(error=RuntimeError("it broke")), ends.append)
    loop.start()
    with pytest.raises(RuntimeError, match="it broke"):
        loop.set_roles({"a": "decode"})
    assert loop.join(LIMIT)
    assert len(ends) == 1 and ends[0].startswith("the scheduler's loop has died")
