"""Stages are dropped behind the loads that were ordered before them."""

from __future__ import annotations

from typing import Any

from runtime.chains import Stage
from runtime.cluster.agent_process.commands import CommandExecutor
from runtime.control.agent_io import DropStage, LoadStage
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
