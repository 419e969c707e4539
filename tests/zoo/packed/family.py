"""A foundation and its fine-tunes as bytes: bf16 matrices with small changes. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.zoo.factory import Bytes, manifest_of
from zoo.manifest import ModelKind, ModelManifest
from zoo.store import Store

SHAPE = (120, 100)


def matrix(seed: int, moved: int = 0, shape: tuple[int, ...] = SHAPE) -> Bytes:
    """Return a bf16 tensor. `moved`: number of the fine-tune it belongs to, 0 for the foundation."""
    values = np.random.default_rng(seed).normal(0, 0.04, shape).astype(np.float32)
    if moved:
        values += np.random.default_rng((seed, moved)).normal(0, 0.0004, shape).astype(np.float32)
    return Bytes((values.view(np.uint32) >> 16).astype("<u2").tobytes(), "BF16", shape)


def put(
    store: Store, name: str, sources: Sequence[Bytes], kind: ModelKind = "foundation", base: str | None = None
) -> ModelManifest:
    """Put the tensors, two blobs and a model of them, as an ingest does."""
    with store.ingesting():
        tensors = [one.tensor for one in store.objects.put_many(sources)]
        header, side = store.blobs.put(f"header of {name}".encode()), store.blobs.put(b"{}")
        manifest = manifest_of(name, tensors, kind, base, header, side)
        with store.catalog.writing() as writer:
            writer.put_model(manifest)
    return manifest


def put_family(store: Store, layers: int = 3, fine_tunes: int = 1) -> list[ModelManifest]:
    """Put `base`, and `tuned-1` … with the base's own last layer."""
    models = [put(store, "base", [matrix(layer) for layer in range(layers)])]
    for number in range(1, fine_tunes + 1):
        sources = [matrix(layer, number if layer < layers - 1 else 0) for layer in range(layers)]
        models.append(put(store, f"tuned-{number}", sources, "full", "base"))
    return models


def contents(store: Store) -> dict[str, bytes]:
    """Return every object's bytes, plain or packed."""
    return {digest: b"".join(store.objects.read(digest)) for digest in store.objects.digests()}


def packed(store: Store) -> set[str]:
    return set(store.objects.packed.shelf.digests())


def plain(store: Store) -> set[str]:
    return set(store.objects.shelf.digests())
