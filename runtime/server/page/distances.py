"""How far the weights of two models are from each other, component by component, within a budget of bytes.

The distance of a pair is |A - B| / |A| over the tensors of one name and shape with different digests. Of tensors that
together exceed the budget only the first part is read, the same share of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.server.page.side_by_side import PartPair
from zoo.manifest import DTYPE_BYTES, ModelManifest, Placed, TensorMeta
from zoo.store import Store

if TYPE_CHECKING:
    import numpy as np

#: Bytes that one comparison reads at most, of both models, and the least that it reads of a tensor.
BUDGET_BYTES, LEAST_BYTES = 256 << 20, 4096
#: Bytes at a time.
_CHUNK = 4 << 20
_NUMPY = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightDistances:
    """Distances by pair, None where nothing can be compared; `share`: of the differing bytes, what was read."""

    distances: Sequence[float | None]
    share: float


def distances(store: Store, a: ModelManifest, b: ModelManifest, pairs: Sequence[PartPair]) -> WeightDistances:
    """Return the distances of pairs of components. Raises DamagedObject."""
    left, right = _metas(a), _metas(b)
    differing = [list(_differing(pair, left, right)) for pair in pairs]
    whole = sum(2 * max(one.nbytes, other.nbytes) for some in differing for one, other in some)
    share = min(1.0, BUDGET_BYTES / whole) if whole else 1.0
    found: list[float | None] = []
    for pair, some in zip(pairs, differing, strict=True):
        if pair.likeness == "same":
            found.append(0.0)
        else:
            found.append(_distance(store, some, share))
    return WeightDistances(found, share)


def _metas(manifest: ModelManifest) -> dict[str, TensorMeta]:
    return {tensor.digest: tensor for tensor in manifest.tensors}


def _differing(
    pair: PartPair, left: dict[str, TensorMeta], right: dict[str, TensorMeta]
) -> Iterator[tuple[TensorMeta, TensorMeta]]:
    others = _named(pair.b)
    for name, digest in _named(pair.a).items():
        other = others.get(name)
        if other is None or other == digest:
            continue
        one, two = left[digest], right[other]
        if one.shape == two.shape and _readable(one) and _readable(two):
            yield one, two


def _named(placed: Placed | None) -> dict[str, str]:
    return {} if placed is None else dict(placed.component.tensors)


def _readable(tensor: TensorMeta) -> bool:
    return tensor.dtype == "BF16" or tensor.dtype in _NUMPY


def _distance(store: Store, pairs: Iterable[tuple[TensorMeta, TensorMeta]], share: float) -> float | None:
    apart = size = 0.0
    for a, b in pairs:
        most = max(int(share * a.elements), min(a.elements, LEAST_BYTES // DTYPE_BYTES[a.dtype]))
        for x, y in zip(_elements(store, a, most), _elements(store, b, most), strict=True):
            difference = x - y
            apart += float(difference @ difference)
            size += float(x @ x)
    if size > 0:
        return float((apart / size) ** 0.5)
    return None


def _elements(store: Store, tensor: TensorMeta, most: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the first elements of a tensor as float64, the same number at a time for every dtype."""
    step = _CHUNK // 8
    width = DTYPE_BYTES[tensor.dtype]
    held = bytearray()
    for chunk in store.objects.read(tensor.digest, step * width):
        held += chunk
        while len(held) >= step * width and most > 0:
            taken = min(step, most)
            yield _floats(bytes(held[: taken * width]), tensor.dtype)
            most -= taken
            del held[: step * width]
        if most <= 0:
            return
    if held:
        yield _floats(bytes(held[: most * width]), tensor.dtype)


def _floats(raw: bytes, dtype: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(raw, _NUMPY[dtype]).astype(np.float64)
