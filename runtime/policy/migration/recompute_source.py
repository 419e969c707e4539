"""Choose what the front of a migration recomputes K and V from: token ids, cached hidden states, or nothing (BL-16).

    blocks at the beginning of the chain                     tokens     known to the scheduler, a few bytes each
    other blocks, if the source caches its stages' inputs    inputs     travel over the same link as K and V
    other blocks                                             none       the preceding blocks would have to run again:
                                                                        reported as cost, not done

Inputs only help if they are fewer bytes than the K and V that they replace. A token's hidden states are one model width
for any number of layers; its K and V are two widths per layer, or a fraction of one with grouped heads, so several
layers are needed then. Otherwise the link, which both ends share, would be busy longer than if everything were copied.

Pure functions on bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["tokens", "inputs", "none"]


@dataclass(frozen=True, slots=True)
class RecomputeRun:
    """Describe the blocks that are to move.

    Fields:
        lo: Their first component.
        hop: First component of the stage in which they run now.
        tokens: Tokens computed so far.
        virtual: The sequence begins with virtual tokens.
        keeps: Bytes of inputs that the source caches; 0 for none.
        input_bytes: Bytes of a token's hidden states before component `lo`; 0 if unknown.
        kv_bytes: Bytes of K and V of a token in the layers of the run.
    """

    lo: int
    hop: int
    tokens: int
    virtual: bool = False
    keeps: int = 0
    input_bytes: int = 0
    kv_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Front:
    """Hold what the front of a migration recomputes from.

    Fields:
        reason: Why there is nothing to recompute from; empty if there is.
        upstream: Tokens times components that would have to run again for the missing inputs.
    """

    origin: Origin
    reason: str = ""
    upstream: int = 0


def front_of(run: RecomputeRun, copy: bool = True) -> Front:
    """Choose what the front recomputes from; without `copy`, any source, whatever it costs."""
    if run.lo == 0:
        return Front("none", "its first positions are no tokens") if run.virtual else Front("tokens")
    again = run.tokens * run.lo
    if not run.keeps:
        return Front(
            "none", f"what came into component {run.lo} is not kept: {run.lo} components would run again", again
        )
    if run.hop != run.lo:
        return Front("none", f"it is kept before component {run.hop}, not {run.lo}", run.tokens * (run.lo - run.hop))
    if copy and not 0 < run.input_bytes < run.kv_bytes:
        return Front("none", f"hidden states are {run.input_bytes} bytes a token, K and V {run.kv_bytes:g}")
    return Front("inputs")
