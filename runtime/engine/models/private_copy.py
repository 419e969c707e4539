"""Models that share no weights: `EngineConfig.weight_sharing` is `models`, the baseline for what sharing gains (UN-04).

    private_copy(manifest)      the manifest, with its tensors under names that no other model has

Components, blocks, packed weights and pages of K and V are identified by the names of tensors. So nothing else needs to
know of it: a model's blocks are its own, are loaded and unloaded with it, and run over the rows of its own requests.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.config import WeightSharing
from surgery.tensors.pool import copy_name
from zoo.manifest import Component, ModelManifest, digest_of

_DIGITS = 16


def manifest_for(manifest: ModelManifest, sharing: WeightSharing) -> ModelManifest:
    """Return the manifest from which a model is described and loaded."""
    return manifest if sharing == "blocks" else private_copy(manifest)


def private_copy(manifest: ModelManifest) -> ModelManifest:
    """Return a manifest with the model's own name in the name of every tensor.

    Tensors that several of its components use, such as those of a tied head, are still held once.
    """
    owner = digest_of(["owner", manifest.name])[:_DIGITS]

    def own(tensors: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((name, copy_name(digest, owner)) for name, digest in tensors)

    def copied(component: Component) -> Component:
        adapter = component.adapter
        if adapter is not None:
            adapter = replace(adapter, tensors=own(adapter.tensors))
        return replace(component, tensors=own(component.tensors), adapter=adapter)

    return replace(
        manifest,
        components=tuple(replace(placed, component=copied(placed.component)) for placed in manifest.components),
        tensors=tuple(replace(tensor, digest=copy_name(tensor.digest, owner)) for tensor in manifest.tensors),
    )
