"""Stored tensors as torch tensors: mapped from the object files, one per distinct digest, with reference counts.

A mapped tensor costs no copy on a CPU: its pages are the file's own in the page cache, shared by every process that
maps them. A packed one is decoded into new memory on each request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from surgery.tensors.upload import Uploads, uploads_to
from zoo.errors import InputError
from zoo.manifest import ModelManifest
from zoo.objects.objects import Decoded, OpenedTensor
from zoo.packed.reader import WORKERS, in_order
from zoo.store import Store

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_BY_NAME: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in TORCH_DTYPES.values()}


#: Between a digest and the name of a copy of its tensor.
_COPY = "@"


def copy_name(digest: str, owner: str) -> str:
    """Return the name under which `TensorPool` holds a copy of a tensor for one owner."""
    return f"{digest}{_COPY}{owner}"


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """Return a dtype by torch's name for it, such as `bfloat16`. Raises InputError if no stored tensor can have it."""
    found = name if isinstance(name, torch.dtype) else _BY_NAME.get(str(name).removeprefix("torch."))
    if found is None:
        raise InputError(f"{json.dumps(str(name)[:40])} is no dtype; there are {', '.join(_BY_NAME)}")
    return found


def stored_tensor(store: Store, digest: str) -> torch.Tensor:
    """Return a stored tensor on the CPU. Raises zoo.errors.DamagedObject that names the affected models."""
    return tensor_of(store.open_tensor, digest)


def tensor_of(open_: Callable[[str], OpenedTensor | Decoded], digest: str) -> torch.Tensor:
    """Return a tensor on the CPU of the object that `open_` finds. Raises as `open_`."""
    while True:
        opened = open_(digest)
        try:
            return map_tensor(opened)
        except RuntimeError:
            if isinstance(opened, Decoded) or opened.path.exists():
                raise
            # It was packed between the two steps: the next attempt reads the packed object.


def stored_tensors(store: Store, digests: Sequence[str]) -> list[torch.Tensor]:
    """Return stored tensors, in order, each separate. Raises as `stored_tensor`.

    Packed ones are decoded in parallel, the largest first.
    """
    objects = store.objects
    packed = [index for index, digest in enumerate(digests) if not objects.path(digest).is_file()]
    packed.sort(key=lambda index: objects.packed.shelf.size(digests[index]), reverse=True)
    decoded = in_order(lambda number: stored_tensor(store, digests[packed[number]]), len(packed), WORKERS)
    found = dict(zip(packed, decoded, strict=True))
    return [found[index] if index in found else stored_tensor(store, digest) for index, digest in enumerate(digests)]


def map_tensor(opened: OpenedTensor | Decoded) -> torch.Tensor:
    """Return the tensor of an opened object.

    A plain one is mapped copy-on-write: reading shares pages, and no write can reach the file.
    """
    meta = opened.tensor
    dtype = TORCH_DTYPES[meta.dtype]
    if meta.nbytes == 0:
        return torch.empty(meta.shape, dtype=dtype)
    if isinstance(opened, Decoded):
        return torch.frombuffer(opened.data, dtype=torch.uint8).view(dtype).view(meta.shape)
    size = opened.offset + meta.nbytes
    storage = torch.UntypedStorage.from_file(str(opened.path), shared=False, nbytes=size)
    whole = torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
    return whole[opened.offset :].view(dtype).view(meta.shape)


class StoredTensors(Mapping[str, torch.Tensor]):
    """A model's tensors by digest, mapped again on each access: equal weights share pages until one is trained."""

    def __init__(self, store: Store, manifest: ModelManifest, dtype: torch.dtype | None = None) -> None:
        """Prepare the mapping. `dtype`: cast floating-point tensors to this; None keeps the stored dtype."""
        self._store = store
        self._digests = {tensor.digest: None for tensor in manifest.tensors}
        self._dtype = dtype

    def __getitem__(self, digest: str) -> torch.Tensor:
        """Return a tensor. Raises zoo.errors.DamagedObject; KeyError for a tensor of another model."""
        if digest not in self._digests:
            raise KeyError(digest)
        tensor = stored_tensor(self._store, digest)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


@dataclass(slots=True)
class _Held:
    tensor: torch.Tensor
    users: int


class Counted:
    """Tensors by name, each once with its number of users; a tensor is dropped when its last user releases it."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        #: Bytes of all tensors held.
        self.nbytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that has no users yet."""
        self._held[name] = _Held(tensor, 0)
        self.nbytes += self.nbytes_of(name)

    def acquire(self, name: str) -> torch.Tensor:
        """Return a tensor and add a user."""
        held = self._held[name]
        held.users += 1
        return held.tensor

    def release(self, names: Iterable[str]) -> None:
        """Remove one user from each tensor; a tensor without users is dropped."""
        for name in names:
            held = self._held[name]
            held.users -= 1
            if held.users == 0:
                self.nbytes -= self.nbytes_of(name)
                del self._held[name]

    def users(self, name: str) -> int:
        """Return a tensor's number of users."""
        held = self._held.get(name)
        return 0 if held is None else held.users

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of a tensor, 0 if it is not held."""
        held = self._held.get(name)
        return 0 if held is None else held.tensor.numel() * held.tensor.element_size()


class TensorPool:
    """Holds every distinct tensor at most once on a device. Pair each `acquire` with a `release`.

    A tensor acquired as an owner's copy (`copy_name`) is read and held apart from that of its digest.

    Args:
        dtype: Cast floating-point tensors to this when loading; None keeps the stored dtype.
        uploads: Transfer to the device; None for the default of the device (see `surgery.tensors.upload`).
    """

    def __init__(
        self, store: Store, device: str = "cpu", dtype: torch.dtype | None = None, uploads: Uploads | None = None
    ) -> None:
        self._store = store
        self._device = torch.device(device)
        self._uploads = uploads or uploads_to(self._device)
        self._dtype = dtype
        self._counted = Counted()

    def acquire(self, digest: str) -> torch.Tensor:
        """Return the tensor of a digest on this device and add a user. Raises zoo.errors.DamagedObject."""
        return self.acquire_all([digest])[0]

    def acquire_all(self, digests: Sequence[str]) -> list[torch.Tensor]:
        """Return the tensors of digests, in order, and add a user for each occurrence; none is added on an error."""
        new = [digest for digest in dict.fromkeys(digests) if digest not in self._counted]
        read = self._placed(stored_tensors(self._store, [name.partition(_COPY)[0] for name in new]))
        for digest, tensor in zip(new, read, strict=True):
            self._counted.put(digest, tensor)
        return [self._counted.acquire(digest) for digest in digests]

    def release(self, digests: Iterable[str]) -> None:
        """Remove one user from each tensor; a tensor without users is dropped."""
        self._counted.release(digests)

    def users(self, digest: str) -> int:
        """Return a tensor's number of users."""
        return self._counted.users(digest)

    def nbytes_of(self, digest: str) -> int:
        """Return the bytes of a tensor, 0 if it is not held."""
        return self._counted.nbytes_of(digest)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, each once."""
        return self._counted.nbytes

    def _placed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._uploads is not None:
            return self._uploads.place(tensors, self._dtype)
        dtypes = [self._dtype if self._dtype is not None and tensor.is_floating_point() else None for tensor in tensors]
        return [tensor.to(device=self._device, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
