"""Delay unloads of stages until the engine has forgotten all page tables on them, and what waits for memory.

The engine learns with its next plan which tables are released; only then may the stage be dropped. Loads that arrive
meanwhile wait, so that a device never holds both what leaves and what comes. Changes of the page limit keep their place
between loads and unloads: it rises after what leaves has left, and falls before what comes is loaded, once no more
pages than that are in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.chains import Stage
from runtime.control.agent_io import DropStage, LoadStage, ReturnPages

Changes = list[DropStage | LoadStage | ReturnPages]


@dataclass(frozen=True, slots=True)
class _PageLimit:
    pages: int


class UnloadingStages:
    """Stages with a pending unload (`stages`), and loads and page limits behind them (`later`).

    `due` returns each once, when it can be carried out; `cancel_unload` takes stages back.
    """

    def __init__(self, tables: SequencePageTables) -> None:
        self._tables = tables
        self.stages: list[Stage] = []
        self.later: deque[LoadStage | _PageLimit] = deque()
        self._coming: dict[Stage, tuple[Stage, ...]] = {}  # stages in the place of each pending one

    def schedule_unload(self, stages: Iterable[Stage], pages: int, coming: tuple[Stage, ...] = ()) -> None:
        """Unload stages to make room for `coming` ones, and set the page limit after that; -1: it stays."""
        for stage in stages:
            self.stages.append(stage)
            self._coming[stage] = coming
        self._limit(pages)

    def cancel_unload(self, stages: Iterable[Stage]) -> None:
        """Keep stages that are loaded again before they were dropped."""
        wanted = set(stages)
        self.stages = [stage for stage in self.stages if stage not in wanted]
        for stage in wanted:
            self._coming.pop(stage, None)

    def delay_loads(self, loads: Iterable[LoadStage], pages: int) -> Changes:
        """Set the page limit, then load stages, both after what waits already; return what can be done now."""
        self._limit(pages)
        self.later += loads
        return self._in_turn()

    @property
    def waits(self) -> bool:
        """Whether a pending stage has no page tables any more."""
        return any(not self._tables.on(stage.id) for stage in self.stages)

    def due(self, between_steps: bool) -> Changes:
        """Return what can be done now: drop stages without page tables, also on the engine's side; then what waited.

        Stages are dropped between steps only.
        """
        dropped: list[DropStage] = []
        if between_steps and not self._tables.released:
            gone = [stage for stage in self.stages if not self._tables.on(stage.id)]
            dropped = [DropStage(stage, self._coming.get(stage, ())) for stage in gone]
            self.cancel_unload(gone)
        return [*dropped, *self._in_turn()]

    def _limit(self, pages: int) -> None:
        if pages >= 0:
            self.later.append(_PageLimit(pages))

    def _in_turn(self) -> Changes:
        """Return what waited, in order, up to what has to wait on."""
        out: Changes = []
        while self.later and not self.stages:
            first = self.later[0]
            if isinstance(first, LoadStage):
                out.append(first)
            else:
                returned = self._tables.book.set_limit(first.pages)
                if returned is None:
                    break
                if returned:
                    out.append(ReturnPages(tuple(returned)))
            self.later.popleft()
        return out
