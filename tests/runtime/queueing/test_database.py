"""The queue's database: one server at a time, which lets it go however it dies; private; only of its own version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text, update

from runtime.queueing.database import QueueDatabase
from runtime.queueing.schema import QueueRow
from zoo.errors import InputError, StoreBusy, StoreError

_HOLD = """
import sys, time
from runtime.queueing.database import QueueDatabase
queue = QueueDatabase(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_server_is_refused_until_the_first_has_closed(target: str) -> None:
    first = QueueDatabase(target)
    with pytest.raises(StoreBusy, match="another server has the queue"):
        QueueDatabase(target, patience=0.2)
    first.close()
    first.close()
    QueueDatabase(target, patience=30).close()
    with pytest.raises(StoreError, match="closed"), first.writing():
        pass


def test_a_killed_server_lets_the_queue_go(target: str) -> None:
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


def test_another_version_is_refused(target: str) -> None:
    queue = QueueDatabase(target)
    with queue.writing() as connection:
        connection.execute(update(QueueRow).values(version=99))
    queue.close()
    with pytest.raises(StoreError, match="version 99"):
        QueueDatabase(target, patience=30)


@pytest.mark.postgres
def test_a_server_whose_session_was_ended_goes_on_unless_another_had_the_queue(postgres_server: str) -> None:
    from tests.zoo import postgres

    target = postgres.new_database(postgres_server)
    queue = QueueDatabase(target)

    def end_sessions() -> None:
        engine = create_engine(target)
        with engine.connect() as connection:
            ended = "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            connection.execute(text(f"{ended} AND datname = current_database()"))
        engine.dispose()

    def write() -> None:
        with queue.writing() as connection:
            connection.execute(update(QueueRow).values(version=QueueRow.version))

    end_sessions()
    with pytest.raises(StoreError):
        write()
    write()
    end_sessions()
    QueueDatabase(target, patience=30).close()
    with pytest.raises(StoreError):
        write()
    with pytest.raises(StoreError, match="taken the queue over"):
        write()
    queue.close()
