"""Run the scheduler on its own thread: pass it events and messages in order, and carry out its commands.

    agents.receive, agents.look -> Scheduler.handle <- requests     Send -> agents    EmitTokens -> streams
                                                                    ModelUpdated -> pending updates

The scheduler is called under a lock that is never held while anything waits, on this thread, but for changes of roles:
these run on the caller's (`set_roles`). Other threads take the lock to read the scheduler. The loop ends on request,
when no model can run any more, or by a defect; then `died` is called once, with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from runtime.cluster.agents.pool import AgentPool
from runtime.cluster.driver.pending_updates import PendingUpdates
from runtime.cluster.driver.plan_thread import PlanThread
from runtime.cluster.driver.pool_threads import PoolThreads
from runtime.cluster.driver.unavailable_models import UnavailableModel, UnavailableModels, ending, whys
from runtime.cluster.errors import public
from runtime.cluster.streams.router import StreamRouter
from runtime.control.agent_io import Send
from runtime.control.pool_io import PoolAnswer, PoolDenial, PoolQuery
from runtime.control.scheduler_io import (
    AbortSequence,
    AddRequest,
    AddRequests,
    AgentDown,
    EmitTokens,
    ExpectRequest,
    LengthPredicted,
    ModelUpdated,
    MoveAnswered,
    MoveSequence,
    PauseSequence,
    PlanSolved,
    ResumeSequence,
    RolesChanged,
    SchedulerCommand,
    SchedulerEvent,
    ServeModel,
    SetRoles,
    SolvePlan,
    Tick,
    WithdrawModel,
)
from runtime.control.token_events import refusal_event
from runtime.lending_config import LendingConfig
from runtime.messages import Message, PoolBeat
from runtime.policy.lengths.forecast import LengthForecast
from runtime.scheduler.observe.replay_log import Handler
from runtime.scheduler.scheduler import Scheduler
from runtime.types import SequenceRequest

_log = logging.getLogger(__name__)

#: Period of Tick events, in seconds.
TICK = 0.05

#: Prompt tokens in one AddRequests event at most: an event is one line of the log, and its length is limited.
_LOT = 1 << 20


class SchedulerLoop:
    """The scheduler's thread. Methods under "any thread" may be called from any thread, all other methods on its own.

    Args:
        changed: The lock; notified after every turn.
        routes: Streams by sequence, guarded by the lock.
        died: Called once with the reason of its end, on its thread, without the lock.
        handler: Handles events in the scheduler's place (`scheduler.observe.replay_log`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        remote_agents: AgentPool,
        changed: threading.Condition,
        routes: StreamRouter,
        clock: Callable[[], int],
        died: Callable[[str], None],
        handler: Handler | None = None,
    ) -> None:
        self._handle = (handler or scheduler).handle
        self._scheduler, self._remote_agents, self._clock, self._died = scheduler, remote_agents, clock, died
        self._changed, self._routes = changed, routes
        self._changes, self.unavailable_models = PendingUpdates(), UnavailableModels()
        #: What other threads have asked for; so many of the first calls are those of `_put_first`.
        self._asked: deque[Callable[[int], None]] = deque()
        self._firsts = 0
        self._arrivals: deque[SequenceRequest] = deque()
        # Models that are all there at once need no plans (`scheduler.order.plan_problem`).
        plans = scheduler.plans is not None and scheduler.residency.on
        self._plans = PlanThread(self._answered) if plans else None
        self.pool = None if scheduler.lending.talks is None else self._pool(scheduler.lending.config)
        self._stopping = False
        self._next_tick = 0
        self._thread = threading.Thread(target=self._run, name="zoo-scheduler", daemon=True)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for beside in (self._plans, self.pool):
            if beside is not None:
                beside.start()
        self._thread.start()

    def stop(self) -> None:
        """End after the current turn."""
        self._stopping = True
        self._remote_agents.wake()

    def join(self, timeout: float | None) -> bool:
        """Return whether the thread has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether no sequence runs and no call is queued. The lock is held."""
        return not (self._asked or self._scheduler.busy)

    def run_soon(self, act: Callable[[int], None]) -> None:
        """Queue a call for the scheduler's thread, behind earlier ones."""
        self._asked.append(act)
        self._remote_agents.wake()

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Queue requests. Those that arrive during one turn are passed to the scheduler together."""
        self._arrivals.extend(requests)
        self.run_soon(self._arrive)

    def add_predicted(self, event: AddRequests) -> None:
        """Queue requests with the forecasts of their answers."""
        self.run_soon(lambda now: self._add_predicted(event, now))

    def expect_request(self, event: ExpectRequest) -> None:
        """Announce a request that is being prepared, or that it does not come."""
        self.run_soon(lambda now: self._handle_events([event], now))

    def tell_lengths(self, events: Sequence[LengthPredicted]) -> None:
        """Queue forecasts of answers; those of sequences that have ended are ignored."""
        if events:
            self.run_soon(lambda now: self._handle_events(events, now))

    def abort(self, seqs: Sequence[str]) -> None:
        self.run_soon(lambda now: self._handle_events([AbortSequence(seq) for seq in seqs], now))

    def change(self, event: ServeModel | WithdrawModel) -> Future[ModelUpdated]:
        """Change the served models; the future gets the outcome."""
        answer: Future[ModelUpdated] = Future()
        self.run_soon(lambda now: self._begin(event, answer, now))
        return answer

    def move(self, seq: str, blocks: range, target: str) -> Future[str | None]:
        """Start moving blocks of a running sequence; the future gets why that cannot be, or None."""
        answer: Future[str | None] = Future()
        self.run_soon(lambda now: self._move(seq, blocks, target, answer, now))
        return answer

    def set_roles(self, roles: Mapping[str, str]) -> str | None:
        """Change roles of devices at once; return why that cannot be, or None.

        Nothing waits for a turn of the scheduler's thread, and for the cores that it would need. What follows from the
        change is carried out there, before anything that is handled later. A defect ends the loop, and is raised.
        """
        with self._changed:
            try:
                commands = self._handle(SetRoles(tuple(roles.items())), self._clock())
            except BaseException as error:
                self._put_first(partial(_raise, error))
                raise
            changed = [each for each in commands if isinstance(each, RolesChanged)]
            if rest := [each for each in commands if not isinstance(each, RolesChanged)]:
                self._put_first(partial(self._carry_out, rest))
        return next((each.error for each in changed), "") or None

    def pause(self, request: str, expected: int | None) -> Future[int]:
        """Pause a request's sequences; the future gets their number."""
        return self._run_for_request(request, lambda seq: PauseSequence(seq, expected))

    def resume(self, request: str) -> Future[int]:
        """Resume a request's sequences; the future gets their number."""
        return self._run_for_request(request, ResumeSequence)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the driver was shut down"
        try:
            while not self._stopping:
                self._turn()
        except UnavailableModel as error:
            reason = str(error)
        except BaseException as error:
            _log.critical("the scheduler's loop has died", exc_info=True)
            reason = f"the scheduler's loop has died: {public(error)}"
        self._asked.clear()
        for beside in (self._plans, self.pool):
            if beside is not None:
                beside.stop()
        self._died(reason)

    def _turn(self) -> None:
        told = self._remote_agents.receive(TICK if not self._asked else 0.0)
        with self._changed:
            now = self._clock()
            told += self._remote_agents.look()
            # Requests first: what they change holds for the rows that go on because of the messages.
            self._firsts = 0
            for _ in range(len(self._asked)):
                self._asked.popleft()(now)
            self._handle_events(told, now)
            if now >= self._next_tick:
                self._next_tick = now + int(TICK * 1e9)
                self._handle_events([Tick()], now)
                self._strand(now)
            self._changed.notify_all()

    def _handle_events(self, events: Iterable[Message | SchedulerEvent], now: int) -> None:
        for event in events:
            if isinstance(event, PoolBeat):
                self._beat(event)
            else:
                self._carry_out(self._handle(event, now), now)

    def _carry_out(self, commands: Iterable[SchedulerCommand], now: int) -> None:
        """Carry out commands in order.

        ReplaceAgent needs nothing: the agent pool noticed the death before the scheduler, and starts another agent by
        itself.
        """
        for command in commands:
            if isinstance(command, Send):
                self._remote_agents.send(command.to, command.message)
            elif isinstance(command, EmitTokens):
                self._handle_events([AbortSequence(seq) for seq in self._routes.deliver(command.events)], now)
            elif isinstance(command, ModelUpdated):
                self._changes.answered(command)
            elif isinstance(command, SolvePlan) and self._plans is not None:
                self._plans.solve(command)
            elif isinstance(command, PoolQuery | PoolDenial) and self.pool is not None:
                self.pool.send_command(command)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, now: int) -> None:
        taken: list[SequenceRequest] = []
        tokens = 0
        while self._arrivals:
            one = self._arrivals.popleft()
            if (why := self.unavailable_models.reason(one.model)) is not None:
                self._routes.deliver([refusal_event(one, why)])
                continue
            size = len(one.prompt) + len(one.output)
            tokens += size
            if taken and tokens > _LOT:
                self._take_in(taken, now)
                taken, tokens = [], size
            taken.append(one)
        if taken:
            self._take_in(taken, now)

    def _add_predicted(self, event: AddRequests, now: int) -> None:
        able: list[tuple[SequenceRequest, LengthForecast | None]] = []
        for one, forecast in zip(event.requests, event.forecasts, strict=True):
            if (why := self.unavailable_models.reason(one.model)) is not None:
                self._routes.deliver([refusal_event(one, why)])
            else:
                able.append((one, forecast))
        if able:
            requests, forecasts = zip(*able, strict=True)
            self._handle_events([AddRequests(requests, forecasts)], now)

    def _take_in(self, taken: Sequence[SequenceRequest], now: int) -> None:
        self._handle_events([AddRequest(taken[0]) if len(taken) == 1 else AddRequests(tuple(taken))], now)

    def _pool(self, config: LendingConfig) -> PoolThreads:
        return PoolThreads(config, self._clock, self._answered)

    def _beat(self, beat: PoolBeat) -> None:
        """Pass an agent's heartbeat to the managers of the pool, past the scheduler."""
        if self.pool is not None:
            self.pool.add_beat(beat)

    def _answered(self, event: PlanSolved | PoolAnswer) -> None:
        """Queue what was worked out beside the scheduler."""
        self.run_soon(lambda now: self._handle_events([event], now))

    def _begin(self, event: ServeModel | WithdrawModel, answer: Future[ModelUpdated], now: int) -> None:
        self._changes.add_update(event, answer)
        self._handle_events([event], now)

    def _move(self, seq: str, blocks: range, target: str, answer: Future[str | None], now: int) -> None:
        commands = self._handle(MoveSequence(seq, blocks.start, blocks.stop, target), now)
        self._carry_out(commands, now)
        answer.set_result(next((each.error for each in commands if isinstance(each, MoveAnswered)), "") or None)

    def _put_first(self, act: Callable[[int], None]) -> None:
        """Queue a call for the scheduler's thread, before earlier ones but behind calls of this kind, with the lock."""
        self._asked.insert(self._firsts, act)
        self._firsts += 1
        self._remote_agents.wake()

    def _run_for_request(self, request: str, event: Callable[[str], PauseSequence | ResumeSequence]) -> Future[int]:
        answer: Future[int] = Future()

        def tell(now: int) -> None:
            seqs = [seq for seq, sequence in self._scheduler.sequences.items() if sequence.request.request == request]
            self._handle_events([event(seq) for seq in seqs], now)
            answer.set_result(len(seqs))

        self.run_soon(tell)
        return answer

    # -- unavailable models --------------------------------------------------------------------------------------------

    def _strand(self, now: int) -> None:
        """End sequences that wait for devices that will not come back.

        Raises UnavailableModel if no served model can run any more, or no device comes back.
        """
        failed = self._remote_agents.lifecycles.failed()
        if not failed:
            return
        reasons = {each.device: each.reason for each in self._remote_agents.lifecycles.facts()}
        self._handle_events(
            [AgentDown(name, reasons[name], final=True) for name in failed if not self._known_final(name)], now
        )
        chains, instances = self._scheduler.chains(), self._scheduler.block_map.instances
        self.unavailable_models.look(chains, instances, failed, reasons)
        # Each by its own chain, a version that new sequences may not get any more. Sequences with a path run elsewhere.
        waiting = [(seq, sequence.chain) for seq, sequence in self._scheduler.sequences.items() if not sequence.path]
        ends = {
            chain.version: whys([chain], instances, failed, reasons)
            for chain in {each.version: each for _, each in waiting}.values()
        }
        for seq, chain in waiting:
            for why in ends[chain.version].values():
                self._carry_out(ending(self._handle(AbortSequence(seq), now), seq, why), now)
        self.unavailable_models.require_hope(chains)
        if len(failed) == len(reasons):
            raise UnavailableModel(f"no agent comes back, that of {failed[0]} because: {reasons[failed[0]]}")

    def _known_final(self, name: str) -> bool:
        device = self._scheduler.devices.get(name)
        return device is None or device.final


def _raise(error: BaseException, now: int) -> None:
    raise error
