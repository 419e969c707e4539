"""Files in the queue's database: their bytes, who sees them, and when they go."""

from __future__ import annotations

import random
from dataclasses import replace

from runtime.queueing import batches, files
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import CHUNK, StoredFile
from tests.runtime.queueing.test_batches import batch

NOW = 1_700_000_000_000_000_000


def file(number: int, **changes: object) -> StoredFile:
    one = StoredFile(f"file-{number}", "p", "in.jsonl", "batch", NOW + number, NOW + 1000)
    return replace(one, **changes)  # type: ignore[arg-type]


def write(queue: QueueDatabase, one: StoredFile, content: bytes = b"x") -> None:
    with queue.writing() as connection:
        files.create(connection, one)
        for number, at in enumerate(range(0, len(content), CHUNK)):
            files.append(connection, one.id, number, content[at : at + CHUNK])
        files.complete(connection, one.id, one.name, one.expires)


def test_bytes_come_back_whole_and_in_ranges(queue: QueueDatabase) -> None:
    content = random.Random(1).randbytes(2 * CHUNK + 77)
    write(queue, file(1), content)
    assert b"".join(files.chunks(queue, "file-1")) == content
    with queue.reading() as connection:
        assert files.get(connection, "p", "file-1") == file(1, nbytes=len(content), complete=True)
        for offset, length in (
            (0, 5),
            (CHUNK - 3, 6),
            (CHUNK - 3, CHUNK + 9),
            (2 * CHUNK, 500),
            (5 * CHUNK, 1),
            (3, 0),
        ):
            assert files.read(connection, "file-1", offset, length) == content[offset : offset + length]
        assert files.total_bytes(connection) == len(content)


def test_a_principal_sees_its_own_complete_files(queue: QueueDatabase) -> None:
    for number in range(1, 5):
        write(queue, file(number, principal="pq"[number % 2], purpose="batch" if number < 4 else "batch_output"))
    with queue.writing() as connection:
        files.create(connection, file(9, principal="p"))
    with queue.reading() as connection:
        assert [each.id for each in files.listed(connection, "p", 9)] == ["file-4", "file-2"]
        assert [each.id for each in files.listed(connection, "p", 9, purpose="batch")] == ["file-2"]
        assert [each.id for each in files.listed(connection, "p", 1)] == ["file-4"]
        assert [each.id for each in files.listed(connection, "p", 9, after="file-4")] == ["file-2"]
        assert files.listed(connection, "p", 9, after="file-3") == [], "a file of another principal"
        assert files.get(connection, "p", "file-1") is None
        assert files.get(connection, "p", "file-9") is None
        assert files.incomplete(connection) == ["file-9"]


def test_a_file_goes_with_its_bytes_once_no_batch_reads_it(queue: QueueDatabase) -> None:
    for number in (1, 2):
        write(queue, file(number))
    with queue.writing() as connection:
        batches.put(connection, batch(1, input_file="file-1"))
        assert (files.in_use(connection, "file-1"), files.in_use(connection, "file-2")) == (True, False)
        assert files.expired(connection, NOW + 999) == []
        assert files.expired(connection, NOW + 1000) == ["file-2"]
        batches.change(connection, "batch_1", ("validating",), NOW, status="failed")
        assert sorted(files.expired(connection, NOW + 1000)) == ["file-1", "file-2"]
        files.remove(connection, "file-1")
        assert files.total_bytes(connection) == 1 and files.read(connection, "file-1", 0, 9) == b""
    assert list(files.chunks(queue, "file-1")) == []


def test_a_file_that_is_written_again_is_a_new_one(queue: QueueDatabase) -> None:
    write(queue, file(1), b"a" * (CHUNK + 1))
    write(queue, file(1), b"b")
    assert list(files.chunks(queue, "file-1")) == [b"b"]
