"""Stages are prepared beside steps, and unloaded units are kept: loading then reads nothing, answers are the same."""

from __future__ import annotations

import threading

import pytest

import surgery.tensors.pool as tensor_pool
from runtime.chains import Stage
from runtime.engine.executors.stage import StagedEngine
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.executors.test_stage import MODELS, SAMPLING, add, engines, length, whole
from tests.runtime.engine.test_equality import prompts

WHOLE = pytest.mark.parametrize("kernels", ["stock", pytest.param("native", marks=needs_kernels)])
LARGE = 1 << 30


@pytest.fixture(scope="module")
def family(bench):
    add(bench, "float32")
    return bench


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Return the digests of tensors that are read, as they are."""
    found: list[str] = []
    stock = tensor_pool.stored_tensors

    def noted(store, digests):
        found.extend(digests)
        return stock(store, digests)

    monkeypatch.setattr(tensor_pool, "stored_tensors", noted)
    return found


def stage_of(family, name: str) -> Stage:
    return Stage(name, 0, length(family, name))


def prepare(engine: StagedEngine, stage: Stage) -> None:
    """Prepare on another thread, and fail as it does."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            engine.prepare(stage)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@WHOLE
@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_model_answers_as_ever(family, name, kernels):
    (engine,) = engines(family, 1, kernels=kernels)
    engine.load(stage_of(family, "neox"))
    before = engine.memory().weights
    prepare(engine, stage_of(family, name))
    assert engine.memory().weights == before, "what is prepared is not in use yet"
    carrier, prompt = Carrier(engine), prompts(3, (9,))[0]
    carrier.add("a", name, prompt, SAMPLING, [(0, 0, length(family, name))])
    carrier.run()
    assert carrier.seqs["a"].produced == whole(family, name, prompt, kernels=kernels).tokens("a")


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_loading_what_was_prepared_reads_only_what_cannot_be(family, reads, name):
    (engine,) = engines(family, 1)
    prepare(engine, stage_of(family, name))
    prepared = set(reads)
    reads.clear()
    engine.load(stage_of(family, name))
    assert reads and not prepared.intersection(reads) and len(reads) <= 4 < len(prepared), "embedding and head alone"


def test_steps_run_while_another_model_is_prepared(family):
    """A sequence decodes on this thread while another thread prepares and drops stages again and again."""
    (engine,) = engines(family, 1)
    carrier, prompt, over = Carrier(engine), prompts(3, (9,))[0], threading.Event()
    carrier.add("a", "llama", prompt, SAMPLING, [(0, 0, length(family, "llama"))])
    failed: list[BaseException] = []

    def prepare_on() -> None:
        try:
            while not over.is_set():
                for name in ("wide", "neox", "stitched"):
                    engine.prepare(stage_of(family, name))
                    engine._registry.units.end_preparation(stage_of(family, name).id)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=prepare_on)
    thread.start()
    carrier.run()
    for name in ("wide", "lora", "neox"):
        engine.load(stage_of(family, name))
        engine.unload(stage_of(family, name))
    over.set()
    thread.join()
    assert not failed and carrier.seqs["a"].produced == whole(family, "llama", prompt).tokens("a")


@WHOLE
def test_unloaded_units_are_kept_within_the_host_memory(family, reads, kernels):
    for limit, again in ((LARGE, False), (0, True)):
        (engine,) = engines(family, 1, kernels=kernels, host_memory_bytes=limit)
        stage = stage_of(family, "llama")
        engine.load(stage)
        full = engine.memory().weights
        engine.unload(stage)
        assert engine.memory().weights == 0
        reads.clear()
        engine.load(stage)
        assert engine.memory().weights == full
        assert (len(reads) > 4) == again, "attention and FFN are read again"


def test_the_least_recently_used_units_go_first_and_the_limit_holds(family, reads):
    (engine,) = engines(family, 1, host_memory_bytes=0)
    for name in ("llama", "wide"):
        engine.load(stage_of(family, name))
    units = engine._registry.units
    sizes = {unit.digest: units.idle.size(unit) for unit in units.units.values() if unit.kind in ("attention", "ffn")}
    own = [unit.digest for unit in engine._registry.models[stage_of(family, "wide").id].units if unit.digest in sizes]
    units.idle._limit = limit = sum(sizes[digest] for digest in own) + 1
    engine.unload(stage_of(family, "llama"))
    engine.unload(stage_of(family, "wide"))
    assert units.idle.nbytes <= limit and all(digest in units.idle for digest in own)


def test_what_leaves_does_not_push_what_comes_out_of_host_memory(family, reads):
    """UN-04: host memory for the units of one model, and two models in turn."""
    for expects in (True, False):
        (engine,) = engines(family, 1, host_memory_bytes=LARGE)
        first, second = stage_of(family, "llama"), stage_of(family, "wide")
        engine.load(first)
        engine.unload(first)
        units = engine._registry.units
        units.idle._limit = units.idle.held
        engine.load(second)
        if expects:
            engine.expect(first)
        engine.unload(second)
        reads.clear()
        engine.load(first)
        assert bool(engine.loaded_units(first).host) == expects
        engine.unload(first)
        assert units.idle.held <= units.idle._limit, "nothing is expected any more"


