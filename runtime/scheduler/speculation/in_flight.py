"""Rows of predicted sequences that are under way (BL-25): the one that counts next, and at most one behind it that
goes on from a guess.

    first     start = computed                           done by: its Done, or its tentative Done and a Verdict that it
                                                         stands
    second    start = computed + 1, from the token that the first one's tentative Done brought; it becomes the first if
              that was the token,
              else it is sent again under a new turn

Contract: data of one sequence, no decisions about others. Messages may come in any order, for they come from
several devices; what is of no try is old.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.types import PromptLogprobs, Sampled


@dataclass(frozen=True, slots=True)
class Result:
    """What came through the last hop."""

    sampled: Sampled | None
    scores: tuple[PromptLogprobs, ...] = ()


@dataclass(slots=True)
class InFlightRow:
    """A row. `guess`: the token it goes on from, where that is one; `started`: it may be predicted. Then what has come
    of it.
    """

    attempt: int
    count: int
    started: bool
    guess: int | None = None
    tentative: Result | None = None
    stands: bool | None = None
    real: Result | None = None

    @property
    def result(self) -> Result | None:
        """What counts, once it is known."""
        if self.real is not None:
            return self.real
        return self.tentative if self.stands else None

    def hit(self, exact: bool) -> bool | None:
        """Whether it was predicted well: it stands or, where that takes the same bits, its token was the same. None if
        it was not predicted in time."""
        if self.stands or self.tentative is None or not exact:
            return self.stands
        guessed, sampled = self.tentative.sampled, None if self.real is None else self.real.sampled
        return guessed is not None and sampled is not None and guessed.token == sampled.token


class InFlightRows:
    """Of one sequence, under one epoch."""

    def __init__(self) -> None:
        self._rows: list[InFlightRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def first(self) -> InFlightRow:
        return self._rows[0]

    def add(self, one: InFlightRow) -> None:
        self._rows.append(one)

    def pop(self) -> InFlightRow:
        return self._rows.pop(0)

    def clear(self) -> None:
        self._rows.clear()

    def back(self, attempt: int, result: Result) -> None:
        """A row is through its last hop; of an odd turn it was tentative."""
        for each in self._rows:
            if each.attempt == attempt:
                each.real = result
            elif each.attempt - 1 == attempt:
                each.tentative = result

    def judged(self, attempt: int, stands: bool) -> InFlightRow | None:
        """Its prediction was checked."""
        found = next((each for each in self._rows if each.attempt == attempt), None)
        if found is not None:
            found.stands = stands
        return found
