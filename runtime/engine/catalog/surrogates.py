"""Find the stored surrogates of a model's parts (BL-10), with which a cluster's scheduler predicts hops (BL-25).

A surrogate is stored as a model of its own: its parent's chain with other components in one place. Only those that
equal the parent everywhere else, bit for bit, are returned: a stage of such a model is a stage of the parent with the
surrogate in it. Reads manifests; loads nothing.
"""

from __future__ import annotations

from runtime.chains import Surrogate
from zoo.manifest import ModelManifest
from zoo.records import Equivalence
from zoo.store import Store


def surrogates_of(store: Store, name: str) -> tuple[Surrogate, ...]:
    """Return a model's surrogates, the cheapest first. Raises NotFound, AmbiguousName."""
    with store.catalog.reading() as catalog:
        model = catalog.resolve(name)
        own = catalog.model(model)
        pairs = [
            pair for pair in catalog.equivalences([model]) if pair.relation == "surrogate" and pair.a.model == model
        ]
        found = [_surrogate(own, catalog.model(pair.b.model), pair) for pair in pairs]
    return tuple(sorted((each for each in found if each is not None), key=lambda each: (each.nbytes, each.model)))


def _surrogate(own: ModelManifest, other: ModelManifest, pair: Equivalence) -> Surrogate | None:
    """Return the pair as a surrogate; None if the two models differ elsewhere too."""
    ours, theirs = ([placed.component.digest for placed in each.components] for each in (own, other))
    if (ours[: pair.a.lo], ours[pair.a.hi :]) != (theirs[: pair.b.lo], theirs[pair.b.hi :]):
        return None
    held = {tensor.digest for tensor in own.tensors}
    nbytes = sum(tensor.nbytes for tensor in other.tensors if tensor.digest not in held)
    return Surrogate(pair.b.model, pair.a.lo, pair.a.hi, pair.b.hi - pair.b.lo, nbytes)
