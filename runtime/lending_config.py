"""Settings of loans of K and V among devices (`--lending`, table `[lending]`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: Whether K and V of a sequence may lie on devices that are not on its path. `planned`: the scheduler,
#: which has the exact account of all pages, chooses the device that holds them. `negotiated`: a manager of the pool,
#: which knows only what agents' heartbeats say, recommends some devices, and these are asked one after another.
LendingMode = Literal["off", "planned", "negotiated"]
#: What travels for attention to lent K and V: always queries, always pages, or what is expected to be faster.
LoanShipping = Literal["query", "pages", "cheapest"]


@dataclass(frozen=True, slots=True)
class LendingConfig:
    """Configure loans of K and V.

    Fields:
        mode: Whether there are any.
        cap: Share of its pages that a device lends at most; 0: none (IL-08).
        busy: A device lends nothing while this share of its `max_num_seqs` runs there: attention for loans takes time
            from its own sequences (IL-09).
        recall: What other devices hold of a sequence comes back when this share of its device's pages stays free then
            (IL-25); 1: never for that.
        reclaim: A device that needs pages gives those that it holds for other devices back to them where they have room
            (IL-18), before it lends its own.
        circle_pages: Devices that hold so many pages for each other, or around a circle, take their own back (IL-21);
            0: never.
        timeout_s: Longest wait for a creditor's part of the attention; then the step fails, and its sequences run
            again.
        ship: What travels for attention to lent K and V: `query`, queries and partial attention; `pages`, the K and V,
            up to 16 MiB at a time; `cheapest`, what is expected to be faster by measured times (IL-28).
        mend: Where a creditor dies, only what it held is computed again, as far as that can be (IL-18); otherwise all
            of the sequence.
        beat_ms: Period of agents' heartbeats to the managers of the pool, and of their sorted lists; with `negotiated`
            (IL-10, IL-16).
        gone_ms: Time without heartbeats after which a device is no longer recommended; with `negotiated`.
        managers: Number of managers of the pool; queries go to one after another, with `negotiated` (IL-16).
    """

    mode: LendingMode = "off"
    cap: float = 0.9
    busy: float = 1.0
    timeout_s: float = 10.0
    recall: float = 0.25
    reclaim: bool = True
    circle_pages: int = 8
    ship: LoanShipping = "query"
    mend: bool = True
    beat_ms: int = 100
    gone_ms: int = 1000
    managers: int = 1

    def __post_init__(self) -> None:
        if self.mode not in get_args(LendingMode):
            raise ValueError(f"lending must be one of {', '.join(get_args(LendingMode))}")
        if not 0.0 <= self.cap <= 1.0 or not 0.0 < self.busy <= 1.0 or not 0.0 < self.timeout_s <= 3600.0:
            raise ValueError("cap is from 0 to 1, busy above 0 and at most 1, timeout_s above 0")
        if self.ship not in get_args(LoanShipping):
            raise ValueError(f"ship must be one of {', '.join(get_args(LoanShipping))}")
        if not 0.0 <= self.recall <= 1.0 or self.circle_pages < 0:
            raise ValueError("recall is from 0 to 1, circle_pages 0 or more")
        if not 1 <= self.beat_ms <= 60_000 or not self.beat_ms < self.gone_ms <= 3_600_000:
            raise ValueError("beat_ms is from 1 to 60000, gone_ms above beat_ms and at most 3600000")
        if not 1 <= self.managers <= 16:
            raise ValueError("managers is from 1 to 16")
