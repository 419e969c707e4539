"""How often a prediction must be right to gain anything, and when one that is not ends (BL-25).

Per pass, with a hop of b seconds, its stand-in of s, a check of v and the hops behind it of d:

    right      gains (b + d) - max(s + d, b + v)      what `policy.speculation.choice.chain_time` says of it
    wrong      costs v + min(d, b - s)                for so long, until the real row comes, devices behind ran for
                                                      nothing; they are taken
                                                      for busy: where nobody waits for them a wrong one costs the
                                                          check alone
    shared     costs s, right or wrong                the stand-in had the hop's own stream
    needed     the share of right ones at which the gains are the costs

Pure: seconds and outcomes in. Whose they are, and what is done about it, is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.policy.speculation.choice import chain_time


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of a hop, its stand-in, the check, and all hops behind it. `shared`: the stand-in has no stream of its
    own.
    """

    hop: float
    stand_in: float
    check: float
    behind: float
    shared: bool = False

    @property
    def needed(self) -> float:
        """The share of right predictions from which on they gain; above 1 where none can."""
        blocks, cheap, checks = (self.hop, self.behind), (self.stand_in, 0.0), (self.check, 0.0)
        always = self.stand_in if self.shared else 0.0
        gain = self.hop + self.behind - chain_time(blocks, cheap, checks, {0}) - always
        cost = self.check + min(self.behind, max(0.0, self.hop - self.stand_in)) + always
        if gain <= 0:
            return 2.0
        return cost / (gain + cost)


@dataclass(frozen=True, slots=True)
class Judgement:
    """`rate` of right ones among the last `count`, of which `needed` are needed. `ends`: it is to be predicted no
    more.
    """

    rate: float
    needed: float
    count: int
    ends: bool


def judge(outcomes: Sequence[bool], needed: float, window: int) -> Judgement:
    """Whether a hop goes on being predicted, by the last `window` outcomes; fewer end nothing, and a window of 0 never
    does.
    """
    last = outcomes[-window:] if window else ()
    rate = sum(last) / len(last) if last else 0.0
    return Judgement(rate, needed, len(last), 0 < window <= len(last) and rate < needed)
