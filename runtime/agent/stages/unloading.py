"""Stages that are to go: an engine drops one when it has forgotten all tables on it, which it is told with its next
plan.

Contract: `drop` names stages; `due` gives those that can go now, each once; `keep` takes back what is wanted again.
Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.chains import Stage
from runtime.control.agent_io import DropStage


class UnloadingStages:
    def __init__(self, tables: SequencePageTables) -> None:
        self._tables = tables
        self._stages: list[Stage] = []

    def schedule_unload(self, stages: Iterable[Stage]) -> None:
        self._stages.extend(stages)

    def cancel_unload(self, stages: Iterable[Stage]) -> None:
        """They are wanted again before they went."""
        wanted = set(stages)
        self._stages = [stage for stage in self._stages if stage not in wanted]

    @property
    def waits(self) -> bool:
        """Whether a stage that nobody is on waits for the next moment between steps."""
        return any(not self._tables.on(stage.id) for stage in self._stages)

    def due(self) -> list[DropStage]:
        """Between steps only: what nobody is on any more, as far as the engine knows."""
        if not self._stages or self._tables.released:
            return []
        able = [stage for stage in self._stages if not self._tables.on(stage.id)]
        self.cancel_unload(able)
        return [DropStage(stage) for stage in able]
