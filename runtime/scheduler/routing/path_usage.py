"""Count the tokens that have passed one path of one chain, and the sequences on it. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.chains import Chain, Path
from runtime.scheduler.kv.page_accounting import Places
from runtime.types import ModelSpec

#: Placeholder for the chain of a sequence that has none.
NOWHERE = Chain(ModelSpec("", 0, 1, 0, 0), "", ())


@dataclass(slots=True, eq=False)
class Passes:
    """Usage of one path of one chain.

    Fields:
        tokens: Tokens that have passed the path.
        places: By block, its device and the pages per page set there.
        users: Sequences on the path.
        counted: Part of `tokens` that `placement.traffic` has counted already.
    """

    chain: Chain
    path: Path
    tokens: int = 0
    places: Places = ()
    users: int = 0
    counted: int = 0


NO_PASSES = Passes(NOWHERE, ())
