"""`blockzoo.json`: which tensors of which store are a model's weights, for readers without the catalogue.

    {"version": 1, "model": "org/tune", "store": "/srv/zoo_store",
     "tensors": {"model.norm.weight": "ab12…", …},
     "low_rank": {"model.layers.0.self_attn.q_proj.weight": {"a": "…", "b": "…", "scaling": 2.0, "transposed": false}}}

A tensor is named by its digest, so what is read is what was exported, or an error. Pure: no torch, no vLLM.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zoo.errors import MalformedCheckpoint

#: The file's name in an exported folder.
FILE = "blockzoo.json"
_VERSION = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Limits, far above any model, of the file's bytes and of a key's characters.
_BYTES, _KEY = 64 << 20, 512


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """A low-rank part of one weight W [out, in]: W + scaling * B A.

    Fields:
        a: Digest of A [rank, in].
        b: Digest of B [out, rank].
        transposed: W is stored as [in, out].
    """

    a: str
    b: str
    scaling: float
    transposed: bool


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A model's weights in a store.

    Fields:
        model: Its name when it was exported, for messages.
        store: The store's folder, absolute.
        tensors: key of a checkpoint -> tensor digest.
        low_rank: key in `tensors` -> what is added to it.
    """

    model: str
    store: Path
    tensors: Mapping[str, str]
    low_rank: Mapping[str, LowRankPart] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the file's content."""
        low_rank = {key: asdict(part) for key, part in self.low_rank.items()}
        made = {"version": _VERSION, "model": self.model, "store": str(self.store), "tensors": dict(self.tensors)}
        return (json.dumps({**made, "low_rank": low_rank}, indent=1) + "\n").encode()


def read_stored_weights(folder: Path) -> StoredWeights | None:
    """Return what a folder's `blockzoo.json` says, or None without one. Raises MalformedCheckpoint."""
    path = folder / FILE
    if not path.is_file():
        return None
    if path.stat().st_size > _BYTES:
        raise MalformedCheckpoint(f"{path} is larger than {_BYTES >> 20} MiB")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise MalformedCheckpoint(f"{path} is not JSON") from None
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        raise MalformedCheckpoint(f"{path} is not of version {_VERSION}: export the model again")
    tensors, low_rank = value.get("tensors"), value.get("low_rank", {})
    model, store = value.get("model"), value.get("store")
    if not isinstance(tensors, dict) or not isinstance(low_rank, dict):
        raise MalformedCheckpoint(f"{path} lists no tensors")
    if not isinstance(model, str) or not isinstance(store, str) or not Path(store).is_absolute():
        raise MalformedCheckpoint(f"{path} names no model in a store")
    if not all(_is_key(key) and _is_digest(digest) for key, digest in tensors.items()):
        raise MalformedCheckpoint(f"{path} lists a tensor without a digest")
    return StoredWeights(
        model, Path(store), tensors, {key: _low_rank(path, key, part, tensors) for key, part in low_rank.items()}
    )


def _low_rank(path: Path, key: str, part: Any, tensors: Mapping[str, str]) -> LowRankPart:
    usable = (
        key in tensors
        and isinstance(part, dict)
        and _is_digest(part.get("a"))
        and _is_digest(part.get("b"))
        and isinstance(part.get("scaling"), float | int)
        and math.isfinite(part["scaling"])
        and isinstance(part.get("transposed"), bool)
    )
    if not usable:
        raise MalformedCheckpoint(f"{path} has a low-rank part that fits no tensor")
    return LowRankPart(part["a"], part["b"], float(part["scaling"]), part["transposed"])


def _is_key(key: str) -> bool:
    return 0 < len(key) <= _KEY


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
