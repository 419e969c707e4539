"""Usage of queues in the catalogue: added once by its id, with marks that go."""

from __future__ import annotations

import pytest

from zoo.catalog import Catalog
from zoo.money import MOST_COST
from zoo.records import KeyUsage


def used(tokens: int, model: str = "m", cost: int = 0) -> KeyUsage:
    return KeyUsage("k", "2026-01-31", 0, tokens, 1, model, 1, cost)


def test_what_has_its_mark_adds_nothing(database_url: str) -> None:
    catalog = Catalog(database_url)
    with catalog.writing() as writer:
        writer.add_key_usage([KeyUsage("k", "2026-01-31", 2)])
        assert writer.fold_usage("q", {"a": used(1), "b": used(10), "c": used(100, "other", MOST_COST)}) == 3
        assert writer.fold_usage("q", {"a": used(1), "d": used(1000)}) == 1
        assert writer.fold_usage("another", {"a": used(10000)}) == 1
        assert writer.fold_usage("q", {}) == 0
    with catalog.reading() as reader:
        found = {each.model: (each.requests, each.answers, each.prompt_tokens) for each in reader.key_usage("2026")}
        assert found == {"": (2, 0, 0), "m": (0, 4, 11011), "other": (0, 1, 100)}
        assert (reader.folded_usage("q"), reader.folded_usage("another")) == ({"a", "b", "c", "d"}, {"a"})
    with catalog.writing() as writer:
        writer.drop_folded("q", {"a", "b", "x"})
        writer.drop_folded("q", set())
        assert (writer.folded_usage("q"), writer.folded_usage("another")) == ({"c", "d"}, {"a"})
    catalog.close()


def test_marks_and_sums_are_of_one_transaction(database_url: str) -> None:
    catalog = Catalog(database_url)
    with pytest.raises(RuntimeError), catalog.writing() as writer:
        writer.fold_usage("q", {"a": used(1)})
        raise RuntimeError
    with catalog.writing() as writer:
        assert (writer.folded_usage("q"), writer.key_usage("2026")) == (set(), [])
        assert writer.fold_usage("q", {str(number): used(1) for number in range(1200)}) == 1200
        writer.drop_folded("q", writer.folded_usage("q"))
        assert (writer.folded_usage("q"), writer.key_usage("2026")[0].prompt_tokens) == (set(), 1200)
    catalog.close()
