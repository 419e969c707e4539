"""What a user types for an alias: names, endings, shares; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.zoo.factory import ingest
from zoo.aliases import MOST_TARGETS, set_alias
from zoo.errors import AmbiguousName, InputError, InUse, NotFound
from zoo.store import Store


@pytest.fixture
def models(store: Store) -> Iterator[Store]:
    for seed, name in enumerate(("org/a", "org/b", "x:7b", "p,q", "other/ab")):
        ingest(store, name, [seed])
    yield store


def test_names_and_shares(models: Store) -> None:
    def found(wanted: str) -> list[tuple[str, int]]:
        return [(target.model, target.share) for target in set_alias(models, "prod", wanted).targets]

    assert found("org/a") == [("org/a", 100)] and found("/b") == [("org/b", 100)]
    assert found("org/a:90,org/b:10") == [("org/a", 90), ("org/b", 10)]
    assert found(" /a : 50 , ab:50") == [("org/a", 50), ("other/ab", 50)]
    assert found("x:7b") == [("x:7b", 100)] and found("p,q") == [("p,q", 100)] and found("x:7b:30,/b:70")[0][1] == 30
    assert found("/a:100") == [("org/a", 100)]


@pytest.mark.parametrize(
    "wanted",
    [
        "org/a,org/b",
        "org/a:90,org/b",
        "org/a:90,org/b:11",
        "org/a:50,org/a:50",
        "org/a:100,org/b:0",
        "org/a:-1,org/b:101",
    ],
)
def test_shares_that_do_not_add_up(models: Store, wanted: str) -> None:
    with pytest.raises(InputError):
        set_alias(models, "prod", wanted)
    with models.catalog.reading() as reader:
        assert reader.aliases() == []


def test_what_is_not_there_or_is_too_much(models: Store) -> None:
    with pytest.raises(NotFound):
        set_alias(models, "prod", "org/a:50,absent:50")
    with pytest.raises(AmbiguousName):
        set_alias(models, "prod", "b")
    with pytest.raises(InputError, match="at most"):
        set_alias(models, "prod", ",".join(["org/a:1"] * (MOST_TARGETS + 1)))
    set_alias(models, "prod", "org/a")
    for chain in ("prod", "prod:50,org/a:50"):
        with pytest.raises(InputError, match="may not point to another"):
            set_alias(models, "live", chain)


def test_a_decision_on_an_older_change_is_refused(models: Store) -> None:
    first = set_alias(models, "prod", "org/a", expected=0).now.id
    with pytest.raises(InUse, match="changed meanwhile"):
        set_alias(models, "prod", "org/b", expected=0)
    assert set_alias(models, "prod", "org/b", expected=first).targets[0].model == "org/b"
