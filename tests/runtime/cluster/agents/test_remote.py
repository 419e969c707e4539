"""Admission of remote agents: what an agent reports in its hello is checked before the scheduler receives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.agents.remote import RemoteAgents
from runtime.cluster.launch.launcher import AgentDied, AgentSlot
from runtime.control.scheduler_io import AgentDown
from runtime.messages import PROTOCOL, AgentHello
from runtime.transport.messenger import Messenger


class Silent:
    """A launcher that does nothing."""

    seat = AgentSlot("")

    def attach(self, listener: Any, scheduler: str) -> None: ...

    def start(self, device: str, incarnation: int) -> None: ...

    def kill(self, device: str, incarnation: int) -> None: ...

    def shutdown(self, timeout: float) -> None: ...


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)  # close the messengers that a failed test has left open


def met(context: zmq.Context[Any]) -> tuple[Messenger, Messenger, RemoteAgents]:
    """Return the scheduler's messenger, that of the awaited agent a, and the `RemoteAgents` under test."""
    scheduler = Messenger("scheduler", bind="inproc://scheduler", context=context)
    agent = Messenger("a", 1, bind="inproc://a", context=context)
    remote_agents = RemoteAgents(["a", "b"], Silent(), scheduler, LifeConfig(), "v", lambda: 0)
    remote_agents.look()
    agent.learn("scheduler", 0, scheduler.address)
    return scheduler, agent, remote_agents


def ready(agent: Messenger) -> dict[str, Any]:
    return {
        "device": "a",
        "protocol": PROTOCOL,
        "version": "v",
        "page_capacity": 8,
        "page_bytes": 64,
        "weights": 0,
        "address": agent.address,
    }


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"address": ""}, "no address"),
        ({"address": "file:///etc/passwd"}, "no address"),
        ({"address": "tcp://host:1\n"}, "no address"),
        ({"device": "b"}, "two names"),
        ({"protocol": PROTOCOL + 1}, "of version"),
        ({"version": "other"}, "of version"),
        ({"page_capacity": 0}, "no room"),
    ],
)
def test_what_an_agent_says_of_itself_is_checked(
    context: zmq.Context[Any], changed: dict[str, Any], why: str | None
) -> None:
    scheduler, agent, remote_agents = met(context)
    agent.send("scheduler", AgentHello(**(ready(agent) | changed)))
    told = remote_agents.receive(5.0)
    (facts, _) = remote_agents.lifecycles.facts()
    if why is None:
        assert [type(each) for each in told] == [AgentHello] and facts.phase == "up"
    else:
        assert told == [] and facts.phase == "failed" and why in facts.reason
    for messenger in (agent, scheduler):
        messenger.close()


@pytest.mark.parametrize("asked", [False, True])
def test_whether_an_agent_was_told_to_end_is_said_of_its_end(context: zmq.Context[Any], asked: bool) -> None:
    scheduler, agent, remote_agents = met(context)
    agent.send("scheduler", AgentHello(**ready(agent)))
    assert len(remote_agents.receive(5.0)) == 1
    if asked:
        remote_agents.restart("a")
    remote_agents.died(AgentDied("a", 1, 0, "it has ended"))
    assert remote_agents.receive(5.0) == [AgentDown("a", "it has ended", planned=asked)]
    assert remote_agents.lifecycles.facts()[0].deaths == (not asked)
    for messenger in (agent, scheduler):
        messenger.close()
