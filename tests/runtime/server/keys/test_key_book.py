"""What keys use, as servers count it: over failures of the catalogue, several servers, and days."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.errors import RequestError
from runtime.server.keys import key_book
from runtime.server.keys.key_book import KeyBook
from zoo.errors import StoreError
from zoo.keys import make_key, principal_of
from zoo.records import KeyUsage
from zoo.store import Store


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Books exchange with the catalogue when they open and close, and where a test says so."""
    monkeypatch.setattr(key_book, "PAUSE", 600.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        yield store


def recorded(store: Store) -> list[KeyUsage]:
    with store.catalog.reading() as reader:
        return reader.key_usage("2000-01-01")


def is_admitted(book: KeyBook, owner: str) -> bool:
    try:
        book.admit(owner)
    except RequestError as error:
        assert error.status == 429
        return False
    return True


def test_servers_of_one_catalogue_count_together(store: Store) -> None:
    owner = principal_of(make_key(store, "k", tokens_per_day=10))

    async def act() -> None:
        one, two = KeyBook(store), KeyBook(store)
        await one.open()
        await two.open()
        one.charge(owner, 4, 2)
        two.charge(owner, 1, 2)
        assert is_admitted(one, owner) and is_admitted(two, owner)
        await one._exchange()
        await two._exchange()
        one.charge(owner, 0, 1)  # 10 in all, and this server knows of 7
        assert is_admitted(one, owner)
        await one._exchange()
        assert not is_admitted(one, owner)
        await one.close()
        await two._exchange()
        assert not is_admitted(two, owner)
        await two.close()

    asyncio.run(act())
    assert [(each.requests, each.tokens) for each in recorded(store)] == [(3, 10)]


def test_a_catalogue_that_fails_loses_no_usage_and_no_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = make_key(store, "k", tokens_per_day=10)
    owner = principal_of(secret)

    def broken(*_: Any) -> Any:
        raise StoreError("the database is gone")

    async def act() -> None:
        book = KeyBook(store)
        await book.open()
        book.charge(owner, 6, 3)
        with monkeypatch.context() as patch:
            patch.setattr(store.catalog, "writing", broken)
            for _ in range(2):
                with pytest.raises(StoreError):
                    await book._exchange()
            assert book.find([secret]) is not None and is_admitted(book, owner)
            book.charge(owner, 0, 1)
            assert not is_admitted(book, owner)
        await book.close()

    asyncio.run(act())
    assert [(each.requests, each.tokens) for each in recorded(store)] == [(1, 10)]


def test_a_new_day_begins_with_nothing_used(store: Store) -> None:
    owner = principal_of(make_key(store, "k", tokens_per_day=5))
    day = "2026-01-31"

    async def act() -> None:
        nonlocal day
        book = KeyBook(store, day=lambda: day)
        await book.open()
        book.charge(owner, 5, 0)
        assert not is_admitted(book, owner)
        await book._exchange()
        assert not is_admitted(book, owner)
        day = "2026-02-01"
        assert is_admitted(book, owner)
        book.charge(owner, 0, 4)
        await book._exchange()
        assert is_admitted(book, owner)
        await book.close()

    asyncio.run(act())
    assert [(each.day, each.requests, each.tokens) for each in recorded(store)] == [
        ("2026-01-31", 0, 5),
        ("2026-02-01", 2, 4),
    ]


def test_a_revoked_key_opens_nothing_and_what_it_was_accepted_for_keeps_its_rules(store: Store) -> None:
    secret = make_key(store, "k", priority=4)

    async def act() -> None:
        book = KeyBook(store)
        await book.open()
        assert book.find(["wrong", secret]) is not None and book.find([]) is None
        with store.catalog.writing() as writer:
            writer.revoke_key("k")
        await book._exchange()
        assert book.find([secret]) is None
        rules = book.rules(principal_of(secret))
        assert rules is not None and rules.priority == 4 and book.rules("") is None
        await book.close()

    asyncio.run(act())
