"""Run one agent's loop: receive messages, pass them to the agent, carry out its commands and steps.

The loop runs in a process, a thread or a Ray actor. Everything except `stop` and `stalled_ns` happens on the thread
that calls `run`: the engine is loaded, read, written and run there, except for steps of lanes with threads of their own
(`agent_process.lanes`).

- A step's results are sent before its lane starts the next step.
- A failed step loses its rows only. EngineLost ends the agent, as does being rejected by the scheduler or a peer. `run`
  returns the reason and never raises.
- Every wait has a limit: an agent that gets no answer from the scheduler ends.
- Control messages are accepted from the scheduler only; agents may send rows, pages, offers and bids.

Commands other than steps are carried out by `agent_process.commands`. Engine, agent and messenger are passed in.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from msgspec.structs import replace

from runtime.agent.agent import Agent
from runtime.chains import Array, HostMemory, IdleWork, StageEngine, WatchesLayers
from runtime.cluster.agent_process.commands import CommandExecutor
from runtime.cluster.agent_process.exit_status import AgentEnded, AgentExit
from runtime.cluster.agent_process.lanes import lanes_for
from runtime.cluster.agent_process.layer_watch import StepWatch
from runtime.cluster.agent_process.side_link import SideClient, SidePeers
from runtime.cluster.errors import public
from runtime.config import DirectConfig
from runtime.control.agent_io import AgentCommand, AgentEvent, Send
from runtime.lending_config import LoanShipping
from runtime.messages import (
    PROTOCOL,
    SCHEDULER,
    AgentHello,
    AgentStats,
    Bid,
    ForwardRows,
    MendPages,
    Message,
    Offer,
    PageData,
    PageRequest,
    PeerDisconnected,
    PeerDown,
    PeerList,
    Retract,
    Shutdown,
    ToAgent,
)
from runtime.transport.link import Link
from runtime.transport.messenger import Envelope, PeerCut
from runtime.transport.tensor_link import TensorLink
from runtime.types import EngineLost

_log = logging.getLogger(__name__)

#: Messages that agents may send to each other.
_OF_AGENTS = (ForwardRows, MendPages, PageRequest, PageData, Offer, Bid, Retract)
#: Longest wait for messages while rows wait for something else (mostly pages), in seconds.
_PAUSE = 0.005
#: Shortest wait, in seconds: below it the loop would spin and take the processor from the scheduler.
_SHORTEST = 0.001


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent's loop.

    Fields:
        weights: Bytes of weights that the device may hold; 0: no limit.
        budget: Bytes of weights and pages together, where pages get what weights leave; 0: they have a fixed share.
        report_seconds: Period of AgentStats.
        hello_seconds: Time that the scheduler may take to answer AgentHello.
        server: The machine; devices of one machine are near each other (BL-26). Empty: the host's name.
        own_lane: Whether stand-ins run on a thread or stream of their own (BL-25).
        direct: How tensors go directly from device to device; None: through host memory (BL-33).
        loan_seconds: Longest wait for attention to K and V on another device; 0: there are no loans (IL-04).
        loan_shipping: What travels for it (IL-28).
        loan_native: Whether native code asks and answers where it can.
        pool_beat_seconds: Period of heartbeats to the managers of the pool; 0: there are none (IL-10).
        watch_layers: Whether page requests are answered between the layers of a step, too (TI-15). Not with lanes of
            their own, nor where tensors go directly: there all pages go between steps.
    """

    weights: int = 0
    budget: int = 0
    report_seconds: float = 0.5
    hello_seconds: float = 10.0
    server: str = ""
    own_lane: bool = False
    direct: DirectConfig | None = None
    loan_seconds: float = 0.0
    loan_shipping: LoanShipping = "query"
    loan_native: bool = True
    pool_beat_seconds: float = 0.0
    watch_layers: bool = False


class _Severed(Exception):
    """The scheduler or a peer rejects this agent."""


class _Unanswered(Exception):
    """The scheduler does not answer."""


