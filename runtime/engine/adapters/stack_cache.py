"""What a layer makes of the adapters that are in use together: kept until others are, by each thread that runs steps
for itself.

A recorded step reads what it read while it was recorded, so it keeps that itself: another step may have other adapters
joined in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.engine.step.context import ForwardContext

T = TypeVar("T")


class StackCache(Generic[T]):
    """The last of what was made of adapters, by their names. A thread's own: another one's may not be there yet (a
    stream each), or be of others by the time that it is read."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[str, ...], T]] = {}

    def get_or_make(self, names: tuple[str, ...], frame: ForwardContext, make: Callable[[tuple[str, ...]], T]) -> T:
        """What `make` makes of these adapters, for a frame."""
        if frame.kept is not None:
            if (self, names) not in frame.kept:
                frame.kept[self, names] = make(names)
            return frame.kept[self, names]  # type: ignore[no-any-return]
        me = threading.get_ident()
        last = self._last.get(me)
        if last is None or last[0] != names:
            last = self._last[me] = names, make(names)
        return last[1]

    def clear(self) -> None:
        """An adapter came or went."""
        self._last.clear()
