"""Which block instances are run ahead by their surrogates, what is accepted, and what that can gain (BL-25).

Choice: of the instances that may, the `top` part by the time that their queue takes to drain. None may whose block is the last of a chain
(what comes after it has left and cannot be corrected), or a neighbour in a chain of one that is chosen already (errors would add up), or
has no surrogate.

Acceptance: `similarity` takes a prediction whose cosine with the real output reaches the threshold, as the paper does; tokens may then
differ from the chain's own. `exact` takes it only if the token that came of it is the chain's. K and V that downstream wrote meanwhile are
tentative until then: neither lent, moved nor shared (UN-13), and gone on a miss.

Times, with real blocks of b, surrogates of s and checks of v seconds, for one pass through a chain:

    chain_time   what this runtime does: behind a chosen block all goes on from its prediction at once, and again from the real output if
                 that proves wrong; nothing leaves before all is checked
    figure_15    the paper's Figure 15, where every block is predicted and the real chain runs beside, block by block on real inputs:
                     no speculation             T6   b + b + b
                     all right and unchecked    T2   s + s + s
                     wrong in A, the first      T3   b + v + s + s         a gain of T6 - T3
                     wrong in C, the last       T6   b + b + b             a gain of 0
                     all right and checked      T5   b + b + v + s         each waits for the check of the one before: the best there is
                 The figure itself is not at hand: this is the reading under which all that the text says of it is so.

Pure: loads, chains and seconds in. It knows neither tensors nor where surrogates come from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Mode = Literal["exact", "similarity"]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A block instance, and seconds that its queue takes to drain."""

    block: str
    device: str
    drain: float


@dataclass(frozen=True, slots=True)
class PassedBy:
    """An instance that its queue would have chosen, and why it was not."""

    instance: Bottleneck
    reason: str


@dataclass(frozen=True, slots=True)
class Speculated:
    """`chosen`, the longest queue first, at most `most`."""

    chosen: tuple[Bottleneck, ...]
    most: int
    passed_by: tuple[PassedBy, ...]


def choose(instances: Sequence[Bottleneck], chains: Sequence[Sequence[str]], surrogates: Collection[str], top: float = 0.1) -> Speculated:
    """Which instances speculate now. `chains`: their blocks in order; `surrogates`: blocks that have one. Raises ValueError unless `top` is
    a part of one."""
    if not 0 <= top <= 1:
        raise ValueError(f"{top} of all instances cannot speculate")
    most = math.ceil(top * len(instances) - 1e-9)
    last = {chain[-1] for chain in chains if chain}
    beside = _neighbours(chains)
    chosen: list[Bottleneck] = []
    passed_by: list[PassedBy] = []
    for each in sorted(instances, key=lambda one: (-one.drain, one.block, one.device)):
        if len(chosen) == most or each.drain <= 0:
            break
        near = beside.get(each.block, frozenset()) & {each.block, *(one.block for one in chosen)}
        if each.block not in surrogates:
            passed_by.append(PassedBy(each, "it has no surrogate"))
        elif each.block in last:
            passed_by.append(PassedBy(each, "it is the last of a chain"))
        elif near:
            passed_by.append(PassedBy(each, f"it is next to {min(near)}"))
        else:
            chosen.append(each)
    return Speculated(tuple(chosen), most, tuple(passed_by))


def _neighbours(chains: Sequence[Sequence[str]]) -> dict[str, frozenset[str]]:
    """Block -> blocks right before or behind it in any chain."""
    beside: dict[str, frozenset[str]] = {}
    for chain in chains:
        for a, b in pairwise(chain):
            beside[a] = beside.get(a, frozenset()) | {b}
            beside[b] = beside.get(b, frozenset()) | {a}
    return beside


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a prediction stands, and by what."""

    accepted: bool
    reason: str


def accept(cosine: float, tokens_equal: bool, mode: Mode = "exact", threshold: float = 0.95) -> Verdict:
    """Check a prediction against the real output. A cosine that is no number is a miss."""
    if mode == "exact":
        return Verdict(tokens_equal, "the token is the same" if tokens_equal else "the token differs")
    return Verdict(cosine >= threshold, f"cosine {cosine:.4f}, {threshold:g} is asked")


def chain_time(
    blocks: Sequence[float], surrogates: Sequence[float], checks: Sequence[float], chosen: Collection[int], wrong: Collection[int] = ()
) -> float:
    """Seconds until a pass through a chain is done and checked. `chosen`: places of blocks that are predicted, `wrong`: those of them whose
    prediction does not stand. Surrogates and what goes on from them have a stream of their own: nothing waits for a device here."""
    now = checked = 0.0
    for place, (block, surrogate, check) in enumerate(zip(blocks, surrogates, checks, strict=True)):
        if place not in chosen:
            now += block
            continue
        real = now + block + check
        checked = max(checked, real)
        now = real if place in wrong else min(now + surrogate, real)
    return max(now, checked)


@dataclass(frozen=True, slots=True)
class Figure15:
    """Times of a pass in the paper's scenarios: T6, T2, the one asked for, T5."""

    none: float
    ideal: float
    after_errors: float
    checked: float

    @property
    def gain(self) -> float:
        """What is gained with the errors asked for, against no speculation: T6 - T3 for one in the first block, 0 in the last."""
        return self.none - self.after_errors


def figure_15(blocks: Sequence[float], surrogates: Sequence[float], checks: Sequence[float], wrong: Collection[int] = ()) -> Figure15:
    """Every block of a chain predicted, the real chain beside it. Unchecked where nothing is wrong (`after_errors` is `ideal` then)."""
    none = math.fsum(blocks)
    last_wrong = max(wrong, default=-1)
    after = math.fsum(surrogates)
    if last_wrong >= 0:
        after = math.fsum((*blocks[: last_wrong + 1], checks[last_wrong], *surrogates[last_wrong + 1 :]))
    checked = math.fsum((*blocks[:-1], *checks[-2:-1], *surrogates[-1:]))
    return Figure15(none, min(math.fsum(surrogates), none), min(after, none), min(checked, none))
