"""From what the front of a move recomputes K and V: token ids, hidden states that were kept where the blocks ran,
or nothing (BL-16).

    blocks that begin the chain                              tokens     known to the scheduler, a few bytes each
    others, whose device keeps what comes into its stages    inputs     travel over the link that K and V travel over
    others                                                   none       upstream would have to run again: that is
                                                                        charged, and not done

Inputs only help where they are fewer bytes than the K and V they stand for. A token's hidden states are one width
of the model, whatever the number of layers behind them; its K and V in one layer are two widths, or, with grouped
heads, a
part of one: then it takes a run of several layers. Otherwise the link, which both ends share, would be longer at it
than at copying everything.

Pure: bytes in, decision out. Knows no devices and no sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["tokens", "inputs", "none"]


@dataclass(frozen=True, slots=True)
class RecomputeRun:
    """Blocks that are to move. `lo`: their first component; `hop`: the first component of the stage that they run in
    now.

    `tokens`: computed so far; `virtual`: the sequence begins with positions that are no tokens. `keeps`: bytes that the
    source keeps of inputs, 0 for none; `input_bytes`: a token's hidden states before component `lo`, 0 if that is not
    known; `kv_bytes`: K and V of a token in the layers of the run.
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
    """`reason`: why it starts from nothing, empty if it does not. `upstream`: tokens times components that would have
    to run again for what it lacks."""

    origin: Origin
    reason: str = ""
    upstream: int = 0


def front_of(run: RecomputeRun, copy: bool = True) -> Front:
    """Where the front of a move starts from; without `copy`, whatever there is, however dear."""
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
