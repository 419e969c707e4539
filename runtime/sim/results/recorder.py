"""What a simulated run comes to, gathered while it runs: one line per request, sums per device, the cluster's state at
every tick.

All of virtual time; numbers in columns of eight bytes each, so that a million requests fit. Knows nothing of what the
figures are used for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.types import SequenceRequest, TokenEvent


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment. `busy`: ns of all devices since the begin; `alive`: requests; bytes on all devices
    together; `tokens`: made since the begin."""

    at: int
    busy: int
    alive: int
    weights: int
    kv: int
    tokens: int = 0


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class RunRecorder:
    """`model`, `arrived`, `first`, `ended`, `tokens`: a request's, by number in the order of arrival; `ended` 0 while
    it is
    alive. `served`: by number, what requests ran on that did not run on what they named."""

    model: list[str] = field(default_factory=list)
    arrived: array[int] = field(default_factory=_column)
    first: array[int] = field(default_factory=_column)
    ended: array[int] = field(default_factory=_column)
    tokens: array[int] = field(default_factory=_column)
    served: dict[int, str] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    load_bytes: int = 0
    load_ns: int = 0
    loads: int = 0
    made: int = 0
    _alive: dict[str, int] = field(default_factory=dict)

    @property
    def alive(self) -> int:
        return len(self._alive)

    def add_request(self, request: SequenceRequest, now: int) -> None:
        self._alive[request.seq] = len(self.model)
        self.model.append(request.model)
        self.arrived.append(now)
        self.first.append(0)
        self.ended.append(0)
        self.tokens.append(0)

    def add_events(self, events: Iterable[TokenEvent], now: int) -> None:
        """Tokens and ends. Raises KeyError for a sequence that has ended or was never asked for."""
        for event in events:
            number = self._alive[event.seq]
            if event.token is not None:
                if not self.first[number]:
                    self.first[number] = now
                self.made += event.index + 1 - self.tokens[number]
                self.tokens[number] = event.index + 1
            if event.finish is not None:
                del self._alive[event.seq]
                self.ended[number] = now
                if event.served is not None:
                    self.served[number] = event.served
                self.reasons[event.finish] = self.reasons.get(event.finish, 0) + 1
                if event.error is not None:
                    self.errors[event.error] = self.errors.get(event.error, 0) + 1

    def loaded(self, nbytes: int, ns: int) -> None:
        self.loads += 1
        self.load_bytes += nbytes
        self.load_ns += ns
