"""Stored stitching blocks (BL-09): a model of kind `stitch` with one component, its tensors, and `stitch.json`.

    stitch.json   {"a": name, "b": name, "dims": [width_a, width_b], …}      the two foundations, and facts about the
                                                                             training

One stitch per ordered pair of foundations is used at every place; the place is given as a position.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from zoo.catalog import Reader
from zoo.errors import MalformedCheckpoint
from zoo.manifest import ModelManifest, TensorMeta
from zoo.store import Store

#: File of a stitch's model that holds its settings.
STITCH_FILE = "stitch.json"


def stitch_position(head_layer: int | None, tail_layer: int) -> float:
    """Return the extra input of a stitch (BL-09).

    It is the head block's layer in its foundation plus the tail block's layer in its own, counted from 0. `head_layer`
    is None if only the embedding precedes the stitch; it then counts as -1.
    """
    return float((-1 if head_layer is None else head_layer) + tail_layer)


@dataclass(frozen=True, slots=True)
class StoredStitch:
    """A trained stitch of the zoo: its model's name, the foundations it joins, their widths, and its tensors."""

    name: str
    a: str
    b: str
    width_a: int
    width_b: int
    weight: TensorMeta
    bias: TensorMeta


def stored_stitches(store: Store, reader: Reader) -> list[StoredStitch]:
    """Return all stitches, oldest first."""
    found = []
    for entry in sorted(reader.entries(), key=lambda entry: entry.created):
        if entry.kind == "stitch":
            found.append(_stored_stitch(store, reader.model(entry.name)))
    return found


def _stored_stitch(store: Store, manifest: ModelManifest) -> StoredStitch:
    data = next((store.read_blob(side.blob) for side in manifest.side_files if side.path == STITCH_FILE), None)
    if data is None:
        raise MalformedCheckpoint(f"the stitch {manifest.name} has no {STITCH_FILE}")
    settings = json.loads(data)
    metas = {tensor.digest: tensor for tensor in manifest.tensors}
    named = {name: metas[digest] for name, digest in manifest.components[0].component.tensors}
    width_a, width_b = settings["dims"]
    return StoredStitch(
        manifest.name, settings["a"], settings["b"], int(width_a), int(width_b), named["weight"], named["bias"]
    )
