"""Release the OpenMP thread team of the loading thread, so that only the engine's thread keeps one.

OpenMP keeps a team of threads for every thread that has ever run a parallel region. With more team threads than cores,
GNU's runtime puts waiting threads to sleep at once instead of letting them spin, and each matrix product of a decode
step then begins with waking them. Loading models on one thread and running them on another makes a step of a small
model 50% slower. The loading code therefore calls `give_back` when it is done.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_HARD = 2  # omp_pause_hard: the threads end; the next parallel region starts them again


def give_back() -> None:
    """End the calling thread's OpenMP team until its next parallel region.

    Does nothing where OpenMP is older than 5.0 or is not GNU's.
    """
    pause = _pause()
    if pause is not None:
        pause(_HARD)


def use_one_thread() -> None:
    """Let the calling thread's products run on itself alone, beside a thread that runs steps.

    Does nothing where OpenMP is not GNU's.
    """
    import torch

    torch.get_num_threads()  # torch sets the number when a thread first asks for it
    try:
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)
    except (OSError, AttributeError):
        return


@functools.cache
def _pause() -> Callable[[int], int] | None:
    try:
        import torch  # noqa: F401

        found: Callable[[int], int] = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return found
