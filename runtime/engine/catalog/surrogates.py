"""Which cheaper stand-ins the zoo has for parts of a model (BL-10), as the scheduler of a cluster needs them to predict
hops (BL-25).

A stand-in is a model of its own: its parent's chain with other components in one place. Only those are taken that are
the parent's
everywhere else, bit for bit: a part of them is a part of the parent with the stand-in in it. Reads manifests; loads
nothing.
"""

from __future__ import annotations

from runtime.chains import Surrogate
from zoo.manifest import ModelManifest
from zoo.records import Equivalence
from zoo.store import Store


def surrogates_of(store: Store, name: str) -> tuple[Surrogate, ...]:
    """Those of a model, the cheapest first. Raises NotFound, AmbiguousName."""
    with store.catalog.reading() as catalog:
        model = catalog.resolve(name)
        own = catalog.model(model)
        pairs = [
            pair for pair in catalog.equivalences([model]) if pair.relation == "surrogate" and pair.a.model == model
        ]
        found = [_surrogate(own, catalog.model(pair.b.model), pair) for pair in pairs]
    return tuple(sorted((each for each in found if each is not None), key=lambda each: (each.nbytes, each.model)))


def _surrogate(own: ModelManifest, other: ModelManifest, pair: Equivalence) -> Surrogate | None:
    """The pair as a stand-in, unless the two differ elsewhere, too."""
    ours, theirs = ([placed.component.digest for placed in each.components] for each in (own, other))
    if (ours[: pair.a.lo], ours[pair.a.hi :]) != (theirs[: pair.b.lo], theirs[pair.b.hi :]):
        return None
    held = {tensor.digest for tensor in own.tensors}
    nbytes = sum(tensor.nbytes for tensor in other.tensors if tensor.digest not in held)
    return Surrogate(pair.b.model, pair.a.lo, pair.a.hi, pair.b.hi - pair.b.lo, nbytes)
