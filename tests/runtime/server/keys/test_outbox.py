"""Usage of durable requests comes from the queue to the catalogue once, over failures, deaths and several servers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.queueing import usage
from runtime.queueing.database import QueueDatabase
from runtime.queueing.usage import RequestUsage
from runtime.server.keys import key_book, outbox
from runtime.server.keys.key_book import KeyBook
from runtime.server.keys.outbox import Outbox
from tests import postgres
from tests.runtime.server.keys.test_key_book import is_admitted, put_prices
from zoo.catalog import Catalog, Writer
from zoo.errors import StoreError, StoreFull
from zoo.keys import make_key, principal_of
from zoo.money import amount_of
from zoo.store import Store

DAY = "2026-01-31"


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "PAUSE", 600.0)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest) -> Callable[[], str | None]:
    """Return what makes an empty database for a queue or a catalogue; None: a file."""
    if request.param == "sqlite":
        return lambda: None
    server = request.getfixturevalue("postgres_server")
    return lambda: postgres.new_database(server)


@pytest.fixture
def store(tmp_path: Path, url: Callable[[], str | None]) -> Iterator[Store]:
    with Store.open(tmp_path / "store", url()) as store:
        yield store


@pytest.fixture
def queue(tmp_path: Path, url: Callable[[], str | None]) -> Iterator[QueueDatabase]:
    database = QueueDatabase(url() or tmp_path / "queue")
    yield database
    database.close()


@pytest.fixture
def owner(store: Store) -> str:
    return principal_of(make_key(store, "k", tokens_per_day=10))


def keep(queue: QueueDatabase, owner: str, *ids: str, tokens: int = 1) -> None:
    """Keep the usage of answers, as servers do when these end."""
    with queue.writing() as connection:
        for name in ids:
            usage.put(connection, RequestUsage(owner, "m", DAY, tokens, 0, 0, 0, name))


def left(queue: QueueDatabase) -> set[str]:
    with queue.reading() as connection:
        return {each.id for each in usage.kept(connection, usage.principals(connection), 1 << 20)}


def counted(store: Store) -> tuple[int, int]:
    """Return answers and tokens in the catalogue."""
    with store.catalog.reading() as reader:
        found = reader.key_usage("2000-01-01")
    return sum(each.answers for each in found), sum(each.tokens for each in found)


def marks(store: Store, queue: QueueDatabase) -> set[str]:
    with queue.reading() as connection, store.catalog.reading() as reader:
        return reader.folded_usage(usage.queue_name(connection))


def full(*_: Any, **__: Any) -> Any:
    raise StoreFull("no space left")


def test_what_is_kept_is_counted_once_and_nothing_of_it_stays(queue: QueueDatabase, store: Store, owner: str) -> None:
    box = Outbox(queue)
    keep(queue, owner, "a", "b", tokens=2)
    for names in ((), ("c",)):
        keep(queue, owner, *names, tokens=3)
        assert box.fold(store.catalog).whole
        assert box.fold(store.catalog).whole
        assert (left(queue), marks(store, queue)) == (set(), set())
    assert counted(store) == (3, 7)


def test_rows_are_dropped_durably(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a power cut brought back after its mark was dropped would be counted again."""
    keep(queue, owner, "a")
    writing, synced = queue.writing, list[bool]()

    def spied(durably: bool = True) -> Any:
        synced.append(durably)
        return writing(durably)

    monkeypatch.setattr(queue, "writing", spied)
    Outbox(queue).fold(store.catalog)
    assert (synced, left(queue)) == ([True], set())


