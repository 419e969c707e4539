"""Write the output and error files of a batch from its lines' answers, in the order of its input file.

Blocks: runs on a worker thread, with one chunk of each file and one page of answers in memory. The files and the
batch's end become visible in one transaction, so that a server that dies meanwhile writes them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from runtime.queueing import batches, files
from runtime.queueing.batches import LineAnswer, StoredBatch
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import CHUNK, StoredFile
from runtime.server.batches.documents import CANCELLED, EXPIRED, SECOND, answered_line, derived, unanswered_line
from runtime.server.batches.intake import pause
from runtime.server.batches.lines import custom_id_of, split_lines

#: Answers read in one transaction, and lines removed in one.
_PAGE = 64
_DROPPED = 500


@dataclass(slots=True)
class _Counts:
    completed: int = 0
    failed: int = 0


class _ResultFile:
    """A file of results; it is made with its first line."""

    def __init__(self, database: QueueDatabase, batch: StoredBatch, kind: str, keep_seconds: int) -> None:
        now = time.time_ns()
        name = f"{batch.id}_{kind}.jsonl"
        self._database = database
        self.expires = now + keep_seconds * SECOND
        self.file = StoredFile(derived("file-", batch.id, kind), batch.principal, name, "batch_output", now)
        self.file = replace(self.file, owner=database.server)
        self._held = bytearray()
        self._number = 0
        self.begun = False

    def add(self, line: bytes) -> None:
        if not self.begun:
            with self._database.writing() as connection:
                files.create(connection, self.file)
            self.begun = True
        self._held += line
        while len(self._held) >= CHUNK:
            self._flush()

    def flush(self) -> str | None:
        """Write what is held; return the file's id, None if it has no lines."""
        if self._held:
            self._flush()
        return self.file.id if self.begun else None

    def _flush(self) -> None:
        data = bytes(self._held[:CHUNK])
        del self._held[:CHUNK]
        with self._database.writing(synced=False) as connection:
            files.append(connection, self.file.id, self._number, data)
        self._number += 1


def write_results(
    database: QueueDatabase,
    batch: StoredBatch,
    line_bytes: int,
    keep_seconds: int,
    stopping: threading.Event,
    busy: Callable[[], bool] = lambda: False,
) -> None:
    """Write the files of a batch that is `finalizing` or `cancelling`, and end it as it `becomes`.

    Lines without an answer are in the error file, as expired or cancelled. `busy`: see `intake.take_in`. Raises
    StoppedEarly.
    """
    written = {kind: _ResultFile(database, batch, kind, keep_seconds) for kind in ("output", "error")}
    missing = CANCELLED if batch.becomes == "cancelled" else EXPIRED
    counts = _Counts()
    answers = _Answers(database, batch.id)
    if batch.total:
        for number, _, text in split_lines(files.chunks(database, batch.input_file), line_bytes):
            if number % _PAGE == 0:
                pause(stopping, busy)
            found, custom_id = answers.at(number), custom_id_of(text)
            if found is None or found.status is None or found.document is None or found.state == "cancelled":
                written["error"].add(unanswered_line(batch.id, number, custom_id, missing))
                continue
            good = found.state == "done" and found.status < 400
            counts.completed += good
            counts.failed += not good
            line = answered_line(batch.id, number, custom_id, found.request, found.status, found.document)
            written["output" if good else "error"].add(line)
    named = {f"{kind}_file": each.flush() for kind, each in written.items()}
    now = time.time_ns()
    with database.writing() as connection:
        for each in written.values():
            if each.begun:
                files.complete(connection, each.file.id, each.file.name, each.expires)
        batches.change(
            connection, batch.id, ("finalizing", "cancelling"), now, status=batch.becomes,
            completed=counts.completed, failed=counts.failed, **named,
        )  # fmt: skip
    _drop_lines(database, batch.id)


def drop_left_lines(database: QueueDatabase) -> None:
    """Remove the lines of batches that have ended, where a server has died before it did."""
    with database.reading() as connection:
        left = batches.ended_with_lines(connection)
    for batch in left:
        _drop_lines(database, batch)


def _drop_lines(database: QueueDatabase, batch: str) -> None:
    """Remove the lines of a batch that has ended: their answers are in the files."""
    dropped = _DROPPED
    while dropped == _DROPPED:
        with database.writing(synced=False) as connection:
            dropped = batches.drop_lines(connection, batch, _DROPPED)
        time.sleep(0.001)  # the journal may write between two lots


class _Answers:
    """The answers of a batch's lines, read page by page in order."""

    def __init__(self, database: QueueDatabase, batch: str) -> None:
        self._pages = self._read(database, batch)
        self._next = next(self._pages, None)

    def at(self, line: int) -> LineAnswer | None:
        """Return the answer of a line; lines are asked for in order."""
        while self._next is not None and self._next.line < line:
            self._next = next(self._pages, None)
        return self._next if self._next is not None and self._next.line == line else None

    @staticmethod
    def _read(database: QueueDatabase, batch: str) -> Iterator[LineAnswer]:
        behind = 0
        while True:
            with database.reading() as connection:
                page = batches.answers(connection, batch, behind, _PAGE)
            yield from page
            if len(page) < _PAGE:
                return
            behind = page[-1].line
