"""The tables of the durable queue. Times are nanoseconds of the wall clock.

`VERSION` changes with the tables; a database of an older version is migrated (`migrations`), one of a newer refused.
`owner` columns: number of the server that has the row; None for no server.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from zoo.tables import named_constraints

VERSION = 3


class QueueBase(DeclarativeBase):
    """Base of all tables of the queue."""

    metadata = named_constraints()


class QueueRow(QueueBase):
    """The only row: the version of the tables, how many servers have opened the queue, and its random name."""

    __tablename__ = "queue"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    version: Mapped[int] = mapped_column(Integer)
    openings: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str] = mapped_column(String(32))


class ServerRow(QueueBase):
    """A server that takes part (`servers`). Its number is that of its opening: no two lives of servers have the same.

    Columns:
        expires: Microseconds of the database's clock at which its lease ends, unless it is renewed.
    """

    __tablename__ = "queue_servers"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    expires: Mapped[int] = mapped_column(BigInteger)


class RequestRow(QueueBase):
    """A request, as `records.DurableRequest`.

    Columns:
        begun: Since it was claimed last, its sequences were opened in the scheduler.
        progress: Number of its latest events when they were opened last, -1 for none.
        answer, stream: Compressed (zstd).
    """

    __tablename__ = "queue_requests"
    __table_args__ = (
        UniqueConstraint("principal", "key"),
        Index(None, "state", "batch", "priority", "created"),
        Index(None, "batch", "line"),
        Index(None, "ended"),
    )
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    principal: Mapped[str] = mapped_column(String(64))
    key: Mapped[str | None] = mapped_column(String(64))
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    file: Mapped[str | None] = mapped_column(String(128))
    offset: Mapped[int | None] = mapped_column(BigInteger)
    length: Mapped[int | None] = mapped_column(BigInteger)
    seed: Mapped[int] = mapped_column(BigInteger)
    created: Mapped[int] = mapped_column(BigInteger)
    deadline: Mapped[int | None] = mapped_column(BigInteger)
    priority: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str] = mapped_column(Text)
    version: Mapped[str] = mapped_column(String(128))
    batch: Mapped[str | None] = mapped_column(String(128))
    line: Mapped[int | None] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int] = mapped_column(Integer)
    owner: Mapped[int | None] = mapped_column(BigInteger)
    begun: Mapped[bool] = mapped_column(Boolean)
    progress: Mapped[int] = mapped_column(BigInteger)
    ended: Mapped[int | None] = mapped_column(BigInteger)
    status: Mapped[int | None] = mapped_column(Integer)
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
    stream: Mapped[bytes | None] = mapped_column(LargeBinary)


class EventRow(QueueBase):
    """Token events of a request that has not ended, from number `ordinal` on (`records.encode_events`)."""

    __tablename__ = "queue_events"
    __table_args__ = ({"sqlite_with_rowid": False},)
    request: Mapped[str] = mapped_column(ForeignKey("queue_requests.id", ondelete="CASCADE"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    events: Mapped[bytes] = mapped_column(LargeBinary)


class UsageRow(QueueBase):
    """What a request of a client has used, as `usage.RequestUsage`, until the catalogue has counted it."""

    __tablename__ = "queue_usage"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    principal: Mapped[str] = mapped_column(String(64), index=True)
    model: Mapped[str] = mapped_column(Text)
    day: Mapped[str] = mapped_column(String(10))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    cost: Mapped[int] = mapped_column(BigInteger)


class FileRow(QueueBase):
    """A file, as `files.StoredFile`."""

    __tablename__ = "queue_files"
    __table_args__ = (Index(None, "principal", "created"), Index(None, "expires"))
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    principal: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(32))
    created: Mapped[int] = mapped_column(BigInteger)
    expires: Mapped[int | None] = mapped_column(BigInteger)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    complete: Mapped[bool] = mapped_column(Boolean)
    owner: Mapped[int | None] = mapped_column(BigInteger)


class FileChunkRow(QueueBase):
    """Bytes [number * CHUNK, ...) of a file (`files.CHUNK`)."""

    __tablename__ = "queue_file_chunks"
    file: Mapped[str] = mapped_column(ForeignKey("queue_files.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class BatchRow(QueueBase):
    """A batch, as `batches.StoredBatch`; `document` columns hold JSON."""

    __tablename__ = "queue_batches"
    __table_args__ = (Index(None, "principal", "created"), Index(None, "status"), Index(None, "input_file"))
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    principal: Mapped[str] = mapped_column(String(64))
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file: Mapped[str] = mapped_column(String(128))
    window: Mapped[str] = mapped_column(String(32))
    created: Mapped[int] = mapped_column(BigInteger)
    deadline: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16))
    metadata_: Mapped[str] = mapped_column("metadata", Text)
    times: Mapped[str] = mapped_column(Text)
    errors: Mapped[str] = mapped_column(Text)
    output_file: Mapped[str | None] = mapped_column(String(128))
    error_file: Mapped[str | None] = mapped_column(String(128))
    total: Mapped[int] = mapped_column(Integer)
    completed: Mapped[int] = mapped_column(Integer)
    failed: Mapped[int] = mapped_column(Integer)
    becomes: Mapped[str] = mapped_column(String(16))
    owner: Mapped[int | None] = mapped_column(BigInteger)
    ended: Mapped[int | None] = mapped_column(BigInteger)
