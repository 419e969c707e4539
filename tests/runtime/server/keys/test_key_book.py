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
from zoo.money import ModelPrice, amount_of, cost_text, price_of
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


def counts(store: Store) -> list[tuple[str, str, int, int, int]]:
    """Return (key, model, requests, answers, tokens) of each row, all of today."""
    return [(each.name, each.model, each.requests, each.answers, each.tokens) for each in recorded(store)]


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
        one.charge(owner, "m", 4, 2)
        two.charge(owner, "m", 1, 2)
        assert is_admitted(one, owner) and is_admitted(two, owner)
        await one._exchange()
        await two._exchange()
        one.charge(owner, "m", 0, 1)  # 10 in all, and this server knows of 7
        assert is_admitted(one, owner)
        await one._exchange()
        assert not is_admitted(one, owner)
        await one.close()
        await two._exchange()
        assert not is_admitted(two, owner)
        await two.close()

    asyncio.run(act())
    assert counts(store) == [("k", "", 3, 0, 0), ("k", "m", 0, 3, 10)]


def test_a_catalogue_that_fails_loses_no_usage_and_no_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = make_key(store, "k", tokens_per_day=10)
    owner = principal_of(secret)

    def broken(*_: Any) -> Any:
        raise StoreError("the database is gone")

    async def act() -> None:
        book = KeyBook(store)
        await book.open()
        book.charge(owner, "m", 6, 3)
        with monkeypatch.context() as patch:
            patch.setattr(store.catalog, "writing", broken)
            for _ in range(2):
                with pytest.raises(StoreError):
                    await book._exchange()
            assert book.find([secret]) is not None and is_admitted(book, owner)
            book.charge(owner, "m", 0, 1)
            assert not is_admitted(book, owner)
        await book.close()

    asyncio.run(act())
    assert counts(store) == [("k", "", 1, 0, 0), ("k", "m", 0, 2, 10)]


def test_a_new_day_begins_with_nothing_used(store: Store) -> None:
    owner = principal_of(make_key(store, "k", tokens_per_day=5))
    day = "2026-01-31"

    async def act() -> None:
        nonlocal day
        book = KeyBook(store, day=lambda: day)
        await book.open()
        book.charge(owner, "m", 5, 0)
        assert not is_admitted(book, owner)
        await book._exchange()
        assert not is_admitted(book, owner)
        day = "2026-02-01"
        assert is_admitted(book, owner)
        book.charge(owner, "m", 0, 4)
        await book._exchange()
        assert is_admitted(book, owner)
        await book.close()

    asyncio.run(act())
    assert [(each.day, each.model, each.requests, each.tokens) for each in recorded(store)] == [
        ("2026-01-31", "m", 0, 5),
        ("2026-02-01", "", 2, 0),
        ("2026-02-01", "m", 0, 4),
    ]


@pytest.mark.parametrize("bound", ["tokens_per_month", "money_per_month"])
def test_a_month_has_a_bound_of_its_own_over_days_and_servers(store: Store, bound: str) -> None:
    most: dict[str, Any] = {bound: 10 if bound == "tokens_per_month" else amount_of("0.001")}
    owner = principal_of(make_key(store, "k", tokens_per_day=8, **most))
    put_prices(store, ("m", "100", "100"))  # 10 tokens are 0.001
    day = "2026-01-30"

    async def act() -> None:
        nonlocal day
        one, two = (KeyBook(store, day=lambda: day) for _ in range(2))
        await one.open()
        await two.open()
        one.charge(owner, "m", 4, 0)
        await one._exchange()
        day = "2026-01-31"
        assert is_admitted(one, owner) and is_admitted(two, owner)
        one.charge(owner, "m", 0, 5)
        await one._exchange()
        await two._exchange()
        assert is_admitted(one, owner) and is_admitted(two, owner), "9 of 10"
        two.charge(owner, "m", 1, 0)
        assert not is_admitted(two, owner), "what is not recorded yet counts, too"
        await two._exchange()
        assert is_admitted(one, owner)
        await one._exchange()
        assert not is_admitted(one, owner)
        with pytest.raises(RequestError, match="of this month") as refused:
            two.admit(owner)
        assert refused.value.code == "insufficient_quota"
        day = "2026-02-01"
        assert is_admitted(one, owner) and is_admitted(two, owner), "a new month"
        one.charge(owner, "m", 8, 0)
        with pytest.raises(RequestError, match="of this day"):
            one.admit(owner)
        await one.close()
        await two.close()

    asyncio.run(act())


