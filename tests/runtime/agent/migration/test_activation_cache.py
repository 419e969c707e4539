"""The activation cache: bounded, oldest out first, overwritten where rows run again, closed with its sequence."""

from __future__ import annotations

import random

import pytest

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.chains import Array
from runtime.transport.checksums import joined_rows

#: Bytes that a piece takes in addition to its data.
AROUND = 256


def array(*values: int) -> Array:
    """Return hidden states of one byte per token."""
    return Array("uint8", (len(values), 1), bytes(values))


def read(kept: ActivationCache, seq: str, before: int, lo: int, hi: int) -> list[int] | None:
    pieces = kept.pieces(seq, before, lo, hi)
    return None if pieces is None else list(joined_rows(pieces).data)


def test_what_came_in_pieces_is_given_in_any_cut() -> None:
    kept = ActivationCache(1 << 20)
    kept.store_span("a", 2, 0, array(0, 1, 2, 3))
    kept.store_span("a", 2, 4, array(4))
    kept.store_span("a", 2, 5, array(5, 6))
    assert kept.spans("a", 2) == ((0, 7),) and read(kept, "a", 2, 0, 7) == list(range(7))
    assert (
        read(kept, "a", 2, 3, 6) == [3, 4, 5] and read(kept, "a", 2, 6, 8) is None and read(kept, "a", 2, 3, 3) is None
    )
    assert kept.spans("a", 1) == kept.spans("b", 2) == () and kept.pieces("b", 2, 0, 1) is None


def test_a_row_that_runs_again_replaces_what_it_overlaps() -> None:
    kept = ActivationCache(1 << 20)
    kept.store_span("a", 2, 0, array(0, 1, 2, 3))
    kept.store_span("a", 2, 4, array(4, 5))
    kept.store_span("a", 2, 2, array(92, 93))
    assert read(kept, "a", 2, 0, 4) == [0, 1, 92, 93] and kept.spans("a", 2) == ((0, 4),)
    kept.check({"a"})


def test_the_oldest_go_first_whosever_they_are() -> None:
    kept = ActivationCache(3 * (AROUND + 4))
    for seq, start in (("a", 0), ("b", 0), ("a", 4)):
        kept.store_span(seq, 1, start, array(*range(4)))
    kept.store_span("c", 1, 0, array(*range(4)))
    assert kept.spans("a", 1) == ((4, 8),) and kept.spans("b", 1) == ((0, 4),)
    kept.store_span("c", 1, 4, array(*range(4)))
    assert "b" not in kept and kept.nbytes == 3 * (AROUND + 4)
    kept.store_span("a", 1, 8, array(*range(200), *range(200)))  # there is room for it alone
    assert kept.nbytes == AROUND + 400 and kept.spans("a", 1) == ((8, 408),) and "c" not in kept
    kept.store_span("d", 1, 0, Array("uint8", (1000, 1), bytes(1000)))
    assert "d" not in kept
    kept.check({"a", "c"})


def test_who_leaves_takes_all_along_and_who_stays_keeps_its_stages() -> None:
    kept = ActivationCache(1 << 20)
    for before in (1, 3, 5):
        kept.store_span("a", before, 0, array(1, 2))
    kept.store_span("b", 1, 0, array(7))
    kept.retain("a", {3})
    assert kept.spans("a", 3) and not kept.spans("a", 1) and not kept.spans("a", 5)
    kept.close("a")
    assert "a" not in kept and kept.nbytes == AROUND + 1
    kept.close("b")
    kept.close("nobody")
    assert kept.nbytes == 0
    kept.check(set())


def test_a_view_of_something_larger_is_copied() -> None:
    whole = bytearray(1 << 16)
    kept = ActivationCache(1 << 20)
    kept.store_span("a", 1, 0, Array("uint8", (2, 1), memoryview(whole)[4:6]))
    whole[4:6] = b"\x09\x09"
    assert read(kept, "a", 1, 0, 2) == [0, 0]


def test_nothing_is_kept_without_a_limit() -> None:
    kept = ActivationCache(0)
    assert not kept
    kept.store_span("a", 1, 0, array(1))
    assert "a" not in kept and kept.nbytes == 0


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_rows_and_ends_against_a_picture_of_them(seed: int) -> None:
    rng = random.Random(seed)
    kept = ActivationCache(rng.choice((AROUND + 3, 5 * AROUND, 1 << 20)))
    snapshot: dict[tuple[str, int], dict[int, int]] = {}
    for _ in range(200):
        seq, before = rng.choice("abc"), rng.choice((1, 4))
        tokens = snapshot.setdefault((seq, before), {})
        if rng.random() < 0.1:
            kept.close(seq)
            snapshot = {name: each for name, each in snapshot.items() if name[0] != seq}
        else:
            start = rng.randrange(max(0, len(tokens) - 3), len(tokens) + 1)
            values = [rng.randrange(256) for _ in range(rng.randrange(1, 5))]
            kept.store_span(seq, before, start, array(*values))
            snapshot[seq, before] = {at: value for at, value in tokens.items() if at < start} | dict(
                enumerate(values, start)
            )
        kept.check(set("abc"))
        for (name, at), known in snapshot.items():
            for lo, hi in kept.spans(name, at):
                assert read(kept, name, at, lo, hi) == [known[token] for token in range(lo, hi)]
