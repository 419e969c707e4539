"""The driver of a cluster: a scheduler on a thread of its own, a fleet that brings agents up, streams to whoever
asked.

    open_stream -> AddRequest -> Scheduler -> RunRows -> agents … RowsDone -> Scheduler -> EmitTokens -> Stream
    an agent dies -> AgentDown -> another

Contract: a device that cannot be brought up again ends what cannot run without it, with the reason;
where nothing is left that could run, and after a defect of the control plane, the driver is dead: `alive` is false,
`death` says why, every stream ends with an error, none hangs. It knows no HTTP, no text, no tensors and no
processes: the fleet is passed in, `company` speaks with the agents, `conductor` with the scheduler, `view` looks
at both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import zmq

from runtime.chains import Block, Chain, Surrogate
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.agents.lifecycle import AgentFacts, LifeConfig
from runtime.cluster.agents.pool import AgentPool
from runtime.cluster.agents.remote import RemoteAgents
from runtime.cluster.driver.base import BaseDriver
from runtime.cluster.driver.scheduler_loop import TICK, SchedulerLoop
from runtime.cluster.driver.view import ClusterView
from runtime.cluster.launch.launcher import AgentLauncher, AgentSlot
from runtime.cluster.streams.streams import Sink
from runtime.cluster.version import own_version
from runtime.config import ClusterConfig
from runtime.control.counters import AgentState
from runtime.control.scheduler_io import ModelUpdated, ServeModel, WithdrawModel
from runtime.messages import SCHEDULER
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.scheduler.observe.replay_log import ReplayRecorder, head_of
from runtime.scheduler.scheduler import Scheduler
from runtime.tracing.sink import TraceSink
from runtime.transport.messenger import Messenger
from runtime.types import EngineMemory, ModelSpec, SequenceRequest, TokenEvent
from zoo.errors import InUse, NotFound, NotServable, Unavailable, ZooError

_log = logging.getLogger(__name__)

#: How long agents may take to end by themselves, in seconds.
_PATIENCE = 10.0

T = TypeVar("T")


class ClusterDriver(BaseDriver):
    """Runs a cluster until `shutdown`. Every method may be called from any thread; those that wait say so.

    Args:
        chains, blocks: the models that are served, and all blocks of them.
        devices: names of the agents that there are to be.
        fleet: what brings them up, or the only one, which runs on the scheduler's thread; it is shut down with the
            driver.
        config, lives: of the scheduler; of the agents' restarts.
        adaptation: what adaptive requests may get. describe: how models that are asked for later are served; None:
            there are none.
        surrogates: by model, cheaper stand-ins of parts of it (BL-25).
        log: takes lines of the scheduler's log (`scheduler.observe.replay_log`), on its thread.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        blocks: Sequence[Block],
        devices: Sequence[str],
        launcher: AgentLauncher | InlineAgent,
        config: ClusterConfig | None = None,
        lifecycles: LifeConfig | None = None,
        trace: TraceSink | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        version: str | None = None,
        adaptation: VariantChoice | None = None,
        describe: Callable[[str], ServeModel] | None = None,
        surrogates: Mapping[str, Sequence[Surrogate]] | None = None,
        log: Callable[[bytes], object] | None = None,
    ) -> None:
        """Waits until all agents are there, with a path for each model. Raises Unavailable if one cannot be brought up;
        the fleet is shut down then, and on Ctrl-C."""
        super().__init__("cluster")
        self._describe = describe
        config = replace(config or ClusterConfig(), devices=len(devices))
        with ExitStack() as undo:
            undo.callback(_let_go, launcher)
            self._scheduler = Scheduler(chains, blocks, config, trace, surrogates or {}, adaptation)
            self._remote_agents: AgentPool = (
                launcher
                if isinstance(launcher, InlineAgent)
                else _remote_agents(devices, launcher, lifecycles or LifeConfig(), version, clock)
            )
            head = head_of(chains, blocks, config, surrogates or {}, adaptation)
            handler = None if log is None else ReplayRecorder(self._scheduler, head, log)
            self._scheduler_loop = SchedulerLoop(
                self._scheduler, self._remote_agents, self._changed, self._routes, clock, self._die, handler
            )
            self.view = ClusterView(
                self._scheduler, self._remote_agents, self._scheduler_loop.unavailable_models, self._changed
            )
            undo.pop_all()
            undo.callback(self.shutdown)
            self._scheduler_loop.start()
            self._await_all()
            undo.pop_all()

    # -- requests ------------------------------------------------------------------------------------------------------

    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that have ended already are nothing to do."""
        self._scheduler_loop.abort(tuple(seqs))

    def move(self, seq: str, blocks: range, target: str) -> str | None:
        """Begin to move blocks of a running sequence's chain, all on one device, to another; why that cannot be, or
        None. Waits for the scheduler, not for the move.

        Raises Unavailable once the driver is dead.
        """
        return self._answer(self._scheduler_loop.move(seq, blocks, target))

    def pause(self, request: str, expected: int | None = None) -> int:
        """No tokens of a request's sequences from now on, but those that are under way, until `resume`; they keep their
        K and V, which may move meanwhile (BL-17). How many sequences those are; 0 for a request that is not here. Waits
        for the scheduler.

        Args:
            expected: how long it will be, in ns, where that is known.

        Raises Unavailable once the driver is dead.
        """
        return self._answer(self._scheduler_loop.pause(request, expected))

    def resume(self, request: str) -> int:
        """They go on. As `pause`."""
        return self._answer(self._scheduler_loop.resume(request))

    # -- models --------------------------------------------------------------------------------------------------------

    def models(self) -> tuple[ModelSpec, ...]:
        return self.view.models()

    def load(self, name: str) -> ModelSpec:
        """One that is served is nothing to do. Waits until another one's blocks are placed and loaded.

        Raises NotServable where there is no room, or where this cluster takes its models when it starts only; else as
        `describe`.
        """
        if self.view.chain(name) is not None:
            return self._served(name)
        if self._describe is None:
            raise NotServable(f"a cluster serves the models that it was started with, and {name} is not one of them")
        return self.serve(self._describe(name))

    def require_loaded(self) -> None:
        """Raises NotServable where a device could not load its part of a model."""
        for why in self.view.refused().values():
            raise NotServable(why)

    def serve(self, event: ServeModel, timeout: float = 600.0) -> ModelSpec:
        """A new model, or another version of one: whoever is there finishes on the one it began with. Waits until
        new sequences get it.

        Raises NotServable with the reason why they never will; Unavailable once the driver is dead, or after that many
        seconds.
        """
        updated = self._change(event, timeout)
        if updated.error:
            raise NotServable(updated.error)
        return self._served(event.chain.model)

    def unload(self, name: str, timeout: float = 60.0) -> None:
        """Take no more requests for a model, wait for its running ones, and until devices are told to drop what only it
        needed.

        Raises NotFound; InUse if they have not ended after `timeout` seconds, and then it takes requests again or says
        why it cannot; NotServable, for it goes on being served, where this cluster takes its models when it starts
        only; Unavailable.
        """
        if self.view.chain(name) is None:
            raise NotFound(f"no model named {name!r} is served")
        if self._describe is None:
            raise NotServable(f"{name} stays: a cluster serves the models that it was started with")
        self._change(WithdrawModel(name), timeout)
        with self._changed:
            gone = self._changed.wait_for(lambda: self._death is not None or not self.view.leaving(name), timeout)
        if not gone:
            why = f"sequences of {name} still run after {timeout:g} s"
            try:
                self.serve(self._describe(name))
            except ZooError as error:
                raise InUse(f"{why}; it takes no others, for it cannot be served again: {error}") from error
            raise InUse(why)

    # -- looking in ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return self._remote_agents.device if isinstance(self._remote_agents, InlineAgent) else "cluster"

    def state(self) -> AgentState:
        return self.view.state()

    def snapshot(self) -> Mapping[str, Any]:
        """Devices, instances, chains, moves (`scheduler.observe.snapshot`)."""
        return self.view.snapshot()

    def agents(self) -> tuple[AgentFacts, ...]:
        return self.view.agents()

    def health(self) -> Mapping[str, Any]:
        """For `/health`."""
        return self.view.health()

    def memory(self) -> EngineMemory:
        """Bytes of all living devices, as of their last loads."""
        return self.view.memory()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def restart(self, device: str, timeout: float) -> bool:
        """Have a device's agent end after its step, and another take its place; what ran there runs again. Waits for
        the new one, false if that takes over `timeout` seconds."""
        with self._changed:
            before = self._remote_agents.lifecycles.incarnation(device)
        self._scheduler_loop.run_soon(lambda now: self._remote_agents.restart(device))
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._death is not None or self._follows(device, before), timeout)
                and self.alive
            )

    def roll(self, timeout: float) -> bool:
        """Restart one device after another, `timeout` seconds for each at most; false if one does not come back: the
        others stay.
        """
        return all(self.restart(each.device, timeout) for each in self.agents())

    def shutdown(self, timeout: float | None = None) -> bool:
        """End all agents after their steps; what is unfinished ends with an error. Again: nothing to do. False if that
        takes longer.
        """
        with self._changed:
            self._draining = True
        self._scheduler_loop.stop()
        return self._scheduler_loop.join(timeout)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[SequenceRequest], sink: Sink) -> list[TokenEvent]:
        with self._changed:
            self._require_open(requests)
            self._routes.add(requests, sink)
        self._scheduler_loop.submit(requests)
        return []

    def _busy(self) -> bool:
        """(A request that was taken is not told to the scheduler at the same moment.)"""
        return len(self._routes) > 0 or not self._scheduler_loop.idle

    def _served(self, name: str) -> ModelSpec:
        """A model with the context that it can have here. Raises NotFound where it has gone meanwhile."""
        for spec in self.models():
            if spec.name == name:
                return spec
        raise NotFound(f"no model named {name!r} is served")

    def _change(self, event: ServeModel | WithdrawModel, timeout: float) -> ModelUpdated:
        return self._answer(self._scheduler_loop.change(event), timeout)

    def _answer(self, answer: Future[T], timeout: float = float("inf")) -> T:
        """Raises Unavailable once the driver is dead, or after so many seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                return answer.result(TICK)
            except TimeoutError:
                if self._death is not None:
                    raise Unavailable(self._death) from None
                if time.monotonic() > end:
                    raise Unavailable(f"it is not done within {timeout:g} seconds, and goes on") from None

    def _await_all(self) -> None:
        lifecycles = self._remote_agents.lifecycles
        with self._changed:
            self._changed.wait_for(lambda: self._death is not None or self._complete() or bool(lifecycles.failed()))
            if self._complete() and self._death is None:
                return
            why = self._death or "; ".join(
                f"the agent of {each.device}: {each.reason}" for each in lifecycles.facts() if each.phase == "failed"
            )
        raise Unavailable(f"the cluster cannot be brought up: {why}")

    def _complete(self) -> bool:
        """Whether all agents are there, and all that models need to begin."""
        return self._remote_agents.lifecycles.all_up() and not self._scheduler.loading

    def _follows(self, device: str, before: int) -> bool:
        lifecycles = self._remote_agents.lifecycles
        return lifecycles.incarnation(device) > before and lifecycles.up(device, lifecycles.incarnation(device))

    def _die(self, reason: str) -> None:
        """Nothing may wait for the scheduler any more: no stream, no drain. Agents end with it, on its thread."""
        with self._changed:
            self._death = reason
            self._routes.deliver(self._routes.ends(reason))
            self._changed.notify_all()
        try:
            self._remote_agents.close(_PATIENCE)
        except Exception:
            _log.critical("the cluster's agents could not be ended well", exc_info=True)


def _let_go(launcher: AgentLauncher | InlineAgent) -> None:
    if isinstance(launcher, InlineAgent):
        launcher.close(_PATIENCE)
    else:
        launcher.shutdown(_PATIENCE)


def _remote_agents(
    devices: Sequence[str],
    launcher: AgentLauncher,
    lifecycles: LifeConfig,
    version: str | None,
    clock: Callable[[], int],
) -> RemoteAgents:
    """Raises Unavailable."""
    return RemoteAgents(devices, launcher, _listening(launcher.seat), lifecycles, version or own_version(), clock)


def _listening(seat: AgentSlot) -> Messenger:
    """The scheduler's post. Raises Unavailable."""
    try:
        return Messenger(SCHEDULER, 0, seat.bind, seat.keys, context=seat.context)
    except (ValueError, zmq.ZMQError) as error:
        raise Unavailable(f"the cluster cannot be brought up: its scheduler cannot listen: {error}") from None
