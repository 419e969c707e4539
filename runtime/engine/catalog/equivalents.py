"""Offer a model's chain with equivalent blocks of other models, as the store has scored them (BL-05, BL-20).

`zoo ingest --threshold` and `zoo compare` score blocks. Each scored block of another model can replace the model's own:

    A = a0 a1 a2      scored: a1 ~ b1 0.99, a2 ~ b2 0.985
    offered for A:    a0 b1 b2, a0 b1 a2, a0 a1 b2       (`engine.models.swapped`; nothing is added to the store)

Where the other model is served too, these blocks may be on a device while A's own are not. Only pairs scored between A
and the other model count (BL-06); of several probes the lowest score counts, and a chain's score is the product of its
pairs' (BL-28). Blocks of other widths need a stitch, so `zoo compose` makes such chains (`engine.catalog.variants`).

Reads the catalogue and configs; loads nothing, writes nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from runtime.chains import Chain, Variant
from runtime.config import EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.catalog.variants import DescribedVariant
from runtime.engine.models.servable import Executor
from runtime.engine.models.swapped import Run, can_swap, swapped_name
from runtime.policy.routing.variants import DispatchLimits
from zoo.catalog import Reader
from zoo.errors import NotServable
from zoo.store import Store

#: Limit of chains that are offered for a model, the best first.
_MOST = 8


def equivalents_in(
    store: Store, exact: Chain, name: str, config: EngineConfig, half_page: int, piece_bytes: int,
    served: Collection[str], limits: DispatchLimits | None = None, executor: Executor = "paged",
) -> tuple[DescribedVariant, ...]:  # fmt: skip
    """Return chains of a model with equivalent blocks of other served models, best first.

    Args:
        exact: the model's chain, as `describe_chain` returned it for `name`.
        served: full names of the models that blocks may come from.
        limits: the lowest score at which a block is used.
        executor: the one that is to run them.

    Raises as `describe_chain`, but leaves out what cannot be served here.
    """
    if config.weight_sharing != "blocks":
        return ()  # each model has blocks of its own
    with store.catalog.reading() as reader:
        found = dict(_offered(reader, reader.resolve(name), served, limits or DispatchLimits()))
    out: list[DescribedVariant] = []
    for other in sorted(found, key=lambda each: -found[each])[:_MOST]:
        try:
            described = describe_chain(store, other, config, half_page, piece_bytes, exact.model, executor)
        except NotServable:
            continue
        out.append(DescribedVariant(Variant(other, described.chain, exact.version, found[other]), described.blocks))
    return tuple(out)


def _offered(reader: Reader, name: str, served: Collection[str], limits: DispatchLimits) -> Iterator[tuple[str, float]]:
    """Yield (name of the chain, score): with all blocks of one other model that can be used, and with each alone."""
    scores = _scores(reader, name, served)
    if not scores:
        return
    own, blocks = reader.model(name), reader.chain(name)
    digests = [placed.component.digest for placed in own.components]
    for other, scored in scores.items():
        manifest, others = reader.model(other), reader.chain(other)
        theirs = [placed.component.digest for placed in manifest.components]
        able = [
            run
            for run, score in sorted(scored.items())
            if score >= limits.equivalent
            and digests[slice(*run)] != theirs[slice(*run)]
            and can_swap(own, manifest, [run], blocks, others)
        ]
        apart = [run for at, run in enumerate(able) if all(before[1] <= run[0] for before in able[:at])]
        for runs in [apart, *([run] for run in able if [run] != apart)]:
            score = math.prod(scored[run] for run in runs)
            if runs and score >= limits.equivalent:
                yield swapped_name(name, other, runs), score


def _scores(reader: Reader, name: str, served: Collection[str]) -> Mapping[str, Mapping[Run, float]]:
    """Return, by other model, the lowest score of each run that both models have at the same components."""
    found: dict[str, dict[Run, float]] = defaultdict(dict)
    for pair in reader.equivalences([name]):
        mine, other = (pair.a, pair.b) if pair.a.model == name else (pair.b, pair.a)
        run, usable = (mine.lo, mine.hi), other.model in served and other.model != name
        if pair.relation == "equivalent" and usable and run == (other.lo, other.hi):
            found[other.model][run] = min(found[other.model].get(run, 1.0), pair.similarity)
    return found
