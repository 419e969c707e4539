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
#: Which pages of a sequence are lent: page sets of all layers, all of some layers, or what is expected to be faster.
LoanShape = Literal["tokens", "layers", "cheapest"]


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
        shape: Which pages of a sequence are lent: `tokens`, the first page sets of all layers; `layers`, all full page
            sets of some layers, where its path has one device; `cheapest`, `layers` for contexts of which a layer has
            at most `layer_mib` of K and V, else `tokens`.
        layer_mib: MiB of K and V that a device attends to in the time of a question to a creditor.
        cut_tokens: Loans begin and end at multiples of so many tokens, where there is a choice. With 64, or a
            multiple of it, answers have the same bits as one device's (`docs/lending.md`); 1: anywhere.
        native: Questions to creditors and their answers pass Python by, where kernels and sockets of one machine allow
            it; answers have the same bits.
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
    shape: LoanShape = "cheapest"
    layer_mib: float = 4.0
    cut_tokens: int = 64
    native: bool = True
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
        if self.shape not in get_args(LoanShape) or not 0.0 < self.layer_mib <= 1 << 20:
            raise ValueError(f"shape must be one of {', '.join(get_args(LoanShape))}, layer_mib above 0")
        if not 1 <= self.cut_tokens <= 65_536:
            raise ValueError("cut_tokens is from 1 to 65536")
        if not 0.0 <= self.recall <= 1.0 or self.circle_pages < 0:
            raise ValueError("recall is from 0 to 1, circle_pages 0 or more")
        if not 1 <= self.beat_ms <= 60_000 or not self.beat_ms < self.gone_ms <= 3_600_000:
            raise ValueError("beat_ms is from 1 to 60000, gone_ms above beat_ms and at most 3600000")
        if not 1 <= self.managers <= 16:
            raise ValueError("managers is from 1 to 16")
