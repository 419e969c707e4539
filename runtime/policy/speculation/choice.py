"""Which block instances are run ahead by their surrogates, what is accepted, and what that can gain (BL-25).

Choice: of the instances that may, the `top` part by the time that their queue takes to drain. None may whose block is
the last of a chain (what comes after it has left and cannot be corrected), or a neighbour in a chain of one that is
chosen already (errors would add up), or has no surrogate.

Acceptance: `similarity` takes a prediction whose cosine with the real output reaches the threshold, as the paper does;
tokens may then differ from the chain's own. `exact` takes it only if it has the same bits; the token that came of
another is a guess (`agent.speculation.hop`). K and V that downstream wrote meanwhile are tentative until then: neither
lent, moved nor shared (UN-13), and gone on a miss.

`chain_time` is what a pass takes: behind a chosen block all goes on from its prediction at once, and again from the
real output if that proves wrong; nothing leaves before all is checked.

Pure: loads, chains and seconds in. It knows neither tensors nor where surrogates come from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SlowHop:
    """A block instance, and seconds that its queue takes to drain."""

    block: str
    device: str
    drain: float


@dataclass(frozen=True, slots=True)
class PassedBy:
    """An instance that its queue would have chosen, and why it was not."""

    instance: SlowHop
    reason: str


@dataclass(frozen=True, slots=True)
class Speculated:
    """`chosen`, the longest queue first, at most `most`."""

    chosen: tuple[SlowHop, ...]
    most: int
    passed_by: tuple[PassedBy, ...]


def choose(
    instances: Sequence[SlowHop], chains: Sequence[Sequence[str]], surrogates: Collection[str], top: float = 0.1
) -> Speculated:
    """Which instances speculate now. `chains`: their blocks in order; `surrogates`: blocks that have one. Raises
    ValueError unless `top` is a part of one."""
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
    """Block -> blocks right before or behind it in any chain."""
    beside: dict[str, frozenset[str]] = {}
    for chain in chains:
        for a, b in pairwise(chain):
            beside[a] = beside.get(a, frozenset()) | {b}
            beside[b] = beside.get(b, frozenset()) | {a}
    return beside


def stands(same: bool, cosine: float, threshold: float | None) -> bool:
    """Whether a prediction stands for the real output: the `same` bits, or, where there is a threshold, alike enough. A
    cosine that is no number is a miss."""
    return same or (threshold is not None and cosine >= threshold)


def chain_time(
    blocks: Sequence[float],
    surrogates: Sequence[float],
    checks: Sequence[float],
    chosen: Collection[int],
    wrong: Collection[int] = (),
) -> float:
    """Seconds until a pass through a chain is done and checked. `chosen`: places of blocks that are predicted, `wrong`:
    those of them whose prediction does not stand. Surrogates and what goes on from them have a stream of their own:
    nothing waits for a device here."""
    now = checked = 0.0
    for place, (block, surrogate, check) in enumerate(zip(blocks, surrogates, checks, strict=True)):
        if place not in chosen:
            now += block
            continue
        real = now + block + check
        checked = max(checked, real)
        now = real if place in wrong else min(now + surrogate, real)
    return max(now, checked)
