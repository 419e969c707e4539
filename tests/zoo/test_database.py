"""A database fails in bounded time where its network hangs: the options of its connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from runtime.queueing.database import QueueDatabase
from tests import postgres
from zoo.catalog.engine import open_database
from zoo.database import BUSY_SECONDS, Database
from zoo.errors import StoreError

#: By name: what libpq is to be given.
WANTED = {
    "connect_timeout", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
}  # fmt: skip


def options_of(database: Database) -> dict[str, Any]:
    """Return what the driver is given for a connection; none is made."""
    given: dict[str, Any] = {}

    def connect(_dialect: object, _record: object, _args: object, options: dict[str, Any]) -> None:
        given.update(options)
        raise StoreError("no connection is wanted")

    event.listen(database.engine, "do_connect", connect)
    with pytest.raises(StoreError, match="no connection is wanted"), database.reading():
        pass
    return given


def test_a_connection_to_postgresql_is_given_up_before_the_writers_behind_it_are() -> None:
    given = options_of(open_database("postgresql+psycopg://zoo@database.example/zoo"))
    assert given.keys() >= WANTED
    assert given["keepalives"] == 1
    probed = given["keepalives_idle"] + given["keepalives_interval"] * given["keepalives_count"]
    for seconds in (given["connect_timeout"], given["tcp_user_timeout"] / 1000, probed):
        assert 5 <= seconds <= BUSY_SECONDS / 2


def test_what_the_url_says_of_the_network_holds() -> None:
    given = options_of(
        open_database("postgresql+psycopg://zoo@database.example/zoo?tcp_user_timeout=7000&keepalives=0")
    )
    assert given.keys() >= WANTED
    assert (given["tcp_user_timeout"], given["keepalives"]) == ("7000", "0")


def test_sqlite_is_given_nothing_of_it(tmp_path: Path) -> None:
    assert not options_of(open_database(f"sqlite:///{tmp_path / 'catalogue.sqlite'}")).keys() & WANTED
    with open_database(f"sqlite:///{tmp_path / 'catalogue.sqlite'}").reading() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1


@pytest.mark.postgres
def test_connections_of_catalogue_and_queue_have_the_options(postgres_server: str) -> None:
    url = postgres.new_database(postgres_server)
    catalogue, queue = open_database(url), QueueDatabase(url)
    with catalogue.reading() as one, queue.reading() as another, queue.writing() as writer:
        for connection in (one, another, writer):
            driver: Any = connection.connection.driver_connection
            given = {each.keyword.decode(): each.val for each in driver.pgconn.info if each.val is not None}
            assert int(given["tcp_user_timeout"]) < 1000 * BUSY_SECONDS / 2 and given["keepalives"] == b"1"
    catalogue.close()
    queue.close()
