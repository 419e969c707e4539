"""While a server runs, no garbage collection looks at many objects: each stops the event loop, and all else."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cli.app import _COLLECT
from runtime.frontend.tokenizer import Tokenizer
from runtime.heap import COLLECT
from tests.runtime.server.harness import running

#: Objects that one collection may look at: the youngest generation and the next one, and some that came meanwhile.
_MOST = COLLECT[0] * (COLLECT[1] + 3)


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Begin with the thresholds of `zoo`, and leave the collector as it was."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def _largest(cycles: int) -> int:
    """Make objects that only the collector can free; return how many objects a collection has looked at, at most."""
    looked = [0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    gc.callbacks.append(note)
    try:
        for _ in range(cycles):
            one: list[object] = []
            one.append(one)
    finally:
        gc.callbacks.remove(note)
    return max(looked)


def test_collections_are_small_while_a_server_runs(tokenizer: Tokenizer) -> None:
    with running(tokenizer):
        assert 0 < _largest(200_000) <= _MOST


def test_what_is_there_at_the_start_is_left_out_of_full_collections(tokenizer: Tokenizer) -> None:
    held = [[number] for number in range(100_000)]
    with running(tokenizer):
        assert gc.get_freeze_count() > len(held)
        assert len(gc.get_objects()) < len(held) / 2