def test_one_stage_is_expected_at_a_time(family):
    (engine,) = engines(family, 1, host_memory_bytes=LARGE)
    for name in ("llama", "wide"):
        engine.load(stage_of(family, name))
        engine.unload(stage_of(family, name))
    units = engine._registry.units
    for name in ("llama", "wide"):
        engine.expect(stage_of(family, name))
    units.share_idle(LARGE)
    kept = units.idle.held
    engine.load(stage_of(family, "wide"))
    assert engine.loaded_units(stage_of(family, "wide")).host == kept > 0


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_a_stage_that_is_not_loaded_after_all_leaves_nothing(family, name):
    (engine,) = engines(family, 1)
    prepare(engine, stage_of(family, name))
    units = engine._registry.units
    assert units.idle.nbytes
    units.end_preparation(stage_of(family, name).id)
    assert not units.idle.nbytes and not units.pool.nbytes and not units.packs.nbytes


@WHOLE
@pytest.mark.parametrize("ahead", [False, True])
def test_a_load_tells_what_came_from_disk_and_what_host_memory_still_had(family, kernels, ahead):
    """UN-04: the second load of a stage gets from host memory what it kept, and the rest from disk again."""
    (engine,) = engines(family, 1, kernels=kernels, host_memory_bytes=LARGE)
    stage = stage_of(family, "llama")

    def load():
        if ahead:
            prepare(engine, stage)
        engine.load(stage)
        return engine.loaded_units(stage)

    first = load()
    assert len(first.units) == length(family, "llama") and not first.host
    assert set(engine.host_changes().values()) <= {0}, "nothing waits in host memory"
    engine.unload(stage)
    kept = engine.host_changes()
    assert set(kept) < set(first.units) and sum(kept.values()) < first.disk
    second = load()
    assert second.units == first.units and second.disk + second.host == first.disk
    assert second.host == sum(kept.values()) > 0
    assert engine.host_changes() == dict.fromkeys(kept, 0)


def test_units_in_use_come_from_nowhere(family):
    (engine,) = engines(family, 1)
    engine.load(stage_of(family, "llama"))
    engine.load(stage_of(family, "lora"))
    found = engine.loaded_units(stage_of(family, "lora"))
    assert (found.disk, found.host) == (0, 0)


def test_what_leaves_host_memory_is_told(family):
    (engine,) = engines(family, 1, host_memory_bytes=1)
    stage = stage_of(family, "llama")
    engine.load(stage)
    engine.host_changes()
    engine.unload(stage)
    assert set(engine.host_changes().values()) <= {0}


def read_ahead(engine: StagedEngine, *stages: Stage) -> list[Stage]:
    """Return the stages that are there in full."""
    return [stage for stage, _ in engine.read_ahead(stages, lambda: False)]


@WHOLE
def test_what_was_read_ahead_comes_from_host_memory(family, reads, kernels):
    """QL-13: the load that follows reads embedding and head alone, and the model answers as ever."""
    (engine,) = engines(family, 1, kernels=kernels, host_memory_bytes=LARGE)
    stage = stage_of(family, "llama")
    assert read_ahead(engine, stage) == [stage]
    kept = {unit: size for unit, size in engine.host_changes().items() if size}
    reads.clear()
    carrier, prompt = Carrier(engine), prompts(3, (9,))[0]
    carrier.add("a", "llama", prompt, SAMPLING, [(0, 0, length(family, "llama"))])
    carrier.run()
    assert len(reads) <= 4
    assert carrier.seqs["a"].produced == whole(family, "llama", prompt, kernels=kernels).tokens("a")
    brought = engine.loaded_units(stage)
    assert kept.keys() <= set(brought.units) and brought.host == sum(kept.values()) > brought.disk


def test_as_much_is_read_ahead_as_fits_and_what_is_needed_first_leaves_last(family):
    (engine,) = engines(family, 1, host_memory_bytes=LARGE)
    first, second = stage_of(family, "llama"), stage_of(family, "wide")
    firsts, seconds = (set(units) for _, units in engine.read_ahead([first, second], lambda: False))
    units = engine._registry.units
    sizes = dict(units.idle._sizes)
    assert firsts & sizes.keys() and seconds & sizes.keys() and not firsts & seconds & sizes.keys()
    units.idle_bytes = max(sum(sizes[digest] for digest in some & sizes.keys()) for some in (firsts, seconds))
    units.share_idle(0)
    assert units.idle._sizes.keys() >= firsts & sizes.keys(), "the first's are all there"
    assert read_ahead(engine, first, second) == [first], "no room for the second"
    assert read_ahead(engine, second, first) == [second], "the order is another now"


def test_reading_ahead_stops_when_it_is_told_to(family):
    (engine,) = engines(family, 1, host_memory_bytes=LARGE)
    calls = iter([False, False, True])
    assert not list(engine.read_ahead([stage_of(family, "llama")], lambda: next(calls)))
    assert len(engine._registry.units.idle._units) == 1, "embedding and one unit"
