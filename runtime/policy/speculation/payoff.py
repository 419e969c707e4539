"""Compute how often a prediction must be right to pay, and end speculation that does not (BL-25).

Per pass, with a hop of b seconds, its stand-in of s, a check of v and the later hops of d:

    right      gains (b + d) - max(s + d, b + v)      as `policy.speculation.choice.chain_time` computes it
    wrong      costs v + min(d, b - s)                until the real row comes, the later devices ran for nothing; they
                                                      are assumed to be busy (on idle ones a miss costs the check alone)
    shared     costs s, right or wrong                the stand-in ran on the hop's own stream
    needed     the share of right ones at which gains equal costs

Pure functions on seconds and outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.policy.speculation.choice import chain_time


@dataclass(frozen=True, slots=True)
class Times:
    """Hold the seconds of a hop, its stand-in, the check, and all later hops.

    Fields:
        shared: The stand-in has no stream of its own.
    """

    hop: float
    stand_in: float
    check: float
    behind: float
    shared: bool = False

    @property
    def needed(self) -> float:
        """Return the share of right predictions above which speculation gains; above 1 if it cannot gain."""
        blocks, cheap, checks = (self.hop, self.behind), (self.stand_in, 0.0), (self.check, 0.0)
        always = self.stand_in if self.shared else 0.0
        gain = self.hop + self.behind - chain_time(blocks, cheap, checks, {0}) - always
        cost = self.check + min(self.behind, max(0.0, self.hop - self.stand_in)) + always
        if gain <= 0:
            return 2.0
        return cost / (gain + cost)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Hold the judgement on a predicted hop.

    Fields:
        rate: Share of right predictions among the last `count`.
        needed: Share that is needed.
        ends: Speculation of the hop ends.
    """

    rate: float
    needed: float
    count: int
    ends: bool


def judge(outcomes: Sequence[bool], needed: float, window: int) -> Judgement:
    """Judge a hop by its last `window` outcomes. With fewer outcomes, or a window of 0, speculation does not end."""
    last = outcomes[-window:] if window else ()
    rate = sum(last) / len(last) if last else 0.0
    return Judgement(rate, needed, len(last), 0 < window <= len(last) and rate < needed)