def test_many_rows_are_counted_in_several_transactions(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [principal_of(make_key(store, f"k{number}")) for number in range(5)]
    for number, each in enumerate([owner, *others]):
        keep(queue, each, *(f"{number}-{row}" for row in range(9)))
    monkeypatch.setattr(outbox, "AT_ONCE", 4)
    monkeypatch.setattr(outbox, "_PRINCIPALS", 2)
    assert Outbox(queue).fold(store.catalog).whole
    assert (counted(store), left(queue)) == ((54, 54), set())


def test_a_failure_anywhere_loses_nothing_and_is_logged_once(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(queue, owner, "a", "b")
    failing = [
        (queue, "reading", "cannot be read", True),
        (store.catalog, "writing", "waits in the queue", True),
        (Writer, "fold_usage", "waits in the queue", True),
        (queue, "writing", "stays in the queue", False),  # after the catalogue has counted it
    ]
    for target, name, message, uncounted in failing:
        box = Outbox(queue)
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "blockzoo.server"):
            patch.setattr(target, name, full)
            for _ in range(3):
                assert box.fold(store.catalog).whole is not uncounted
        assert [message in each.message for each in caplog.records] == [True], message
        assert left(queue) == {"a", "b"}
        assert counted(store) == ((0, 0) if uncounted else (2, 2))
    keep(queue, owner, "c")
    assert Outbox(queue).fold(store.catalog).whole
    assert (counted(store), left(queue)) == ((3, 3), set())


def test_nothing_is_dropped_that_the_catalogue_could_not_commit(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(queue, owner, "a")
    writing = store.catalog.writing

    @contextmanager
    def undone() -> Iterator[Writer]:
        with writing() as writer:
            yield writer
            raise StoreFull("no space left for the catalogue")

    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "writing", undone)
        assert not Outbox(queue).fold(store.catalog).whole
    assert (counted(store), left(queue), marks(store, queue)) == ((0, 0), {"a"}, set())
    assert Outbox(queue).fold(store.catalog).whole
    assert counted(store) == (1, 1)


def test_a_server_that_was_stopped_while_others_counted_counts_nothing_again(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen the rows, and goes on once they are counted and dropped, and their marks are gone, too."""
    seen, go_on, stopped, writing = threading.Event(), threading.Event(), Outbox(queue), store.catalog.writing

    def waits() -> Any:
        if threading.current_thread() is not threading.main_thread():
            seen.set()
            assert go_on.wait(60)
        return writing()

    monkeypatch.setattr(store.catalog, "writing", waits)
    keep(queue, owner, "a", "b")
    with ThreadPoolExecutor(1) as pool:
        folding = pool.submit(stopped.fold, store.catalog)
        assert seen.wait(60)
        for _ in range(2):
            assert Outbox(queue).fold(store.catalog).whole
        assert (left(queue), marks(store, queue)) == (set(), set())
        go_on.set()
        assert folding.result(60).whole
    assert counted(store) == (2, 2)


def test_many_servers_count_at_once(queue: QueueDatabase, store: Store, owner: str) -> None:
    boxes, over = [Outbox(queue) for _ in range(4)], threading.Event()

    def fold(box: Outbox) -> None:
        while not over.is_set():
            box.fold(store.catalog)
        assert box.fold(store.catalog).whole

    with ThreadPoolExecutor(4) as pool:
        folding = [pool.submit(fold, box) for box in boxes]
        for number in range(60):
            keep(queue, owner, f"{number}-a", f"{number}-b")
        over.set()
        for each in folding:
            each.result(120)
    assert (counted(store), left(queue), marks(store, queue)) == ((120, 120), set(), set())


def test_queues_of_one_catalogue_leave_each_others_marks(
    queue: QueueDatabase, store: Store, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = QueueDatabase(tmp_path / "another")
    keep(queue, owner, "a")
    keep(another, owner, "a", tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(usage, "drop", full)
        Outbox(queue).fold(store.catalog)
    for _ in range(2):
        Outbox(another).fold(store.catalog)
    assert (marks(store, queue), marks(store, another)) == ({"a"}, set())
    Outbox(queue).fold(store.catalog)
    assert counted(store) == (2, 3)
    another.close()


def test_usage_of_a_key_that_the_catalogue_does_not_know_stays(
    queue: QueueDatabase, store: Store, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(queue, "0" * 64, "of another catalogue")
    keep(queue, owner, "a")
    with caplog.at_level(logging.WARNING, "blockzoo.server"):
        for _ in range(2):
            assert Outbox(queue).fold(store.catalog).whole
    assert "usage of 1 keys that this catalogue does not know" in caplog.text
    assert (counted(store), left(queue)) == ((1, 1), {"of another catalogue"})


def test_the_usage_of_a_revoked_key_is_counted(queue: QueueDatabase, store: Store, owner: str) -> None:
    with store.catalog.writing() as writer:
        writer.revoke_key("k")
    keep(queue, owner, "a")
    assert Outbox(queue).fold(store.catalog).whole
    assert counted(store) == (1, 1)


# -- bounds ------------------------------------------------------------------------------------------------------------


def end(queue: QueueDatabase, book: KeyBook, owner: str, tokens: int) -> None:
    """Let a durable request end on a server."""
    used = book.usage_of(owner, "m", tokens, 0)
    assert used is not None
    with queue.writing() as connection:
        usage.put(connection, used)
    book.settle(used)


def broken(*_: Any) -> Any:
    raise StoreError("the database is gone")


@asynccontextmanager
async def server(queue: QueueDatabase, store: Store) -> AsyncIterator[KeyBook]:
    """Open the keys of a server of the queue, and close them."""
    book = KeyBook(store, day=lambda: DAY, outbox=Outbox(queue))
    await book.open()
    try:
        yield book
    finally:
        await book.close()


@contextmanager
def no_catalogue(monkeypatch: pytest.MonkeyPatch, store: Store) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in ("writing", "reading"):
            patch.setattr(store.catalog, name, broken)
        yield


async def exchange_fails(book: KeyBook) -> None:
    with pytest.raises(StoreError):
        await book._exchange()


@pytest.mark.parametrize("bound", ["tokens_per_day", "money_per_day", "tokens_per_month", "money_per_month"])
def test_bounds_count_what_lies_in_the_queue_while_the_catalogue_is_away(
    queue: QueueDatabase, store: Store, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    most: dict[str, Any] = {bound: amount_of("0.001") if bound.startswith("money") else 10}
    owner = principal_of(make_key(store, "bounded", **most))
    put_prices(store, ("m", "100", "100"))  # 10 tokens are 0.001

    async def act() -> None:
        async with server(queue, store) as one, server(queue, store) as two:
            with no_catalogue(monkeypatch, store):
                end(queue, one, owner, 6)
                for _ in range(3):
                    end(queue, two, owner, 1)
                    for book in (one, two):
                        await exchange_fails(book)
                assert is_admitted(one, owner) and is_admitted(two, owner), "9 of 10"
                end(queue, one, owner, 1)
                assert not is_admitted(one, owner)
                await exchange_fails(two)
                assert not is_admitted(two, owner), "what the other server has is in the queue"
            for book in (one, two):
                await book._exchange()
                assert not is_admitted(book, owner)
                used = book._used("bounded", "day")
                assert (used.tokens, used.answers) == (10, 5), "counted once"

    asyncio.run(act())
    assert (counted(store), left(queue)) == ((5, 10), set())


def test_a_server_that_is_cut_from_the_catalogue_keeps_counting_what_others_have_folded(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        async with server(queue, store) as cut:
            end(queue, cut, owner, 10)
            assert Outbox(queue).fold(store.catalog).whole
            with no_catalogue(monkeypatch, store):
                for _ in range(2):
                    await exchange_fails(cut)
                    assert not is_admitted(cut, owner)
            await cut._exchange()
            assert cut._used("k", "day").tokens == 10

    asyncio.run(act())


def test_a_new_server_counts_what_the_one_before_has_left_before_it_answers(
    queue: QueueDatabase, store: Store, owner: str
) -> None:
    keep(queue, owner, "a", tokens=10)

    async def act() -> None:
        async with server(queue, store) as book:
            assert not is_admitted(book, owner)
            assert book.totals == {}

    asyncio.run(act())


def test_a_queue_that_is_away_keeps_nothing_else_from_the_catalogue(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        async with server(queue, store) as book:
            end(queue, book, owner, 2)
            book.charge(owner, "m", 3, 0)
            with monkeypatch.context() as patch:
                patch.setattr(queue, "reading", broken)
                await book._exchange()
                assert counted(store) == (1, 3)
                assert book._used("k", "day").tokens == 5

    asyncio.run(act())
    assert counted(store) == (2, 5)


def test_a_queue_that_does_not_answer_keeps_no_key_from_being_counted_and_known(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_book, "QUEUE_SECONDS", 0.05)
    answers, reading = threading.Event(), queue.reading

    def waits() -> Any:
        assert answers.wait(60)
        return reading()

    async def act() -> None:
        async with server(queue, store) as book:
            end(queue, book, owner, 4)
            book.charge(owner, "m", 5, 0)
            with monkeypatch.context() as patch:
                patch.setattr(queue, "reading", waits)
                for _ in range(2):
                    await asyncio.wait_for(book._exchange(), 30)
                assert counted(store) == (1, 5) and book._used("k", "day").tokens == 9
                secret = make_key(store, "later")
                await book._exchange()
                assert book.find([secret]) is not None
                end(queue, book, owner, 1)
                assert not is_admitted(book, owner)
                answers.set()
                while book._used("k", "day").tokens != 10 or counted(store) != (3, 10) or left(queue):
                    await book._exchange()

    asyncio.run(asyncio.wait_for(act(), 60))
    assert (counted(store), left(queue)) == ((3, 10), set())


def test_a_defect_keeps_usage_in_the_queue_and_the_keys_going(
    queue: QueueDatabase, store: Store, owner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: Any) -> Any:
        raise ZeroDivisionError

    async def act() -> None:
        async with server(queue, store) as book:
            end(queue, book, owner, 4)
            book.charge(owner, "m", 5, 0)
            with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "blockzoo.server"):
                patch.setattr(Writer, "fold_usage", defect)
                await book._exchange()
            assert counted(store) == (1, 5) and "ZeroDivisionError" in caplog.text

    asyncio.run(act())
    assert (counted(store), left(queue)) == ((2, 9), set())


def test_nothing_is_kept_for_nothing_used(queue: QueueDatabase, store: Store, owner: str) -> None:
    book = KeyBook(store, outbox=Outbox(queue))
    assert book.usage_of(owner, "m", 0, 0) is None
    assert KeyBook(store).usage_of(owner, "m", 1, 1) is None
    assert isinstance(store.catalog, Catalog)
