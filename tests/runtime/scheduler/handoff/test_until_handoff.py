"""A sequence that decodes where its prompt ran until it is handed off: tokens, gaps, room, ends (TI-15)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.decode_config import DecodeConfig, HandoffGrain, UntilHandoff
from runtime.role_config import RoleName
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.handoff.test_handoffs import PAIR, moves, reach
from tests.runtime.scheduler.test_scheduler import some
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request


def decoding(
    *roles: RoleName, until: UntilHandoff = "decode", grain: HandoffGrain = "request", **changes: Any
) -> Apart:
    decode = DecodeConfig(until_handoff=until, grain=grain)
    settings = {"decode": decode, "prefill_chunk": 8, **changes.pop("settings", {})}
    return Apart(*roles, settings=settings, **{"pages": 4000, **changes})


def at_source(cluster: Apart) -> list[tuple[str, int]]:
    """Return the sequence and position of each row behind a prompt that ran on a device for prompts."""
    return [
        (seq, start)
        for device, seq, start, _ in cluster.ran
        if cluster.roles[device] == "prefill" and start >= len(cluster.requests[seq].prompt)
    ]


@pytest.mark.parametrize("grain", ["request", "chunk", "layer"])
@pytest.mark.parametrize(
    ("roles", "placement"),
    [(PAIR, "auto"), (("prefill", "decode", "decode"), "partition"), (("prefill", "prefill", "decode"), "partition")],
)
def test_all_are_handed_off_with_the_right_tokens(
    roles: Sequence[RoleName], placement: str, grain: HandoffGrain
) -> None:
    cluster = decoding(*roles, grain=grain, settings={"placement": placement}, page_bytes_per_ms=40.0)
    for one in some(24, 3):
        cluster.ask(one, at=random.Random(one.seq).randrange(40 * MS))
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert 0 < counters.handoffs <= len(cluster.handed_off()) and not counters.handoffs_aborted
    assert at_source(cluster) and {device for device, *_ in cluster.ran} == set(cluster.roles)


def test_tokens_go_on_while_the_prompt_travels() -> None:
    """On a link on which the pages of the prompt take many steps, the second token does not wait for them."""
    gaps = {}
    for until in ("rest", "decode"):
        cluster = decoding(*PAIR, until=until, page_bytes_per_ms=100.0)  # type: ignore[arg-type]
        cluster.ask(request("a", range(24), "m", max_tokens=40))
        told = cluster.told["a"]
        reach(cluster, lambda told=told: told.tokens)
        last, longest = cluster.now, 0
        while len(told.tokens) < 40:
            seen = len(told.tokens)
            reach(cluster, lambda told=told, seen=seen: len(told.tokens) > seen)
            longest, last = max(longest, cluster.now - last), cluster.now
        gaps[until] = longest
        cluster.run()
        cluster.expect()
        assert cluster.scheduler.state().counters.handoffs == 1
        assert bool(at_source(cluster)) == (until == "decode")
    assert gaps["decode"] < 0.5 * gaps["rest"], gaps


def test_a_sequence_without_room_is_handed_off_at_a_later_token() -> None:
    """The first fills the decode side; the second decodes where it is, and goes when the first has ended."""
    counts = {}
    for until in ("rest", "decode"):
        cluster = decoding(*PAIR, until=until, settings={"max_num_seqs": 1})  # type: ignore[arg-type]
        cluster.ask(request("s", range(24), "m", max_tokens=20))
        cluster.ask(request("t", range(24), "m", max_tokens=40), at=20 * MS)
        reach(cluster, lambda cluster=cluster: len(cluster.told["s"].tokens) == 20)
        counts[until] = len(cluster.told["t"].tokens)
        cluster.run()
        cluster.expect()
        assert cluster.scheduler.state().counters.handoffs == 2 and not cluster.scheduler.state().counters.preemptions
    assert counts["rest"] == 1 < counts["decode"], counts


def test_it_rests_rather_than_take_the_last_pages_of_prompts() -> None:
    """Where the pages for prompts end, a sequence that decodes there waits; nothing is preempted for it."""
    cluster = decoding(*PAIR, pages=60, page_bytes_per_ms=0.5)
    cluster.ask(request("s", range(30), "m", max_tokens=200), request("t", range(60), "m", max_tokens=200))
    cluster.run()
    cluster.expect()
    assert at_source(cluster) and not cluster.scheduler.state().counters.preemptions


@pytest.mark.parametrize("victim", ["d0", "d1"])
def test_a_death_meanwhile_costs_only_time(victim: str) -> None:
    """Where the device that decodes dies, nothing runs again: all goes on where it is."""
    cluster = decoding(*PAIR, page_bytes_per_ms=300.0)
    cluster.ask(request("a", range(20), "m", max_tokens=40), request("b", range(20), "n", max_tokens=40))
    reach(cluster, lambda: moves(cluster) and len(cluster.told["a"].tokens) > 1)
    cluster.kill(victim)
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert counters.handoffs >= 2 if victim == "d0" else not counters.preemptions


def test_an_answer_that_ends_meanwhile_frees_both_sides() -> None:
    cluster = decoding(*PAIR, page_bytes_per_ms=5.0)
    cluster.ask(request("a", range(40), "m", max_tokens=5))
    reach(cluster, lambda: moves(cluster))
    cluster.run()
    cluster.expect()
    assert not moves(cluster) and not cluster.scheduler.state().counters.handoffs


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="until_handoff must be one of rest, decode"):
        DecodeConfig(until_handoff="sleep")  # type: ignore[arg-type]


def test_what_grows_faster_than_it_travels_rests_for_the_rest() -> None:
    """A move is given up then; a hand-off is not, since the sequence is to decode elsewhere."""
    settings = {"migration_max_stages": 1, "migration_final_sets": 1}
    cluster = decoding(*PAIR, page_bytes_per_ms=100.0, settings=settings)
    cluster.ask(request("a", range(24), "m", max_tokens=40))
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.handoffs_aborted) == (1, 0)
    assert len(at_source(cluster)) > 4


def test_chunks_that_were_sent_ahead_are_followed_by_the_rest() -> None:
    """On a fast link a sequence whose chunks travelled before has few tokens at its source."""
    cluster = decoding(*PAIR, grain="chunk")
    cluster.ask(request("a", range(24), "m", max_tokens=40))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == 1 and len(at_source(cluster)) < 8


def test_without_room_for_what_has_grown_it_goes_later() -> None:
    """That is no failed hand-off: the device that decodes has room later, and a failed one would end its attempts."""
    settings = {"migration_final_sets": 1, "max_crashes": 1}
    cluster = decoding(*PAIR, pages=52, page_bytes_per_ms=60.0, settings=settings)
    cluster.ask(request("s", range(16), "m", max_tokens=40))
    cluster.ask(request("t", range(16), "m", max_tokens=40), at=5 * MS)
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.handoffs_aborted) == (2, 1)


def test_after_as_many_failed_hand_offs_as_devices_may_die_it_stays() -> None:
    cluster = decoding(*PAIR, page_bytes_per_ms=300.0, settings={"max_crashes": 1})
    cluster.ask(request("a", range(20), "m", max_tokens=40))
    reach(cluster, lambda: moves(cluster) and len(cluster.told["a"].tokens) > 1)
    cluster.kill("d1")
    cluster.run()
    cluster.expect()
    why = [event.extra["error"] for event in cluster.trace.named("handoff.none")]
    assert why == ["too many hand-offs of it have failed"] and not cluster.scheduler.state().counters.handoffs
