"""Rows in flight of a predicted sequence (BL-25): the next one, and at most one after it that starts from a guess.

    first     start = computed        final with its RowsDone, or with its tentative RowsDone and a SpeculationResult
                                      that the prediction stands
    second    start = computed + 1    starts from the token of the first one's tentative RowsDone; becomes the first if
                                      that was the token, else it is sent again with a new attempt number

Contract: data of one sequence. Messages may arrive in any order, since several devices send them; a message with no
matching attempt is outdated.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.types import PromptLogprobs, Sampled


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a row at the last hop."""

    sampled: Sampled | None
    scores: tuple[PromptLogprobs, ...] = ()


@dataclass(slots=True)
class InFlightRow:
    """A row and its results so far.

    Fields:
        attempt: Its (even) attempt number.
        count: Its tokens.
        started: Whether it may be predicted.
        guess: The predicted token it starts from; None for a row that starts from final tokens.
        tentative: Result with the predicted hop, of attempt number - 1.
        stands: Whether the prediction stands; None while it is unknown.
        real: Result without prediction.
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
        """The final result; None while it is unknown."""
        if self.real is not None:
            return self.real
        return self.tentative if self.stands else None

    def hit(self, exact: bool) -> bool | None:
        """Return whether the prediction was right: it stands or, in exact mode, its token is the same.

        None if there was no prediction in time.
        """
        if self.stands or self.tentative is None or not exact:
            return self.stands
        guessed, sampled = self.tentative.sampled, None if self.real is None else self.real.sampled
        return guessed is not None and sampled is not None and guessed.token == sampled.token


class InFlightRows:
    """Rows in flight of one sequence, under one epoch."""

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
        """Record the result of a row at its last hop; odd attempt numbers are tentative results."""
        for each in self._rows:
            if each.attempt == attempt:
                each.real = result
            elif each.attempt - 1 == attempt:
                each.tentative = result

    def judged(self, attempt: int, stands: bool) -> InFlightRow | None:
        """Record the check of a row's prediction; return the row, None for an outdated attempt."""
        found = next((each for each in self._rows if each.attempt == attempt), None)
        if found is not None:
            found.stands = stands
        return found
