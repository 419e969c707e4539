"""Helpers for scheduler tests: short constructors, a trace kept in memory, and checked token events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.tracing.sink import line_of
from runtime.types import ModelSpec, SamplingParams, SequenceRequest, TokenEvent, TraceEvent


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
    """A trace that keeps every event in a list."""

    events: list[TraceEvent] = field(default_factory=list)

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[TraceEvent]:
        return [event for event in self.events if event.ev == name]

    def text(self) -> str:
        return "".join(line_of(event) for event in self.events)


@dataclass
class Told:
    """The token events that one sequence's client received, checked for order as they arrive."""

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
