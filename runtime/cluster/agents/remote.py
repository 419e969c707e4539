"""Start, kill and admit the agents of a cluster, and filter their messages.

`receive` and `look` return events for the scheduler, in order: messages of agents that are up, about themselves, and an
AgentDown for each agent that is gone. An agent is cut off and killed if it is of another version, has pages of another
size, sends messages in another agent's name, or sends what only a scheduler sends. The reason is kept
(`AgentFacts.reason`).

All methods except `died` and `wake` are called on one thread. Nothing about sequences is decided here.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable

from runtime.cluster.agents.lifecycle import AgentLifecycles, LifeConfig
from runtime.cluster.agents.pool import AgentWork, Told
from runtime.cluster.launch.launcher import AgentDied, AgentLauncher
from runtime.control.scheduler_io import AgentDown
from runtime.messages import (
    PROTOCOL,
    AgentHello,
    AgentStats,
    Heartbeat,
    Message,
    PeerDisconnected,
    PeerList,
    PoolBeat,
    Shutdown,
    ToScheduler,
)
from runtime.transport.channels.sockets import ADDRESS
from runtime.transport.messenger import Envelope, Messenger, PeerCut

_log = logging.getLogger(__name__)

#: How long an agent that was refused may take to end by itself, in nanoseconds.
_GRACE_NS = 5_000_000_000


class RemoteAgents:
    """The agents of a cluster, in processes, threads or Ray actors. `names`: the devices."""

    def __init__(
        self,
        names: Iterable[str],
        launcher: AgentLauncher,
        messenger: Messenger,
        config: LifeConfig,
        version: str,
        clock: Callable[[], int],
    ) -> None:
        self._launcher, self._messenger, self._version, self._clock = launcher, messenger, version, clock
        self.lifecycles = AgentLifecycles(names, config)
        self._addresses: dict[str, tuple[int, str]] = {}
        self._rails: dict[str, str] = {}
        self._sides: dict[str, str] = {}
        self.reports: dict[str, AgentStats] = {}
        self._page_bytes: int | None = None
        self._deaths: queue.SimpleQueue[AgentDied] = queue.SimpleQueue()
        self._planned: set[tuple[str, int]] = set()
        self._leaving: list[tuple[int, str, int]] = []
        self._past = AgentWork()
        messenger.admit(self.lifecycles.begun)
        launcher.attach(self.died, messenger.address)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the same on all agents; 0 before the first is up."""
        return self._page_bytes or 0

    # -- any thread --

    def died(self, died: AgentDied) -> None:
        """Record that an agent ended. Called by the launcher, from any thread."""
        self._deaths.put(died)
        self._messenger.wake()

    def wake(self) -> None:
        """End a `receive` that waits."""
        self._messenger.wake()

    # -- events --------------------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[Told]:
        """Return the events that arrived; wait up to `timeout` seconds for the first."""
        items = self._messenger.receive(timeout)
        told: list[Told] = []
        for item in items:
            if isinstance(item, PeerCut):
                told += self._lose(item.peer, item.incarnation, item.reason, kill=True)
            else:
                told += self._handle_envelope(item)
        while not self._deaths.empty():
            died = self._deaths.get()
            told += self._lose(died.device, died.incarnation, died.reason, final=died.final)
        return told

    def look(self) -> list[Told]:
        """Kill agents that hang, start those that are due, and return the resulting events."""
        now = self._clock()
        told: list[Told] = []
        for late in self.lifecycles.overdue(now):
            told += self._lose(late.device, late.incarnation, late.reason, kill=True)
        for _, device, incarnation in [each for each in self._leaving if each[0] <= now]:
            self._launcher.kill(device, incarnation)
        self._leaving = [each for each in self._leaving if each[0] > now]
        for device, incarnation in self.lifecycles.due(now):
            self._launcher.start(device, incarnation)
        return told

    # -- actions -------------------------------------------------------------------------------------------------------

    def send(self, device: str, message: Message) -> None:
        """Send a message to an agent. One that is gone is ignored: the scheduler receives its AgentDown."""
        if self._messenger.knows(device):
            self._messenger.send(device, message)

    def restart(self, device: str) -> None:
        """Have an agent end after its running step; another one takes its place."""
        self._planned.add((device, self.lifecycles.incarnation(device)))
        self.send(device, Shutdown())

    def work(self) -> AgentWork:
        """Return the steps and times that agents reported, once per period; other counts stay 0."""
        reports, past = self.reports.values(), self._past
        return AgentWork(
            past.steps + sum(each.steps for each in reports), past.busy + sum(each.busy for each in reports)
        )

    def close(self, patience: float) -> None:
        """End all agents, by force after `patience` seconds, and release everything."""
        self.halt()
        self._messenger.close()
        self._launcher.shutdown(patience)

    def halt(self) -> None:
        """Order all agents to end after their running steps."""
        for device in self._addresses:
            self.send(device, Shutdown())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _handle_envelope(self, envelope: Envelope) -> list[Told]:
        message, device, incarnation = envelope.message, envelope.sender, envelope.incarnation
        if isinstance(message, AgentHello):
            return self._welcome(device, incarnation, message)
        if not self.lifecycles.up(device, incarnation):
            return []
        if isinstance(message, Heartbeat):
            self.lifecycles.beat(device, incarnation, message.stalled_ms, self._clock())
            return []
        if isinstance(message, PeerDisconnected):
            return self._lose(
                message.peer, message.incarnation, f"{device} has cut it off: {message.reason}", kill=True
            )
        if isinstance(message, ToScheduler | PoolBeat) and message.device == device:
            if isinstance(message, AgentStats):
                self.reports[device] = message
            return [message]
        return self._refuse(device, incarnation, f"a {type(message).__name__} is not its to send", kill=True)

    def _welcome(self, device: str, incarnation: int, ready: AgentHello) -> list[Told]:
        why = self._why_not(device, ready)
        if why is not None:
            return self._refuse(device, incarnation, why, final=True)
        if not self.lifecycles.ready(device, incarnation, self._clock()):
            return self._refuse(device, incarnation, "no agent of that name is expected")
        self._page_bytes = ready.page_bytes
        self._addresses[device] = incarnation, ready.address
        self._rails[device] = ready.tensor_transport
        self._sides[device] = ready.side
        self._introduce()
        return [ready]

    def _why_not(self, device: str, ready: AgentHello) -> str | None:
        """Return why an agent cannot join this cluster; None if it can."""
        if ready.device != device:
            return "it calls itself by two names"
        if ready.protocol != PROTOCOL or ready.version != self._version:
            return (
                f"it is of version {ready.version!r} (protocol {ready.protocol}), the cluster of {self._version!r} "
                f"(protocol {PROTOCOL})"
            )
        if self._page_bytes not in (None, ready.page_bytes):
            return f"its pages have {ready.page_bytes} bytes, those of the cluster {self._page_bytes}"
        if ready.page_capacity < 1 or ready.page_bytes < 1 or ready.weights < 0:
            return "it has no room for a page"
        if not ADDRESS.fullmatch(ready.address) or (ready.side and not ADDRESS.fullmatch(ready.side)):
            return "it gives no address that others could reach it at"
        return None

    def _refuse(
        self, device: str, incarnation: int, reason: str, *, final: bool = False, kill: bool = False
    ) -> list[Told]:
        _log.warning("the agent of %s is refused: %s", device, reason)
        self._messenger.deny(device, reason)
        self._leaving.append((self._clock() + _GRACE_NS, device, incarnation))
        return self._lose(device, incarnation, reason, final=final, kill=kill)

    def _lose(
        self, device: str, incarnation: int, reason: str, *, final: bool = False, kill: bool = False
    ) -> list[Told]:
        """Record that an agent is gone or has to go; return nothing if that was known."""
        planned = (device, incarnation) in self._planned
        self._planned.discard((device, incarnation))
        was_up = self.lifecycles.up(device, incarnation)
        if not self.lifecycles.died(device, incarnation, reason, self._clock(), final=final, planned=planned):
            return []
        _log.log(logging.INFO if planned else logging.WARNING, "the agent of %s is gone: %s", device, reason)
        if kill:
            self._launcher.kill(device, incarnation)
        self._addresses.pop(device, None)
        last = self.reports.pop(device, None)
        if last is not None:
            self._past = AgentWork(self._past.steps + last.steps, self._past.busy + last.busy)
        self._messenger.remove_peer(device)
        self._introduce()
        return [AgentDown(device, reason, planned=planned)] if was_up else []

    def _introduce(self) -> None:
        """Send all agents the list of agents."""
        rails = tuple(self._rails.get(device, "") for device in self._addresses)
        sides = tuple(self._sides.get(device, "") for device in self._addresses)
        peers = PeerList(
            tuple((device, incarnation, address) for device, (incarnation, address) in self._addresses.items()),
            rails if any(rails) else (),
            sides if any(sides) else (),
        )
        for device in self._addresses:
            self.send(device, peers)
