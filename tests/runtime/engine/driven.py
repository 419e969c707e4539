"""Drive the real scheduler and agent over any engine, step by step and without threads, so that runs are repeatable.

This is the server's path without its clock, its processes and torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from runtime.agent.agent import Agent
from runtime.chains import Array, LaunchedStep, StageResult, looks_ahead
from runtime.cluster.agent_process.lanes import OneLane
from runtime.cluster.agents.inline import by_models
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, PrefixCaching
from runtime.control.agent_io import CopiedIn, CopiedOut, CopyIn, CopyOut, DropStage, LoadStage, Send, StageLoaded
from runtime.control.scheduler_io import AddRequest, EmitTokens, Tick
from runtime.messages import PROTOCOL, AgentHello
from runtime.scheduler.scheduler import Scheduler
from runtime.types import SequenceRequest, StepPlan, StepResult, TokenEvent

NAME = "here"


@dataclass(frozen=True)
class Limits:
    """Limits of a step, the watermark for admitting sequences, and host memory for K and V of those that give way."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    watermark: float = 0.01
    host_memory: int = 0


@dataclass
class Drive:
    """What a run gave.

    Fields:
        events: Token events by sequence.
        steps: Result of every step; sequences have the names of their requests.
        plans: Plans as the engine received them.
        preemptions: Number of preemptions.
        swapped: Sequences that came back from host memory.
        resumed: Tokens that were computed again.
        shared: Prompt tokens taken from the prefix cache.
        awaited: Rows launched before their input token was known.
    """

    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    preemptions: int = 0
    swapped: int = 0
    resumed: int = 0
    shared: int = 0
    awaited: int = 0

    def tokens(self, seq: str) -> list[int]:
        return [event.token for event in self.events[seq] if event.token is not None]


class Driven:
    """A scheduler and one agent over an engine, without a clock: call `tell` and `step` until `busy` is false.

    `heard` holds all messages the agent sent. The engine lists what it serves in `described` (a chain and its blocks
    each).
    """

    def __init__(
        self, engine: Any, config: Limits | None = None, sharing: PrefixCaching = "off", credit: int = 1, late: int = 0
    ) -> None:
        """`late`: Number of steps after which the scheduler's messages reach the agent."""
        config, self._late = config or Limits(), late
        self._envelope: deque[tuple[int, Send]] = deque()
        self._events: deque[Any] = deque()
        self.engine, self.out, self.now = engine, Drive(), 0
        self.heard: list[Any] = []
        chains = [each.chain for each in engine.described]
        blocks = {block.id: block for each in engine.described for block in each.blocks}
        cluster = ClusterConfig(
            max_num_seqs=config.max_num_seqs,
            prefill_chunk=4 * config.max_num_batched_tokens,
            watermark=config.watermark,
            control=ControlConfig.off(),
            prefix_caching=sharing,
            stride=credit,
        )
        self.scheduler = Scheduler(chains, blocks.values(), cluster)
        agent = AgentConfig(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            batch_wait_us=0,
            chunk_prefill=True,
            host_memory_bytes=config.host_memory,
        )
        self.agent = Agent(
            NAME,
            engine.page_capacity,
            agent,
            engine.alike,
            lacks=engine.lacks,
            looks_ahead=looks_ahead(engine),
            page_bytes=engine.page_bytes,
        )
        self._lane = OneLane(_Watched(engine, self.out), self.agent, lambda: self.now, lambda send: self._obey([send]))
        self.tell(
            AgentHello(
                NAME,
                PROTOCOL,
                "test",
                engine.page_capacity,
                engine.page_bytes,
                0,
                NAME,
                lacks=tuple(sorted(engine.lacks)),
                host_memory=config.host_memory,
            )
        )

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def tell(self, event: Any) -> None:
        """Give the scheduler an event and carry out the commands that follow, in order.

        An event raised while another is handled waits until that one is done.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return  # the loop below handles it
        while self._events:
            for command in self.scheduler.handle(self._events[0], self.now):
                if isinstance(command, Send):
                    self._envelope.append((self.now + self._late, command))
                elif isinstance(command, EmitTokens):
                    for told in command.events:
                        self.out.events.setdefault(told.seq, []).append(told)
            if not self._late:
                self._deliver()
            self._events.popleft()

    def _deliver(self) -> None:
        while self._envelope and self._envelope[0][0] <= self.now:
            _, send = self._envelope.popleft()
            self._obey(self.agent.handle(send.message, send.arrays, self.now))

    def arrive(self, request: SequenceRequest) -> None:
        self.tell(AddRequest(request))

    def step(self) -> bool:
        """Run the agent's next plan, or launch it and collect the one before; return false if none was due."""
        self.now += 1
        commands = self._lane.turn()
        self._obey(commands or ())
        waits = bool(self._envelope)
        self._deliver()
        if commands is None:
            return waits
        self.scheduler.check()
        self.agent.check()
        return True

    def end(self) -> Drive:
        """Check that no page is left in use; return what the run gave."""
        self.scheduler.prefix_cache.clear()
        self.tell(Tick())
        while self.step():
            pass
        counts = self.agent.pages()
        assert counts.free == counts.capacity, f"{counts}"
        assert all(device.pages.used == device.host_used == 0 for device in self.scheduler.devices)
        assert not self.agent.host_copies.nbytes
        counters = self.scheduler.state().counters
        self.out.preemptions, self.out.shared = counters.preemptions, counters.shared_tokens
        self.out.swapped, self.out.resumed = counters.swapped_in, counters.resumed_tokens
        return self.out

    def _obey(self, commands: Iterable[Any]) -> None:
        for command in commands:
            match command:
                case Send(_, message, _):
                    self.heard.append(message)
                    self.tell(message)
                case LoadStage(stage):
                    event = StageLoaded(stage, self.engine.load(stage), self.engine.memory().weights)
                    self._obey(self.agent.handle(event, (), self.now))
                case DropStage(stage):
                    self.engine.unload(stage)
                case CopyOut(key, tokens, pages):
                    copied = CopiedOut(key, self.engine.copy_out(key, tokens, pages), 1)
                    self._obey(self.agent.handle(copied, (), self.now))
                case CopyIn(opened, tokens, pages, data):
                    self.engine.copy_in(opened, tokens, pages, data)
                    self._obey(self.agent.handle(CopiedIn(command.key, 1), (), self.now))


