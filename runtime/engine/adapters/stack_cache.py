"""A cache of what a layer joins of the adapters in use, per thread; replaced when another set of adapters is in use.

A recorded step must keep reading the tensors that it read while it was recorded. So it keeps them itself
(`ForwardContext.kept`), because another step may have other adapters joined in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.engine.step.context import ForwardContext

T = TypeVar("T")


class StackCache(Generic[T]):
    """The last value made of a set of adapters, one per thread.

    Threads do not share values: another thread's value may not be complete yet (each has a CUDA stream of its own), or
    may be replaced before it is read.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[str, ...], T]] = {}

    def get_or_make(self, names: tuple[str, ...], frame: ForwardContext, make: Callable[[tuple[str, ...]], T]) -> T:
        """Return what `make` makes of these adapters, from the cache if possible."""
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
        """Drop all values, because an adapter was attached or detached."""
        self._last.clear()
