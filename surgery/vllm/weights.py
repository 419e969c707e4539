"""Yield a folder's weights from the store, as torch tensors: mapped from the object files, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from surgery.tensors.pool import tensor_of
from surgery.vllm.stored_weights import LowRankPart, StoredWeights
from zoo.errors import DamagedObject, StoreError
from zoo.objects import identity, locks
from zoo.objects.objects import ObjectStore

#: Seconds to wait for a collection of the store.
_LOCK_SECONDS = 600.0


def read_weights(weights: StoredWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) without the catalogue. Plain objects are mapped, and cost no memory of their own.

    Raises StoreError: The store is not there any more, or a tensor is damaged or was collected with its model.
    """
    root = weights.store
    if not identity.is_store(root):
        raise StoreError(f"{weights.model}: there is no store in {root} any more: export it again")
    objects = ObjectStore(root / "objects", root / "packed")

    def read(digest: str) -> Tensor:
        return tensor_of(objects.open, digest)

    with locks.shared(root / "lock", _LOCK_SECONDS):
        try:
            for key, digest in weights.tensors.items():
                part = weights.low_rank.get(key)
                yield key, read(digest) if part is None else _with_low_rank(read, digest, part)
        except DamagedObject as error:
            raise StoreError(f"{weights.model} cannot be read from {root}: {error}") from error


def _with_low_rank(read: Callable[[str], Tensor], digest: str, part: LowRankPart) -> Tensor:
    """Return the sum in float32: vLLM rounds it to the dtype that it computes in."""
    weight, a, b = (read(each).float() for each in (digest, part.a, part.b))
    added = (b @ a) * part.scaling
    return weight + (added.T if part.transposed else added)
