"""The driver of a cluster: a scheduler on its own thread, a launcher of agents, and a stream for each request.

    open_stream -> AddRequest -> Scheduler -> RunRows -> agents … RowsDone -> Scheduler -> EmitTokens -> Stream
    an agent dies -> AgentDown -> another agent starts

- If a device cannot be started again, sequences that need it end with the reason.
- If no model can run any more, or the control plane has a defect, the driver is dead: `alive` is False, `death` is the
  reason, and every stream ends with an error; none hangs.

The launcher is passed in; `RemoteAgents` talks to the agents, `SchedulerLoop` to the scheduler, and `ClusterView` reads
both. HTTP, text, tensors and processes are handled elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, TypeVar

import zmq

from runtime.chains import Block, Chain, Surrogate
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.agents.lifecycle import AgentFacts, LifeConfig
from runtime.cluster.agents.pool import AgentPool
from runtime.cluster.agents.remote import RemoteAgents
from runtime.cluster.driver.base import BaseDriver
from runtime.cluster.driver.length_thread import LengthMode, LengthThread, Predict
from runtime.cluster.driver.pool_threads import PoolThreads
from runtime.cluster.driver.scheduler_loop import TICK, SchedulerLoop
from runtime.cluster.driver.view import ClusterView
from runtime.cluster.launch.launcher import AgentLauncher, AgentSlot
from runtime.cluster.streams.streams import Sink
from runtime.cluster.version import own_version
from runtime.config import ClusterConfig
from runtime.control.counters import AgentState
from runtime.control.scheduler_io import ExpectRequest, ModelUpdated, ServeModel, WithdrawModel
from runtime.messages import SCHEDULER
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.scheduler.observe.replay_log import ReplayRecorder, head_of
from runtime.scheduler.scheduler import Scheduler
from runtime.tracing.sink import TraceSink
from runtime.transport.messenger import Messenger
from runtime.types import EngineMemory, ModelSpec, SequenceRequest, TokenEvent
from zoo.errors import InUse, NotFound, NotServable, Unavailable, ZooError

_log = logging.getLogger(__name__)

#: Time that agents have to end before they are killed, in seconds.
_PATIENCE = 10.0

T = TypeVar("T")


class ClusterDriver(BaseDriver):
    """Run a cluster until `shutdown`.

    Every method may be called from any thread; those that wait are documented as such.

    Args:
        chains, blocks: The models that are served, and all blocks of them.
        devices: Names of the agents.
        launcher: Starts the agents, or is the only agent, inline; shut down with the driver.
        config, lifecycles: Of the scheduler; of the agents' restarts.
        adaptation: What adaptive requests may get.
        describe: Describes how a model that is loaded later is served; None: the set of models is fixed.
        surrogates: By model, cheaper stand-ins of parts of it (BL-25).
        log: Receives the lines of the scheduler's log (`scheduler.observe.replay_log`), under its lock.
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
        """Wait until all agents are up and each model has a path.

        Raises Unavailable if that cannot be; the launcher is shut down then, and on Ctrl-C.
        """
        super().__init__("cluster")
        self._describe = describe
        self._lengths: LengthThread | None = None
        config = replace(config or ClusterConfig(), devices=len(devices))
        self._shares = config.background_share > 0
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

    def expect_request(self, request: str, comes: bool = True) -> None:
        """Announce a request of a client that is being prepared, so that no line of a batch delays it (QL-02).

        Not `comes`: it was announced, and is refused.
        """
        if self._shares and self._death is None:
            self._scheduler_loop.expect_request(ExpectRequest(request, comes))

    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that have ended already are ignored."""
        (self._lengths or self._scheduler_loop).abort(tuple(seqs))

    def predict_lengths(self, predict: Predict, mode: LengthMode) -> None:
        """Predict lengths of answers from now on (`driver.length_thread`). Call it once, before the first request."""
        self._lengths = LengthThread(predict, self._scheduler_loop, mode)
        self._lengths.start()

    @property
    def lengths(self) -> LengthThread | None:
        """What predicts lengths of answers; None if nothing does."""
        return self._lengths

    def move(self, seq: str, blocks: range, target: str) -> str | None:
        """Start moving blocks of a running sequence's chain, all on one device, to another device.

        Returns why that cannot be, or None. Waits for the scheduler's answer, not for the migration. Raises Unavailable
        once the driver is dead.
        """
        return self._answer(self._scheduler_loop.move(seq, blocks, target))

    def set_roles(self, roles: Mapping[str, str]) -> str | None:
        """Change what agents run (`policy.roles.role`), by their names, all of them or none.

        Returns why that cannot be, or None. Nothing is loaded again or restarted. It is done on this thread, which
        waits for no other one. Raises Unavailable once the driver is dead.
        """
        if self._death is not None:
            raise Unavailable(self._death)
        return self._scheduler_loop.set_roles(roles)

    def pause(self, request: str, expected: int | None = None) -> int:
        """Pause a request's sequences until `resume`; return how many there are, 0 for an unknown request.

        Rows already running still produce their tokens. The sequences keep their K and V, which may migrate meanwhile
        (BL-17). Waits for the scheduler.

        Args:
            expected: Expected length of the pause in ns, if known.

        Raises Unavailable once the driver is dead.
        """
        return self._answer(self._scheduler_loop.pause(request, expected))

    def resume(self, request: str) -> int:
        """Resume a request's sequences; return how many there are. Waits and raises as `pause`."""
        return self._answer(self._scheduler_loop.resume(request))

    # -- models --------------------------------------------------------------------------------------------------------

    def models(self) -> tuple[ModelSpec, ...]:
        return self.view.models()

    def load(self, name: str) -> ModelSpec:
        """Serve a model, and wait until its blocks are placed and loaded. Returns at once if it is served already.

        Raises NotServable if there is no room, or if this cluster's models are fixed; else as `describe`.
        """
        if self.view.chain(name) is not None:
            return self._served(name)
        if self._describe is None:
            raise NotServable(f"a cluster serves the models that it was started with, and {name} is not one of them")
        return self.serve(self._describe(name))

    def require_loaded(self) -> None:
        """Raise NotServable if a device could not load its part of a model, or roles leave a model without a phase."""
        for why in (*self.view.refused().values(), *self.view.split().values()):
            raise NotServable(why)

    def serve(self, event: ServeModel, timeout: float = 600.0) -> ModelSpec:
        """Serve a new model, or a new version of one, and wait until new sequences use it.

        Running sequences finish on the version that they began with. Raises NotServable with the reason if it cannot be
        served; Unavailable once the driver is dead, or after `timeout` seconds.
        """
        updated = self._change(event, timeout)
        if updated.error:
            raise NotServable(updated.error)
        return self._served(event.chain.model)

    def unload(self, name: str, timeout: float = 60.0) -> None:
        """Accept no more requests for a model, wait for its running sequences, and drop the stages that only it needs.

        Raises:
            NotFound: No such model.
            InUse: Its sequences have not ended after `timeout` seconds. It is served again, or the message says why
                not.
            NotServable: This cluster's models are fixed; the model stays.
            Unavailable: The driver is dead, or the scheduler did not answer in time.
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

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return self._remote_agents.device if isinstance(self._remote_agents, InlineAgent) else "cluster"

    def state(self) -> AgentState:
        state, lengths = self.view.state(), self._lengths
        return state if lengths is None else replace(state, counters=lengths.counted(state.counters))

    def snapshot(self) -> Mapping[str, Any]:
        """Return devices, instances, chains and migrations (`scheduler.observe.snapshot`).

        With managers of the pool, `pool` is what each of them knows.
        """
        pool = self._scheduler_loop.pool
        known = {} if pool is None else {"pool": [asdict(each) for each in pool.pictures()]}
        return {**self.view.snapshot(), **known}

    @property
    def pool(self) -> PoolThreads | None:
        """The managers of the pool; None if there are none."""
        return self._scheduler_loop.pool

    def agents(self) -> tuple[AgentFacts, ...]:
        return self.view.agents()

    def health(self) -> Mapping[str, Any]:
        """Return the document for `/health`."""
        return self.view.health()

    def memory(self) -> EngineMemory:
        """Return the bytes of all living devices, as of their latest loads."""
        return self.view.memory()

    # -- restarts and shutdown -----------------------------------------------------------------------------------------

    def restart(self, device: str, timeout: float) -> bool:
        """Replace a device's agent after its running step, and wait for the new one; what ran there runs again.

        Returns False if that takes over `timeout` seconds, or once the driver is dead.
        """
        with self._changed:
            before = self._remote_agents.lifecycles.incarnation(device)
        self._scheduler_loop.run_soon(lambda now: self._remote_agents.restart(device))
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._death is not None or self._follows(device, before), timeout)
                and self.alive
            )

    def roll(self, timeout: float) -> bool:
        """Restart one device after another, waiting up to `timeout` seconds for each.

        Stops and returns False if one does not come up.
        """
        return all(self.restart(each.device, timeout) for each in self.agents())

    def shutdown(self, timeout: float | None = None) -> bool:
        """End all agents after their steps; unfinished sequences end with an error. May be called again.

        Returns False if it takes over `timeout` seconds.
        """
        with self._changed:
            self._draining = True
        if self._lengths is not None:
            self._lengths.stop()
        self._scheduler_loop.stop()
        return self._scheduler_loop.join(timeout)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[SequenceRequest], sink: Sink) -> list[TokenEvent]:
        with self._changed:
            self._require_open(requests)
            self._routes.add(requests, sink)
        (self._lengths or self._scheduler_loop).submit(requests)
        return []

    def _busy(self) -> bool:
        """Return whether sequences run or wait, including accepted ones that the scheduler has not received yet."""
        return len(self._routes) > 0 or not self._scheduler_loop.idle

    def _served(self, name: str) -> ModelSpec:
        """Return a model's spec, with the context length possible here. Raises NotFound if it is gone meanwhile."""
        for spec in self.models():
            if spec.name == name:
                return spec
        raise NotFound(f"no model named {name!r} is served")

    def _change(self, event: ServeModel | WithdrawModel, timeout: float) -> ModelUpdated:
        return self._answer(self._scheduler_loop.change(event), timeout)

    def _answer(self, answer: Future[T], timeout: float = float("inf")) -> T:
        """Wait for the scheduler's answer. Raises Unavailable once the driver is dead, or after `timeout` seconds."""
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
        """Wait until all agents are up. Raises Unavailable if one cannot be started."""
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
        """Return whether all agents are up and the stages that models need at first are loaded."""
        return self._remote_agents.lifecycles.all_up() and not self._scheduler.loading

    def _follows(self, device: str, before: int) -> bool:
        lifecycles = self._remote_agents.lifecycles
        return lifecycles.incarnation(device) > before and lifecycles.up(device, lifecycles.incarnation(device))

    def _die(self, reason: str) -> None:
        """Record the driver's end: end all streams with the reason, wake all that wait, and close the agents.

        Called once, on the scheduler's thread.
        """
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
    """Return the agents of a launcher. Raises Unavailable."""
    return RemoteAgents(devices, launcher, _listening(launcher.seat), lifecycles, version or own_version(), clock)


def _listening(seat: AgentSlot) -> Messenger:
    """Return the scheduler's messenger. Raises Unavailable if it cannot listen."""
    try:
        return Messenger(SCHEDULER, 0, seat.bind, seat.keys, context=seat.context)
    except (ValueError, zmq.ZMQError) as error:
        raise Unavailable(f"the cluster cannot be brought up: its scheduler cannot listen: {error}") from None
