"""The catalogue on SQLite and PostgreSQL: manifests come back as stored, queries are right, removal leaves no row."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event, func, select

from tests.zoo.factory import manifest_of, with_adapter
from zoo.catalog import Catalog, ModelConfig, ModelEntry
from zoo.catalog import schema as t
from zoo.catalog.names import check_name
from zoo.errors import InputError, InUse, NameTaken, NotFound, StoreBusy
from zoo.manifest import (
    Adapter,
    ChainBlock,
    Component,
    ModelManifest,
    Placed,
    SideFile,
    TensorMeta,
    WeightFile,
    block_digest,
    digest_of,
)


def tensor(number: int, elements: int = 3) -> TensorMeta:
    return TensorMeta(digest_of(number), "F32", (elements,))


def put(catalog: Catalog, *manifests: ModelManifest) -> None:
    with catalog.writing() as writer:
        for manifest in manifests:
            writer.put_model(manifest)


def components_of(manifest: ModelManifest) -> tuple[str, ...]:
    return tuple(placed.component.digest for placed in manifest.components)


def cut(manifest: ModelManifest, *bounds: int) -> tuple[ChainBlock, ...]:
    """Return the blocks of the chain between the bounds."""
    parts = components_of(manifest)
    return tuple(ChainBlock(block_digest(parts[lo:hi]), lo, hi) for lo, hi in pairwise(bounds))


def rows(catalog: Catalog) -> dict[str, int]:
    with catalog.reading() as reader:
        tables = [table for table in t.Base.metadata.sorted_tables if table.name != "settings"]
        return {
            table.name: reader._connection.execute(select(func.count()).select_from(table)).scalar() or 0
            for table in tables
        }


# --- manifests ------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 2**17), max_size=3).map(tuple)
TENSORS = st.lists(
    st.builds(TensorMeta, st.integers(0, 10**9).map(digest_of), st.sampled_from(["F32", "BF16"]), SHAPES),
    min_size=1,
    max_size=5,
    unique_by=lambda meta: meta.digest,
)


def _legal(name: str) -> bool:
    try:
        return check_name(name) == name
    except InputError:
        return False


@st.composite
def manifests(draw: st.DrawFn) -> ModelManifest:
    """Draw a manifest of any shape."""
    tensors = draw(TENSORS)
    named = st.lists(st.tuples(TEXTS, st.sampled_from([meta.digest for meta in tensors])), max_size=3).map(tuple)
    adapters = st.none() | st.builds(Adapter, st.sampled_from(["lora", "ia3"]), TEXTS, named)
    kinds = st.sampled_from(["embedding", "attention", "ffn", "layer", "lm_head"])
    components = st.builds(Component, kinds, TEXTS, TEXTS, named, adapters)
    blobs = st.integers(0, 9).map(digest_of)
    return ModelManifest(
        name=draw(TEXTS.filter(_legal)),
        kind="foundation",
        base=None,
        family=draw(TEXTS),
        source=draw(TEXTS),
        components=tuple(
            draw(st.lists(st.builds(Placed, st.none() | st.integers(0, 99), components), min_size=1, max_size=5))
        ),
        weight_files=tuple(draw(st.lists(st.builds(WeightFile, TEXTS, blobs, named), max_size=3))),
        side_files=tuple(
            draw(st.lists(st.builds(SideFile, TEXTS, blobs, st.integers(0, 2**40), st.booleans()), max_size=3))
        ),
        tensors=tuple(tensors),
    )


@given(manifests())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
def test_any_manifest_comes_back_as_it_was_and_goes_without_a_trace(catalog: Catalog, manifest: ModelManifest) -> None:
    put(catalog, manifest)
    with catalog.reading() as reader:
        found = reader.model(manifest.name)
        assert found == manifest
        assert found.fingerprint == manifest.fingerprint
        assert reader.live_tensors() == {meta.digest for meta in manifest.tensors}
        assert reader.live_blobs() == {side.blob for side in manifest.side_files} | {
            file.header for file in manifest.weight_files
        }
        for meta in manifest.tensors:
            assert reader.tensor(meta.digest) == meta
        assert reader.chain(manifest.name) == cut(manifest, 0, len(manifest.components))
    with catalog.writing() as writer:
        writer.remove_model(manifest.name)
    assert set(rows(catalog).values()) == {0}


def test_an_adapter_on_a_base(catalog: Catalog) -> None:
    base = manifest_of("base", [tensor(1), tensor(2)])
    lora = dataclasses.replace(
        manifest_of("lora", [tensor(1), tensor(2)], kind="lora", base="base"),
        components=(
            with_adapter(base.components[0], [("a", tensor(3).digest), ("b", tensor(4).digest)]),
            base.components[1],
        ),
        weight_files=(
            WeightFile("adapter_model.safetensors", "2" * 64, (("a", tensor(3).digest), ("b", tensor(4).digest))),
        ),
        tensors=tuple(tensor(number) for number in (1, 2, 3, 4)),
    )
    put(catalog, base, lora)
    with catalog.reading() as reader:
        assert reader.model("lora") == lora
        assert reader.model("lora").components[0].component.base_digest == components_of(base)[0]
        assert reader.dependents("base") == ("lora",)
        assert reader.dependents("lora") == ()
        own = {
            summary.name: (summary.base, summary.params, summary.bytes, summary.bytes_own)
            for summary in reader.models()
        }
    assert own == {"base": (None, 6, 24, 0), "lora": ("base", 12, 48, 24)}


def test_putting_twice_is_once_and_another_needs_another_name(catalog: Catalog) -> None:
    first = manifest_of("a", [tensor(1)])
    put(catalog, first, first)
    before = rows(catalog)
    with pytest.raises(NameTaken, match="'a' holds another model"):
        put(catalog, manifest_of("a", [tensor(2)]))
    assert rows(catalog) == before
    put(catalog, dataclasses.replace(first, name="b"))
    with catalog.reading() as reader:
        assert reader.model("a").fingerprint == reader.model("b").fingerprint


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\0", "x" * 256, "../evil"])
def test_names_that_cannot_be(catalog: Catalog, name: str) -> None:
    with pytest.raises(InputError, match="cannot be a model's name"):
        put(catalog, manifest_of(name, [tensor(1)]))


def test_a_base_must_be_there(catalog: Catalog) -> None:
    with pytest.raises(NotFound, match="base 'none' of 'a'"):
        put(catalog, manifest_of("a", [tensor(1)], base="none"))
    assert set(rows(catalog).values()) == {0}


def test_a_manifest_must_hold_what_it_names(catalog: Catalog) -> None:
    manifest = manifest_of("a", [tensor(1), tensor(2)])
    for tensors in [manifest.tensors[:1], manifest.tensors * 2]:
        with pytest.raises(ValueError, match="manifest of 'a'"):
            put(catalog, dataclasses.replace(manifest, tensors=tensors))


# --- removal --------------------------------------------------------------------------------------------------------


def test_removal_leaves_what_others_name(catalog: Catalog) -> None:
    one, two = manifest_of("one", [tensor(1), tensor(2)]), manifest_of("two", [tensor(2), tensor(3)])
    put(catalog, one)
    before = rows(catalog)
    put(catalog, two)
    with catalog.writing() as writer:
        writer.remove_model("two")
    assert rows(catalog) == before
    with catalog.reading() as reader:
        assert reader.model("one") == one


def test_a_base_in_use_stays(catalog: Catalog) -> None:
    put(catalog, manifest_of("base", [tensor(1)]), manifest_of("ft", [tensor(2)], kind="full", base="base"))
    with pytest.raises(InUse, match="base of ft"), catalog.writing() as writer:
        writer.remove_model("base")
    with catalog.writing() as writer:
        writer.remove_model("ft")
        writer.remove_model("base")
    assert set(rows(catalog).values()) == {0}


def test_unknown_names(catalog: Catalog) -> None:
    put(catalog, manifest_of("llama", [tensor(1)]))
    with catalog.writing() as writer:
        for attempt in (
            writer.model,
            writer.chain,
            writer.dependents,
            writer.remove_model,
            lambda name: writer.set_chain(name, []),
        ):
            with pytest.raises(NotFound, match="did you mean llama"):
                attempt("lama")
        assert writer.chains(["lama"]) == {}
        assert writer.tensor("0" * 64) is None
        assert writer.users_of(["9" * 64]) == {}


# --- chains and sharing ---------------------------------------------------------------------------------------------


def test_chains_are_rewritten(catalog: Catalog) -> None:
    one, two = (
        manifest_of("one", [tensor(i) for i in (1, 2, 3, 4)]),
        manifest_of("two", [tensor(i) for i in (1, 2, 5, 6)]),
    )
    put(catalog, one)
    with catalog.writing() as writer:
        writer.put_model(two)
        writer.set_chain("one", cut(one, 0, 2, 4))
        writer.set_chain("two", cut(two, 0, 2, 4))
    shared = cut(one, 0, 2)[0].digest
    with catalog.reading() as reader:
        assert reader.chains(["one", "two"]) == {"one": cut(one, 0, 2, 4), "two": cut(two, 0, 2, 4)}
        assert reader.block_models([shared, cut(two, 2, 4)[0].digest]) == {
            shared: ("one", "two"),
            cut(two, 2, 4)[0].digest: ("two",),
        }
        assert {summary.name: summary.blocks for summary in reader.models()} == {"one": 2, "two": 2}
    assert rows(catalog)["blocks"] == 3
    assert rows(catalog)["block_components"] == 6
    with catalog.writing() as writer:
        writer.set_chain("one", cut(one, 0, 4))
        writer.set_chain("two", cut(two, 0, 4))
    assert rows(catalog)["blocks"] == 2


@pytest.mark.parametrize("bounds", [(0, 3), (1, 4), (0, 2, 2, 4), (0, 5), (2, 4, 0, 2), ()])
def test_a_chain_covers_its_model_once_and_in_order(catalog: Catalog, bounds: tuple[int, ...]) -> None:
    manifest = manifest_of("one", [tensor(i) for i in (1, 2, 3, 4)])
    put(catalog, manifest)
    with pytest.raises(ValueError, match=r"block \[|the chain ends"), catalog.writing() as writer:
        writer.set_chain("one", cut(manifest, *bounds))
    with pytest.raises(ValueError, match="components' digest"), catalog.writing() as writer:
        writer.set_chain("one", [ChainBlock("0" * 64, 0, 4)])
    with catalog.reading() as reader:
        assert reader.chain("one") == cut(manifest, 0, 4)


def test_the_sharing_group_is_transitive(catalog: Catalog) -> None:
    numbers = {
        "a": [1, 2],
        "b": [3, 2],
        "c": [3, 4],
        "d": [5, 4],
        "e": [6, 7],
    }  # each shares one tensor with the one before, "e" shares none
    made = [manifest_of(name, [tensor(number) for number in pair]) for name, pair in numbers.items()]
    put(catalog, *made)
    expected = {manifest.name: components_of(manifest) for manifest in made[:4]}
    with catalog.reading() as reader:
        assert reader.sharing_group([components_of(made[0])[0]]) == expected
        assert reader.sharing_group(components_of(made[3])) == expected
        assert reader.sharing_group(components_of(made[4])) == {"e": components_of(made[4])}
        assert reader.sharing_group(["0" * 64]) == {}


def test_users_of_tensors_and_blobs(catalog: Catalog) -> None:
    put(catalog, manifest_of("one", [tensor(1), tensor(2)]), manifest_of("two", [tensor(2)], header="3" * 64))
    with catalog.reading() as reader:
        found = reader.users_of([tensor(1).digest, tensor(2).digest, "0" * 64, "1" * 64, "3" * 64, "9" * 64])
    assert found == {
        tensor(1).digest: ("one",),
        tensor(2).digest: ("one", "two"),
        "0" * 64: ("one",),
        "1" * 64: ("one", "two"),
        "3" * 64: ("two",),
    }


def test_summaries(catalog: Catalog) -> None:
    put(catalog, manifest_of("b", [tensor(1, 10), tensor(2, 20), tensor(1, 10)]), manifest_of("a", [tensor(2, 20)]))
    with catalog.reading() as reader:
        a, b = reader.models()
        assert reader.names() == ["a", "b"]
        assert reader.resolve("B") == "b"
        assert reader.created("a") == a.created
    assert (a.name, a.kind, a.family, a.source, a.base) == ("a", "foundation", "llama", "/checkpoints/a", None)
    assert (a.params, a.bytes, a.bytes_own, a.blocks) == (20, 80, 0, 1)
    assert (b.params, b.bytes, b.bytes_own, b.blocks) == (30, 120, 40, 1)
    assert abs(datetime.now(UTC) - a.created) < timedelta(minutes=1)


def test_entries_are_the_summaries_without_their_sizes(catalog: Catalog) -> None:
    base, tuned = manifest_of("base", [tensor(1)]), manifest_of("tuned", [tensor(1), tensor(2)], "full", "base")
    put(catalog, base, tuned, manifest_of("a", [], side="2" * 64))
    with catalog.reading() as reader:
        found, whole = reader.entries(), reader.models()
        configs = reader.configs()
    assert [entry.name for entry in found] == ["a", "base", "tuned"]
    assert [entry.base for entry in found] == [None, None, "base"]
    fields = [field.name for field in dataclasses.fields(ModelEntry)]
    assert [[getattr(each, field) for field in fields] for each in found] == [
        [getattr(each, field) for field in fields] for each in whole
    ]
    same = ModelConfig("llama", "1" * 64, "F32")
    assert configs == {"a": ModelConfig("llama", "2" * 64, None), "base": same, "tuned": same}


# --- transactions ---------------------------------------------------------------------------------------------------


def test_an_error_undoes_the_whole_transaction(catalog: Catalog) -> None:
    with pytest.raises(RuntimeError), catalog.writing() as writer:
        writer.put_model(manifest_of("a", [tensor(1)]))
        raise RuntimeError
    assert set(rows(catalog).values()) == {0}


def test_a_reader_sees_one_moment_and_waits_for_nobody(catalog: Catalog) -> None:
    with catalog.reading() as before:
        assert before.names() == []
        with catalog.writing() as writer:
            writer.put_model(manifest_of("a", [tensor(1)]))
            with catalog.reading() as other:
                assert other.names() == []
        assert before.names() == []
        assert before.models() == []
    with catalog.reading() as after:
        assert after.names() == ["a"]


def test_writers_take_turns(catalog: Catalog) -> None:
    """Each writer reads before it writes, which a deferred transaction cannot do safely."""

    def count() -> None:
        for _ in range(10):
            with catalog.writing() as writer:
                known = int(writer.setting("count") or "0")
                time.sleep(0.001)
                writer.set_setting("count", str(known + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with catalog.reading() as reader:
        assert reader.setting("count") == "40"


@pytest.fixture
def impatient(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    monkeypatch.setattr("zoo.database.BUSY_SECONDS", 1)
    catalog = Catalog(database_url)
    yield catalog
    catalog.close()


def test_a_writer_that_waits_too_long_says_so(catalog: Catalog, impatient: Catalog) -> None:
    with catalog.writing(), pytest.raises(StoreBusy, match="another process is writing"), impatient.writing():
        pass


def test_a_model_is_read_in_few_queries(catalog: Catalog) -> None:
    """The number of queries, which takes the time, does not grow with the model."""
    put(catalog, manifest_of("large", [tensor(number) for number in range(600)]))
    statements: list[str] = []
    event.listen(
        catalog._database.engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: statements.append(statement),
    )
    with catalog.reading() as reader:
        assert len(reader.model("large").components) == 600
    assert len(statements) < 12
