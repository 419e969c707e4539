"""Agents for tests: the real loop and state machine with counting engines, in threads or processes.

`End` is the scheduler's end of their links.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from runtime.agent.agent import Agent
from runtime.chains import StageEngine
from runtime.cluster.agent_process.exit_status import AgentEnded
from runtime.cluster.agent_process.loop import AgentLoop, AgentSettings
from runtime.cluster.agent_process.main import Identity, Preparation, Word
from runtime.config import AgentConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from runtime.messages import SCHEDULER, AgentHello, AgentStats, Heartbeat, Message, PeerList
from runtime.transport.messenger import Envelope, Messenger, PeerCut
from runtime.transport.tensor_link import TensorLink

LIMIT = 60.0
VERSION = "1"
MODEL = counting_model("org/m", "1 2* 3* 4", max_model_len=256)
M = TypeVar("M", bound=Message)


@dataclass
class End:
    """The scheduler's end of the links: `envelope` has what came, except hellos, reports and heartbeats."""

    messenger: Messenger
    envelope: list[Envelope] = field(default_factory=list)
    cuts: list[PeerCut] = field(default_factory=list)
    ready: dict[str, Envelope] = field(default_factory=dict)
    reports: dict[str, AgentStats] = field(default_factory=dict)
    beats: int = 0

    def pump(self, seconds: float = 0.01) -> None:
        """Receive for a while, and sort what came."""
        for item in self.messenger.receive(seconds):
            if isinstance(item, PeerCut):
                self.cuts.append(item)
            elif isinstance(item.message, AgentHello):
                self.ready[item.sender] = item
            elif isinstance(item.message, AgentStats):
                self.reports[item.sender] = item.message
            elif isinstance(item.message, Heartbeat):
                self.beats += 1
            else:
                self.envelope.append(item)

    def until(self, condition: Callable[[], object], seconds: float = LIMIT) -> None:
        """Receive until the condition holds; fail after `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.envelope, self.cuts)
            self.pump()

    def welcome(self, *names: str) -> None:
        """Wait for the agents' hellos, and send all of them the list of peers."""
        self.until(lambda: set(names) <= self.ready.keys())
        agents = tuple((name, self.ready[name].incarnation, address(self.ready[name])) for name in names)
        rails = tuple(
            message.tensor_transport for name in names if isinstance(message := self.ready[name].message, AgentHello)
        )
        for name in names:
            self.messenger.send(name, PeerList(agents, rails))

    def next(self, kind: type[M]) -> M:
        """Return the next message of a kind; messages before it stay queued."""
        self.until(lambda: any(isinstance(item.message, kind) for item in self.envelope))
        found = next(item for item in self.envelope if isinstance(item.message, kind))
        self.envelope.remove(found)
        assert isinstance(found.message, kind)
        return found.message


def address(envelope: Envelope) -> str:
    assert isinstance(envelope.message, AgentHello)
    return envelope.message.address


@dataclass
class Threaded:
    """An agent's loop in a thread, and how it ended."""

    loop: AgentLoop
    thread: threading.Thread
    ended: list[AgentEnded]

    def wait(self) -> AgentEnded:
        """Wait for the end of the agent, and return it."""
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        return self.ended[0]


@contextmanager
def threads(
    *names: str, engines: Sequence[StageEngine] = (), **settings: Any
) -> Iterator[tuple[End, dict[str, Threaded]]]:
    """Run agents in threads of this process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = End(Messenger(SCHEDULER, bind="inproc://scheduler", context=context))
    agents = {}
    for at, name in enumerate(names):
        engine = engines[at] if engines else IntegerEngine([MODEL], 200)
        agents[name] = _thread(name, engine, context, AgentSettings(**{"report_seconds": 0.02} | settings))
    try:
        yield end, agents
    finally:
        for each in agents.values():
            each.loop.stop()
            each.thread.join(LIMIT)
        end.messenger.close()
        context.term()


def _thread(
    name: str, engine: StageEngine, context: zmq.Context[zmq.Socket[bytes]], settings: AgentSettings
) -> Threaded:
    messenger = Messenger(name, 1, f"inproc://{name}", context=context)
    messenger.learn(SCHEDULER, 0, "inproc://scheduler")
    directed = None if settings.direct is None else TensorLink(name, messenger, engine.direct(settings.direct, ""))  # type: ignore[attr-defined]
    loop = AgentLoop(
        engine, Agent(name, engine.page_capacity, AgentConfig()), messenger, settings, VERSION, directed=directed
    )
    ended: list[AgentEnded] = []

    def run() -> None:
        try:
            ended.append(loop.run())
        finally:
            if directed is not None:
                directed.close()
            messenger.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return Threaded(loop, thread, ended)


def counting(models: Sequence[IntegerModel] = (MODEL,), pages: int = 200, **others: Any) -> Preparation:
    """Return the preparation of a counting engine for an agent process."""
    return Preparation(
        "counting", {"models": [msgspec.to_builtins(model) for model in models], "pages": pages, **others}
    )


def identity(name: str, scheduler: str, folder: Path, incarnation: int = 1, **others: Any) -> Identity:
    """Return the identity of an agent process with short periods."""
    settings = AgentSettings(report_seconds=0.05, hello_seconds=others.pop("hello_seconds", 10.0))
    return Identity(
        name,
        incarnation,
        scheduler,
        f"ipc://{folder}/{name}.{incarnation}",
        settings,
        AgentConfig(),
        beat_seconds=0.05,
        **others,
    )


@contextmanager
def process(*lines: msgspec.Struct | bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Start an agent process and send it these lines."""
    child = subprocess.Popen(
        [sys.executable, "-m", "cli.serving.agent_engines"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        for line in lines:
            tell(child, line)
        yield child
    finally:
        child.kill()
        child.wait(LIMIT)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def tell(child: subprocess.Popen[bytes], line: msgspec.Struct | bytes) -> None:
    """Write a line to the process's input."""
    assert child.stdin is not None
    child.stdin.write((line if isinstance(line, bytes) else msgspec.json.encode(line)) + b"\n")
    child.stdin.flush()


def said(child: subprocess.Popen[bytes]) -> Word:
    """Read a line of the process's output."""
    assert child.stdout is not None
    return msgspec.json.decode(child.stdout.readline(), type=Word)
