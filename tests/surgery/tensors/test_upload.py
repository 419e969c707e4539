"""Uploads to a device over a link that copies as late as possible: nothing arrives before it is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from surgery.tensors.pool import TensorPool, stored_tensor
from surgery.tensors.upload import HostLink, Uploads, uploads_to
from tests import checkpoints
from zoo.store import Store

BUFFER = 64


class Slow(HostLink):
    """A link that copies only when waited for or joined.

    `log`: the calls in order; `room`: number of tensors that the device holds.
    """

    def __init__(self, room: int = 1000) -> None:
        self.log: list[str] = []
        self.buffers = self.made = 0
        self._room = room
        self._under_way: list[Callable[[], None]] = []

    def buffer(self, nbytes: int) -> Tensor:
        self.buffers += nbytes
        return super().buffer(nbytes)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        self.made += 1
        if self.made > self._room:
            raise torch.OutOfMemoryError("the device is full")
        return super().empty(shape, dtype)

    def begin(self) -> None:
        self.log.append("begin")

    def send(self, part: Tensor, into: Tensor) -> Callable[[], None]:
        number, done = sum(each.startswith("send") for each in self.log), []
        assert len(self._under_way) < 2, "two buffers, two parts under way"
        self.log.append(f"send {number}")

        def arrive() -> None:
            if not done:
                done.append(into.copy_(part))
                self.log.append(f"arrive {number}")
                self._under_way.remove(arrive)

        self._under_way.append(arrive)
        return arrive

    def join(self) -> None:
        for arrive in tuple(self._under_way):
            arrive()
        self.log.append("join")


def tensors() -> list[Tensor]:
    """Return tensors of several dtypes and shapes, empty and scalar ones included."""
    torch.manual_seed(0)
    return [
        torch.randn(7, 9),
        torch.randn(()),
        torch.empty(0, 3),
        torch.randn(40, dtype=torch.float64),
        torch.arange(100, dtype=torch.int64).view(10, 10),
        torch.randn(33).bfloat16(),
        torch.rand(5, 5) > 0.5,
    ]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("link", [HostLink, Slow])
@pytest.mark.parametrize("nbytes", [8, BUFFER, 1 << 12])
def test_copies_in_order(link, dtype, nbytes):
    uploads = Uploads(link(), nbytes)
    for _ in range(2):
        made = uploads.place(tensors(), dtype)
        for given, got in zip(tensors(), made, strict=True):
            expected = given if dtype is None or not given.is_floating_point() else given.to(dtype)
            assert torch.equal(got, expected) and got.dtype == expected.dtype and got.shape == expected.shape


def test_a_part_is_read_while_another_travels_and_no_buffer_is_written_before_its_part_arrived():
    link = Slow()
    Uploads(link, BUFFER).place([torch.zeros(64)], None)  # 256 bytes: four parts
    assert link.log == [
        "begin",
        "send 0",
        "send 1",
        "arrive 0",
        "send 2",
        "arrive 1",
        "send 3",
        "arrive 2",
        "arrive 3",
        "join",
    ]
    assert link.buffers == 2 * BUFFER


def test_an_error_leaves_nothing_under_way():
    link = Slow(room=1)
    uploads = Uploads(link, BUFFER)
    with pytest.raises(torch.OutOfMemoryError):
        uploads.place([torch.ones(64), torch.ones(64)], None)
    assert link.log[-1] == "join" and not link._under_way
    link._room = 1000
    assert torch.equal(uploads.place([torch.arange(50.0)], None)[0], torch.arange(50.0))
    assert link.buffers == 2 * BUFFER


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("staging")
    made = Store.open(root / "store")
    ingest(made, open_source(str(checkpoints.make("llama", root / "hf", tokenizer=False))), name="base")
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_pool_through_the_link(store, dtype):
    with store.catalog.reading() as reader:
        digests = [tensor.digest for tensor in reader.model("base").tensors]
    pool = TensorPool(store, dtype=dtype, uploads=Uploads(Slow(), 1 << 10))
    for digest, tensor in zip(digests, pool.acquire_all(digests), strict=True):
        stored = stored_tensor(store, digest)
        assert torch.equal(tensor, stored if dtype is None else stored.to(dtype))
    pool.release(digests)
    assert pool.nbytes == 0


def test_a_pool_whose_device_is_full_holds_nothing(store):
    with store.catalog.reading() as reader:
        digests = [tensor.digest for tensor in reader.model("base").tensors]
    pool = TensorPool(store, uploads=Uploads(Slow(room=3), 1 << 10))
    with pytest.raises(torch.OutOfMemoryError):
        pool.acquire_all(digests)
    assert pool.nbytes == 0 and all(pool.users(digest) == 0 for digest in digests)


def test_a_cpu_maps():
    assert uploads_to(torch.device("cpu")) is None
