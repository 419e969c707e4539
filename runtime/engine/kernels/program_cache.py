"""Cache of programs: which units of a segment run in one call; cleared when units are loaded or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.engine.kernels.program import Program, program_of

if TYPE_CHECKING:
    from runtime.engine.models.components import SharedComponent


class Programs:
    """Programs by segment and first unit. With `most` of them in the cache, the next one clears it."""

    def __init__(self, wanted: bool, most: int = 256) -> None:
        self._wanted = wanted
        self._most = most
        self._known: dict[tuple[tuple[str, ...], int], tuple[Program, int] | None] = {}

    def get_program(
        self, key: tuple[str, ...], units: Sequence[SharedComponent], at: int
    ) -> tuple[Program, int] | None:
        """Return a program of units [at, end) of a segment, and end; None if it would cover fewer than two units.

        `key`: the digests of the segment's units.
        """
        if not self._wanted:
            return None
        if (key, at) not in self._known:
            if len(self._known) >= self._most:
                self._known.clear()
            self._known[key, at] = self._compile_program(units, at)
        return self._known[key, at]

    def clear(self) -> None:
        """Forget all programs, because units were loaded or dropped."""
        self._known.clear()

    @staticmethod
    def _compile_program(units: Sequence[SharedComponent], at: int) -> tuple[Program, int] | None:
        end = at
        while (
            end < len(units)
            and program_of([units[end].module]) is not None
            and units[end].rotary in (None, _first(units, at))
        ):
            end += 1
        made = program_of([unit.module for unit in units[at:end]]) if end > at + 1 else None
        return None if made is None else (made, end)


def _first(units: Sequence[SharedComponent], at: int) -> str | None:
    """Return the rotary key of the first unit that has one."""
    return next((unit.rotary for unit in units[at:] if unit.rotary is not None), None)
