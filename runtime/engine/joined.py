"""What a layer makes of the adapters that are in use together: kept until others are.

A recorded step reads what it read while it was recorded, so it keeps that itself: another step may have other adapters joined in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.engine.frame import Frame

T = TypeVar("T")


class Joined(Generic[T]):
    """The last of what was made of adapters, by their names."""

    def __init__(self) -> None:
        self._last: tuple[tuple[str, ...], T] | None = None

    def of(self, names: tuple[str, ...], frame: Frame, make: Callable[[tuple[str, ...]], T]) -> T:
        """What `make` makes of these adapters, for a frame."""
        if frame.kept is not None:
            if (self, names) not in frame.kept:
                frame.kept[self, names] = make(names)
            return frame.kept[self, names]  # type: ignore[no-any-return]
        if self._last is None or self._last[0] != names:
            self._last = names, make(names)
        return self._last[1]

    def forget(self) -> None:
        """An adapter came or went."""
        self._last = None
