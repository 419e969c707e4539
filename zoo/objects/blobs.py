"""Small files by content: configs, tokenizers, chat templates, the headers of weight files.

A blob is held in memory whole; its digest is BLAKE3 of its bytes. This module does not depend on names, models or the
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
        """Store the bytes, durable on return, and return their digest. Raises StoreFull.

        Bytes that are present and undamaged are not written again.
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
        """Return the bytes, verified on each call. Raises DamagedObject if they are missing or changed."""
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
        """Return whether the blob is present and undamaged."""
        try:
            self.get(digest)
        except DamagedObject:
            return False
        return True

    def digests(self) -> Iterator[str]:
        return self.shelf.digests()

    def size(self, digest: str) -> int:
        """Return the bytes of its file, 0 if there is none."""
        return self.shelf.size(digest)

    def path(self, digest: str) -> Path:
        return self.shelf.path(digest)
