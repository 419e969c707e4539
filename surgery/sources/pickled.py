"""Pickled weights, read by torch's restricted loader behind an explicit switch and stored as safetensors.

`weights_only=True` builds only tensors and plain containers; memory maps keep the peak small. An export writes
safetensors, so a pickled checkpoint is the only kind that is not exported in its original files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.sources.base import Source, SourceSide, SourceWeights
from surgery.sources.folder import Folder
from zoo.errors import MalformedCheckpoint, UnsafeCheckpoint
from zoo.objects.headers import make_header

if TYPE_CHECKING:
    import torch

_NOTE = "the weights were pickled; they are kept, and exported, as safetensors"
#: transformers and peft refuse safetensors files that do not name the framework that wrote them.
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A torch tensor as a `SourceTensor`. `chunks` copies at most one chunk, or the tensor if it is not contiguous."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: torch.Tensor

    @classmethod
    def from_tensor(cls, key: str, tensor: torch.Tensor) -> TorchTensor:
        """Wrap a tensor. Raises MalformedCheckpoint for layouts and dtypes that safetensors does not have."""
        name = _dtype_name(tensor)
        if name is None:
            raise MalformedCheckpoint(
                f"tensor {key!r} has a layout or a dtype that safetensors cannot hold ({tensor.dtype})"
            )
        return cls(key, name, tuple(tensor.shape), tensor.numel() * tensor.element_size(), tensor)

    def chunks(self, size: int) -> Iterator[bytes]:
        import torch

        flat = self.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, self.nbytes, size):
            yield flat[begin : begin + size].numpy().tobytes()


def open_pickles(here: Folder, origin: str, config: dict[str, Any] | None, adapter: dict[str, Any] | None) -> Source:
    """Return the `*.bin` files of a folder as a source of safetensors.

    Raises as `surgery.sources.local.open_local`.
    """
    from surgery.sources.local import left_out_note

    files = _files(here, adapter is not None)
    weights = tuple(_weights(here, old, new) for old, new in files.items())
    skip = frozenset({*files, "pytorch_model.bin.index.json"})
    sides = here.sides(skip) + _index(weights)
    return Source(origin, config, adapter, weights, sides, (_NOTE, *left_out_note(here, skip)))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load a pickled state dict by torch's restricted loader, with mmap if the file allows it.

    Raises:
        UnsafeCheckpoint: The file holds anything but tensors and plain containers.
        MalformedCheckpoint: It is not a state dict.
    """
    import pickle  # for the class of the error only, which torch's restricted loader raises

    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError:
        raise UnsafeCheckpoint(f"{path.name} holds more than tensors: torch's restricted loader refuses it") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise MalformedCheckpoint(
            f"{path.name} cannot be read: {(str(error).splitlines() or ['?'])[0][:200]}"
        ) from None
    if not isinstance(loaded, Mapping) or not loaded:
        raise MalformedCheckpoint(f"{path.name} holds no state dict")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise MalformedCheckpoint(f"{path.name} holds {str(key)[:100]!r}, which is not a tensor")
    return dict(loaded)


def _is_zip(path: Path) -> bool:
    """Return whether the file is a zip archive; files from before torch 1.6 are not, and cannot be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _files(here: Folder, adapter: bool) -> dict[str, str]:
    """Return pickled file -> the safetensors file that replaces it."""
    from surgery.sources.local import ADAPTER_PICKLES, PICKLES, SINGLE, read_index

    if adapter:
        return {old: new for old, new in ADAPTER_PICKLES.items() if here.has(old)}
    if here.has(PICKLES[0]):
        return {PICKLES[0]: SINGLE}
    names = sorted(set(read_index(here, PICKLES[1]).values()))
    for name in names:
        if not name.startswith("pytorch_model") or not name.endswith(".bin"):
            raise MalformedCheckpoint(f"{PICKLES[1]} names {name!r}, which is not a pytorch_model*.bin")
    return {name: "model" + name.removeprefix("pytorch_model").removesuffix(".bin") + ".safetensors" for name in names}


def _weights(here: Folder, old: str, new: str) -> SourceWeights:
    loaded = load_tensors(here.locate(old))
    tensors = tuple(TorchTensor.from_tensor(key, tensor) for key, tensor in sorted(loaded.items()))
    header = make_header([(one.key, one.dtype, one.shape) for one in tensors], _METADATA)
    return SourceWeights(new, header, tensors)


def _index(weights: tuple[SourceWeights, ...]) -> tuple[SourceSide, ...]:
    """Return the shard index that transformers needs if there is more than one file."""
    if len(weights) < 2:
        return ()
    table = {tensor.key: one.path for one in weights for tensor in one.tensors}
    total = sum(tensor.nbytes for one in weights for tensor in one.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": table}
    return (
        SourceSide("model.safetensors.index.json", json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"),
    )


def _dtype_name(tensor: torch.Tensor) -> str | None:
    import torch

    names = {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.int16: "I16",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
    return names.get(tensor.dtype) if tensor.layout == torch.strided else None
