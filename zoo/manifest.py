"""The words of the catalogue as frozen data: tensors, components, blocks, chains, models.

Everything names its parents by digest, so two manifests are equal exactly when the things are.
This file knows nothing of disks, databases, torch or architectures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from blake3 import blake3

ComponentKind = Literal["embedding", "attention", "ffn", "layer", "stitch", "lm_head"]
#: From checkpoints: the first nine. Made here: chains of other models' blocks, with pruned blocks, with low-rank
#: deltas; stitches alone.
ModelKind = Literal[
    "foundation",
    "full",
    "lora",
    "prefix",
    "prompt",
    "ia3",
    "ln",
    "adapter",
    "bitfit",
    "composed",
    "surrogate",
    "delta",
    "stitch",
]

#: Bytes per element, by safetensors dtype name.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no white space: equal values, equal text. Refuses NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: object) -> str:
    """BLAKE3 (hex, 64 characters) of a value's canonical JSON."""
    return blake3(canonical_json(value).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A distinct tensor: BLAKE3 over (dtype, shape, bytes), and what is needed to read it."""

    digest: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The parameter-efficient part of a component (BL-03). `config` is canonical JSON; `tensors` are (name, digest)."""

    kind: str
    config: str
    tensors: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Component:
    """The finest cut (BL-01): weights, what fixes their computation, and at most one adapter on top.

    `tensors` are (name within the component, tensor digest), sorted by name. `spec` is canonical JSON of
    the configuration values that change what the component computes. Two components are the same exactly
    when their digests are.
    """

    kind: ComponentKind
    family: str
    spec: str
    tensors: tuple[tuple[str, str], ...]
    adapter: Adapter | None = None

    @cached_property
    def base_digest(self) -> str:
        """Digest of the component without its adapter: what a batch can share (BL-15)."""
        return digest_of(["component", self.kind, self.family, self.spec, self.tensors])

    @cached_property
    def digest(self) -> str:
        if self.adapter is None:
            return self.base_digest
        part = [self.adapter.kind, self.adapter.config, self.adapter.tensors]
        return digest_of(["adapted", self.base_digest, part])


@dataclass(frozen=True, slots=True)
class Placed:
    """A component at its place in a model. `layer` is None for embedding, lm_head and stitches."""

    layer: int | None
    component: Component


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One weight file as it came: the blob of its safetensors header (verbatim) and (key, tensor digest) in file
    order.
    """

    path: str
    header: str
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file beside the weights, by content. Inherited files (an adapter's base config) are used, never exported."""

    path: str
    blob: str
    nbytes: int
    inherited: bool = False


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block in a chain: components [lo, hi) of its model."""

    digest: str
    lo: int
    hi: int


def block_digest(components: Sequence[str]) -> str:
    """A block is named by its components' digests, in order."""
    return digest_of(["block", list(components)])


@dataclass(frozen=True)
class ModelManifest:
    """All that the catalogue keeps of one model. `tensors` holds every tensor that it names."""

    name: str
    kind: ModelKind
    base: str | None
    family: str
    source: str
    components: tuple[Placed, ...]
    weight_files: tuple[WeightFile, ...]
    side_files: tuple[SideFile, ...]
    tensors: tuple[TensorMeta, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two ingests of the same thing, whatever their names."""
        files = [[w.path, w.header, w.entries] for w in self.weight_files]
        sides = sorted([s.path, s.blob, s.inherited] for s in self.side_files)
        chain = [[p.layer, p.component.digest] for p in self.components]
        return digest_of([self.kind, self.family, chain, files, sides])
