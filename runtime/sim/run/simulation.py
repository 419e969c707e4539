"""Drive the real scheduler and the real agents in virtual time; only engines and links are simulated.

    request -> Scheduler.handle --Send--> control latency --> Agent.handle -> BEGIN -> Agent.next_step -> engine's ns
    engine's ns -> DONE -> Agent.finish_step --> control latency (to the scheduler), or network (bytes, contention)
    to the next agent

- Commands are carried out in order; messages between two parties arrive in the order in which they were sent.
- The same inputs give the same calls in the same order. No event runs inside the one that scheduled it.
- Stalled is raised if requests are alive and no event is due.

Scheduling is left to the scheduler and the agents; measurements go into a `RunRecorder`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from runtime.agent.steps.queue import Lane
from runtime.chains import Array, LoadedUnits
from runtime.control.agent_io import (
    ActivationsVerified,
    AgentCommand,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    DropStage,
    LoadStage,
    PagesWritten,
    ReadPages,
    ReadStagesAhead,
    ReturnPages,
    Send,
    SendActivations,
    ShareHostMemory,
    StageFailed,
    StageLoaded,
    VerifyActivations,
    WritePages,
)
from runtime.control.scheduler_io import (
    AddRequest,
    AgentDown,
    EmitTokens,
    ReplaceAgent,
    SchedulerEvent,
    SolvePlan,
    Tick,
)
from runtime.messages import PROTOCOL, SCHEDULER, AgentHello, Message
from runtime.scheduler.observe.replay_log import Handler
from runtime.sim.cost.plans import solved
from runtime.sim.results.recorder import RunRecorder, Sample
from runtime.sim.run.clock import EventClass, VirtualClock
from runtime.sim.run.engine import hollow_rows
from runtime.sim.run.lenders import LenderTimes
from runtime.sim.run.network import Network
from runtime.sim.run.node import Cost, Node, Periods
from runtime.sim.run.playback import Playback
from runtime.sim.workload.predictions import HiddenAnswers
from runtime.types import SequenceRequest

#: Version that simulated agents report.
VERSION = "simulated"
#: Digest of simulated arrays.
_DIGEST = "0" * 64


class Simulation:
    """One run.

    Args:
        nodes: Devices by name.
        pace: Periods of ticks and reports.
        revive: Makes a new device in place of a dead one; None: dead devices are not replaced.
        timed: Whether to measure the scheduler's processor time.
        loads_stop_steps: Whether a device starts no step while it loads a stage.
        counts: Returns the scheduler's counters.
        answers: Hides the lengths of answers; None: the scheduler knows them.
    """

    def __init__(
        self,
        scheduler: Handler,
        nodes: dict[str, Node],
        network: Network,
        pace: Periods | None = None,
        revive: Callable[[str], Node] | None = None,
        timed: bool = False,
        loads_stop_steps: bool = False,
        counts: Callable[[], dict[str, int]] = dict,
        answers: HiddenAnswers | None = None,
    ) -> None:
        self._answers = answers
        self.clock = VirtualClock()
        self.ledger = RunRecorder()
        self.cost = Cost()
        self.nodes = nodes
        self.network = network
        self._scheduler = scheduler
        self._pace = pace or Periods()
        self._revive = revive
        self._timed = timed
        self._loads_stop_steps = loads_stop_steps
        self.counts = counts
        self._lenders = LenderTimes(self.clock, network, nodes)
        for node in nodes.values():
            node.engine.borrow(self._lenders)
        self._playback = Playback(self.clock, self.ledger, self._arrive)

    def run(
        self,
        requests: Iterable[SequenceRequest],
        faults: Sequence[tuple[int, str]] = (),
        progress: Callable[[int], None] | None = None,
        clients: int = 0,
    ) -> RunRecorder:
        """Run until every request has ended.

        Args:
            requests: In order of `arrival`.
            faults: Devices that die: (time in ns, name).
            progress: Called now and then with the number of requests that have ended since the last call.
            clients: Most requests at a time (`Demand.clients`).
        """
        for name in self.nodes:
            self._join(name)
        for at, name in faults:
            self.clock.at(at, EventClass.TICK, (self._die, name))
        self._playback.begin(requests, clients)
        if self._pace.tick:
            self.clock.at(self._pace.tick, EventClass.TICK, (self._tick,))
        for place, name in enumerate(self.nodes if self._pace.report else ()):
            # Reports of the devices are spread over the period.
            self.clock.at(self._pace.report * (place + 1) // len(self.nodes), EventClass.TICK, (self._report, name))
        self._playback.play(progress)
        return self.ledger

    # -- requests and the scheduler ------------------------------------------------------------------------------------

    def _arrive(self, request: SequenceRequest) -> None:
        shown, predicted = (request, None) if self._answers is None else self._answers.hide(request)
        self._handle_at_scheduler(AddRequest(shown))
        if predicted is not None:
            after, event = predicted
            self.clock.at(self.clock.now + after, EventClass.ARRIVED, (self._handle_at_scheduler, event))

    def _handle_at_scheduler(self, event: Message | SchedulerEvent) -> None:
        """Pass an event to the scheduler and carry out its commands."""
        now = self.clock.now
        if not self._timed:
            commands = self._scheduler.handle(event, now)
        else:
            begin = time.process_time()
            commands = self._scheduler.handle(event, now)
            self._count(event, time.process_time() - begin)
        said: dict[str, list[Send]] = {}
        for command in commands:
            if type(command) is Send:
                said.setdefault(command.to, []).append(command)
            elif type(command) is EmitTokens:
                self.ledger.add_events(command.events, now)
            elif type(command) is ReplaceAgent:
                self._replace(command.device)
            elif type(command) is SolvePlan:
                found = solved(command)
                self.clock.at(now + found.took_ns, EventClass.ARRIVED, (self._handle_at_scheduler, found))
        for device, sends in said.items():
            self.clock.at(now + self.network.control_ns, EventClass.ARRIVED, (self._hear_all, device, sends))

    def _count(self, event: object, seconds: float) -> None:
        self.cost.calls += 1
        self.cost.seconds += seconds
        self.cost.slowest = max(self.cost.slowest, seconds)
        name = type(event).__name__
        self.cost.by_event[name] = self.cost.by_event.get(name, 0) + 1

    def _tick(self) -> None:
        busy = sum(node.busy for node in self.nodes.values())
        weights = sum(node.engine.memory().weights for node in self.nodes.values())
        pages = [node.agent.pages() for node in self.nodes.values()]
        kv = sum((each.capacity - each.free) for each in pages) * next(iter(self.nodes.values())).engine.page_bytes
        self.ledger.samples.append(Sample(self.clock.now, busy, self.ledger.alive, weights, kv, self.ledger.made))
        self.clock.at(self.clock.now + self._pace.tick, EventClass.TICK, (self._tick,))
        self._handle_at_scheduler(Tick())

    # -- devices -------------------------------------------------------------------------------------------------------

    def _join(self, name: str) -> None:
        node = self.nodes[name]
        server = f"server-{self.network.server_of(name)}"
        self._handle_at_scheduler(
            AgentHello(
                name, PROTOCOL, VERSION, node.engine.page_capacity, node.engine.page_bytes, node.weights, name, server,
                0, node.agent.inputs, budget=node.budget, fetch_sets=node.agent.fetch_sets,
                recompute_chunk=node.agent.recompute_chunk, host_memory=node.agent.host_memory, copies_beside=True,
            )
        )  # fmt: skip

    def _hear_all(self, name: str, sends: Sequence[Send]) -> None:
        """Deliver the messages that the scheduler sent to a device at one moment, in order."""
        node, now = self.nodes[name], self.clock.now
        if node.alive:
            commands: list[AgentCommand] = []
            for send in sends:
                commands += node.agent.handle(send.message, send.arrays, now)
            self._carry_out(name, node, commands)

    def _deliver(self, name: str, message: Message, arrays: Sequence[Array]) -> None:
        node = self.nodes[name]
        if node.alive:
            self._carry_out(name, node, node.agent.handle(message, arrays, self.clock.now))

    def _carry_out(self, name: str, node: Node, commands: Iterable[AgentCommand]) -> None:
        now = self.clock.now
        for command in commands:
            if type(command) is Send:
                self._send(name, command.to, command.message, command.arrays)
            elif type(command) is LoadStage:
                if node.loader.submit(command.stage):
                    self.clock.at(now, EventClass.LOADED, (self._load, name, node.life))
            elif type(command) is ReadStagesAhead:
                node.loader.read_ahead(command.stages)
                self._read_ahead(name, node.life)
            elif type(command) is DropStage:
                node.engine.unload(command.stage)
            elif type(command) is ReturnPages:
                node.engine.return_pages(command.pages)
            elif type(command) is ReadPages:
                array = node.engine.read_pages(command.pages)
                self._send(name, command.to, msgspec.structs.replace(command.message, digest=_DIGEST), (array,))
            elif type(command) is WritePages:
                node.engine.write_pages(command.pages, command.data)
                written = PagesWritten(command.move, command.lo, command.hi, command.layers)
                self.clock.at(now, EventClass.LOADED, (self._handle_at_device, name, node.life, written))
            elif type(command) is SendActivations:
                rows = hollow_rows(command.pieces)
                self._send(name, command.to, msgspec.structs.replace(command.message, digest=_DIGEST), (rows,))
            elif type(command) is VerifyActivations:
                verified = ActivationsVerified(command.move, command.lo, command.hi)
                self.clock.at(now, EventClass.LOADED, (self._handle_at_device, name, node.life, verified))
            elif type(command) is CopyOut:
                copied = node.engine.read_pages(command.pages)
                self._copied(name, node, CopiedOut(command.key, copied, 0), len(copied.data))
            elif type(command) is CopyIn:
                node.engine.write_pages(command.pages, command.data)
                self._copied(name, node, CopiedIn(command.key, 0), len(command.data.data))
            elif type(command) is ShareHostMemory:
                node.host_kv += command.change
                node.loader.host.share_memory(name, node.host_kv)
        self._wake(name, node)

    def _copied(self, name: str, node: Node, event: CopiedOut | CopiedIn, nbytes: int) -> None:
        """Report K and V that go to host memory or come back over the device's link, each way one after the other."""
        began, took = node.copy(isinstance(event, CopiedIn), nbytes, self.clock.now)
        self.clock.at(
            began + took, EventClass.LOADED, (self._handle_at_device, name, node.life, replace(event, took=took))
        )

    def _send(self, source: str, to: str, message: Message, arrays: Sequence[Array]) -> None:
        now = self.clock.now
        if to == SCHEDULER:
            self.clock.at(now + self.network.control_ns, EventClass.ARRIVED, (self._handle_at_scheduler, message))
            return
        nbytes = self.network.carried(message, sum(len(array.data) for array in arrays))
        there = self.network.arrival(source, to, nbytes, now)
        self.clock.at(there, EventClass.ARRIVED, (self._deliver, to, message, arrays))

    def _handle_at_device(self, name: str, life: int, event: Any) -> None:
        """Pass an event of the device itself to its agent, unless the device has died since."""
        node = self.nodes[name]
        if node.alive and node.life == life:
            self._carry_out(name, node, node.agent.handle(event, (), self.clock.now))

    def _load(self, name: str, life: int) -> None:
        """Go on with the loads of a device: one after the other, beside its steps or instead of them."""
        node, now = self.nodes[name], self.clock.now
        if node.life != life or not node.alive:
            return
        while node.loader.busy:
            found = node.loader.advance(now)
            if isinstance(found, int):
                self.clock.at(found, EventClass.LOADED, (self._load, name, life))
                return
            if found.spec is None:
                self._handle_at_device(name, life, StageFailed(found.stage, found.error))
                continue
            self.ledger.loaded(found.nbytes, found.ns)
            units = LoadedUnits((), found.disk, found.host)
            self._handle_at_device(
                name, life, StageLoaded(found.stage, found.spec, node.engine.memory().weights, units)
            )
        self._wake(name, node)
        self._read_ahead(name, life)

    def _read_ahead(self, name: str, life: int) -> None:
        """Go on with what a device's host memory reads while nothing is loaded."""
        node = self.nodes[name]
        if node.life == life and node.alive and (then := node.loader.read_next(self.clock.now)) is not None:
            self.clock.at(then, EventClass.LOADED, (self._read_ahead, name, life))

    def _report(self, name: str) -> None:
        node = self.nodes[name]
        if node.alive:
            self._send(name, SCHEDULER, node.agent.report(), ())
            self._wake(name, node)
        self.clock.at(self.clock.now + self._pace.report, EventClass.TICK, (self._report, name))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _wake(self, name: str, node: Node) -> None:
        """Schedule the begin of a step at this moment, after all other events of the moment."""
        if not node.due and len(node.stepping) < len(node.lanes):
            node.due = True
            self.clock.at(self.clock.now, EventClass.BEGIN, (self._begin, name, node.life))

    def _begin(self, name: str, life: int) -> None:
        node = self.nodes[name]
        if node.life != life or not node.alive:
            return
        node.due = False
        if self._loads_stop_steps and node.loader.busy:
            return
        for lane in node.lanes:
            if lane not in node.stepping:
                self._step(name, node, lane)

    def _step(self, name: str, node: Node, lane: Lane) -> None:
        """Start the next step of a lane, if there is one."""
        now = self.clock.now
        step = node.agent.next_step(now, lane)
        if step is None:
            if lane != "ahead" and node.agent.lingers is not None:
                self.clock.at(node.agent.lingers, EventClass.TICK, (self._resume, name, node.life))
            return
        result = node.engine.run(step.plan, step.inputs, step.strides)
        busy = result.result.busy
        node.begin_step(lane, busy, now)
        self.clock.at(now + busy, EventClass.DONE, (self._finish, name, node.life, lane, result))

    def _resume(self, name: str, life: int) -> None:
        """Try a step again that was put off, because the rows it waited for have not come."""
        node = self.nodes[name]
        if node.life == life and node.alive:
            self._wake(name, node)

    def _finish(self, name: str, life: int, lane: Lane, result: Any) -> None:
        node, now = self.nodes[name], self.clock.now
        if node.life != life or not node.alive:
            return
        if node.debt and lane != "ahead":
            late, node.debt = node.debt, 0
            self.clock.at(now + late, EventClass.DONE, (self._finish, name, life, lane, result))
            return
        del node.stepping[lane]
        self._carry_out(name, node, node.agent.finish_step(result, now, lane))

    # -- faults --------------------------------------------------------------------------------------------------------

    def _die(self, name: str) -> None:
        """Kill a device; the scheduler learns of it after the time of a message, and tells the other devices."""
        self.nodes[name].alive = False
        self.nodes[name].loader.host.share_memory(name, 0)
        self.clock.at(
            self.clock.now + self.network.control_ns,
            EventClass.ARRIVED,
            (self._handle_at_scheduler, AgentDown(name, "it died")),
        )

    def _replace(self, name: str) -> None:
        if self._revive is None:
            return
        node = self._revive(name)
        node.life = self.nodes[name].life + 1
        node.engine.borrow(self._lenders)
        self.nodes[name] = node
        self.clock.at(self.clock.now + self.network.control_ns, EventClass.ARRIVED, (self._join, name))
