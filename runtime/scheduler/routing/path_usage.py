"""How many tokens have gone along one path of one chain, and how many sequences are on it. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.chains import Chain, Path
from runtime.scheduler.kv.page_accounting import Places
from runtime.types import ModelSpec

#: The chain of a sequence that has none yet.
NOWHERE = Chain(ModelSpec("", 0, 1, 0, 0), "", ())


@dataclass(slots=True, eq=False)
class Passes:
    """Tokens that have gone along one path of one chain; `counted` of them are in `flow`. `users`: sequences that are
    on it. `places`: by block its device, and the pages that a group takes there.
    """

    chain: Chain
    path: Path
    tokens: int = 0
    places: Places = ()
    users: int = 0
    counted: int = 0


NO_PASSES = Passes(NOWHERE, ())
