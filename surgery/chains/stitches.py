"""Stitching blocks as they are stored: a model of kind `stitch`, with one component, its tensors, and `stitch.json`
(BL-09).

    stitch.json   {"a": name, "b": name, "dims": [width_a, width_b], …}      from which foundation to which; training's
                                                                             own facts beside it

One stitch per ordered pair of foundations serves every place; the place comes in as a position. Knows nothing of
training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from zoo.catalog import Reader
from zoo.errors import MalformedCheckpoint
from zoo.manifest import ModelManifest, TensorMeta
from zoo.store import Store

#: The settings of a stitch among its model's files.
STITCH_FILE = "stitch.json"


def stitch_position(head_layer: int | None, tail_layer: int) -> float:
    """The extra input of a stitch (BL-09): the head block's layer in its foundation plus the tail block's in its own,
    counted from 0.

    `head_layer` None: the embedding alone stands before the stitch, at -1.
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
    """All stitches, oldest first."""
    found = []
    for summary in sorted(reader.models(), key=lambda summary: summary.created):
        if summary.kind == "stitch":
            found.append(_stored_stitch(store, reader.model(summary.name)))
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