def test_tokens_that_a_cache_had_are_counted_and_cost_what_is_said_of_them(store: Store) -> None:
    owner = principal_of(make_key(store, "k", money_per_day=amount_of("0.0001"), tokens_per_day=1000))
    with store.catalog.writing() as writer:
        writer.put_price(ModelPrice("apart", price_of("10"), price_of("0"), price_of("1")))
        writer.put_price(ModelPrice("plain", price_of("10"), price_of("0")))

    async def act() -> None:
        book = KeyBook(store)
        await book.open()
        book.charge(owner, "apart", 10, 3, 8)  # 2 at 10, and 8 at 1
        assert cost_text(book.totals["k"].cost) == "0.000028" and book.totals["k"].cached_tokens == 8
        book.charge(owner, "plain", 7, 0, 7)
        assert is_admitted(book, owner), "0.000098 of 0.0001"
        book.charge(owner, "apart", 2, 0, 2)
        assert not is_admitted(book, owner)
        await book._exchange()
        await book.close()

    asyncio.run(act())
    found = {each.model: (each.prompt_tokens, each.cached_tokens, cost_text(each.cost)) for each in recorded(store)}
    assert found == {"": (0, 0, "0.00"), "apart": (12, 10, "0.00003"), "plain": (7, 7, "0.00007")}


def test_money_of_a_day_bounds_a_key_over_servers_models_and_changes_of_prices(store: Store) -> None:
    owner = principal_of(make_key(store, "k", money_per_day=amount_of("0.0021")))
    free = principal_of(make_key(store, "free"))
    put_prices(store, ("dear", "100", "200"), ("", "1", "10"))

    async def act() -> None:
        one, two = KeyBook(store), KeyBook(store)
        await one.open()
        await two.open()
        one.charge(owner, "dear", 3, 4)  # 0.0011
        two.charge(owner, "cheap", 100, 30)  # 0.0004 by the price of the rest
        for owns in (owner, free):
            assert is_admitted(one, owns) and is_admitted(two, owns)
        await one._exchange()
        await two._exchange()
        put_prices(store, ("dear", "0", "0"))
        two.charge(owner, "dear", 1, 2)  # 0.0005 by the price that it knows
        await two._exchange()
        two.charge(owner, "dear", 1000, 1000)
        assert is_admitted(two, owner), "0.0020 of 0.0021"
        two.charge(owner, "cheap", 100, 0)
        assert not is_admitted(two, owner) and is_admitted(two, free)
        assert two.refused == {"k": 1}
        await two._exchange()
        assert is_admitted(one, owner)
        await one._exchange()
        assert not is_admitted(one, owner)
        await one.close()
        await two.close()

    asyncio.run(act())
    costs = {each.model: cost_text(each.cost) for each in recorded(store) if each.name == "k"}
    assert costs == {"": "0.00", "dear": "0.0016", "cheap": "0.0005"}


def test_without_prices_all_is_free(store: Store) -> None:
    owner = principal_of(make_key(store, "k", money_per_day=1))

    async def act() -> None:
        book = KeyBook(store)
        await book.open()
        book.charge(owner, "m", 1_000_000, 1_000_000)
        assert is_admitted(book, owner)
        put_prices(store, ("other", "1", "1"))
        await book._exchange()
        book.charge(owner, "m", 1_000_000, 1_000_000)
        assert is_admitted(book, owner)
        await book.close()

    asyncio.run(act())


def put_prices(store: Store, *prices: tuple[str, str, str]) -> None:
    with store.catalog.writing() as writer:
        for model, prompt, generated in prices:
            writer.put_price(ModelPrice(model, price_of(prompt), price_of(generated)))


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
