"""Scored pairs and documents come back as stored, replace their equals, and are removed with their models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.zoo.factory import manifest_of
from zoo.catalog import Catalog
from zoo.errors import NotFound
from zoo.manifest import TensorMeta
from zoo.records import Document, Equivalence, ScoredRun

PAIR = Equivalence("equivalent", ScoredRun("a", 1, 2), ScoredRun("b", 1, 3), "f" * 64, 0.987654321, 0.25, {"kl": 0.5})


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    catalog = Catalog(database_url)
    with catalog.writing() as writer:
        for name in "abc":
            writer.put_model(manifest_of(name, [TensorMeta(name * 64, "F32", (2,))]))
    yield catalog
    catalog.close()


def test_pairs_come_back_and_are_found_from_either_side(catalog: Catalog) -> None:
    other = dataclasses.replace(PAIR, a=ScoredRun("c", 0, 1), relation="surrogate", control=None, metrics={})
    with catalog.writing() as writer:
        writer.put_equivalences([PAIR, other])
    with catalog.reading() as reader:
        assert reader.equivalences() == [PAIR, other]
        assert reader.equivalences(["a"]) == [PAIR]
        assert reader.equivalences(["b"]) == [PAIR, other]
        assert reader.equivalences([]) == []


def test_a_pair_scored_again_replaces_only_its_like(catalog: Catalog) -> None:
    elsewhere = dataclasses.replace(PAIR, probe="0" * 64)
    again = dataclasses.replace(PAIR, similarity=0.5)
    with catalog.writing() as writer:
        writer.put_equivalences([PAIR, elsewhere])
        writer.put_equivalences([again])
        assert writer.equivalences() == [elsewhere, again]


def test_documents_come_back_and_replace_their_like(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        writer.put_document(Document("eval", "a", "task", {"acc": 0.5}))
        writer.put_document(Document("eval", "a", "task", {"acc": 0.75}))
        writer.put_document(Document("eval", "b", "task", [1]))
        writer.put_document(Document("profile", "a", "task", 3))
        assert writer.documents("eval", "a") == [Document("eval", "a", "task", {"acc": 0.75})]
        assert writer.documents(model="a") == [
            Document("eval", "a", "task", {"acc": 0.75}),
            Document("profile", "a", "task", 3),
        ]
        assert writer.documents("eval") == [
            Document("eval", "a", "task", {"acc": 0.75}),
            Document("eval", "b", "task", [1]),
        ]


def test_findings_go_with_their_models_and_need_them(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        writer.put_equivalences([PAIR])
        writer.put_document(Document("eval", "b", "task", 1))
        writer.remove_model("b")
        assert writer.equivalences() == []
        assert writer.documents("eval") == []
        with pytest.raises(NotFound):
            writer.put_equivalences([PAIR])
        with pytest.raises(NotFound):
            writer.put_document(Document("eval", "b", "task", 1))


def test_a_pair_is_forgotten_by_relation_runs_and_probe(catalog: Catalog) -> None:
    others = [
        dataclasses.replace(PAIR, probe="0" * 64),
        dataclasses.replace(PAIR, relation="delta"),
        dataclasses.replace(PAIR, a=ScoredRun("a", 0, 2)),
    ]
    with catalog.writing() as writer:
        writer.put_equivalences([PAIR, *others])
        writer.drop_equivalences([dataclasses.replace(PAIR, similarity=0.1, metrics={})])
        assert writer.equivalences() == others
        writer.drop_equivalences([PAIR])
        assert writer.equivalences() == others
