"""A packed model loads, trains, exports and is repaired like any other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surgery.tensors.pool import TensorPool, stored_tensor
from tests.checkpoints import make_lora
from tests.surgery.helpers import edit_weights, files_of
from tests.zoo.factory import flip_byte
from zoo import Zoo
from zoo.errors import DamagedObject


def test_a_packed_model_is_the_same_model(copied: Callable[..., Path], zoo: Zoo, tmp_path: Path) -> None:
    base = copied("llama", "base", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    shutil.copytree(base, tmp_path / "tuned")
    edit_weights(tmp_path / "tuned", lambda key, tensor: tensor * (1 + 1 / 128))
    zoo.ingest(base)
    zoo.ingest(tmp_path / "tuned", base="base")
    zoo.ingest(make_lora(tmp_path / "tuned", tmp_path / "lora"), base="tuned")
    ids = torch.arange(12)[None]
    before = {name: zoo.model(name).load()(ids).logits for name in ("base", "tuned", "lora")}
    assert zoo.pack().packed > 10
    with Zoo(tmp_path / "zoo_store") as again:
        for name, logits in before.items():
            assert torch.equal(again.model(name).load()(ids).logits, logits)
        model = again.model("tuned").load().train()
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()  # the weights are private copies: nothing reaches the store
        assert not again.verify().damaged
        again.model("tuned").export(tmp_path / "out")
        assert files_of(tmp_path / "out") == files_of(tmp_path / "tuned")
        assert again.ingest(tmp_path / "tuned", base="base").tensors.new == 0


def test_a_pool_decodes_a_packed_tensor_once(copied: Callable[..., Path], zoo: Zoo, tmp_path: Path) -> None:
    base = copied("llama", "base", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    shutil.copytree(base, tmp_path / "tuned")
    edit_weights(tmp_path / "tuned", lambda key, tensor: tensor * (1 + 1 / 128))
    zoo.ingest(base)
    zoo.ingest(tmp_path / "tuned", base="base")
    zoo.pack()
    digest, other, *_ = zoo.store.objects.packed.shelf.digests()
    plain = next(zoo.store.objects.shelf.digests())
    pool = TensorPool(zoo.store)
    first = pool.acquire(digest)
    assert pool.acquire(digest) is first
    assert pool.nbytes == first.numel() * first.element_size()
    again, second, third, twin = pool.acquire_all([digest, plain, other, plain])
    assert again is first
    assert second is twin
    for tensor, name in ((second, plain), (third, other)):
        assert torch.equal(tensor, stored_tensor(zoo.store, name))
    pool.release([digest, digest, plain, other])
    assert pool.nbytes == sum(tensor.nbytes for tensor in (first, second))
    pool.release([digest, plain])
    assert pool.nbytes == 0


def test_a_pool_counts_nothing_when_one_of_several_is_damaged(
    copied: Callable[..., Path], zoo: Zoo, tmp_path: Path
) -> None:
    base = copied("llama", "base", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    zoo.ingest(base)
    zoo.pack(alone=True)
    digests = list(zoo.store.objects.packed.shelf.digests())
    flip_byte(zoo.store.objects.packed.shelf.path(digests[1]), 9)
    pool = TensorPool(zoo.store)
    with pytest.raises(DamagedObject, match=f"{digests[1]}.*base"):
        pool.acquire_all(digests)
    assert pool.nbytes == 0
