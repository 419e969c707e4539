"""Choose the block instances that surrogates run ahead of, and accept or reject predictions (BL-25).

Choice: the `top` share of eligible instances, by the time that their queue takes to drain. An instance is not eligible
if its block is the last of a chain (its output has left and cannot be corrected), or next to a chosen one in a chain
(errors would add up), or has no surrogate.

Acceptance: `similarity` accepts a prediction with a cosine to the real output of at least the threshold, as in the
paper; tokens may then differ from the chain's own. `exact` accepts only identical bits; the token that results from any
other prediction is a guess (`agent.speculation.hop`). K and V that later hops write meanwhile are tentative until then:
not lent, shared or moved (UN-13), and discarded on a miss.

`chain_time` estimates the time of a pass: behind a chosen block it continues from the prediction at once, and again
from the real output if the prediction is wrong; nothing is emitted before it is checked. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SlowHop:
    """Describe a block instance. `drain`: seconds that its queue takes to drain."""

    block: str
    device: str
    drain: float


@dataclass(frozen=True, slots=True)
class PassedBy:
    """Describe an instance that would have been chosen by its queue, and why it was not."""

    instance: SlowHop
    reason: str


@dataclass(frozen=True, slots=True)
class Speculated:
    """Hold the chosen instances, the longest queue first, at most `most`."""

    chosen: tuple[SlowHop, ...]
    most: int
    passed_by: tuple[PassedBy, ...]


def choose(
    instances: Sequence[SlowHop], chains: Sequence[Sequence[str]], surrogates: Collection[str], top: float = 0.1
) -> Speculated:
    """Choose the instances that speculate now.

    `chains`: their blocks in order; `surrogates`: blocks that have one. Raises ValueError unless 0 <= `top` <= 1.
    """
    if not 0 <= top <= 1:
        raise ValueError(f"{top} of all instances cannot speculate")
    most = math.ceil(top * len(instances) - 1e-9)
    last = {chain[-1] for chain in chains if chain}
    beside = _neighbours(chains)
    chosen: list[SlowHop] = []
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
    """Return for each block the blocks directly before or after it in any chain."""
    beside: dict[str, frozenset[str]] = {}
    for chain in chains:
        for a, b in pairwise(chain):
            beside[a] = beside.get(a, frozenset()) | {b}
            beside[b] = beside.get(b, frozenset()) | {a}
    return beside


def stands(same: bool, cosine: float, threshold: float | None) -> bool:
    """Return whether a prediction is accepted: identical bits, or a cosine of at least the threshold, if there is one.

    A NaN cosine is a miss.
    """
    return same or (threshold is not None and cosine >= threshold)


def chain_time(
    blocks: Sequence[float],
    surrogates: Sequence[float],
    checks: Sequence[float],
    chosen: Collection[int],
    wrong: Collection[int] = (),
) -> float:
    """Return the seconds until a pass through a chain is done and checked.

    Surrogates and what continues from them have a stream of their own; waiting for devices is not modelled.

    Args:
        blocks, surrogates, checks: Seconds of each block, its surrogate and the check of its prediction.
        chosen: Positions of the blocks that are predicted.
        wrong: Positions among them with a rejected prediction.
    """
    now = checked = 0.0
    for place, (block, surrogate, check) in enumerate(zip(blocks, surrogates, checks, strict=True)):
        if place not in chosen:
            now += block
            continue
        real = now + block + check
        checked = max(checked, real)
        now = real if place in wrong else min(now + surrogate, real)
    return max(now, checked)
