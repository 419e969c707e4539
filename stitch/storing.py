"""Store a trained stitch in the zoo: a model of kind `stitch` with one component, its weights, and its document.

    stitch.safetensors    weight [d_b, d_a + 1], bias [d_b]
    stitch.json           the foundations, their widths, the scores (`surgery.chains.stitches` reads it)

The component's own position is zero. A chain that uses the stitch gets a component of the same tensors with the
position of its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stitch.block import Folded
from surgery.chains.plan import STITCH, StitchSpec, stitch_component
from surgery.chains.stitches import STITCH_FILE
from surgery.tensors.store import keep_tensors
from zoo.catalog.names import check_name
from zoo.errors import NameTaken
from zoo.manifest import Component, ModelManifest, Placed, SideFile, TensorMeta, WeightFile
from zoo.objects.headers import make_header
from zoo.records import Document
from zoo.store import Store

WEIGHTS_FILE = "stitch.safetensors"
#: Kind of the documents that hold a stitch's scores.
DOCUMENT = "stitch"


def stored_document(store: Store, name: str) -> Mapping[str, Any] | None:
    """Return the document of the stitch of this name; None if the name is free.

    Raises:
        NameTaken: The name is that of a model that is not a stitch.
    """
    with store.catalog.reading() as reader:
        if name not in reader.names():
            return None
        manifest = reader.model(name)
    side = next((side for side in manifest.side_files if side.path == STITCH_FILE), None)
    if manifest.kind != "stitch" or side is None:
        raise NameTaken(f"the name {name!r} holds another model: choose another with --name")
    document: Mapping[str, Any] = json.loads(store.read_blob(side.blob))
    return document


def put_stitch(store: Store, name: str, stitch: Folded, document: Mapping[str, Any]) -> None:
    """Store a stitch and its document, durably. Raises NameTaken, StoreFull, StoreError."""
    check_name(name)
    with store.ingesting():
        kept = keep_tensors(store, {"weight": stitch.weight.contiguous(), "bias": stitch.bias.contiguous()})
        side = (json.dumps(document, indent=2) + "\n").encode()
        manifest = ModelManifest(
            name=name,
            kind="stitch",
            base=None,
            family=STITCH,
            source=f"stitched: {document['a']} to {document['b']}",
            components=(Placed(None, _component(kept)),),
            weight_files=(_weight_file(store, kept),),
            side_files=(SideFile(STITCH_FILE, store.blobs.put(side), len(side)),),
            tensors=tuple(kept.values()),
        )
        with store.catalog.writing() as writer:
            writer.put_model(manifest)
            writer.put_document(Document(DOCUMENT, name, f"{document['a']} {document['b']}", dict(document)))


def _component(kept: Mapping[str, TensorMeta]) -> Component:
    width_out, width_in = kept["weight"].shape
    return stitch_component(StitchSpec(width_in - 1, width_out, 0.0), kept["weight"].digest, kept["bias"].digest)


def _weight_file(store: Store, kept: Mapping[str, TensorMeta]) -> WeightFile:
    header = make_header([(key, tensor.dtype, tensor.shape) for key, tensor in kept.items()], {"format": "pt"})
    return WeightFile(
        WEIGHTS_FILE, store.blobs.put(header), tuple((key, tensor.digest) for key, tensor in kept.items())
    )
