"""Windows of prompts and chunks against the paper's example and brute force (TI-07, TI-08)."""

from __future__ import annotations

import random

import pytest

from runtime.policy.prefill.prompt_order import ChunkPart, PromptJob, PromptOrder, assemble, next_window


def chunks(scheduled: list[PromptJob], size: int) -> list[list[tuple[str, int]]]:
    """Return all chunks of prompts that run alone, one chunk at a time."""
    left, found = {job.seq: job.left for job in scheduled}, []
    while any(left.values()):
        parts = assemble([PromptJob(seq, count) for seq, count in left.items() if count], size)
        for part in parts:
            left[part.seq] -= part.tokens
        found.append([tuple(part) for part in parts])
    return found


def test_chunks_of_the_example() -> None:
    """Prompts of 18, 700, 40 and 1000 tokens in chunks of 512, the shortest first."""
    raw = [PromptJob("a", 18), PromptJob("b", 700), PromptJob("c", 40), PromptJob("d", 1000)]
    by = {job.seq: job for job in raw}
    scheduled = [by[seq] for seq in next_window(raw, 16, "sjf")]
    assert chunks(scheduled, 512) == [
        [("a", 18), ("c", 40), ("b", 454)],
        [("b", 246), ("d", 266)],
        [("d", 512)],
        [("d", 222)],
    ]


@pytest.mark.parametrize("order", ["fcfs", "sjf", "ljf"])
def test_twenty_prompts_in_windows_of_ten_are_two_sorted_runs(order: PromptOrder) -> None:
    rng = random.Random(1)
    raw = [PromptJob(f"p{at}", rng.randint(1, 900)) for at in range(20)]
    first = next_window(raw, 10, order)
    rest = [job for job in raw if job.seq not in first]
    second = next_window(rest, 10, order)
    assert set(first) == {f"p{at}" for at in range(10)} and set(second) == {f"p{at}" for at in range(10, 20)}
    lengths = {job.seq: job.left for job in raw}
    for window in (first, second):
        found = [lengths[seq] for seq in window]
        assert (
            found
            == {
                "fcfs": [lengths[seq] for seq in sorted(window, key=lambda seq: int(seq[1:]))],
                "sjf": sorted(found),
                "ljf": sorted(found, reverse=True),
            }[order]
        )


@pytest.mark.parametrize("order", ["sjf", "ljf"])
def test_equal_prompts_run_by_arrival(order: PromptOrder) -> None:
    raw = [PromptJob(name, 7) for name in "dbca"]
    assert next_window(raw, 16, order) == tuple("dbca")


def test_priorities_come_before_lengths() -> None:
    raw = [PromptJob("long", 900, -1), PromptJob("short", 3), PromptJob("late", 5, -1), PromptJob("last", 1, 2)]
    assert next_window(raw, 3, "sjf") == ("late", "long", "short")
    assert next_window(raw, 2, "fcfs") == ("long", "late"), "a window has the most urgent ones, not the first ones"


def test_a_chunk_takes_all_tokens_once_and_is_full_while_tokens_are_left() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        scheduled = [PromptJob(f"p{at}", rng.randint(1, 300)) for at in range(rng.randint(1, 12))]
        size = rng.randint(1, 256)
        found = chunks(scheduled, size)
        for job in scheduled:
            assert sum(tokens for chunk in found for seq, tokens in chunk if seq == job.seq) == job.left
        assert all(sum(tokens for _, tokens in chunk) == size for chunk in found[:-1])
        flat = [seq for chunk in found for seq, _ in chunk]
        assert [seq for at, seq in enumerate(flat) if at == 0 or flat[at - 1] != seq] == [job.seq for job in scheduled]


def test_nothing_waits() -> None:
    assert next_window([], 16, "sjf") == () and assemble([], 512) == ()
    assert assemble([PromptJob("a", 5)], 5) == (ChunkPart("a", 5),)
