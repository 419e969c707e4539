"""Loads, unloads and page limits of one device are carried out in their order, and only when there is memory."""

from __future__ import annotations

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.stages.unloading import UnloadingStages
from runtime.chains import Stage
from runtime.control.agent_io import DropStage, LoadStage, ReturnPages
from tests.runtime.virtual import spec

A, B = Stage("a", 0, 3), Stage("b", 0, 3)


def tables(*seqs: str) -> tuple[SequencePageTables, list[str]]:
    """Return the tables of a device with 12 pages, three of each sequence on stage A."""
    made = SequencePageTables(12)
    keys = [made.open(seq, 0, spec(A.id, kv_layers=3, page_tokens=4)) for seq in seqs]
    for key in keys:
        assert made.grow(key, 4)
    return made, keys


def test_a_load_waits_until_no_more_pages_are_in_use_than_it_leaves() -> None:
    pages, keys = tables("x", "y", "z")
    stages = UnloadingStages(pages)
    assert stages.delay_loads([LoadStage(B)], 6) == [] and stages.later
    assert pages.book.limit == 12, "rows may use what the load does not have yet"
    pages.write(keys[:1])
    pages.release(keys[0])
    assert stages.due(False) == [], "a step writes these pages"
    pages.settle(keys[:1])
    assert stages.due(False) == [ReturnPages((2, 1, 0)), LoadStage(B)] and not stages.later
    assert pages.book.limit == 6 and pages.book.free == 0


def test_pages_are_there_once_what_leaves_has_left() -> None:
    pages, keys = tables("x")
    pages.book.set_limit(6)
    stages = UnloadingStages(pages)
    stages.schedule_unload([A], 9)
    assert stages.delay_loads([LoadStage(B)], 8) == []
    assert stages.due(True) == [] and pages.book.limit == 6, "a table is on the stage"
    pages.release(keys[0])
    assert stages.due(False) == [] and pages.book.limit == 6, "stages are dropped between steps"
    assert stages.due(True) == [DropStage(A), LoadStage(B)]
    assert pages.book.limit == 8, "the later limit counts"


def test_a_drop_names_what_is_loaded_in_its_place() -> None:
    stages = UnloadingStages(tables()[0])
    stages.schedule_unload([A], -1, (B,))
    stages.cancel_unload([A])
    stages.schedule_unload([A], -1)
    assert stages.due(True) == [DropStage(A)], "what was cancelled left for another one"
    stages.schedule_unload([A], -1, (B,))
    assert stages.due(True) == [DropStage(A, (B,))]
    assert not stages._coming, "nothing is kept of a stage that is gone"


def test_without_a_shared_budget_the_limit_stays() -> None:
    pages, _ = tables("x")
    stages = UnloadingStages(pages)
    assert stages.delay_loads([LoadStage(B)], -1) == [LoadStage(B)]
    stages.schedule_unload([B], -1)
    assert stages.due(True) == [DropStage(B)] and pages.book.limit == 12
