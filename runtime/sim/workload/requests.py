"""Requests to a simulated cluster as columns, and as a file with one JSON line each: time in ns, model, both lengths.

Prompts are numbers without meaning. Their first tokens differ within any 30,000 requests in a row, so that prefixes are
not shared by accident.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.bench.lengths import MOST_TOKENS
from runtime.types import SamplingParams, SequenceRequest
from zoo.errors import InputError

SECOND = 10**9
#: The first token of a prompt is below this; every vocabulary is larger.
_NUMBERS = 30_000
_MOST_LINE = 1 << 16
#: Number of requests converted to Python numbers at a time.
_AT_ONCE = 1 << 14
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A class of requests. `slo_ms`, `ttft_slo_ms`: of the whole answer, or its first token; None for no objective."""

    name: str
    slo_ms: int | None = None
    priority: int = 0
    ttft_slo_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests in the order of time, as columns.

    Fields:
        classes: Classes of requests; empty where all are alike.
        kind: Index in `classes`; None without classes.
        at: ns since the start.
        model: Index in `models`.
        prompt, answer: Tokens.
        clients: Clients that ask one request after another: what is due when so many run comes when one has ended. 0:
            every request comes when it is due.
    """

    models: tuple[str, ...]
    at: Numbers
    model: Numbers
    prompt: Numbers
    answer: Numbers
    classes: tuple[RequestClass, ...] = ()
    kind: Numbers | None = None
    clients: int = 0

    def __len__(self) -> int:
        return len(self.at)

    @property
    def seconds(self) -> float:
        """Time until the last request arrives."""
        return float(self.at[-1]) / SECOND if len(self.at) else 0.0

    def requests(self, adaptive: bool = False) -> Iterator[SequenceRequest]:
        """Yield the requests one by one, so that a million of them need not be in memory at once."""
        kinds = np.zeros(len(self), dtype=np.int64) if self.kind is None else self.kind
        classes = self.classes or (RequestClass(""),)
        columns = self.at, self.model, self.prompt, self.answer, kinds
        for first in range(0, len(self), _AT_ONCE):
            some = (column[first : first + _AT_ONCE].tolist() for column in columns)
            for number, (at, model, prompt, answer, kind) in enumerate(zip(*some, strict=True), first):
                name = f"r{number}"
                tokens = (number % _NUMBERS, *_zeros(prompt - 1))
                yield SequenceRequest(
                    name,
                    name,
                    self.models[model],
                    tokens,
                    _sampling(answer),
                    priority=classes[kind].priority,
                    slo_ms=classes[kind].slo_ms,
                    ttft_slo_ms=classes[kind].ttft_slo_ms,
                    adaptive=adaptive,
                    arrival=at,
                )

    def faster(self, factor: float) -> Demand:
        """Return the same requests, arriving so many times as fast. Raises InputError."""
        if not 0 < factor < 1e9:
            raise InputError("a demand is made faster by a positive factor")
        return replace(self, at=np.rint(self.at / factor).astype(np.int64))

    def later(self, seconds: float) -> Demand:
        """Return the same requests, each so many seconds later."""
        return replace(self, at=self.at + round(seconds * SECOND))


def write_demand(demand: Demand, path: Path) -> None:
    """Write one JSON line per request. The same demand gives the same bytes."""
    with path.open("w", encoding="utf-8") as file:
        for at, model, prompt, answer in zip(
            demand.at.tolist(), demand.model.tolist(), demand.prompt.tolist(), demand.answer.tolist(), strict=True
        ):
            record = {"at": at, "model": demand.models[model], "prompt": prompt, "answer": answer}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_demand(path: Path, most: int = 10_000_000) -> Demand:
    """Read what `write_demand` wrote. Raises InputError with the number of an invalid line."""
    rows: list[tuple[int, int, int, int]] = []
    models: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE), ""), 1):
                at, model, prompt, answer = _record(line, path, number)
                rows.append((at, models.setdefault(model, len(models)), prompt, answer))
                if len(rows) > most:
                    raise InputError(f"{path} has more than {most:,} requests")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise InputError(f"{path} holds no request")
    columns = np.array(sorted(rows, key=lambda row: row[0]), dtype=np.int64).T
    return Demand(tuple(models), *columns)


def _record(line: str, path: Path, number: int) -> tuple[int, str, int, int]:
    try:
        record = json.loads(line)
        at, model, prompt, answer = record["at"], record["model"], record["prompt"], record["answer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path}, line {number}: not a request with at, model, prompt and answer") from None
    numbers = all(type(value) is int for value in (at, prompt, answer)) and isinstance(model, str)
    if not numbers or not 0 <= at < 2**62 or not 1 <= prompt <= MOST_TOKENS or not 1 <= answer <= MOST_TOKENS:
        raise InputError(f"{path}, line {number}: a time from 0 in ns, lengths from 1, and a model's name")
    return at, model, prompt, answer


@lru_cache(maxsize=8192)
def _zeros(count: int) -> tuple[int, ...]:
    return (0,) * count


@lru_cache(maxsize=8192)
def _sampling(answer: int) -> SamplingParams:
    return SamplingParams(max_tokens=answer, ignore_eos=True)
