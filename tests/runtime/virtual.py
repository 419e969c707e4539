"""Agent and engine under a virtual clock: a heap instead of threads, so that the same inputs give the same trace, byte
for byte.

Every event is checked: pages and queues agree, tokens come once and in order, each sequence ends once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.agent.local.agent import LocalAgent
from runtime.config import BatchingConfig
from runtime.engine.fakes.fake import FakeEngine
from runtime.tracing.sink import line_of
from runtime.types import ModelSpec, SamplingParams, SequenceRequest, StepPlan, StepSkipped, TokenEvent, TraceEvent


def spec(name: str = "m", **changes: object) -> ModelSpec:
    values: dict[str, object] = dict(
        kv_layers=2, page_tokens=4, max_model_len=64, vocab_size=97, eos_token_ids=(), blocks=("b0", "b1")
    )
    return ModelSpec(name, **(values | changes))  # type: ignore[arg-type]


def request(
    seq: str, prompt: Iterable[int] = (1, 2, 3), model: str = "m", max_tokens: int = 4, **changes: object
) -> SequenceRequest:
    fields = {name: changes.pop(name) for name in ("priority", "arrival", "request") if name in changes}
    sampling = SamplingParams(max_tokens=max_tokens, **changes)  # type: ignore[arg-type]
    fields.setdefault("request", f"r-{seq}")
    return SequenceRequest(seq=seq, model=model, prompt=tuple(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


@dataclass
class ListTrace:
    """Every event, kept."""

    events: list[TraceEvent] = field(default_factory=list)

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[TraceEvent]:
        return [event for event in self.events if event.ev == name]

    def text(self) -> str:
        return "".join(line_of(event) for event in self.events)


@dataclass
class Told:
    """What the owner of one sequence was told."""

    tokens: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]

    def take(self, event: TokenEvent) -> None:
        assert not self.events or self.last.finish is None, f"{event} came after {self.last}"
        assert event.index == len(self.tokens)
        self.events.append(event)
        if event.token is not None:
            self.tokens.append(event.token)


class Virtual:
    """Drives one agent. `arrive` and `abort` schedule, `run` plays until nothing is left."""

    def __init__(self, engine: FakeEngine, config: BatchingConfig | None = None, *, watched: bool = True) -> None:
        """`watched`: keep the trace and check everything after every event."""
        self.trace = ListTrace()
        self.engine = engine
        trace = self.trace if watched else None
        self.agent = LocalAgent(
            engine.models(), engine.page_capacity, config or BatchingConfig(), trace, ahead=engine.ahead
        )
        self.told: dict[str, Told] = {}
        self.plans: list[StepPlan] = []
        self.now = 0
        self._watched = watched
        self._heap: list[tuple[int, int, str, object]] = []
        self._scheduled = 0
        self._under_way, self._most = 0, 2 if engine.ahead else 1
        self._failing = False
        self._free_at = 0  # when the engine is through with what it was given

    def arrive(self, one: SequenceRequest, at: int = 0) -> None:
        self._at(at, "arrive", one)

    def abort(self, seq: str, at: int) -> None:
        self._at(at, "abort", seq)

    def run(self) -> dict[str, Told]:
        while self._heap or self.agent.busy:
            while self._under_way < self._most and not self._failing and self._start_step():
                pass
            if self._heap:
                self._play(*heapq.heappop(self._heap))
        return self.told

    def _at(self, time: int, kind: str, what: object) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (time, self._scheduled, kind, what))

    def _start_step(self) -> bool:
        # Whatever happens at this very moment happens first: a step takes all that is there.
        if self._heap and self._heap[0][0] <= self.now:
            return False
        plan = self.agent.next_step(self.now)
        self._verify()
        if plan is None:
            return False
        self.plans.append(plan)
        begin = max(self.now, self._free_at)
        try:
            launched = self.engine.launch(plan)
        except Exception as error:
            self._failing = True  # what comes after it is planned when that is known
            self._free_at = begin + 1
            self._at(self._free_at, "fault", error)
        else:
            self._under_way += 1
            self._free_at = begin + self.engine.duration(plan)
            self._at(self._free_at, "done", launched)
        return True

    def _play(self, time: int, _order: int, kind: str, what: object) -> None:
        assert time >= self.now
        self.now = time
        if kind == "arrive":
            self.told[what.seq] = Told()  # type: ignore[attr-defined]
            events = self.agent.add(what, time)  # type: ignore[arg-type]
        elif kind == "abort":
            events = self.agent.abort(what, time)  # type: ignore[arg-type]
        else:
            events = self._over(kind, what)
        for event in events:
            self.told[event.seq].take(event)
        self._verify()

    def _over(self, kind: str, what: object) -> list[TokenEvent]:
        if kind == "fault":
            self._failing = False
            return self.agent.fail_step(str(what), self.now)
        self._under_way -= 1
        try:
            result = what.result()  # type: ignore[attr-defined]
        except StepSkipped:
            self.agent.skip_step(self.now)
            return []
        except Exception as error:
            return self.agent.fail_step(str(error), self.now)
        return self.agent.finish_step(result, self.now)

    def _verify(self) -> None:
        if self._watched:
            self.agent.check()
