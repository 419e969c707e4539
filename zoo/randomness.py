"""Keep the random generators of a process as they are while something else draws from them or seeds them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Restore the states of Python's, numpy's and torch's global generators, of GPUs too, after the block."""
    import numpy
    import torch

    python, arrays, devices = random.getstate(), numpy.random.get_state(), range(torch.cuda.device_count())
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
