"""Models that do not fit together serve in turns, round robin (after Aegaeon, SOSP'25).

    residency: a stage is loaded -> `begin`
               a sequence waits for room -> `end` of the stages in its way -> close them
               which waiting sequence gets room first -> `place`
    evictions: what runs on closed stages gives way

A turn begins with the load of a stage, and is at least its run floor: otherwise loads would take more time than
answers. A sequence goes on in the next turn of its model, from K and V that host memory kept or from its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

_MS = 1_000_000


class ModelTurns:
    """The turns of one scheduler's models. Times in ns.

    `turn_ms`: see `OrderConfig.turn_ms`; 0: no turns.
    """

    def __init__(self, turn_ms: int) -> None:
        self.on = turn_ms > 0
        self._turn = turn_ms * _MS
        self._began: dict[str, int] = {}

    def begin(self, model: str, known: Iterable[str], now: int) -> None:
        """Record that a model (`Chain.loaded_as`) is loaded; those that are not known any more are forgotten."""
        if self.on:
            kept = set(known)
            self._began = {each: at for each, at in self._began.items() if each in kept} | {model: now}

    def place(self, model: str) -> int:
        """Return a model's place in the round: when its latest turn began, 0 if it had none."""
        return self._began.get(model, 0)

    def end(self, loads: Iterable[tuple[int, int]], floor: float) -> int:
        """Return when stages have had their turn.

        Args:
            loads: The end and the duration of the latest load of each.
            floor: See `OrderConfig.run_floor`.
        """
        return max((since + max(self._turn, int(floor * took)) for since, took in loads), default=0)
