"""Stages are dropped behind the loads that were ordered before them."""

from __future__ import annotations

from typing import Any

from runtime.chains import LoadedUnits, Stage
from runtime.cluster.agent_process.commands import CommandExecutor
from runtime.control.agent_io import DropStage, HostChanged, LoadStage, StageLoaded
from runtime.transport.link import InlineLink
from tests.runtime.cluster.clusters import eventually

OLD, NEW, THIRD = (Stage(name, 0, 3) for name in ("old", "new", "third"))


class Noting:
    """An engine that notes what it is told, and prepares at once or never."""

    def __init__(self, prepares: bool) -> None:
        self.prepares, self.done = prepares, list[tuple[str, str]]()

    def prepare(self, stage: Stage) -> None: ...

    def load(self, stage: Stage) -> Any:
        self.done.append(("load", stage.model))

    def unload(self, stage: Stage) -> None:
        self.done.append(("drop", stage.model))

    def memory(self) -> Any:
        return type("Memory", (), {"weights": 0})


def carried_out(prepares: bool) -> list[tuple[str, str]]:
    engine = Noting(prepares)
    executor = CommandExecutor(engine, InlineLink())  # type: ignore[arg-type]
    executor.do(DropStage(THIRD))
    for command in (LoadStage(NEW), DropStage(OLD), LoadStage(THIRD)):
        executor.do(command)
    assert prepares == (("drop", "old") not in engine.done)
    assert eventually(lambda: not (executor.load_prepared() or executor.preparing))
    if executor.loader is not None:
        executor.loader.close()
    return engine.done


def test_a_stage_leaves_behind_the_loads_before_it_and_ahead_of_those_after_it() -> None:
    wanted = [("drop", "third"), ("load", "new"), ("drop", "old"), ("load", "third")]
    assert carried_out(prepares=True) == carried_out(prepares=False) == wanted


class Keeping(Noting):
    """An engine that tells what its host memory keeps: the last stage that was dropped."""

    def loaded_units(self, stage: Stage) -> LoadedUnits:
        return LoadedUnits((stage.model,), 7, 3)

    def expect(self, stage: Stage) -> None:
        self.done.append(("expect", stage.model))
        if stage == THIRD:
            raise OSError("the catalogue cannot be read")

    def host_changes(self) -> dict[str, int]:
        return {self.done[-1][1]: 5}


def test_what_loads_brought_and_what_host_memory_keeps_is_reported() -> None:
    """UN-04."""
    engine = Keeping(prepares=False)
    executor = CommandExecutor(engine, InlineLink())  # type: ignore[arg-type]
    loaded = executor.do(LoadStage(NEW))
    assert isinstance(loaded, StageLoaded)
    assert loaded.brought == LoadedUnits(("new",), 7, 3) and loaded.host == {"new": 5}
    assert executor.do(DropStage(OLD)) == HostChanged((OLD.id,), {"old": 5})


def test_what_comes_is_expected_before_what_leaves_is_dropped() -> None:
    engine = Keeping(prepares=False)
    executor = CommandExecutor(engine, InlineLink())  # type: ignore[arg-type]
    executor.do(DropStage(OLD, (NEW,)))
    executor.do(DropStage(NEW, (THIRD,)))
    assert engine.done == [("expect", "new"), ("drop", "old"), ("expect", "third"), ("drop", "new")]


def test_drops_behind_a_load_are_reported_with_it() -> None:
    engine = Keeping(prepares=True)
    executor = CommandExecutor(engine, InlineLink())  # type: ignore[arg-type]
    assert executor.do(LoadStage(NEW)) is None and executor.do(DropStage(OLD)) is None
    events: list[Any] = []
    assert eventually(lambda: (events.extend(executor.load_prepared()), len(events) == 2)[1])
    if executor.loader is not None:
        executor.loader.close()
    assert isinstance(events[0], StageLoaded) and events[1] == HostChanged((OLD.id,), {"old": 5})


def test_an_engine_without_tiers_reports_neither() -> None:
    executor = CommandExecutor(Noting(prepares=False), InlineLink())  # type: ignore[arg-type]
    loaded = executor.do(LoadStage(NEW))
    assert isinstance(loaded, StageLoaded) and loaded.brought is None and loaded.host == {}
    assert executor.do(DropStage(OLD)) is None
