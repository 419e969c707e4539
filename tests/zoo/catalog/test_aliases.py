"""Aliases: names that stand for models, on SQLite and PostgreSQL; what they point to cannot be removed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.zoo.factory import manifest_of
from zoo.catalog import Catalog
from zoo.errors import AmbiguousName, InputError, InUse, NameTaken, NotFound
from zoo.manifest import ModelKind, TensorMeta
from zoo.records import AliasTarget

A, B, C = AliasTarget("org/a"), AliasTarget("org/b"), AliasTarget("org/c")


def put(catalog: Catalog, name: str, kind: ModelKind = "foundation") -> None:
    with catalog.writing() as writer:
        writer.put_model(manifest_of(name, [TensorMeta(name[-1] * 64, "F32", (2,))], kind))


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    catalog = Catalog(database_url)
    for name in ("org/a", "org/b", "org/c"):
        put(catalog, name)
    yield catalog
    catalog.close()


def point(catalog: Catalog, *targets: AliasTarget, name: str = "prod") -> None:
    with catalog.writing() as writer:
        writer.set_alias(name, targets)


def remove(catalog: Catalog, name: str) -> None:
    with catalog.writing() as writer:
        writer.remove_model(name)


def test_an_alias_comes_back_with_what_it_points_to_and_its_history(catalog: Catalog) -> None:
    point(catalog, A)
    point(catalog, B)
    point(catalog, B)  # changes nothing
    point(catalog, AliasTarget("org/a", 90), AliasTarget("org/c", 10), name="beta")
    with catalog.reading() as reader:
        beta, prod = reader.aliases()
        assert (prod.name, prod.targets, prod.now.act) == ("prod", (B,), "set")
        assert prod.before is not None and prod.before.targets == (A,)
        assert [(target.model, target.share) for target in beta.targets] == [("org/a", 90), ("org/c", 10)]
        assert [change.targets for change in reader.alias_changes("prod")] == [(B,), (A,)]
        assert len(reader.alias_changes("prod", 1)) == 1 and reader.alias_changes("none") == []
        assert reader.latest_alias_change() == beta.now.id > prod.now.id and prod.now.created.tzinfo is not None


def test_a_name_stands_for_a_model_wherever_one_is_named(catalog: Catalog) -> None:
    point(catalog, A)
    point(catalog, AliasTarget("org/a", 50), AliasTarget("org/b", 50), name="both")
    with catalog.reading() as reader:
        assert reader.resolve("prod") == "org/a" and reader.resolve("b") == "org/b"
        with pytest.raises(AmbiguousName, match="org/a, org/b"):
            reader.resolve("both")
        with pytest.raises(NotFound):
            reader.resolve("pro")


def test_rollbacks_go_back_step_by_step(catalog: Catalog) -> None:
    for target in (A, B, C):
        point(catalog, target)
    with catalog.writing() as writer:
        assert writer.roll_back("prod").targets == (B,)
        assert writer.roll_back("prod").targets == (A,)
        with pytest.raises(InputError, match="nothing to roll back to"):
            writer.roll_back("prod")
        with pytest.raises(NotFound, match="no alias 'other'"):
            writer.roll_back("other")
    point(catalog, C)
    with catalog.writing() as writer:
        assert writer.roll_back("prod").targets == (A,)
        acts = [change.act for change in writer.alias_changes("prod")]
    assert acts == ["rollback", "set", "rollback", "rollback", "set", "set", "set"]


def test_what_is_pointed_to_or_would_be_again_cannot_be_removed(catalog: Catalog) -> None:
    for target in (A, B, C):
        point(catalog, target)
    with pytest.raises(InUse, match="alias 'prod' points to it"):
        remove(catalog, "org/c")
    with pytest.raises(InUse, match="zoo rollback prod"):
        remove(catalog, "org/b")
    remove(catalog, "org/a")
    with catalog.writing() as writer:
        writer.roll_back("prod")
    remove(catalog, "org/c")
    with catalog.writing() as writer, pytest.raises(NotFound, match="org/a"):
        writer.roll_back("prod")
    with catalog.writing() as writer:
        assert writer.required_alias("prod").targets == (B,)
        writer.delete_alias("prod")
    remove(catalog, "org/b")


def test_a_deleted_alias_leaves_its_history_and_begins_anew(catalog: Catalog) -> None:
    point(catalog, A)
    with catalog.writing() as writer:
        before = writer.latest_alias_change()
        writer.delete_alias("prod")
        assert writer.aliases() == [] and writer.alias("prod") is None and writer.latest_alias_change() > before
        with pytest.raises(NotFound):
            writer.delete_alias("prod")
    point(catalog, B)
    with catalog.writing() as writer:
        assert [change.act for change in writer.alias_changes("prod")] == ["set", "delete", "set"]
        with pytest.raises(InputError, match="nothing to roll back to"):
            writer.roll_back("prod")


@pytest.mark.parametrize("name", ["", " prod", "-prod", "a/../b", "x" * 256, "a\nb", "a\\b"])
def test_names_are_those_that_models_may_have(catalog: Catalog, name: str) -> None:
    with pytest.raises(InputError, match="cannot be a model's name"):
        point(catalog, A, name=name)


def test_no_chains_no_names_twice_and_only_what_answers_by_itself(catalog: Catalog) -> None:
    point(catalog, A)
    put(catalog, "org/lengths-d", "lengths")
    with pytest.raises(NameTaken, match="is a model"):
        point(catalog, A, name="org/b")
    with pytest.raises(NotFound):
        point(catalog, AliasTarget("prod"), name="live")  # an alias of an alias
    with pytest.raises(NotFound):
        point(catalog, AliasTarget("prod"))
    with pytest.raises(InputError, match="by itself"):
        point(catalog, AliasTarget("org/lengths-d"))
    with pytest.raises(InputError, match="needs a model"):
        point(catalog)
    with pytest.raises(NameTaken, match="is an alias"):
        put(catalog, "prod")
    with catalog.reading() as reader:
        assert [alias.targets for alias in reader.aliases()] == [(A,)] and "prod" not in reader.names()
