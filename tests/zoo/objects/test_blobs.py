"""Blobs are stored by content and verified on each read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.factory import flip_byte
from zoo.errors import DamagedObject, StoreError
from zoo.objects.blobs import BlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "files")


def test_bytes_come_back_and_are_kept_once(blobs: BlobStore) -> None:
    digests = [blobs.put(data) for data in (b"", b"a", b"a", b"\0" * 100_000)]
    assert digests[1] == digests[2]
    assert [blobs.get(digest) for digest in digests] == [b"", b"a", b"a", b"\0" * 100_000]
    assert sorted(blobs.digests()) == sorted(set(digests))
    assert blobs.has(digests[0])


def test_damage_is_found_and_healed_by_putting_again(blobs: BlobStore) -> None:
    digest = blobs.put(b"config")
    flip_byte(blobs.path(digest), 0)
    assert not blobs.check(digest)
    with pytest.raises(DamagedObject, match=digest):
        blobs.get(digest)
    assert blobs.put(b"config") == digest
    assert blobs.get(digest) == b"config"


def test_what_is_missing_is_damaged(blobs: BlobStore) -> None:
    assert not blobs.check("0" * 64)
    assert not blobs.has("0" * 64)
    with pytest.raises(DamagedObject):
        blobs.get("0" * 64)
    with pytest.raises(StoreError, match="not a digest"):
        blobs.get("../../etc/passwd")
