"""Uploaded and written files in the queue's database: a row per file, and its bytes in rows of `CHUNK` bytes.

Each function works in the transaction that it is given. A file is written chunk by chunk in short transactions and
exists for readers once it is complete. A principal sees its own files only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import cast

from sqlalchemy import Connection, RowMapping, Table, delete, func, insert, select, update

from runtime.queueing.database import QueueDatabase
from runtime.queueing.schema import BatchRow, FileChunkRow, FileRow
from runtime.queueing.servers import orphaned

#: Bytes of a chunk; the last one of a file may be shorter.
CHUNK = 1 << 20

_files, _chunks = cast(Table, FileRow.__table__), cast(Table, FileChunkRow.__table__)
_batches = cast(Table, BatchRow.__table__)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file.

    Fields:
        principal: Digest of the API key that it belongs to; "" where the server has none.
        nbytes: Its size; of an incomplete file, what has been written.
        created, expires: Nanoseconds of the wall clock; a file that does not expire has None.
        owner: Number of the server that writes it.
    """

    id: str
    principal: str
    name: str
    purpose: str
    created: int
    expires: int | None = None
    nbytes: int = 0
    complete: bool = False
    owner: int | None = None


def create(connection: Connection, file: StoredFile) -> None:
    """Begin a file without bytes; one of the same name is removed before."""
    remove(connection, file.id)
    row = {each.name: getattr(file, each.name) for each in fields(file)}
    connection.execute(insert(_files).values(row | {"nbytes": 0, "complete": False}))


def append(connection: Connection, file: str, number: int, data: bytes) -> None:
    """Write chunk `number` of a file, of `CHUNK` bytes unless it is the last one."""
    connection.execute(insert(_chunks).values(file=file, number=number, data=data))
    own = _files.c.id == file
    connection.execute(update(_files).where(own).values(nbytes=_files.c.nbytes + len(data)))


def complete(connection: Connection, file: str, name: str, expires: int | None) -> bool:
    """Make a file visible, under a name and until a time. Return False if it is gone."""
    values = {"complete": True, "name": name, "expires": expires}
    return connection.execute(update(_files).where(_files.c.id == file).values(values)).rowcount == 1


def get(connection: Connection, principal: str, file: str) -> StoredFile | None:
    """Return a principal's complete file."""
    own = (_files.c.id == file) & (_files.c.principal == principal) & _files.c.complete
    row = connection.execute(select(_files).where(own)).mappings().first()
    return None if row is None else _file(row)


def listed(
    connection: Connection, principal: str, limit: int, after: str | None = None, purpose: str | None = None
) -> list[StoredFile]:
    """Return a principal's complete files, the latest first: at most `limit`, those behind the file `after`."""
    query = select(_files).where((_files.c.principal == principal) & _files.c.complete)
    if purpose is not None:
        query = query.where(_files.c.purpose == purpose)
    if after is not None:
        made = select(_files.c.created).where((_files.c.id == after) & (_files.c.principal == principal))
        last = connection.execute(made).scalar()
        if last is None:
            return []
        query = query.where((_files.c.created < last) | ((_files.c.created == last) & (_files.c.id > after)))
    query = query.order_by(_files.c.created.desc(), _files.c.id).limit(limit)
    return [_file(row) for row in connection.execute(query).mappings()]


def in_use(connection: Connection, file: str) -> bool:
    """Return whether a batch that has not ended reads a file."""
    own = (_batches.c.input_file == file) & _batches.c.ended.is_(None)
    return connection.execute(select(_batches.c.id).where(own).limit(1)).first() is not None


def remove(connection: Connection, file: str) -> None:
    """Remove a file and its bytes, if it exists."""
    connection.execute(delete(_chunks).where(_chunks.c.file == file))
    connection.execute(delete(_files).where(_files.c.id == file))


def total_bytes(connection: Connection) -> int:
    """Return the bytes of all files, incomplete ones included."""
    return int(connection.execute(select(func.coalesce(func.sum(_files.c.nbytes), 0))).scalar_one())


def expired(connection: Connection, now: int) -> list[str]:
    """Return the expired files that no unfinished batch reads."""
    used = select(_batches.c.input_file).where(_batches.c.ended.is_(None))
    own = (_files.c.expires <= now) & _files.c.id.not_in(used)
    return list(connection.execute(select(_files.c.id).where(own)).scalars())


def incomplete(connection: Connection) -> list[str]:
    """Return the files that are not complete and that no server writes: what dead writers left."""
    query = select(_files.c.id).where(~_files.c.complete & orphaned(_files.c.owner))
    return list(connection.execute(query).scalars())


def read(connection: Connection, file: str, offset: int, length: int) -> bytes:
    """Return bytes [offset, offset + length) of a file; fewer at its end. Reads only the chunks that hold them."""
    if length <= 0:
        return b""
    first = offset // CHUNK
    span = _chunks.c.number.between(first, (offset + length - 1) // CHUNK)
    query = select(_chunks.c.data).where((_chunks.c.file == file) & span).order_by(_chunks.c.number)
    data = b"".join(connection.execute(query).scalars())
    return data[offset - first * CHUNK : offset - first * CHUNK + length]


def chunks(database: QueueDatabase, file: str) -> Iterator[bytes]:
    """Yield a file's bytes, each chunk in a transaction of its own. Ends early if the file is removed meanwhile."""
    number = 0
    while True:
        with database.reading() as connection:
            query = select(_chunks.c.data).where((_chunks.c.file == file) & (_chunks.c.number == number))
            data = connection.execute(query).scalar()
        if data is None:
            return
        yield data
        number += 1


def _file(row: RowMapping) -> StoredFile:
    return StoredFile(**row)