class AgentLoop:
    """The loop of one agent.

    Args:
        messenger: Has the scheduler's address already; closed by the caller.
        version: Of this program; an agent of another version than the scheduler's is refused.
        directed: The link over the same messenger, if tensors may go directly.
        side: Address at which the agent answers queries to lent pages; empty: it does not.
        side_peers: Gets those of the other agents.
        side_client: Asks them in steps, on the thread of these.
    """

    def __init__(
        self,
        engine: StageEngine,
        agent: Agent,
        messenger: Link,
        settings: AgentSettings,
        version: str,
        clock: Callable[[], int] = time.monotonic_ns,
        directed: TensorLink | None = None,
        side: str = "",
        side_peers: SidePeers | None = None,
        side_client: SideClient | None = None,
    ) -> None:
        self._side, self._side_peers = side, side_peers
        self._came: list[Envelope | PeerCut] = []
        self._engine, self._agent, self._clock, self._directed = engine, agent, clock, directed
        self._messenger: Link = directed or messenger
        self._settings, self._version, self._executor = (
            settings,
            version,
            CommandExecutor(engine, self._messenger, directed),
        )
        second = engine.second_lane() if settings.own_lane else None
        if side_client is not None and second is None:  # with lanes of their own, messages are read during steps
            side_client.look = self._look_beside
        self._lanes = lanes_for(engine, second, agent, clock, self._messenger.wake, self._send)
        if settings.watch_layers and second is None and directed is None and isinstance(engine, WatchesLayers):
            engine.watch_layers(StepWatch(agent, messenger, clock, self._carry_out, self._came_beside))
        self._agents: dict[str, int] = {}
        self._welcome = False
        self._stopping = self._ran = False
        self._began: int | None = None
        self._server = settings.server or platform.node()
        self._next_report = self._next_beat = 0
        self._busy_since: int | None = None

    def stop(self) -> None:
        """End after the running step. From any thread, and from signal handlers."""
        self._stopping = True
        self._messenger.wake()

    def stalled_ns(self) -> int:
        """Return how long the loop or a lane's thread has been busy with one thing, in ns; 0 while all wait."""
        since = min((each for each in (self._busy_since, self._lanes.since()) if each is not None), default=None)
        return 0 if since is None else self._clock() - since

    def run(self) -> AgentEnded:
        """Run until stopped or until something ends the agent; return how it ended."""
        try:
            while (ended := self.turn()) is None:
                pass
            return ended
        finally:
            self.close()

    def close(self) -> None:
        """End the threads of the lanes and of the loader."""
        self._lanes.close()
        if self._executor.loader is not None:
            self._executor.loader.close()

    def turn(self, limit: float = math.inf) -> AgentEnded | None:
        """Handle messages and run a step if there is one; else wait for messages, up to `limit` seconds.

        Returns how the agent ended, or None while it runs.
        """
        try:
            if self._stopping:
                return AgentEnded(AgentExit.STOPPED, "it was told to stop")
            self._turn(limit)
            return None
        except EngineLost as error:
            _log.error("the engine is lost", exc_info=True)
            return AgentEnded(AgentExit.LOST, f"the engine is lost: {public(error)}")
        except _Severed as error:
            return AgentEnded(AgentExit.DENIED, str(error))
        except _Unanswered as error:
            return AgentEnded(AgentExit.UNANSWERED, str(error))
        except Exception as error:
            _log.critical("the agent's loop has died", exc_info=True)
            return AgentEnded(AgentExit.DEFECT, f"the agent's loop has died: {public(error)}")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _turn(self, limit: float) -> None:
        if self._began is None:
            self._say_hello()
        more = False
        if not self._ran:
            self._agent.prepare()
            self._messenger.prepare()
            more = isinstance(self._engine, IdleWork) and not self._agent.busy and self._engine.prepare_next()
        self._receive(0.0 if self._ran or more else min(limit, self._patience()))
        self._require_answer()
        if self._executor.preparing or self._executor.reads:
            for event in self._executor.load_prepared():
                self._handle_event(event)
        self._look()
        self._ran = self._step()

    def _say_hello(self) -> None:
        engine, settings = self._engine, self._settings
        self._began = self._clock()
        self._messenger.send(
            SCHEDULER,
            AgentHello(
                self._agent.device,
                PROTOCOL,
                self._version,
                engine.page_capacity,
                engine.page_bytes,
                settings.weights,
                self._messenger.address,
                self._server,
                pid=os.getpid(),
                activation_cache_bytes=self._agent.inputs,
                tensor_transport="" if self._directed is None else self._directed.process_group,
                lacks=tuple(sorted(engine.lacks if self._side else engine.lacks | {"loans"})),
                budget=settings.budget,
                fetch_sets=self._agent.fetch_sets,
                recompute_chunk=self._agent.recompute_chunk,
                host_memory=self._agent.host_memory,
                between_steps=self._agent.between_steps,
                side=self._side,
            ),
        )

    def _require_answer(self) -> None:
        limit = self._settings.hello_seconds
        if not self._welcome and self._clock() - (self._began or 0) > limit * 1e9:
            raise _Unanswered(f"the scheduler did not answer within {limit:g} s: a wrong address, or another key")

    def _patience(self) -> float:
        if self._agent.lingers is not None:
            return max(_SHORTEST, min(_PAUSE, (self._agent.lingers - self._clock()) / 1e9))
        if self._agent.busy or not self._welcome:
            return _PAUSE
        due = min(self._next_report, self._next_beat) if self._beats else self._next_report
        return max(0.0, min(self._settings.report_seconds, (due - self._clock()) / 1e9))

    @property
    def _beats(self) -> bool:
        """Whether the managers of the pool hear of this agent: it can hold pages for other ones."""
        return self._settings.pool_beat_seconds > 0 and bool(self._side)

    def _receive(self, timeout: float) -> None:
        self._busy_since = None
        came, self._came = self._came, []
        items = [*came, *self._messenger.receive(0.0 if came else timeout)]
        self._busy_since = self._clock()
        for item in items:
            if isinstance(item, PeerCut):
                self._cut(item)
            else:
                self._handle_envelope(item)

    def _look_beside(self) -> None:
        """Read messages while a step waits for another agent: is that one gone, the step need not wait.

        They are handled after the step, in their order.
        """
        came = self._messenger.receive(0.0)
        self._came += came
        for item in came:
            if isinstance(item, Envelope) and item.sender == SCHEDULER and isinstance(item.message, PeerList):
                self._learn_sides(item.message)

    def _learn_sides(self, peers: PeerList) -> None:
        if self._side_peers is not None:
            sides = zip(peers.agents, peers.sides, strict=False)
            self._side_peers.update({name: (incarnation, side) for (name, incarnation, _), side in sides})

    def _came_beside(self, item: Envelope | PeerCut) -> None:
        self._came.append(item)

    def _look(self) -> None:
        """Carry out what is due by time."""
        now = self._clock()
        if self._welcome and now >= self._next_report:
            self._next_report = now + int(self._settings.report_seconds * 1e9)
            self._messenger.send(SCHEDULER, self._report())
            self._carry_out(self._agent.starved(now))
        if self._beats and self._welcome and now >= self._next_beat:
            self._next_beat = now + int(self._settings.pool_beat_seconds * 1e9)
            self._messenger.send(SCHEDULER, self._agent.beat(self._server))

    def _report(self) -> AgentStats:
        report = self._agent.report()
        if isinstance(self._engine, HostMemory):
            report = replace(report, host_weights=self._engine.host_weights)
        return report if self._directed is None else replace(report, links=self._directed.links())

    def _step(self) -> bool:
        """Run a turn of the lanes; return whether there was anything to do."""
        self._busy_since = self._clock()
        commands = self._lanes.turn()
        if commands is None:
            return False
        self._carry_out(commands)
        return True

    # -- messages ----------------------------------------------------------------------------------------------------

    def _handle_envelope(self, envelope: Envelope) -> None:
        message = envelope.message
        if envelope.sender != SCHEDULER:
            if isinstance(message, _OF_AGENTS):
                self._handle_event(message, envelope.arrays)
            else:
                self._messenger.deny(envelope.sender, f"a {type(message).__name__} is the scheduler's to send")
        elif isinstance(message, PeerList):
            self._peers(message)
        elif isinstance(message, Shutdown):
            self._stopping = True
        elif isinstance(message, ToAgent):
            self._handle_event(message, envelope.arrays)
        else:
            raise _Severed(f"the scheduler sent a {type(message).__name__}")

    def _peers(self, peers: PeerList) -> None:
        self._welcome = True
        now = {name: incarnation for name, incarnation, _ in peers.agents}
        for name, incarnation in self._agents.items():
            if now.get(name) != incarnation:
                self._messenger.remove_peer(name)
        for (name, incarnation, address), process_group in zip(
            peers.agents, peers.tensor_transports or repeat(""), strict=False
        ):
            if name != self._agent.device:
                self._messenger.learn(name, incarnation, address)
                if self._directed is not None:
                    self._directed.reach(name, process_group)
        self._learn_sides(peers)
        self._agents = {name: incarnation for name, incarnation in now.items() if name != self._agent.device}

    def _cut(self, cut: PeerCut) -> None:
        if cut.peer == SCHEDULER or cut.denied:
            raise _Severed(f"{cut.peer}: {cut.reason}")
        self._messenger.send(SCHEDULER, PeerDisconnected(cut.peer, cut.incarnation, cut.reason))
        self._handle_event(PeerDown(cut.peer))

    def _handle_event(self, event: Message | AgentEvent, arrays: Sequence[Array] = ()) -> None:
        self._carry_out(self._agent.handle(event, arrays, self._clock()))

    # -- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, commands: Iterable[AgentCommand]) -> None:
        """Carry out commands in order; commands that result from one come right behind it."""
        todo = deque(commands)
        while todo:
            command = todo.popleft()
            if isinstance(command, Send):
                if command.to != self._agent.device:
                    self._send(command)
                else:  # after a migration, neighbouring hops may be on one device
                    todo.extendleft(reversed(self._agent.handle(command.message, command.arrays, self._clock())))
                continue
            self._busy_since = self._clock()
            event = self._executor.do(command)
            if event is not None:
                todo.extendleft(reversed(self._agent.handle(event, (), self._clock())))

    def _send(self, command: Send) -> None:
        self._busy_since = self._clock()
        self._messenger.send(command.to, command.message, command.arrays)