class _Watched:
    """An engine proxy that records its plans and step results in a `Drive`."""

    def __init__(self, engine: Any, out: Drive) -> None:
        self._engine, self._out = engine, out
        self.ahead = looks_ahead(engine)

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        self._note(plan)
        return self._told(plan, self._engine.run(plan, inputs))

    def launch(self, plan: StepPlan, inputs: Mapping[str, Array]) -> LaunchedStep:
        self._note(plan)
        return _Launched(self, plan, self._engine.launch(plan, inputs))

    def _note(self, plan: StepPlan) -> None:
        self._out.plans.append(plan)
        self._out.awaited += sum(row.awaits for row in plan.rows)

    def _told(self, plan: StepPlan, told: StageResult) -> StageResult:
        if plan.rows:
            self._out.steps.append(_by_sequence(told.result))
        return told


@dataclass
class _Launched:
    """A launched step with a result that is recorded when it is read."""

    watched: _Watched
    plan: StepPlan
    step: LaunchedStep

    def result(self) -> StageResult:
        return self.watched._told(self.plan, self.step.result())


def drive(
    engine: Any,
    arrivals: Mapping[int, Iterable[SequenceRequest]],
    config: Limits | None = None,
    sharing: PrefixCaching = "off",
    credit: int = 1,
) -> Drive:
    """Run until all sequences are done. `arrivals`: step number -> requests that arrive before that step."""
    made, step, last = Driven(engine, config, sharing, credit), 0, max(arrivals)
    while made.busy or step <= last:
        for request in arrivals.get(step, ()):
            made.arrive(request)
        ran = made.step()
        assert ran or step <= last or not made.busy, "nothing runs, and sequences are alive"
        step += 1
    return made.end()


def _by_sequence(told: StepResult) -> StepResult:
    """Name sequences as their requests do (without the agent's suffix), and models in place of stages."""
    segments = tuple(map(by_models, told.segments))
    sampled = tuple(structs.replace(one, seq=name_of(one.seq)) for one in told.sampled)
    return replace(told, segments=segments, sampled=sampled, deferred=tuple(map(name_of, told.deferred)))


def name_of(key: str) -> str:
    """Return the sequence that a page table belongs to."""
    return key.rpartition("#")[0]
