"""The catalogue's vocabulary as frozen data: tensors, components, blocks, chains, models.

Every item refers to its parts by digest, so two manifests are equal exactly when their contents are. This module does
not depend on disks, databases, torch or architectures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from blake3 import blake3

ComponentKind = Literal["embedding", "attention", "ffn", "layer", "stitch", "lm_head"]
#: The first nine come from checkpoints. The rest are made here: chains of other models' blocks, of pruned blocks, with
#: low-rank deltas; stitches alone; predictors of lengths; quantised weights.
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
    "lengths",
    "quantized",
]
#: Kinds of models that do not run by themselves: a part of chains, and a predictor of lengths.
PARTS: frozenset[ModelKind] = frozenset({"stitch", "lengths"})

#: Bytes per element, by safetensors dtype name.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def canonical_json(value: object) -> str:
    """Return JSON with sorted keys and no white space, so that equal values give equal text.

    Raises ValueError for NaN and infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: object) -> str:
    """Return the BLAKE3 (hex, 64 characters) of a value's canonical JSON."""
    return blake3(canonical_json(value).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A distinct tensor: its BLAKE3 over (dtype, shape, bytes), its dtype and its shape."""

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
    """The parameter-efficient part of a component (BL-03).

    Fields:
        config: Canonical JSON.
        tensors: (name, tensor digest) pairs.
    """

    kind: str
    config: str
    tensors: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Component:
    """The finest cut of a model (BL-01): weights, the settings that fix their computation, and at most one adapter.

    Two components are the same exactly when their digests are.

    Fields:
        spec: Canonical JSON of the configuration values that change what the component computes.
        tensors: (name within the component, tensor digest) pairs, sorted by name.
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
    """A component at its position in a model. `layer` is None for embedding, lm_head and stitches."""

    layer: int | None
    component: Component


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One weight file as ingested.

    Fields:
        header: Digest of the blob with the file's first bytes (safetensors' or GGUF's header), verbatim.
        entries: (key, tensor digest) pairs in file order.
    """

    path: str
    header: str
    entries: tuple[tuple[str, str], ...]

    @property
    def is_encoded(self) -> bool:
        """Whether the entries hold the file's bytes in a form of its own (GGUF), not the model's tensors."""
        return self.path.lower().endswith(".gguf")


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file beside the weights.

    Fields:
        blob: Digest of its content.
        inherited: Taken from the base (an adapter's base config), or made of what the weight file holds (GGUF's
            metadata): used, but never exported.
    """

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
    """Return a block's digest, computed from its components' digests in order."""
    return digest_of(["block", list(components)])


@dataclass(frozen=True)
class ModelManifest:
    """All that the catalogue stores about one model. `tensors` holds every tensor that the model references."""

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
        """Digest of the model's content: equal for two ingests of the same content under any names."""
        files = [[w.path, w.header, w.entries] for w in self.weight_files]
        sides = sorted([s.path, s.blob, s.inherited] for s in self.side_files)
        chain = [[p.layer, p.component.digest] for p in self.components]
        return digest_of([self.kind, self.family, chain, files, sides])
