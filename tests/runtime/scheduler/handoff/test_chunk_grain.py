"""K and V of each chunk of a prompt travel while the next is computed (TI-15): same tokens and bytes, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.decode_config import DecodeConfig
from runtime.kv.pages import groups_for
from runtime.messages import StartMigration
from runtime.role_config import RoleName
from tests.runtime.scheduler.handoff.apart import Apart, run_disturbed
from tests.runtime.scheduler.handoff.test_handoffs import PAIR, moves, reach
from tests.runtime.scheduler.test_scheduler import some
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

CHUNKS = DecodeConfig(grain="chunk")


def by_chunks(*roles: RoleName, chunk: int = 8, **changes: Any) -> Apart:
    settings = {"decode": CHUNKS, "prefill_chunk": chunk, **changes.pop("settings", {})}
    return Apart(*roles, settings=settings, **{"pages": 4000, **changes})


def asked(cluster: Apart) -> dict[str, list[int]]:
    """Return up to how many tokens each sequence's K and V were requested, in order."""
    found: dict[str, list[int]] = {}
    for *_, message in cluster.sent:
        if isinstance(message, StartMigration) and message.layers[0] == 0:
            found.setdefault(message.seq, []).append(message.upto)
    return found


@pytest.mark.parametrize(
    ("roles", "placement"),
    [
        (PAIR, "auto"),
        (("prefill", "decode", "decode"), "auto"),
        (("prefill", "decode", "decode"), "partition"),
        (("prefill", "prefill", "decode"), "partition"),
        (("prefill", "prefill", "prefill", "decode", "decode"), "partition"),
    ],
)  # fmt: skip
def test_each_chunk_is_sent_once_and_all_bytes_are_those_of_one_transfer(
    roles: Sequence[RoleName], placement: str
) -> None:
    cluster = by_chunks(*roles, settings={"placement": placement})
    for one in some(64 if roles == PAIR else 24, 3):
        cluster.ask(one, at=random.Random(one.seq).randrange(200 * MS))
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    went, counters = cluster.handed_off(), cluster.scheduler.state().counters
    assert (counters.handoffs, counters.handoffs_aborted) == (len(went), 0)
    assert counters.handoff_bytes == sum(map(cluster.kv_bytes, went))
    chunks = {one.seq: -(-len(one.prompt) // 8) for one in went}
    assert counters.handoff_transfers == sum(chunks.values()) > len(went)
    if placement == "auto":
        for seq, requests in asked(cluster).items():
            if seq not in chunks:
                continue
            assert requests == [*range(8, len(cluster.requests[seq].prompt), 8), len(cluster.requests[seq].prompt)]


def test_chunks_travel_while_the_next_one_is_computed() -> None:
    """With a link on which a chunk takes as long as a step, only the last chunk is waited for."""
    waits = []
    for decode in (DecodeConfig(), CHUNKS):
        cluster = by_chunks(*PAIR, settings={"decode": decode}, page_bytes_per_ms=400.0)
        cluster.ask(request("a", range(40), "m", max_tokens=6))
        told = cluster.told["a"]
        reach(cluster, lambda told=told: told.tokens)
        first = cluster.now
        reach(cluster, lambda told=told: len(told.tokens) > 1)
        waits.append(cluster.now - first)
        cluster.run()
        cluster.expect()
        phases = [event.extra["phase"] for event in cluster.trace.named("phase")]
        assert phases == ["queued", "prefill", "transfer", "decode", "done"]
    assert waits[1] < 0.6 * waits[0], waits


def test_chunks_that_come_while_one_travels_go_together() -> None:
    cluster = by_chunks(*PAIR, page_bytes_per_ms=2.0)
    cluster.ask(request("a", range(48), "m", max_tokens=6))
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert 2 <= counters.handoff_transfers < 6
    assert counters.handoff_bytes == cluster.kv_bytes(cluster.requests["a"])


def test_pages_that_are_not_full_wait_for_the_next_chunk() -> None:
    """Chunks of 6 tokens with pages of 4: none is sent twice."""
    cluster = by_chunks(*PAIR, chunk=6)
    cluster.ask(request("a", range(21), "m", max_tokens=6))
    cluster.run()
    cluster.expect()
    assert asked(cluster)["a"] == [4, 12, 16, 21]
    assert cluster.scheduler.state().counters.handoff_bytes == cluster.kv_bytes(cluster.requests["a"])


def test_room_for_the_whole_prompt_is_taken_with_the_first_chunk() -> None:
    cluster = by_chunks(*PAIR)
    cluster.ask(request("a", range(40), "m", max_tokens=6))
    reach(cluster, lambda: moves(cluster))
    spec = cluster.models[0].spec
    assert cluster.scheduler.devices["d1"].pages.used == groups_for(spec, 40) * spec.kv_layers
    cluster.run()
    cluster.expect()


def test_without_room_chunks_stay_until_there_is_some_and_pass_none_that_waits() -> None:
    """Two sequences fill the decode side; what comes behind goes in order."""
    cluster = by_chunks(*PAIR, pages=60)
    cluster.ask(*(request(f"s{at}", range(30), "m", max_tokens=30) for at in range(2)))
    cluster.ask(*(request(f"t{at}", range(30 - at), "m", max_tokens=12) for at in range(4)), at=20 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs >= 6


@pytest.mark.parametrize("victim", ["d0", "d1"])
def test_a_death_while_chunks_travel_costs_only_time(victim: str) -> None:
    cluster = by_chunks(*PAIR, page_bytes_per_ms=20.0)
    cluster.ask(request("a", range(40), "m", max_tokens=12), request("b", range(30), "n", max_tokens=12))
    reach(cluster, lambda: moves(cluster))
    assert not cluster.told["a"].tokens
    cluster.kill(victim)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs >= 2


def test_an_abort_while_chunks_travel_frees_both_sides() -> None:
    cluster = by_chunks(*PAIR, page_bytes_per_ms=20.0)
    cluster.ask(request("a", range(40), "m", max_tokens=12))
    reach(cluster, lambda: moves(cluster))
    del cluster.requests["a"]
    cluster.abort("a", cluster.now)
    cluster.run()
    cluster.expect()
    assert not moves(cluster)


def test_an_answer_of_one_token_that_was_sent_ahead_ends_where_its_prompt_ran() -> None:
    cluster = by_chunks(*PAIR)
    cluster.ask(request("a", range(40), "m", max_tokens=1))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == 0


def test_roles_that_change_meanwhile_let_it_decode_where_it_is() -> None:
    from tests.runtime.scheduler.handoff.test_role_changes import change

    cluster = by_chunks(*PAIR, page_bytes_per_ms=20.0)
    cluster.ask(request("a", range(40), "m", max_tokens=12))
    reach(cluster, lambda: moves(cluster))
    assert change(cluster, {"d0": "both"}) == ""
    reach(cluster, lambda: cluster.told["a"].tokens)
    assert not moves(cluster)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == 0


def test_chunks_do_not_take_the_room_that_a_sequence_waits_for() -> None:
    cluster = by_chunks(*PAIR)
    cluster.ask(request("a", range(40), "m", max_tokens=12))
    reach(cluster, lambda: cluster.ran)
    cluster.scheduler._state.awaited = frozenset({"d1"})  # as if an earlier one lacked room there
    reach(cluster, lambda: max(start for *_, start, _ in cluster.ran) >= 24)
    assert not asked(cluster)
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("most", [1, 4])
def test_after_a_failed_hand_off_all_goes_at_the_end(most: int) -> None:
    made: list[Apart] = []

    def damage(pages: object) -> bool:
        return made[0].scheduler.state().counters.handoffs_aborted == 0

    cluster = by_chunks(*PAIR, damage=damage, settings={"max_crashes": most})
    made.append(cluster)
    cluster.ask(request("a", range(40), "m", max_tokens=12))
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.handoffs_aborted, counters.handoff_transfers) == (1, 1, 1)


@pytest.mark.parametrize("seed", range(12))
def test_deaths_aborts_and_short_pages_at_random(seed: int) -> None:
    rng = random.Random(seed)
    roles: Sequence[RoleName] = rng.choice((PAIR, ("prefill", "decode", "decode"), ("prefill", "prefill", "decode")))
    cluster = by_chunks(
        *roles, chunk=rng.choice((4, 6, 8)), pages=rng.choice((70, 120, 400)),
        page_bytes_per_ms=rng.choice((1e9, 200.0, 30.0, 5.0)),
        settings={
            "prefix_caching": rng.choice(("off", "active", "cached")),
            "prefill_order": rng.choice(("off", "sjf")),
            "placement": rng.choice(("replicate", "partition")),
        },
    )  # fmt: skip
    run_disturbed(cluster, some(30, seed), len(roles), rng)
