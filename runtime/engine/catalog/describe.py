"""Describe a stored model to a cluster's scheduler: its chain as blocks small enough to spread over devices.

The zoo's blocks are what models share (`surgery.partition.partition`); a model that shares nothing is one block of any
size. For placement a block is cut again, at layers, into pieces of at most a given number of bytes. No bytes move, and
models that share the block share its pieces. A piece is named by its components without their adapters: a LoRA
fine-tune has its base's pieces and runs in their batches.

Reads manifests and configs; loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from runtime.chains import Block, BlockUse, Boundary, Chain
from runtime.config import EngineConfig
from runtime.engine.attention.varlen import page_multiple
from runtime.engine.catalog.held_bytes import HeldBytes, form_of
from runtime.engine.models.load import spec_of
from runtime.engine.models.private_copy import manifest_for
from runtime.engine.models.registry import dtype_named
from runtime.engine.models.servable import Executor, Servable, servable
from runtime.engine.models.swapped import read_model
from runtime.engine.models.versions import pinned, version_of
from runtime.kv.pool import PageSizes
from zoo.manifest import ChainBlock, Component, ModelManifest, digest_of
from zoo.store import Store

#: Component kinds that a piece may begin with; an FFN stays with the attention before it.
_BEGINS = frozenset(["attention", "layer", "lm_head", "stitch"])

#: Hexadecimal digits of a boundary's domain: enough that collisions cannot be found.
_DOMAIN = 32


@dataclass(frozen=True, slots=True)
class DescribedChain:
    """A chain, and its blocks in order."""

    chain: Chain
    blocks: tuple[Block, ...]


def describe_chain(
    store: Store, name: str, config: EngineConfig, half_page: int, piece_bytes: int, serve_as: str | None = None,
    executor: Executor = "paged",
) -> DescribedChain:  # fmt: skip
    """Describe one model as blocks of at most `piece_bytes` bytes (single layers may be larger).

    The chain is pinned to this version of the model: engines load this version or raise NotFound.

    Args:
        name: as `engine.models.swapped.read_model` takes it.
        half_page: bytes of K in a page, the same on all devices (`engine.models.registry.half_page`).
        serve_as: the name under which it is served, if that is not its own, such as a new version of a model that is
            stored beside the old one.
        executor: the executor that is to run it.

    Raises:
        NotServable, NotFound, AmbiguousName, MalformedCheckpoint: as loading does.
    """
    with store.catalog.reading() as catalog:
        stored, chain = read_model(catalog, name)
    name, manifest = stored.name, manifest_for(stored, config.weight_sharing)
    dtype = None if config.dtype is None else dtype_named(config.dtype)
    found = servable(store, manifest, dtype, executor)
    layers = sum(_attends(placed.component) for placed in manifest.components)
    multiple = page_multiple(torch.device(config.device)) if executor == "paged" else 1
    pages = PageSizes(config.kv_cache_memory_bytes, half_page, multiple)
    spec = spec_of(store, manifest, chain, found, config, kv_layers=layers, page_tokens=found.page_tokens(pages))
    sizes = HeldBytes(manifest, form_of(config, executor))
    uses, blocks = [], []
    for lo, hi in _pieces(manifest, chain, sizes, piece_bytes):
        components = [placed.component for placed in manifest.components[lo:hi]]
        block = digest_of(["block of units", [component.base_digest for component in components]])
        upstream = [placed.component.digest for placed in manifest.components[:hi]]
        attends = sum(_attends(component) for component in components)
        domain = digest_of(["kv", upstream, str(found.dtype)])
        into = found.widths[lo] * found.dtype.itemsize if lo else 0
        uses.append(BlockUse(block, lo, hi, attends, domain, sizes.adapters(components), into))
        blocks.append(Block(block, sizes.weights(components), attends, sizes.tables(components), hi - lo))
    version = version_of(manifest, found.dtype)
    spec = spec if serve_as is None else replace(spec, name=serve_as)
    # Two models with the same components are two chains: each is loaded and requested under its own name.
    parts = () if spec.virtual_tokens else tuple(boundaries_of(manifest, found))
    made = Chain(spec, f"{name}#{version}", tuple(uses), pinned(name, version), boundaries=parts)
    return DescribedChain(made, tuple(blocks))


def boundaries_of(manifest: ModelManifest, found: Servable) -> Iterator[Boundary]:
    """Yield the boundaries of a chain: behind its first attention layer, up to its last one (UN-15).

    A component's digest covers its weights, the settings that change what it computes (norms, rotary positions and
    their scaling), and its adapter. Each domain includes the domain before it, and so everything upstream.
    """
    components = [placed.component for placed in manifest.components]
    last = max((at for at, component in enumerate(components) if _attends(component)), default=0)
    domain, layers = digest_of(["kv of layers", str(found.dtype)]), 0
    for at, component in enumerate(components[:last], 1):
        domain, layers = digest_of([domain, component.digest])[:_DOMAIN], layers + _attends(component)
        if layers:
            yield Boundary(at, layers, domain, found.widths[at] * found.dtype.itemsize)


def _pieces(
    manifest: ModelManifest, chain: Sequence[ChainBlock], sizes: HeldBytes, piece_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the zoo's blocks, cut before layers wherever a piece would exceed `piece_bytes`."""
    components = [placed.component for placed in manifest.components]
    for block in chain:
        first = block.lo
        for at in range(block.lo + 1, block.hi):
            end = next((after for after in range(at + 1, block.hi) if components[after].kind in _BEGINS), block.hi)
            if components[at].kind in _BEGINS and sizes.weights(components[first:end]) > piece_bytes:
                yield first, at
                first = at
        yield first, block.hi


def _attends(component: Component) -> bool:
    return component.kind in ("attention", "layer")
