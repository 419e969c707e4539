"""Defer Ctrl-C to the end of a step, so that the saved state is consistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def deferred() -> Iterator[Interrupt]:
    """Record the first Ctrl-C in the context instead of raising; a second one raises KeyboardInterrupt at once.

    Outside the main thread, which gets no signals, nothing is changed.
    """
    noted = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted.asked:
            raise KeyboardInterrupt
        noted.asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
