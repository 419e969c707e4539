"""Put new torch tensors into the store, as byte sources. Call within `store.ingesting()`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from surgery.tensors.pool import TORCH_DTYPES
from zoo.manifest import TensorMeta
from zoo.store import Store

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class TensorBytes:
    """A torch tensor as a `zoo.objects.sources.ByteSource`."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        return _NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def chunks(self, size: int) -> Iterator[memoryview]:
        flat = self.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), size):
            yield flat[begin : begin + size].numpy().data


def keep_tensors(store: Store, tensors: Mapping[_Key, torch.Tensor]) -> dict[_Key, TensorMeta]:
    """Store tensors durably and return their metadata by the same keys.

    Raises StoreFull, StoreError; KeyError for a dtype that safetensors lacks.
    """
    puts = store.objects.put_many(TensorBytes(tensor) for tensor in tensors.values())
    return {key: put.tensor for key, put in zip(tensors, puts, strict=True)}
