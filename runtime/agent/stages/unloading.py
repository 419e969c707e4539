"""Delay unloads of stages until the engine has forgotten all page tables on them.

The engine learns with its next plan which tables are released; only then may the stage be dropped. Loads that arrive
meanwhile wait, so that a device never holds both what leaves and what comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.chains import Stage
from runtime.control.agent_io import DropStage, LoadStage


class UnloadingStages:
    """Stages with a pending unload.

    `due` returns each once, when it can be dropped, and then the loads that waited; `cancel_unload` takes stages back.
    """

    def __init__(self, tables: SequencePageTables) -> None:
        self._tables = tables
        self.stages: list[Stage] = []
        self._loads: list[LoadStage] = []

    def schedule_unload(self, stages: Iterable[Stage]) -> None:
        self.stages.extend(stages)

    def cancel_unload(self, stages: Iterable[Stage]) -> None:
        """Keep stages that are loaded again before they were dropped."""
        wanted = set(stages)
        self.stages = [stage for stage in self.stages if stage not in wanted]

    def delay_loads(self, loads: list[LoadStage]) -> list[LoadStage]:
        """Return these loads, after earlier ones; nothing while stages are pending, `due` returns them later."""
        self._loads += loads
        return [] if self.stages else self._take_loads()

    @property
    def waits(self) -> bool:
        """Whether a pending stage has no page tables any more."""
        return any(not self._tables.on(stage.id) for stage in self.stages)

    def due(self) -> list[DropStage | LoadStage]:
        """Return commands to drop stages without page tables, also on the engine's side, and loads that waited for it.

        Call between steps only.
        """
        if not self.stages or self._tables.released:
            return []
        able = [stage for stage in self.stages if not self._tables.on(stage.id)]
        self.cancel_unload(able)
        dropped = [DropStage(stage) for stage in able]
        return [*dropped, *([] if self.stages else self._take_loads())]

    def _take_loads(self) -> list[LoadStage]:
        loads, self._loads = self._loads, []
        return loads
