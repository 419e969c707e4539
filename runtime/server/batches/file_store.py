"""Files of the queue for the event loop: stored chunk by chunk, read piece by piece, bounded in size and time.

Every call that touches the database leaves the event loop free. What a writer that failed or left had written is
removed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from runtime.config import BatchLimits
from runtime.frontend.errors import RequestError
from runtime.queueing import files
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import CHUNK, StoredFile
from runtime.queueing.journal import Journal
from runtime.server.batches.documents import SECOND
from zoo.errors import StoreError

T = TypeVar("T")


class FileStore:
    """The files of all principals."""

    def __init__(self, database: QueueDatabase, journal: Journal, limits: BatchLimits) -> None:
        self._database = database
        self._journal = journal
        self.limits = limits

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query on a worker thread, in a reading transaction."""

        def work() -> T:
            with self._database.reading() as connection:
                return query(connection)

        return await run_in_threadpool(work)

    @asynccontextmanager
    async def writing(self, principal: str, purpose: str) -> AsyncIterator[FileUpload]:
        """Write a new file; it is removed again unless `FileUpload.complete` is called. Raises StoreError."""
        file = StoredFile(f"file-{uuid.uuid4().hex}", principal, "", purpose, time.time_ns())
        file = replace(file, owner=self._database.server)
        await self._journal.write(partial(files.create, file=file))
        upload = FileUpload(self._journal, file, self.limits)
        try:
            yield upload
        finally:
            if not upload.completed:
                await asyncio.shield(self._journal.write(partial(files.remove, file=file.id)))

    async def get(self, principal: str, file: str) -> StoredFile:
        """Return a principal's file. Raises RequestError 404."""
        found = await self.read(lambda connection: files.get(connection, principal, file))
        if found is None or (found.expires is not None and found.expires <= time.time_ns()):
            raise no_file(file)
        return found

    async def page(
        self, principal: str, limit: int, after: str | None, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of a principal's files, the latest first, and whether more follow."""
        found = await self.read(lambda connection: files.listed(connection, principal, limit + 1, after, purpose))
        return found[:limit], len(found) > limit

    async def delete(self, principal: str, file: str) -> None:
        """Remove a principal's file. Raises RequestError: 404, or 409 while a batch reads it."""

        def work(connection: Connection) -> bool | None:
            if files.get(connection, principal, file) is None:
                return None
            if files.in_use(connection, file):
                return False
            files.remove(connection, file)
            return True

        done = await self._journal.write(work)
        if done is None:
            raise no_file(file)
        if not done:
            raise RequestError("A batch that has not ended reads this file.", status=409, code="file_in_use")

    def content(self, file: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes in chunks."""
        return iterate_in_threadpool(self.chunks(file))

    def chunks(self, file: str) -> Iterator[bytes]:
        """Yield a file's bytes in chunks. Blocks."""
        return files.chunks(self._database, file)

    async def remove_left_over(self) -> None:
        """Remove what writers that are gone had written."""
        for file in await self.read(files.incomplete):
            await self._journal.write(partial(files.remove, file=file))

    async def remove_expired(self) -> None:
        """Remove expired files."""
        now = time.time_ns()
        for file in await self.read(lambda connection: files.expired(connection, now)):
            await self._journal.write(partial(files.remove, file=file))


class FileUpload:
    """A file that is being written."""

    def __init__(self, journal: Journal, file: StoredFile, limits: BatchLimits) -> None:
        self._journal = journal
        self._limits = limits
        self._held = bytearray()
        self._number = 0
        self.file = file
        self.completed = False

    async def write(self, data: bytes) -> None:
        """Add bytes. Raises RequestError 413 for a file that is too large, 507 where all files together are."""
        size = self.file.nbytes + len(data)
        if size > self._limits.file_bytes:
            raise RequestError(
                f"The file is larger than {self._limits.file_bytes} bytes.", status=413, code="file_too_large"
            )
        self.file = replace(self.file, nbytes=size)
        self._held += data
        while len(self._held) >= CHUNK:
            await self._flush()

    async def complete(self, name: str, keep_seconds: int | None = None) -> StoredFile:
        """Finish the file under a name, kept for so long (None: as the limits say); return it."""
        if self._held:
            await self._flush()
        keep = self._limits.keep_seconds if keep_seconds is None else keep_seconds
        self.file = replace(self.file, name=name, expires=self.file.created + keep * SECOND, complete=True)
        file = self.file
        if not await self._journal.write(lambda it: files.complete(it, file.id, file.name, file.expires)):
            raise StoreError("the file was removed while it was written: this server's part in the queue had ended")
        self.completed = True
        return file

    async def _flush(self) -> None:
        data = bytes(self._held[:CHUNK])
        del self._held[:CHUNK]
        file, number, most = self.file.id, self._number, self._limits.total_bytes

        def work(connection: Connection) -> bool:
            if files.total_bytes(connection) + len(data) > most:
                return False
            files.append(connection, file, number, data)
            return True

        if not await self._journal.write(work):
            raise RequestError(
                f"The files of this server would take more than {most} bytes.", status=507, code="files_full"
            )
        self._number += 1


def no_file(file: str) -> RequestError:
    return RequestError(f"There is no file {file[:100]!r}.", status=404, code="file_not_found", param="file_id")
