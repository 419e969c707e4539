"""Stitches with random weights, and chains composed with them: models with components of several checkpoints.

Nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from surgery.chains.compose import compose
from surgery.chains.composition import parse
from surgery.chains.plan import StitchSpec, stitch_component
from surgery.chains.stitches import STITCH_FILE
from surgery.families.settings import config_of
from surgery.tensors.store import keep_tensors
from zoo.manifest import ModelManifest, Placed, SideFile
from zoo.store import Store


def manifest_of(store: Store, name: str) -> ModelManifest:
    with store.catalog.reading() as reader:
        return reader.model(name)


def width_of(store: Store, name: str) -> int:
    return int(config_of(store, manifest_of(store, name))["hidden_size"])


def put_stitch(
    store: Store, a: str, b: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, name: str | None = None
) -> str:
    """Store a random stitch from one foundation's width to another's.

    Its weights are such that a change of a tenth in the position changes the bias noticeably.
    """
    width_a, width_b = width_of(store, a), width_of(store, b)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((width_b, width_a + 1), generator=generator) / width_a**0.5
    bias = torch.randn(width_b, generator=generator) * 0.1
    name = name or f"{a}-{b}"
    with store.ingesting():
        metas = keep_tensors(store, {"weight": weight.to(dtype), "bias": bias.to(dtype)})
        component = stitch_component(StitchSpec(width_a, width_b, 0.0), metas["weight"].digest, metas["bias"].digest)
        settings = json.dumps({"a": a, "b": b, "dims": [width_a, width_b]}).encode()
        side = SideFile(STITCH_FILE, store.blobs.put(settings), len(settings))
        manifest = ModelManifest(
            name, "stitch", None, "stitch", "random", (Placed(None, component),), (), (side,), tuple(metas.values())
        )
        with store.catalog.writing() as writer:
            writer.put_model(manifest)
    return name


def put_chain(store: Store, name: str, *parts: tuple[str, int, int], **extra: Any) -> str:
    """Store a chain composed of layers [lo, hi) of models."""
    slices = [{"sources": [{"model": model, "layer_range": [lo, hi]}]} for model, lo, hi in parts]
    compose(store, parse({"slices": slices, **extra}), name)
    return name


def put_changed(
    store: Store,
    like: str,
    name: str,
    config: Callable[[dict[str, Any]], None] = lambda _: None,
    components: Callable[[list[Placed]], list[Placed]] = list,
) -> str:
    """Store a copy of a chain with a changed config or changed components, which no command would write."""
    old = manifest_of(store, like)
    settings = config_of(store, old)
    config(settings)
    data = json.dumps(settings).encode()
    with store.ingesting():
        side = SideFile("config.json", store.blobs.put(data), len(data))
        placed = tuple(components(list(old.components)))
        named = {digest for each in placed for _, digest in each.component.tensors}
        tensors = tuple(tensor for tensor in old.tensors if tensor.digest in named)
        manifest = ModelManifest(name, "composed", None, old.family, "by hand", placed, (), (side,), tensors)
        with store.catalog.writing() as writer:
            writer.put_model(manifest)
    return name
