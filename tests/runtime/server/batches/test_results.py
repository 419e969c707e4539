"""Taking a file in and writing results: broken off anywhere and done again, they are as if done once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.config import ServerConfig
from runtime.queueing import batches, files, requests
from runtime.queueing.batches import LineAnswer, StoredBatch
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import CHUNK, StoredFile
from runtime.queueing.records import StoredAnswer
from runtime.server.batches import intake, results
from runtime.server.batches.intake import StoppedEarly, take_in
from runtime.server.batches.lines import LineCheck
from runtime.server.batches.results import write_results
from tests.runtime.server.batches.asking import LIMIT, content_of, line

COUNT = 1300
NOW = 1_700_000_000_000_000_000
SERVICE: Any = SimpleNamespace(
    config=ServerConfig(), models=SimpleNamespace(find=lambda *_: None, knows=lambda _: False), key_of=lambda _: None
)


@pytest.fixture
def queue(tmp_path: Path) -> Any:
    database = QueueDatabase(str(tmp_path / "queue"))
    content = content_of(line(number) for number in range(COUNT))
    with database.writing() as connection:
        files.create(connection, StoredFile("file-in", "p", "in", "batch", NOW))
        for number, at in enumerate(range(0, len(content), CHUNK)):
            files.append(connection, "file-in", number, content[at : at + CHUNK])
        files.complete(connection, "file-in", "in", None)
        batches.put(
            connection, StoredBatch("batch_1", "p", "/v1/completions", "file-in", "24h", NOW, time.time_ns() + 10**13)
        )
    yield database
    database.close()


class StoppedAfter(threading.Event):
    """Is set once it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def stored(queue: QueueDatabase) -> StoredBatch:
    with queue.reading() as connection:
        found = batches.get(connection, "batch_1")
    assert found is not None
    return found


def content(queue: QueueDatabase, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(each) for each in b"".join(files.chunks(queue, file)).splitlines()]


@pytest.mark.parametrize("looks", [0, 5, COUNT // intake._PAUSE_LINES + 1])
def test_a_file_that_was_taken_in_in_part_is_taken_in_whole(queue: QueueDatabase, looks: int) -> None:
    with pytest.raises(StoppedEarly):
        take_in(SERVICE, queue, stored(queue), StoppedAfter(looks))
    with queue.reading() as connection:
        lines = batches.line_counts(connection, "batch_1").get("queued", 0)
    assert lines == (intake._LOT * 2 if looks > 5 else 0) and stored(queue).status == "validating"
    assert take_in(SERVICE, queue, stored(queue), threading.Event())
    assert (stored(queue).status, stored(queue).total) == ("in_progress", COUNT)
    with queue.writing() as connection:
        claimed = requests.claim(connection, owner=queue.server, batch="batch_1", limit=COUNT + 1)
        assert [each.line for each in claimed] == list(range(1, COUNT + 1))
        first, last = (claimed[at].source for at in (0, -1))
        assert first is not None and last is not None
        bodies = [files.read(connection, each.file, each.offset, each.length) for each in (first, last)]
        assert [json.loads(body) for body in bodies] == [line(0)["body"], line(COUNT - 1)["body"]]
        assert len({each.seed for each in claimed}) == len({each.id for each in claimed}) == COUNT


def test_work_on_lines_waits_a_little_for_interactive_requests(
    queue: QueueDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_PATIENCE", LIMIT)
    seen: list[str] = []
    here = iter([True] * 5)
    add = LineCheck.add

    def checked(self: LineCheck, number: int, offset: int, text: bytes) -> None:
        seen.append("line")
        add(self, number, offset, text)

    def busy() -> bool:
        seen.append("busy")
        return next(here, False)

    monkeypatch.setattr(LineCheck, "add", checked)
    assert take_in(SERVICE, queue, stored(queue), threading.Event(), busy=busy)
    some = ["line"] * intake._PAUSE_LINES
    assert seen[: 2 * len(some) + 6] == [*some, *["busy"] * 6, *some]
    assert seen[-COUNT // intake._LOT :] == ["busy"] * (COUNT // intake._LOT), "between two lots"

    monkeypatch.setattr(intake, "_PATIENCE", 0.001)
    with queue.writing() as connection:
        batches.change(connection, "batch_1", ("in_progress",), NOW, status="finalizing", becomes="expired")
    seen.clear()
    with pytest.raises(StoppedEarly):  # before any line has an answer
        write_results(queue, stored(queue), 1 << 20, 60, StoppedAfter(4), lambda: not seen.append("busy"))
    assert len(seen) >= 5, "lines without an answer take their time, too"

    seen.clear()
    answers = (LineAnswer(number, f"l{number}", "done", 200, b"{}") for number in range(1, COUNT + 1))
    monkeypatch.setattr(results._Answers, "at", lambda _, number: next(answers))
    write_results(queue, stored(queue), 1 << 20, 60, threading.Event(), lambda: not seen.append("busy"))
    assert stored(queue).completed == COUNT and len(seen) >= COUNT // results._PAGE, "not for ever"


@pytest.mark.parametrize("looks", [0, 7])
def test_results_that_were_written_in_part_are_written_whole(queue: QueueDatabase, looks: int) -> None:
    take_in(SERVICE, queue, stored(queue), threading.Event())
    with queue.writing() as connection:
        for each in requests.claim(connection, owner=queue.server, batch="batch_1", limit=COUNT - 100):
            number = each.line or 0
            answer = StoredAnswer(200 if number % 9 else 400, b'{"n":%d,"text":"%s"}' % (number, b"x" * 3000))
            requests.finish(connection, each.id, "done" if number % 9 else "failed", answer, NOW)
        batches.change(connection, "batch_1", ("in_progress",), NOW, status="finalizing", becomes="expired")
    with pytest.raises(StoppedEarly):
        write_results(queue, stored(queue), 1 << 20, 60, StoppedAfter(looks))
    assert stored(queue).status == "finalizing"
    with queue.reading() as connection:
        assert files.listed(connection, "p", 9, purpose="batch_output") == [], "what is not complete is not there"
    write_results(queue, stored(queue), 1 << 20, 60, threading.Event())
    ended = stored(queue)
    assert (ended.status, ended.total, ended.completed, ended.failed) == ("expired", COUNT, 1067, 133)
    good, bad = content(queue, ended.output_file), content(queue, ended.error_file)
    assert [each["response"]["body"]["n"] for each in good] == [n for n in range(1, COUNT - 99) if n % 9]
    assert [each["custom_id"] for each in bad] == [
        f"line-{n - 1}" for n in range(1, COUNT + 1) if n % 9 == 0 or n > COUNT - 100
    ]
    assert [each["error"]["code"] for each in bad if each["error"]] == ["batch_expired"] * 100
    with queue.reading() as connection:
        assert batches.line_counts(connection, "batch_1") == {}
        assert len(files.listed(connection, "p", 9, purpose="batch_output")) == 2 and not files.incomplete(connection)
    assert results._PAGE < 100
