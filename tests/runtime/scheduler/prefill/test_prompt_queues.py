"""Prompts in chunks that several of them fill, in a virtual cluster: which rows go out, and in which order (TI-05)."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig, ControlConfig, PrefillOrder
from runtime.control.scheduler_io import AddRequests
from runtime.engine.fakes.integer_model import counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import Told, request

M = counting_model("m", "1* 2 3* 4", max_model_len=2048)


def cluster(
    order: PrefillOrder = "sjf", window: int = 16, chunk: int = 512, devices: int = 1, pages: int = 4000, **more: Any
) -> VirtualCluster:
    config = ClusterConfig(
        devices=devices, placement="partition", control=ControlConfig.off(), prefill_order=order, prefill_window=window,
        prefill_chunk=chunk, prefix_caching="off", **more,
    )  # fmt: skip
    cuts = [(2,)] if devices > 1 else ()
    agent = AgentConfig(max_num_batched_tokens=chunk)
    return VirtualCluster((M,), cuts, devices=devices, pages=pages, config=config, agent_config=agent)


def ask(made: VirtualCluster, lengths: list[int], at: int = MS, answer: int = 1) -> None:
    """Ask for answers to prompts of these lengths, all of which come at once."""
    asked = []
    for number, length in enumerate(lengths):
        prompt = [(number + token) % 90 for token in range(length)]
        asked.append(request(f"s{number}", prompt, max_tokens=answer, ignore_eos=True))
        made.requests[asked[-1].seq], made.told[asked[-1].seq] = asked[-1], Told([])
    made.at(at, lambda: made.tell(AddRequests(tuple(asked))))


def chunks(made: VirtualCluster) -> list[list[tuple[str, int]]]:
    made.ticks(10 * MS, 1000 * MS)
    made.run(until=1000 * MS)
    made.expect()
    return [[(seq, tokens) for seq, tokens in event.extra["chunk"]] for event in made.trace.named("prefill.chunk")]


def test_the_chunks_of_the_example() -> None:
    made = cluster()
    ask(made, [18, 700, 40, 1000], at=20 * MS)
    assert chunks(made) == [
        [("s0", 18), ("s2", 40), ("s1", 454)],
        [("s1", 246), ("s3", 266)],
        [("s3", 512)],
        [("s3", 222)],
    ]
    assert [event.extra["padding"] for event in made.trace.named("prefill.chunk")] == [0, 0, 0, 290]
    counters = made.scheduler.state().counters
    assert (counters.prompt_chunks, counters.prompt_chunk_tokens) == (4, 1758)


@pytest.mark.parametrize(("order", "sign"), [("sjf", 1), ("ljf", -1)])
def test_twenty_prompts_in_windows_of_ten_are_two_sorted_runs(order: PrefillOrder, sign: int) -> None:
    lengths = [(37 * number) % 101 + 5 for number in range(20)]
    made = cluster(order, window=10, chunk=64)
    ask(made, lengths, at=20 * MS)
    ran = list(dict.fromkeys(seq for chunk in chunks(made) for seq, _ in chunk))
    by_length = [
        [f"s{at}" for at in sorted(some, key=lambda at: sign * lengths[at])] for some in (range(10), range(10, 20))
    ]
    assert ran == [*by_length[0], *by_length[1]]


def test_a_long_prompt_waits_for_its_own_window_only() -> None:
    """Short prompts that come all the time do not overtake a long one of an earlier window."""
    made = cluster(window=4, chunk=32)
    ask(made, [200, 8, 8, 8], at=20 * MS)
    for number in range(4, 60):
        made.ask(request(f"s{number}", [number] * 8, max_tokens=1, ignore_eos=True), at=(21 + number) * MS)
    found = [seq for chunk in chunks(made) for seq, _ in chunk]
    assert max(at for at, seq in enumerate(found) if seq == "s0") < found.index("s20")


def test_a_window_is_sorted_when_the_one_before_it_has_nearly_run() -> None:
    """A short prompt that comes while the first window runs is the first of the second one."""
    made = cluster(window=4, chunk=32)
    ask(made, [30] * 4 + [40] * 3, at=20 * MS)
    made.ask(request("s7", [1] * 8, max_tokens=1, ignore_eos=True), at=21 * MS)
    assert list(dict.fromkeys(seq for chunk in chunks(made) for seq, _ in chunk))[4:] == ["s7", "s4", "s5", "s6"]


def test_as_many_chunks_as_hops_are_under_way() -> None:
    made, most = cluster("fcfs", chunk=16, devices=2), 0

    def look() -> None:
        nonlocal most
        flying = sum(each.issued for each in made.scheduler._state.running.values() if each.flying)
        most = max(most, flying)

    ask(made, [40] * 12, at=20 * MS)
    for at in range(80):
        made.at(20 * MS + at * MS // 4, look)
    found = chunks(made)
    assert 16 < most <= 32
    assert all(sum(tokens for _, tokens in chunk) == 16 for chunk in found[:-2])


def test_prompts_without_pages_do_not_hold_back_those_that_have_some() -> None:
    made = cluster("sjf", chunk=64, pages=60)
    ask(made, [80, 85, 20, 30, 80, 85], at=20 * MS, answer=30)
    chunks(made)  # all answers are each request's own


def test_off_sends_each_prompt_by_itself() -> None:
    made = cluster("off")
    ask(made, [18, 700, 40, 1000], at=20 * MS)
    assert chunks(made) == []
    assert made.scheduler.state().counters.prompt_chunks == 0


def test_unknown_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_order must be one of off, fcfs, sjf, ljf"):
        ClusterConfig(prefill_order="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        ClusterConfig(prefill_window=0)
