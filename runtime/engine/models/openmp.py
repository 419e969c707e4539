"""The threads that share a step's work: one team, of the engine's thread.

OpenMP keeps a team of threads for every thread that ever asked for one. While there are more of them than cores, GNU's
runtime lets waiting threads sleep at once instead of spinning for a while, and each product of a decode step begins
with waking them: loading models on one thread and running them on another makes a small model's step half as slow
again. So whoever loads gives its team back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_HARD = 2  # omp_pause_hard: threads end, and come again when they are wanted


def give_back() -> None:
    """End the calling thread's team, until it wants one again. Where OpenMP is older than 5.0, or not GNU's, nothing
    happens.
    """
    pause = _pause()
    if pause is not None:
        pause(_HARD)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    try:
        import torch  # noqa: F401

        found: Callable[[int], int] = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return found
