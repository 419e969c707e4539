"""Choose what rows of background sequences get of a device's next step: lines of batches, beside interactive ones.

A step is as long as all of its rows take together. Interactive answers may take longer for the background by a share of
the time that they take alone, on average (ConServe, arXiv 2410.01228: what interactive rows leave of a step):

- Half of it for background rows in their own steps. Each step earns that of its time, until there is enough for all
  that decode and one prompt: then they are in a step. So the background never stops for good, and most steps are as
  they are alone; rows that come and go with each step would cost more than their own time.
- Half of it for the step that runs when a request comes, which is half over on average. While requests come now and
  then, steps of background rows alone are therefore as short as the whole share; one row always runs. Without any
  request there is no limit. While a request is being prepared, no such step begins.

Pure; times in ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.policy.measured_cost import MeasuredCost

#: Steps that are measured before anything is limited by their times.
_LEAST = 8
#: Until an interactive request was seen so long ago, background steps are short.
_RECENT = 60_000_000_000
#: Weight of the latest request in the time that they take.
_LATEST = 0.1
#: Assumed seconds of a step, of a row in it, and of a token of a prompt, until steps are measured.
_ASSUMED = (2e-2, 1e-3, 5e-4)


class StepCosts:
    """Time of a step by its rows and its tokens of prompts, fitted to the latest ones."""

    def __init__(self) -> None:
        self._cost = MeasuredCost.assuming(_ASSUMED)

    @property
    def known(self) -> bool:
        """Whether enough steps were measured."""
        return self._cost.count >= _LEAST

    def add(self, rows: int, prompt: int, elapsed: int) -> None:
        """Record a step of so many rows, with so many tokens of prompts beside one token of each row."""
        self._cost.add((1.0, float(rows), float(prompt)), elapsed / 1e9)

    def step(self, rows: int) -> float:
        """Return the time of a step that decodes so many rows."""
        return 1e9 * self._cost.at((1.0, float(rows), 0.0))

    def prompt(self, tokens: int) -> float:
        """Return by how much a prompt of so many tokens makes a step longer."""
        return 1e9 * self._cost.at((0.0, 1.0, float(max(tokens - 1, 0))))


@dataclass(frozen=True, slots=True)
class BackgroundShare:
    """What background rows get of the next step.

    Fields:
        rows: How many of those that decode run in it.
        spare: Time that prompts of further ones may take in it; None: any.
    """

    rows: int
    spare: float | None = None


class Background:
    """The background's share of one device.

    `share`: by which an answer may take longer for the background, greater than 0.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0
        self._stay: float | None = None
        self._seen = 0

    def record_stay(self, alone: float, now: int) -> None:
        """Record how long an interactive sequence that has ended would have run alone."""
        self._seen = now
        self._stay = alone if self._stay is None else self._stay + (alone - self._stay) * _LATEST

    def next_step(
        self,
        beside: int,
        decoding: int,
        prompt: float | None,
        step: Callable[[int], float],
        now: int,
        expected: bool = False,
    ) -> BackgroundShare:
        """Return what background rows get of the next step. To be called once per step.

        Args:
            beside: Interactive rows.
            decoding: Background rows that decode.
            prompt: Least time of a background prompt that waits to begin or to go on; None where none does.
            step: Returns the mean time of a step of so many rows; it never falls.
            expected: An interactive request is about to come.
        """
        if beside:
            self._seen = now
            alone = step(beside)
            rows = step(beside + decoding) - alone
            price = rows + (prompt or 0.0)
            self._credit = min(self._credit + self._share * alone / 2, price)
            if self._credit < price or not price:
                return BackgroundShare(0, 0.0)
            self._credit -= rows
            return BackgroundShare(decoding, self._credit)
        self._credit = 0.0
        if expected:
            return BackgroundShare(0, 0.0)
        if self._stay is None or now - self._seen > _RECENT:
            return BackgroundShare(decoding)
        budget = self._share * self._stay
        rows = max(_most(decoding, lambda rows: step(rows) <= budget), min(decoding, 1))
        return BackgroundShare(rows, max(budget - step(rows), 0.0))

    def pay(self, time: float) -> None:
        """Pay for a prompt that begins beside interactive rows."""
        self._credit = max(self._credit - time, 0.0)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the greatest number up to a limit that fits; 0 if not even one does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
