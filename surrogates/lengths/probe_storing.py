"""Keep a length probe in the zoo, as TARGET@probe beside its target, and read it for serving.

It is a model of kind `lengths`, as predictors are (`surrogates.lengths.storing`), and holds for one content of its
target, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.tensors.pool import stored_tensor
from surrogates.lengths.probe import LengthProbe
from surrogates.lengths.storing import document_of, put_lengths
from zoo.errors import MalformedCheckpoint
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Ending of the name of a probe, behind that of its target.
PROBE_ENDING = "@probe"


def put_probe(
    store: Store,
    target: ModelManifest,
    probe: LengthProbe,
    document: Mapping[str, Any],
    replace: bool = False,
) -> dict[str, Any]:
    """Store a probe, durably; return what is written of it. Arguments and errors as of `put_predictor`."""
    told = {**document, "kind": "probe", "edges": list(probe.edges), "at": probe.at}
    weights = {"weight": probe.weight.contiguous(), "bias": probe.bias.contiguous()}
    if probe.later is not None:
        weights |= {"later.weight": probe.later.weight.contiguous(), "later.bias": probe.later.bias.contiguous()}
    put_lengths(store, target.name + PROBE_ENDING, target, weights, {}, told, replace)
    return told


def stored_probe(store: Store, model: str) -> LengthProbe | None:
    """Return the probe of a model; None if the store has none, or no such model.

    Raises InputError if its target had other content, MalformedCheckpoint if what is stored is no probe, DamagedObject.
    """
    with store.catalog.reading() as reader:
        names = reader.names()
        if model not in names or model + PROBE_ENDING not in names:
            return None
        target, manifest = reader.model(model), reader.model(model + PROBE_ENDING)
    document = document_of(store, manifest, target, " --kind probe")
    entries = dict(manifest.weight_files[0].entries) if manifest.weight_files else {}
    try:
        edges, at = tuple(int(each) for each in document["edges"]), int(document["at"])
        weight, bias = (stored_tensor(store, entries[name]) for name in ("weight", "bias"))
        later = None
        if "later.weight" in entries:  # of earlier versions there is none
            own_weight, own_bias = (stored_tensor(store, entries[name]) for name in ("later.weight", "later.bias"))
            later = LengthProbe(edges, at, own_weight, own_bias)
    except KeyError as error:
        raise MalformedCheckpoint(f"{manifest.name} is no length probe of this version: {error}") from None
    sizes = [(weight, bias), *([] if later is None else [(later.weight, later.bias)])]
    fit = all(each.dim() == 2 and each.shape[:1] == own.shape == (len(edges),) for each, own in sizes)
    if not fit or not 0 < at < len(target.components):
        raise MalformedCheckpoint(f"{manifest.name} is no length probe of this version: its sizes do not match")
    return LengthProbe(edges, at, weight, bias, later)
