"""The driver of a cluster: a thread with the scheduler and the post, a fleet that brings agents up, streams to whoever asked.

    open_stream -> Arrive -> Scheduler -> Open, Go -> agents … Done -> Scheduler -> Emit -> Stream     an agent dies -> Down -> another

Contract: to servers it is what `LocalDriver` is. The scheduler is called on one thread, behind a lock that is never held while anything
waits. A device that cannot be brought up again ends what cannot run without it, with the reason; where nothing is left that could run, and
after a defect of the control plane, the driver is dead: `alive` is false, `death` says why, every stream ends with an error, none hangs.
It knows no HTTP, no text, no tensors and no processes: the fleet is passed in, and `company` speaks with the agents.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from msgspec import structs

from runtime.agent.commands import SCHEDULER, Abort, Arrive, Emit, SchedulerCommand, SchedulerEvent, Send, Serve, Tick, Updated, Withdraw
from runtime.agent.events import refusal_event
from runtime.agent.state import AgentState
from runtime.cluster.changes import Changes
from runtime.cluster.company import Company
from runtime.cluster.errors import public
from runtime.cluster.fleet import Fleet
from runtime.cluster.lives import AgentFacts, LifeConfig
from runtime.cluster.post import Post
from runtime.cluster.routes import Routes
from runtime.cluster.stranded import stranded
from runtime.cluster.streams import Inbox, Sink, Stream
from runtime.cluster.version import own_version
from runtime.config import ClusterConfig
from runtime.messages import Message, Report
from runtime.scheduler.adaptive import Adaptation
from runtime.scheduler.cluster import Scheduler
from runtime.scheduler.devices import Device
from runtime.scheduler.handover import HandoverCounts
from runtime.scheduler.picture import picture_of
from runtime.scheduler.speculation import SpeculationCounts
from runtime.stages import Block, Chain, Surrogate
from runtime.trace import TraceSink
from runtime.types import EngineMemory, ModelSpec, SequenceRequest, TokenEvent
from zoo.errors import NotFound, NotServable, Unavailable

_log = logging.getLogger(__name__)

#: Period of what is due by time alone, in seconds.
_TICK = 0.05


class _Hopeless(Exception):
    """No model can run any more."""


class ClusterDriver:
    """Runs a cluster until `shutdown`. Every method may be called from any thread; those that wait say so.

    Args:
        chains, blocks: the models that are served, and all blocks of them.
        devices: names of the agents that there are to be.
        fleet: what brings them up; it is shut down with the driver.
        config, lives: of the scheduler; of the agents' restarts.
        adaptation: what adaptive requests may get. describe: how models that are asked for later are served; None: there are none.
        surrogates: by model, cheaper stand-ins of parts of it (BL-25).
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        blocks: Sequence[Block],
        devices: Sequence[str],
        fleet: Fleet,
        config: ClusterConfig | None = None,
        lives: LifeConfig | None = None,
        trace: TraceSink | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        version: str | None = None,
        adaptation: Adaptation | None = None,
        describe: Callable[[str], Serve] | None = None,
        surrogates: Mapping[str, Sequence[Surrogate]] | None = None,
    ) -> None:
        """Waits until all agents are there, with a path for each model. Raises Unavailable if one cannot be brought up."""
        self._chains, self._fleet, self._clock = {chain.model: chain for chain in chains}, fleet, clock
        self._describe, self._changes = describe, Changes()
        config = replace(config or ClusterConfig(), devices=len(devices))
        self._scheduler = Scheduler(chains, blocks, config, trace, surrogates or {}, adaptation)
        self._post = Post(SCHEDULER, 0, fleet.seat.bind, fleet.seat.keys, context=fleet.seat.context)
        self._company = Company(devices, fleet, self._post, lives or LifeConfig(), version or own_version(), clock)
        self._changed = threading.Condition()
        self._routes = Routes()
        self._asked: deque[Callable[[int], None]] = deque()
        self._stranded: dict[str, str] = {}
        self._draining = self._stopping = False
        self._death: str | None = None
        self._next_tick = 0
        self._thread = threading.Thread(target=self._run, name="zoo-scheduler", daemon=True)
        self._thread.start()
        self._await_all()

    # -- requests ------------------------------------------------------------------------------------------------------

    def open_stream(self, requests: Sequence[SequenceRequest]) -> Stream:
        """Submit sequences; their events come out of the stream, refusals included. Call it on a running event loop.

        Raises Unavailable while draining or dead; ValueError if two sequences have one name.
        """
        stream = Stream((one.seq for one in requests), asyncio.get_running_loop(), self.abort)
        self._submit(requests, stream)
        return stream

    def run(self, requests: Sequence[SequenceRequest]) -> Generator[TokenEvent, None, None]:
        """Submit sequences at once; iterate over their events in this thread. Leaving early aborts. Raises as `open_stream`."""
        inbox = Inbox((one.seq for one in requests), self.abort)
        self._submit(requests, inbox)
        return inbox.drain()

    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that have ended already are nothing to do."""
        names = tuple(seqs)
        self._ask(lambda now: self._tell([Abort(seq) for seq in names], now))

    def move(self, seq: str, blocks: range, target: str) -> str | None:
        """Begin to move blocks of a running sequence's chain, all on one device, to another; why that cannot be, or None. Waits for the
        scheduler, not for the move.

        Raises Unavailable once the driver is dead.
        """
        answer: Future[str | None] = Future()
        self._ask(lambda now: self._move(seq, blocks, target, answer, now))
        while True:
            try:
                return answer.result(_TICK)
            except TimeoutError:
                if self._death is not None:
                    raise Unavailable(self._death) from None

    # -- models --------------------------------------------------------------------------------------------------------

    def models(self) -> tuple[ModelSpec, ...]:
        with self._changed:
            return self._scheduler.models()

    def load(self, name: str) -> ModelSpec:
        """One that is served is nothing to do. Waits until another one's blocks are placed and loaded.

        Raises NotServable where there is no room, or where this cluster takes its models when it starts only; else as `describe`.
        """
        chain = self._chains.get(name)
        if chain is not None:
            return chain.spec
        if self._describe is None:
            raise NotServable(f"a cluster serves the models that it was started with, and {name} is not one of them")
        return self.serve(self._describe(name))

    def serve(self, event: Serve, timeout: float = 600.0) -> ModelSpec:
        """A new model, or another version of one: whoever is there finishes on the one it began with. Waits until newcomers get it.

        Raises NotServable with the reason why they never will; Unavailable once the driver is dead, or after that many seconds.
        """
        updated = self._change(event, timeout)
        if updated.error:
            raise NotServable(updated.error)
        return event.chain.spec

    def unload(self, name: str, timeout: float = 60.0) -> None:
        """Take no more requests for a model; its blocks go when the last sequence that runs on it has ended, which is not waited for.

        Raises NotFound; NotServable, for it goes on being served, where this cluster takes its models when it starts only.
        """
        if name not in self._chains:
            raise NotFound(f"no model named {name!r} is served")
        if self._describe is None:
            raise NotServable(f"{name} stays: a cluster serves the models that it was started with")
        self._change(Withdraw(name), timeout)

    def _change(self, event: Serve | Withdraw, timeout: float) -> Updated:
        answer: Future[Updated] = Future()
        self._ask(lambda now: self._begin(event, answer, now))
        end = time.monotonic() + timeout
        while True:
            try:
                return answer.result(_TICK)
            except TimeoutError:
                if self._death is not None:
                    raise Unavailable(self._death) from None
                if time.monotonic() > end:
                    raise Unavailable(f"it is not done within {timeout:g} seconds, and goes on") from None

    # -- looking in ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once the scheduler's loop has ended, for whatever reason."""
        return self._death is None

    @property
    def death(self) -> str | None:
        return self._death

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def device(self) -> str:
        return "cluster"

    def state(self) -> AgentState:
        with self._changed:
            return self._scheduler.state()

    def picture(self) -> Mapping[str, Any]:
        """Devices, instances, chains, moves (`scheduler.picture`)."""
        with self._changed:
            return picture_of(self._scheduler).document()

    def agents(self) -> tuple[AgentFacts, ...]:
        with self._changed:
            return self._company.lives.facts()

    def reports(self) -> Mapping[str, Report]:
        """The last that each agent that is up has told of itself."""
        with self._changed:
            return dict(self._company.reports)

    def moving(self) -> int:
        """Migrations under way."""
        with self._changed:
            return len(self._scheduler.handovers)

    def moves(self) -> HandoverCounts:
        """Migrations so far."""
        with self._changed:
            return self._scheduler.handovers.counts()

    def speculation(self) -> SpeculationCounts:
        """Predicted hops so far (BL-25)."""
        with self._changed:
            return self._scheduler.speculation.counts()

    def health(self) -> Mapping[str, Any]:
        """For `/health`: `degraded` while an agent is away; requests are taken all the same, and wait where they must."""
        facts = self.agents()
        degraded = bool(self._stranded) or any(each.phase != "up" for each in facts)
        stranded = {"unavailable": dict(self._stranded)} if self._stranded else {}
        return {"status": "degraded" if degraded else "ok", "agents": [asdict(each) for each in facts], **stranded}

    def memory(self) -> EngineMemory:
        """Bytes of all living devices, as of their last loads. `weights_unshared`: each stage of each model with weights of its own."""
        with self._changed:
            alive = [device for device in self._scheduler.devices if device.alive]
            unshared = sum(map(self._stages_bytes, alive))
            pages = sum(device.capacity for device in alive)
            return EngineMemory(sum(d.weights for d in alive), unshared, pages * self._company.page_bytes)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def restart(self, device: str, timeout: float) -> bool:
        """Have a device's agent end after its step, and another take its place; what ran there runs again. Waits for the new one, false if
        that takes over `timeout` seconds."""
        with self._changed:
            before = self._company.lives.incarnation(device)
        self._ask(lambda now: self._company.restart(device))
        with self._changed:
            return self._changed.wait_for(lambda: self._death is not None or self._follows(device, before), timeout) and self.alive

    def roll(self, timeout: float) -> bool:
        """Restart one device after another, `timeout` seconds for each at most; false if one does not come back: the others stay."""
        return all(self.restart(each.device, timeout) for each in self.agents())

    def drain(self, timeout: float) -> bool:
        """Take no more requests, wait until the ones there are have ended (or died); false if that takes over `timeout` seconds."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._death is not None or not (self._asked or self._scheduler.busy), timeout)

    def shutdown(self, timeout: float | None = None) -> bool:
        """End all agents after their steps; what is unfinished ends with an error. Again: nothing to do. False if that takes longer."""
        with self._changed:
            self._draining = self._stopping = True
        self._post.wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> ClusterDriver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    # -- inside: any thread --------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[SequenceRequest], sink: Sink) -> None:
        with self._changed:
            if self._death is not None:
                raise Unavailable(self._death)
            if self._draining:
                raise Unavailable("the cluster takes no more requests: it is shutting down")
            names = {one.seq for one in requests}
            if len(names) < len(requests) or self._routes.any_of(names):
                raise ValueError("two sequences have the same name")
            self._routes.add(requests, sink)
        self._ask(lambda now: self._arrive(requests, now))

    def _ask(self, act: Callable[[int], None]) -> None:
        """Have the scheduler's thread do something, behind what was asked before."""
        self._asked.append(act)
        self._post.wake()

    def _await_all(self) -> None:
        lives = self._company.lives
        with self._changed:
            self._changed.wait_for(lambda: self._death is not None or self._complete() or bool(lives.failed()))
            if self._complete() and self._death is None:
                return
            why = self._death or "; ".join(f"the agent of {each.device}: {each.reason}" for each in lives.facts() if each.phase == "failed")
        self.shutdown()
        raise Unavailable(f"the cluster cannot be brought up: {why}")

    def _complete(self) -> bool:
        """Whether all agents are there, and all that models need to begin."""
        return self._company.lives.all_up() and not self._scheduler.loading

    def _follows(self, device: str, before: int) -> bool:
        lives = self._company.lives
        return lives.incarnation(device) > before and lives.up(device, lives.incarnation(device))

    def _stages_bytes(self, device: Device) -> int:
        """Of the blocks of each stage that is loaded there."""
        block, wanted = self._scheduler.provision.block, device.wanted
        return sum(block(each).nbytes for stage in device.loaded if stage in wanted for each in wanted[stage][1])

    # -- inside: the scheduler's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the driver was shut down"
        try:
            self._loop()
        except _Hopeless as error:
            reason = str(error)
        except BaseException as error:
            _log.critical("the scheduler's loop has died", exc_info=True)
            reason = f"the scheduler's loop has died: {public(error)}"
        self._die(reason)

    def _loop(self) -> None:
        while not self._stopping:
            told = self._company.receive(_TICK if not self._asked else 0.0)
            with self._changed:
                now = self._clock()
                told += self._company.look()
                self._tell(told, now)
                while self._asked:
                    self._asked.popleft()(now)
                if now >= self._next_tick:
                    self._next_tick = now + int(_TICK * 1e9)
                    self._tell([Tick()], now)
                self._strand(now)
                self._changed.notify_all()

    def _tell(self, events: Iterable[Message | SchedulerEvent], now: int) -> None:
        for event in events:
            self._carry_out(self._scheduler.handle(event, now), now)

    def _carry_out(self, commands: Iterable[SchedulerCommand], now: int) -> None:
        """A Replace is nothing to do: `company` has known of the death before the scheduler, and starts another when its time has come."""
        for command in commands:
            if isinstance(command, Send):
                self._company.send(command.to, command.message)
            elif isinstance(command, Emit):
                self._tell([Abort(seq) for seq in self._routes.deliver(command.events)], now)
            elif isinstance(command, Updated):
                self._chains = {chain.model: chain for chain in self._scheduler.chains()}
                self._changes.answered(command)

    def _begin(self, event: Serve | Withdraw, answer: Future[Updated], now: int) -> None:
        self._changes.asked(event, answer)
        self._tell([event], now)

    def _arrive(self, requests: Iterable[SequenceRequest], now: int) -> None:
        for one in requests:
            if (why := self._stranded.get(one.model)) is not None:
                self._routes.deliver([refusal_event(one, why)])
            else:
                self._tell([Arrive(one)], now)

    def _move(self, seq: str, blocks: range, target: str, answer: Future[str | None], now: int) -> None:
        member = self._scheduler.members.get(seq)
        why = f"no sequence {seq}" if member is None else self._scheduler.handovers.start(member, blocks, target, now)
        self._tell([Tick()], now)  # what it has to say goes out with an event's commands
        answer.set_result(why)

    # -- inside: what cannot go on -------------------------------------------------------------------------------------

    def _strand(self, now: int) -> None:
        """End what waits for devices that will not come back. Raises _Hopeless where that is everything."""
        failed = self._company.lives.failed()
        if not failed:
            return
        reasons = {each.device: each.reason for each in self._company.lives.facts()}
        for model, device in stranded(self._chains.values(), self._scheduler.provision.instances, failed).items():
            if model not in self._stranded:
                self._stranded[model] = f"{model} cannot run any more: the agent of {device} does not come back ({reasons[device]})"
                self._end_all(model, self._stranded[model], now)
        if self._chains and self._stranded.keys() >= self._chains.keys():
            raise _Hopeless(next(iter(self._stranded.values())))

    def _end_all(self, model: str, why: str, now: int) -> None:
        for seq in [seq for seq, member in self._scheduler.members.items() if member.request.model == model]:
            for command in self._scheduler.handle(Abort(seq), now):
                if isinstance(command, Emit):
                    ends = tuple(
                        structs.replace(event, finish="error", error=why) if event.seq == seq else event for event in command.events
                    )
                    command = Emit(ends)
                self._carry_out([command], now)

    def _die(self, reason: str) -> None:
        """Nothing may wait for this thread any more: no stream, no drain. Agents end with it."""
        with self._changed:
            self._death = reason
            self._asked.clear()
            self._routes.deliver(self._routes.ends(reason))
            self._changed.notify_all()
        try:
            self._company.halt()
            self._post.close()
            self._fleet.shutdown(10.0)
        except Exception:
            _log.critical("the cluster's agents could not be ended well", exc_info=True)
