"""Delay unloads of stages until the engine has forgotten all page tables on them.

The engine learns with its next plan which tables are released; only then may the stage be dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.chains import Stage
from runtime.control.agent_io import DropStage


class UnloadingStages:
    """Stages with a pending unload.

    `due` returns each once, when it can be dropped; `cancel_unload` takes stages back.
    """

    def __init__(self, tables: SequencePageTables) -> None:
        self._tables = tables
        self.stages: list[Stage] = []

    def schedule_unload(self, stages: Iterable[Stage]) -> None:
        self.stages.extend(stages)

    def cancel_unload(self, stages: Iterable[Stage]) -> None:
        """Keep stages that are loaded again before they were dropped."""
        wanted = set(stages)
        self.stages = [stage for stage in self.stages if stage not in wanted]

    @property
    def waits(self) -> bool:
        """Whether a pending stage has no page tables any more."""
        return any(not self._tables.on(stage.id) for stage in self.stages)

    def due(self) -> list[DropStage]:
        """Return commands to drop stages without page tables, also on the engine's side. Call between steps only."""
        if not self.stages or self._tables.released:
            return []
        able = [stage for stage in self.stages if not self._tables.on(stage.id)]
        self.cancel_unload(able)
        return [DropStage(stage) for stage in able]
