"""Keys of clients in the catalogue, on both databases: secrets are not kept, limits are checked, usage adds up."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.zoo.factory import ingest
from zoo.aliases import set_alias
from zoo.catalog import Catalog
from zoo.errors import InputError, NameTaken, NotFound
from zoo.keys import make_key, principal_of, set_price
from zoo.money import MOST_COST, ModelPrice
from zoo.records import ClientKey, KeyUsage
from zoo.store import Store


def key(name: str, number: int) -> ClientKey:
    return ClientKey(name, f"{number}" * 64, ("a", "b"), 5, None, -3, datetime(2026, 1, 2, 3, tzinfo=UTC))


def test_a_secret_is_made_once_and_kept_nowhere(store: Store) -> None:
    ingest(store, "org/a", [1])
    first, second = make_key(store, "one", ["org/a", "org/a"], 3, 4, -1), make_key(store, "two")
    assert first != second and len(first) > 40 and first.isascii()
    with store.catalog.reading() as reader:
        found, other = reader.keys()
    assert (found.name, found.models, found.requests_per_minute, found.tokens_per_day, found.priority) == (
        "one", ("org/a",), 3, 4, -1,
    )  # fmt: skip
    assert found.principal == principal_of(first) != other.principal and found.revoked is None
    assert first.encode() not in (store.root / "catalog.sqlite").read_bytes()


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"requests_per_minute": 0},
        {"tokens_per_day": -1},
        {"tokens_per_month": 0},
        {"money_per_month": -1},
        {"money_per_month": 1 << 63},
        {"money_per_day": 0},
        {"money_per_day": 1 << 63},
        {"priority": 1 << 31},
    ],
)
def test_wrong_keys_are_refused(store: Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make_key(store, **{"name": "one", **wrong})
    with pytest.raises(NotFound, match="no stored model"):
        make_key(store, "one", ["org/none"])
    with store.catalog.reading() as reader:
        assert reader.keys() == []


def test_a_name_is_free_again_once_its_key_is_revoked(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        writer.put_key(key("one", 1))
        with pytest.raises(NameTaken):
            writer.put_key(key("one", 2))
        writer.revoke_key("one")
        with pytest.raises(NotFound):
            writer.revoke_key("one")
        writer.put_key(key("one", 2))
    with catalog.reading() as reader:
        old, new = reader.keys()
    assert old.revoked is not None and new == key("one", 2)


def test_usage_adds_up_by_key_and_day(catalog: Catalog) -> None:
    for _ in range(2):
        with catalog.writing() as writer:
            writer.add_key_usage([KeyUsage("one", "2026-01-02", 1, 10, 5), KeyUsage("two", "2026-01-02", 2)])
            writer.add_key_usage([KeyUsage("one", "2026-01-03", 0, 1, 1)])
    with catalog.reading() as reader:
        assert reader.key_usage("2026-01-02") == [
            KeyUsage("one", "2026-01-02", 2, 20, 10),
            KeyUsage("two", "2026-01-02", 4),
            KeyUsage("one", "2026-01-03", 0, 2, 2),
        ]
        assert [each.day for each in reader.key_usage("2026-01-03")] == ["2026-01-03"]


def test_usage_is_kept_by_model_with_its_cost_and_added_up_by_key(catalog: Catalog) -> None:
    day = "2026-01-02"
    for _ in range(2):
        with catalog.writing() as writer:
            writer.add_key_usage(
                [
                    KeyUsage("one", day, 3),
                    KeyUsage("one", day, 0, 10, 5, "a", 1, (5 << 32) + 7, 3),
                    KeyUsage("one", day, 0, 1, 2, "b", 1, (1 << 32) - 1),
                    KeyUsage("two", day, 0, 1, 1, "a", 1, 1),
                    KeyUsage("one", "2026-01-03", 0, 7, 7, "a", 1, 9),
                ]
            )
    with catalog.reading() as reader:
        found = [each for each in reader.key_usage(day) if each.name == "one"]
        assert found == [
            KeyUsage("one", day, 6),
            KeyUsage("one", day, 0, 20, 10, "a", 2, (10 << 32) + 14, 6),
            KeyUsage("one", day, 0, 2, 4, "b", 2, (2 << 32) - 2),
            KeyUsage("one", "2026-01-03", 0, 14, 14, "a", 2, 18),
        ]
        assert sorted(reader.key_usage_of_day(day), key=lambda each: each.name) == [
            KeyUsage("one", day, 6, 22, 14, "", 4, (12 << 32) + 12, 6),
            KeyUsage("two", day, 0, 2, 2, "", 2, 2),
        ]


def test_the_usage_of_a_month_is_that_of_its_days_for_keys_with_a_bound_for_months(store: Store) -> None:
    for name in ("tokens", "money", "none", "ended"):
        limits = {"tokens": {"tokens_per_month": 5}, "none": {"tokens_per_day": 5, "money_per_day": 5}}
        make_key(store, name, **limits.get(name, {"money_per_month": 7}))
    with store.catalog.writing() as writer:
        writer.revoke_key("ended")
        for day in ("2025-11-30", "2026-01-31", "2026-02-01", "2026-02-15", "2026-02-28", "2026-03-01", "2027-02-01"):
            names = ("tokens", "money", "none", "ended")
            writer.add_key_usage([KeyUsage(name, day, 1, 10, 5, "m", 1, 1 << 62, 4) for name in names])
            writer.add_key_usage([KeyUsage("tokens", day, 1)])
    with store.catalog.reading() as reader:
        found = {each.name: each for each in reader.key_usage_of_month("2026-02")}
        assert found == {
            "tokens": KeyUsage("tokens", "2026-02", 6, 30, 15, "", 3, 3 << 62, 12),
            "money": KeyUsage("money", "2026-02", 3, 30, 15, "", 3, 3 << 62, 12),
        }
        assert reader.key_usage_of_month("2026-04") == []
        keys = reader.keys()
        budgets = {each.name: each.budgets for each in keys}
    assert budgets["tokens"] == (("day", None, None), ("month", 5, None))
    assert budgets["none"] == (("day", 5, 5), ("month", None, None)) and budgets["money"][1] == ("month", None, 7)


def test_costs_that_no_longer_fit_stay_at_the_most(catalog: Catalog) -> None:
    for cost in (1 << 62, 1 << 62, 1 << 80, 5):
        with catalog.writing() as writer:
            writer.add_key_usage([KeyUsage("one", "2026-01-02", model=model, cost=cost) for model in ("a", "b", "c")])
    with catalog.writing() as writer:
        writer.add_key_usage([KeyUsage("one", "2026-01-02", model="new", cost=1 << 70)])
    with catalog.reading() as reader:
        assert {each.cost for each in reader.key_usage("2026-01-02")} == {MOST_COST}
        assert [each.cost for each in reader.key_usage_of_day("2026-01-02")] == [4 * MOST_COST]


def test_prices_are_replaced_and_removed(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        for price in (ModelPrice("b", 1, 2), ModelPrice("", 3, 4), ModelPrice("b", 5, 6, 0)):
            writer.put_price(price)
    with catalog.reading() as reader:
        assert reader.prices() == [ModelPrice("", 3, 4), ModelPrice("b", 5, 6, 0)]
    with catalog.writing() as writer:
        writer.drop_price("")
        for model in ("", "none"):
            with pytest.raises(NotFound, match="price"):
                writer.drop_price(model)
        assert writer.prices() == [ModelPrice("b", 5, 6, 0)]


def test_a_price_is_for_a_stored_model_or_for_the_rest(store: Store) -> None:
    ingest(store, "org/a", [1])
    set_alias(store, "prod", "org/a")
    assert set_price(store, "org/a", 1, 2) == ModelPrice("org/a", 1, 2)
    set_price(store, "", 0, 0, 3)
    with pytest.raises(InputError, match="alias"):
        set_price(store, "prod", 1, 2)
    with pytest.raises(NotFound, match="full name"):
        set_price(store, "a", 1, 2)
    with store.catalog.reading() as reader:
        assert reader.prices() == [ModelPrice("", 0, 0, 3), ModelPrice("org/a", 1, 2)]
