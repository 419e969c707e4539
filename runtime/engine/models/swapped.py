"""Chains that the store does not list: a stored model with some of its blocks replaced by another model's (BL-20).

    org/a[3:6=org/b]          org/a, but components [3, 6) are those of org/b
    org/a[0:1,3:6=org/b]      several runs

Such a name says all that is needed to describe and load the chain, in any process that reads the store. A stored model
of the same name goes first. Exchanged components have the same settings, so the model's own config builds them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from zoo.catalog import Reader
from zoo.errors import NotFound
from zoo.manifest import ChainBlock, ModelManifest, Placed

#: Components [lo, hi) of two chains.
Run = tuple[int, int]

_SWAPPED = re.compile(r"(?P<name>.+)\[(?P<runs>\d+:\d+(?:,\d+:\d+)*)=(?P<other>.+)\]", re.DOTALL)


def swapped_name(name: str, other: str, runs: Sequence[Run]) -> str:
    """Return the name of a model with runs of components of another one."""
    return f"{name}[{','.join(f'{lo}:{hi}' for lo, hi in runs)}={other}]"


def read_model(reader: Reader, name: str) -> tuple[ModelManifest, tuple[ChainBlock, ...]]:
    """Return a model's manifest and blocks by its name, a unique ending of it, or a name of `swapped_name`.

    Raises NotFound, AmbiguousName; NotFound also for runs that cannot be exchanged.
    """
    found = _SWAPPED.fullmatch(name)
    if found is None or name in reader.names():
        name = reader.resolve(name)
        return reader.model(name), tuple(reader.chain(name))
    runs = [(int(lo), int(hi)) for lo, hi in (run.split(":") for run in found["runs"].split(","))]
    own, other = (reader.model(reader.resolve(found[part])) for part in ("name", "other"))
    blocks = {each.name: reader.chain(each.name) for each in (own, other)}
    if not can_swap(own, other, runs, blocks[own.name], blocks[other.name]):
        raise NotFound(f"{own.name} and {other.name} have no blocks at {found['runs']} that can replace each other")
    return _swapped(own, other, runs), _blocks(blocks[own.name], blocks[other.name], runs)


def can_swap(
    own: ModelManifest, other: ModelManifest, runs: Sequence[Run], own_blocks: Sequence[ChainBlock],
    other_blocks: Sequence[ChainBlock],
) -> bool:  # fmt: skip
    """Return whether these runs are whole blocks of both models, with equal settings and without adapters."""
    cuts = [{0, *(block.hi for block in blocks)} for blocks in (own_blocks, other_blocks)]
    ends = [0, *(end for run in runs for end in run)]
    if ends != sorted(ends) or any(lo == hi for lo, hi in runs) or not all(set(ends) <= each for each in cuts):
        return False
    pairs = (pair for lo, hi in runs for pair in zip(own.components[lo:hi], other.components[lo:hi], strict=True))
    return all(_exchangeable(one, two) for one, two in pairs)


def _exchangeable(one: Placed, two: Placed) -> bool:
    a, b = one.component, two.component
    alike = (one.layer, a.kind, a.family, a.spec) == (two.layer, b.kind, b.family, b.spec)
    return alike and a.adapter is None and b.adapter is None


def _swapped(own: ModelManifest, other: ModelManifest, runs: Sequence[Run]) -> ModelManifest:
    components = list(own.components)
    for lo, hi in runs:
        components[lo:hi] = other.components[lo:hi]
    parts = [placed.component for placed in components]
    used = {digest for part in parts for _, digest in part.tensors}
    used |= {digest for part in parts if part.adapter is not None for _, digest in part.adapter.tensors}
    tensors = {tensor.digest: tensor for each in (own, other) for tensor in each.tensors if tensor.digest in used}
    return replace(
        own,
        name=swapped_name(own.name, other.name, runs),
        kind="composed",
        base=None,
        components=tuple(components),
        weight_files=(),
        tensors=tuple(tensors.values()),
    )


def _blocks(own: Sequence[ChainBlock], other: Sequence[ChainBlock], runs: Sequence[Run]) -> tuple[ChainBlock, ...]:
    inside = [block for block in other if any(lo <= block.lo and block.hi <= hi for lo, hi in runs)]
    outside = [block for block in own if all(block.hi <= lo or hi <= block.lo for lo, hi in runs)]
    return tuple(sorted((*inside, *outside), key=lambda block: block.lo))
