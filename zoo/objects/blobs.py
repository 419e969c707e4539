"""Small files by content: configs, tokenizers, chat templates, the headers of weight files.

A blob is held in memory whole. Its digest is BLAKE3 of its bytes. This file knows nothing of names, models or the
catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from zoo.errors import DamagedObject
from zoo.objects.publish import ObjectShelf, discard


class BlobStore:
    """Blobs under `root` (`files/` of a store). Safe for any number of threads and processes."""

    def __init__(self, root: Path) -> None:
        self.shelf = ObjectShelf(root)

    def put(self, data: bytes) -> str:
        """Store the bytes, durably on return; bytes that are there already, undamaged, are not written again. Raises
        StoreFull.
        """
        digest = blake3(data).hexdigest()
        if not self.check(digest):
            staged = self.shelf.stage([data])
            try:
                self.shelf.publish(staged, digest)
            finally:
                discard(staged)
        self.shelf.settle([digest])
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes, verified on each call. Raises DamagedObject when they are missing or changed."""
        try:
            data = self.path(digest).read_bytes()
        except OSError as error:
            raise DamagedObject(f"file {digest} cannot be read from the store: {error.strerror or error}") from error
        if blake3(data).hexdigest() != digest:
            raise DamagedObject(f"file {digest} is damaged: its bytes do not match its digest")
        return data

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def check(self, digest: str) -> bool:
        """Whether the blob is there and undamaged."""
        try:
            self.get(digest)
        except DamagedObject:
            return False
        return True

    def digests(self) -> Iterator[str]:
        return self.shelf.digests()

    def size(self, digest: str) -> int:
        """Bytes of its file, 0 when there is none."""
        return self.shelf.size(digest)

    def path(self, digest: str) -> Path:
        return self.shelf.path(digest)
