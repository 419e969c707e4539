"""Whether a request that allows it gets the model it named or that model's low-rank rewriting: the less latency
(BL-21).

Both run on the same device in the same step, block after block: a step takes as long as all batches in it. An exact
fine-tune's rows are a batch of their own; the rewriting's rows join the batch of its base, and the other batch
stands before it. So for each of the two

    T_queue    the other's batch            T_compute    its own batch, this request among it            T_transfer =
                                                         T_load = 0

from the profiles of both chains. Pure: profiles and counts in, a decision with its terms out. Of equals the exact
one is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.policy.profiles import BlockProfile
from runtime.policy.routing.latency import Candidate, Choice, RowWork, choose
from runtime.types import ModelSpec


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its chain's profile, and rows of the batch that it would join."""

    name: str
    chain: BlockProfile
    rows: int


def decide(exact: Side, rewriting: Side, context: int) -> Choice:
    """Choose for one request. `context`: tokens that it attends to, about; those of other rows are taken for as
    many.
    """
    return choose([_candidate(exact, rewriting, context), _candidate(rewriting, exact, context)], RowWork(1, context))


def _candidate(own: Side, other: Side, context: int) -> Candidate:
    return Candidate(own.name, own.chain, (RowWork(other.rows, context),) if other.rows else (), joins=own.rows)


def rows_beside(name: str, specs: Iterable[ModelSpec], rows: dict[str, int]) -> int:
    """Rows of all models that run in one batch with this one: its base and everything that lies on it but other full
    fine-tunes.

    Args:
        specs: of the loaded models; rows: model -> sequences that run or wait.
    """
    by_name = {spec.name: spec for spec in specs}
    own = by_name.get(name)
    if own is None:
        return 0
    root = name if own.kind in _ALONE else own.base
    mates = [
        spec.name
        for spec in by_name.values()
        if spec.name in (root, name) or (spec.base == root and spec.kind not in _ALONE)
    ]
    return sum(rows.get(mate, 0) for mate in mates)


#: Kinds with weights of their own.
_ALONE = frozenset({"foundation", "full"})
