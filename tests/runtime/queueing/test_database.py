"""The queue's database: a folder has one server, PostgreSQL several with leases; private; old ones migrated."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, inspect, text, update

from runtime.queueing import requests, servers, usage
from runtime.queueing.database import _ADVISORY_LOCK, LeaseLost, QueueDatabase
from runtime.queueing.journal import Journal
from runtime.queueing.schema import QueueRow
from tests import postgres
from tests.runtime.queueing.test_requests import GIVEN_UP, NOW, made
from tests.runtime.queueing.test_usage import used
from tests.runtime.server.harness import eventually
from zoo.errors import InputError, StoreBusy, StoreError

_HOLD = """
import sys, time
from runtime.queueing.database import QueueDatabase
queue = QueueDatabase(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    first = QueueDatabase(tmp_path / "queue")
    with pytest.raises(StoreBusy, match="another server has the queue"):
        QueueDatabase(tmp_path / "queue", patience=0.2)
    first.close()
    first.close()
    QueueDatabase(tmp_path / "queue", patience=30).close()
    with pytest.raises(StoreError, match="closed"), first.writing():
        pass


def test_a_killed_server_lets_its_folder_go(tmp_path: Path) -> None:
    target = str(tmp_path / "queue")
    child = subprocess.Popen([sys.executable, "-c", _HOLD, target], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(StoreBusy):
            QueueDatabase(target, patience=0.2)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
    QueueDatabase(target, patience=60).close()


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "queue"
    queue = QueueDatabase(folder)
    with queue.writing() as connection:
        connection.execute(update(QueueRow).values(openings=QueueRow.openings))
    assert queue.folder == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir() if each.name != "lock"}
    assert set(modes.values()) == {0o600}
    assert set(modes) == {"queue.sqlite", "queue.sqlite-wal", "queue.sqlite-shm"}
    queue.close()


def test_other_folders_and_databases_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(InputError, match="something else"):
        QueueDatabase(tmp_path)
    with pytest.raises(InputError, match="cannot be kept"):
        QueueDatabase(tmp_path / "note")
    with pytest.raises(InputError, match="postgresql"):
        QueueDatabase("mysql://host/queue")
    with pytest.raises(StoreError, match="database failed"):
        QueueDatabase(f"postgresql://zoo@/none?host={tmp_path}", patience=0)


def test_a_newer_version_is_refused(target: str) -> None:
    queue = QueueDatabase(target)
    with queue.writing() as connection:
        connection.execute(update(QueueRow).values(version=99))
    queue.close()
    with pytest.raises(StoreError, match="version 99"):
        QueueDatabase(target, patience=30)


def _shape(target: str) -> dict[str, list[str]]:
    queue = QueueDatabase(target)
    with queue.reading() as connection:
        found = inspect(connection)
        shape = {
            table: sorted(f"{each['name']} {each['type']} {each['nullable']}" for each in found.get_columns(table))
            for table in found.get_table_names()
        }
    queue.close()
    return shape


def without_usage(connection: Connection) -> None:
    """Take out what version 3 of the tables has added."""
    connection.execute(text("DROP TABLE queue_usage"))
    connection.execute(text("ALTER TABLE queue DROP COLUMN name"))


def test_tables_of_version_2_are_migrated_and_each_queue_gets_a_name_of_its_own(target: str, tmp_path: Path) -> None:
    wanted, names = _shape(target), set[str]()
    for _ in range(2):
        queue = QueueDatabase(target, patience=30)
        with queue.writing() as connection:
            names.add(usage.queue_name(connection))
            without_usage(connection)
            connection.execute(update(QueueRow).values(version=2))
        queue.close()
    assert _shape(target) == wanted
    with closing(QueueDatabase(target)) as queue, queue.writing() as connection:
        names.add(usage.queue_name(connection))
        requests.put(connection, [made(1, state="running")])
        assert requests.finish(connection, "cmpl-1", "done", GIVEN_UP, NOW, used=used("a"))
        assert usage.kept(connection, ["p"], 9) == [used("a")]
    with closing(QueueDatabase(tmp_path / "another")) as queue, queue.reading() as connection:
        names.add(usage.queue_name(connection))
    assert len(names) == 4 and "" not in names


def test_tables_of_version_1_are_migrated_with_their_rows(target: str) -> None:
    queue = QueueDatabase(target)
    with queue.writing() as connection:
        requests.put(connection, [made(1), made(2, state="running", attempts=2)])
    queue.close()
    wanted = _shape(target)
    queue = QueueDatabase(target)
    with queue._database.engine.begin() as connection:
        for table in ("queue_requests", "queue_files", "queue_batches"):
            connection.execute(text(f"ALTER TABLE {table} DROP COLUMN owner"))
        connection.execute(text("ALTER TABLE queue_requests DROP COLUMN begun"))
        connection.execute(text("DROP TABLE queue_servers"))
        without_usage(connection)
        connection.execute(update(QueueRow).values(version=1))
    with suppress(StoreError):
        queue.close()  # it has no part to end any more
    assert _shape(target) == wanted
    queue = QueueDatabase(target)
    with queue.writing() as connection:
        assert [(each.id, each.attempts) for each in requests.unfinished(connection)] == [("cmpl-1", 0), ("cmpl-2", 2)]
        requests.recover(connection, GIVEN_UP, NOW)
        assert [each.id for each in requests.adopt(connection, queue.server)] == ["cmpl-1", "cmpl-2"]
    queue.close()


# -- several servers ---------------------------------------------------------------------------------------------------


def touch(queue: QueueDatabase) -> None:
    with queue.writing() as connection:
        connection.execute(update(QueueRow).values(version=QueueRow.version))


@pytest.fixture
def shared(postgres_server: str) -> str:
    """An empty PostgreSQL database."""
    return postgres.new_database(postgres_server)


@pytest.mark.postgres
def test_a_lease_is_renewed_while_its_server_lives(shared: str) -> None:
    with closing(QueueDatabase(shared, lease=0.5)) as first, closing(QueueDatabase(shared)) as second:
        assert first.server != second.server
        for _ in range(10):
            time.sleep(0.15)
            with second.writing() as connection:
                assert servers.bury(connection, second.server) == []
        touch(first)


@pytest.mark.postgres
def test_a_server_without_its_lease_writes_nothing_until_it_has_joined_again(shared: str) -> None:
    first, second = QueueDatabase(shared, lease=0.2), QueueDatabase(shared)
    first._heart.stop()  # type: ignore[union-attr]
    old = first.server
    time.sleep(0.5)
    touch(first)  # no server has taken over: it may go on
    with second.writing() as connection:
        assert servers.bury(connection, second.server) == [old]
    for _ in range(2):
        with pytest.raises(LeaseLost):
            touch(first)
    assert first.has_lost_lease
    first.rejoin()
    touch(first)
    assert first.server not in (old, second.server)
    first.close()
    second.close()


@pytest.mark.postgres
def test_no_server_takes_over_while_a_server_writes(shared: str) -> None:
    """The fence holds also for a transaction that began in time and ends late."""
    first, second = QueueDatabase(shared, lease=2.0), QueueDatabase(shared)
    first._heart.stop()  # type: ignore[union-attr]
    with first.writing() as connection:
        for _ in range(30):
            time.sleep(0.1)
            connection.execute(text("SELECT 1"))  # slow, not stopped
        with second.writing() as other:
            assert servers.bury(other, second.server) == []
        requests.put(connection, [made(1, owner=first.server)])
    with second.writing() as other:
        assert servers.bury(other, second.server) == [first.server]
        assert [each.id for each in requests.adopt(other, second.server)] == ["cmpl-1"]
    with closing(first), closing(second):
        pass


@pytest.mark.postgres
def test_a_server_that_is_stopped_in_a_transaction_is_buried_and_its_transaction_undone(shared: str) -> None:
    first, second = QueueDatabase(shared, lease=0.3), QueueDatabase(shared)
    first._heart.stop()  # type: ignore[union-attr]
    old = first.server

    def buried() -> bool:
        with second.writing() as connection:
            return servers.bury(connection, second.server) == [old]

    with pytest.raises(StoreError), first.writing() as connection:
        requests.put(connection, [made(1, owner=old)])
        assert eventually(buried, 30)
        requests.put(connection, [made(2, owner=old)])
    with pytest.raises(LeaseLost):
        touch(first)
    with second.reading() as reader:
        assert requests.get(reader, "cmpl-1") is None
    first.rejoin()
    touch(first)
    first.close()
    second.close()


@pytest.mark.postgres
def test_a_slow_server_does_not_bury_itself(shared: str) -> None:
    """One that could not renew its lease in time, and looks then for what dead ones have left."""
    with closing(QueueDatabase(shared, lease=0.2)) as queue:
        queue._heart.stop()  # type: ignore[union-attr]
        time.sleep(0.5)
        with queue.writing() as connection:
            assert servers.bury(connection, queue.server) == []
        touch(queue)


@pytest.mark.postgres
def test_servers_claim_beside_each_other_and_nothing_twice(shared: str) -> None:
    first, second = QueueDatabase(shared), QueueDatabase(shared)
    with first.writing() as connection:
        requests.put(connection, [made(i) for i in range(9)])
    with first.writing() as one, second.writing() as two:
        claimed = requests.claim(one, owner=first.server, limit=4), requests.claim(two, owner=second.server, limit=9)
        assert [len(each) for each in claimed] == [4, 5]
        assert not {each.id for each in claimed[0]} & {each.id for each in claimed[1]}
    first.close()
    second.close()


@pytest.mark.postgres
def test_a_server_of_version_1_keeps_others_out(shared: str) -> None:
    QueueDatabase(shared).close()
    engine = create_engine(shared)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
        with pytest.raises(StoreBusy, match="older version"):
            QueueDatabase(shared, patience=0.2)
    engine.dispose()


@pytest.mark.postgres
def test_a_session_that_ends_within_a_transaction_fails_all_writes_of_it_as_the_stores_errors(shared: str) -> None:
    """Else a request would end with a defect of the server: with the store's error it is put down and tried again."""
    queue = QueueDatabase(shared)

    async def write() -> None:
        journal = Journal(queue, gather=0.05)
        ended = journal.write(lambda c: c.execute(text("SELECT pg_terminate_backend(pg_backend_pid())")).all())
        event = journal.append("cmpl-1", 0, b"a")
        for outcome in await asyncio.gather(ended, event, return_exceptions=True):
            assert isinstance(outcome, StoreError), repr(outcome)
        assert await journal.append("cmpl-1", 0, b"a")
        await journal.close()

    with queue.writing() as connection:
        requests.put(connection, [made(1, state="running")])
    asyncio.run(write())
    queue.close()


@pytest.mark.postgres
def test_a_server_whose_sessions_were_ended_goes_on(shared: str) -> None:
    queue = QueueDatabase(shared)
    engine = create_engine(shared)
    with engine.connect() as connection:
        ended = "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        connection.execute(text(f"{ended} AND datname = current_database()"))
    engine.dispose()
    with pytest.raises(StoreError):
        touch(queue)
    touch(queue)
    queue.close()
