"""Record a simulated run: one entry per request, sums per device, and the cluster's state at every tick.

All times are virtual. Numbers are stored in columns of eight bytes each, so that a million requests fit into memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.types import SequenceRequest, TokenEvent


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment.

    Fields:
        at: Virtual time in ns.
        busy: ns in steps of all devices since the start.
        alive: Running requests.
        weights, kv: Bytes on all devices together.
        tokens: Tokens generated since the start.
    """

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
    """Measurements of a run.

    Fields:
        model, arrived, first, ended, tokens: Columns by request, in the order of arrival: model, times of arrival,
            first token and end (ns; `ended` is 0 while it runs), generated tokens.
        latest, gap: Columns by request: time of the latest token, and the longest time between two (ns).
        served: By request number, the model that it ran on, if that is another than the requested one.
        reasons: Number of requests by finish reason.
        errors: Number of requests by error.
        loads, load_bytes, load_ns: Loads of stages: number, bytes and time.
        made: Tokens generated.
    """

    model: list[str] = field(default_factory=list)
    arrived: array[int] = field(default_factory=_column)
    first: array[int] = field(default_factory=_column)
    ended: array[int] = field(default_factory=_column)
    tokens: array[int] = field(default_factory=_column)
    latest: array[int] = field(default_factory=_column)
    gap: array[int] = field(default_factory=_column)
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
        self.tokens.append(len(request.output))
        self.latest.append(0)
        self.gap.append(0)

    def add_events(self, events: Iterable[TokenEvent], now: int) -> None:
        """Record tokens and ends. Raises KeyError for a sequence that has ended or is unknown."""
        for event in events:
            number = self._alive[event.seq]
            if event.token is not None:
                if not self.first[number]:
                    self.first[number] = self.latest[number] = now
                elif now - self.latest[number] > self.gap[number]:
                    self.gap[number] = now - self.latest[number]
                self.latest[number] = now
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
