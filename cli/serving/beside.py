"""Do what a start needs besides the weights while these are read and packed, which is mostly native code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` on another thread beside the block; leave the block once both are done.

    `work` only does early what would be done later anyway: an error in it is met again there, and reported then.
    """
    thread = threading.Thread(target=_run, args=(work,), name="zoo-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _run(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        _log.info("a part of the start could not be prepared", exc_info=True)
