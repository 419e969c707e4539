"""Short remainders of prompts run where they decode (UN-18): same tokens, no hand-off, nothing lost."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.decode_config import DecodeConfig
from runtime.role_config import RoleName
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.handoff.test_handoffs import PAIR, reach
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: Tokens of a remainder at most, in these tests.
MOST = 8


def chatting(*roles: RoleName, most: int = MOST, **changes: Any) -> Apart:
    settings = {"prefix_caching": "cached", "decode": DecodeConfig(local_prefill=most), **changes.pop("settings", {})}
    return Apart(*roles, settings=settings, **{"pages": 4000, **changes})


def next_turn(cluster: Apart, before: str, name: str, said: Sequence[int], answer: int = 6) -> None:
    """Ask with the prompt and answer of an earlier request, and more behind them, and wait for the answer."""
    one = cluster.requests[before]
    cluster.ask(request(name, [*one.prompt, *cluster.told[before].tokens, *said], one.model, max_tokens=answer),
                at=cluster.now)  # fmt: skip


def first_turn(cluster: Apart, tokens: int = 20, answer: int = 5) -> None:
    cluster.ask(request("a", range(tokens), "n", max_tokens=answer))
    cluster.run()


def ran_locally(cluster: Apart) -> dict[str, list[tuple[str, int, int]]]:
    """Return the rows of prompts on devices that only decode, by sequence."""
    found = defaultdict(list)
    for device, seq, start, count in cluster.ran:
        if cluster.roles[device] == "decode" and start < len(cluster.requests[seq].prompt):
            found[seq].append((device, start, count))
    return dict(found)


def expect_roles(cluster: Apart, most: int = MOST) -> None:
    """Assert that decode devices ran only short remainders, of sequences that were not handed off, in few tokens."""
    told = {event.extra["seq"] for event in cluster.trace.named("dispatch.choose")}
    local = {seq: {row[1:] for row in rows} for seq, rows in ran_locally(cluster).items()}  # once, however many hops
    counters = cluster.scheduler.state().counters
    for rows in local.values():
        assert sum(count for _, count in rows) <= most
    if not counters.preemptions:
        assert not told & set(local) and counters.local_prefills == len(local)
        assert counters.local_prefill_tokens == sum(count for rows in local.values() for _, count in rows)
    for device, seq, start, _ in cluster.ran:
        assert start < len(cluster.requests[seq].prompt) or cluster.roles[device] != "prefill"


@pytest.mark.parametrize("order", ["off", "fcfs", "sjf"])
def test_the_next_turn_runs_its_remainder_where_it_decodes(order: str) -> None:
    """A page set has 4 tokens: of the first turn's 24 computed tokens all are cached, the answer's last one is not."""
    cluster = chatting(*PAIR, settings={"prefill_order": order})
    first_turn(cluster)
    next_turn(cluster, "a", "b", [50, 51])
    cluster.run()
    cluster.expect()
    assert ran_locally(cluster) == {"b": [("d1", 24, 3)]}
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.local_prefills, counters.local_prefill_tokens) == (1, 1, 3)
    expect_roles(cluster)
    (event,) = cluster.trace.named("prefill.local")
    assert event.dev == "d1" and event.extra == {"seq": "b", "left": 3}


@pytest.mark.parametrize(("said", "local"), [(MOST - 1, True), (MOST, False)])
def test_a_longer_remainder_is_handed_off(said: int, local: bool) -> None:
    cluster = chatting(*PAIR)
    first_turn(cluster)
    next_turn(cluster, "a", "b", range(60, 60 + said))
    cluster.run()
    cluster.expect()
    expect_roles(cluster)
    assert cluster.scheduler.state().counters.handoffs == 2 - local
    assert set(ran_locally(cluster)) == ({"b"} if local else set())


def test_a_remainder_runs_in_chunks_and_is_not_sent_ahead() -> None:
    decode = DecodeConfig(local_prefill=MOST, grain="chunk")
    cluster = chatting(*PAIR, settings={"prefill_chunk": 3, "decode": decode})
    first_turn(cluster)
    next_turn(cluster, "a", "b", range(60, 67))
    cluster.run()
    cluster.expect()
    assert ran_locally(cluster) == {"b": [("d1", 24, 3), ("d1", 27, 3), ("d1", 30, 2)]}
    expect_roles(cluster)


@pytest.mark.parametrize("most", [0, MOST])
def test_off_nothing_runs_there(most: int) -> None:
    cluster = chatting(*PAIR, most=most)
    first_turn(cluster)
    assert {each.path[0].device for each in cluster.scheduler.prefix_cache} == {"d0", "d1"}
    next_turn(cluster, "a", "b", [50])
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == (1 if most else 2)
    if not most:
        cluster.expect_phases()


def test_with_active_prefixes_a_running_one_is_continued() -> None:
    cluster = chatting(*PAIR, settings={"prefix_caching": "active"})
    cluster.ask(request("a", range(20), "n", max_tokens=60))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 6)
    next_turn(cluster, "a", "b", [50, 51])
    cluster.run()
    cluster.expect()
    expect_roles(cluster)
    assert set(ran_locally(cluster)) == {"b"}


@pytest.mark.parametrize(
    ("roles", "placement"),
    [
        (PAIR, "auto"),
        (("prefill", "decode", "decode"), "auto"),
        (("prefill", "decode", "decode"), "partition"),
        (("prefill", "prefill", "decode"), "partition"),
        (("both", "prefill", "decode"), "auto"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pages", [90, 4000])
def test_chats_of_many_turns(roles: Sequence[RoleName], placement: str, pages: int) -> None:
    """Chats of four turns, all at a time: tokens are the model's own, and with room most turns are not handed off."""
    cluster = chatting(*roles, settings={"placement": placement, "prefill_chunk": 8}, pages=pages)
    rng, chats = random.Random(len(roles)), 6
    for chat in range(chats):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(4, 13))]
        cluster.ask(request(f"{chat}-0", prompt, rng.choice("mn"), max_tokens=5))
    cluster.run()
    for turn in range(1, 4):
        for chat in range(chats):
            said = [rng.randrange(97) for _ in range(rng.choice((1, 3, 9)))]
            next_turn(cluster, f"{chat}-{turn - 1}", f"{chat}-{turn}", said, answer=4)
        cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    if "both" in roles:
        return
    expect_roles(cluster)
    assert counters.preemptions or counters.handoffs + counters.local_prefills == 4 * chats
    assert counters.local_prefills > (chats if pages == 4000 else 0)


def test_where_all_places_are_taken_it_is_handed_off() -> None:
    """It begins on the device for prompts, and waits there until the decode device has a place."""
    cluster = chatting(*PAIR, settings={"max_num_seqs": 1})
    first_turn(cluster)
    cluster.ask(request("busy", range(40, 49), "n", max_tokens=30), at=cluster.now)
    reach(cluster, lambda: len(cluster.told["busy"].tokens) > 2)
    next_turn(cluster, "a", "b", [50])
    cluster.run()
    cluster.expect()
    expect_roles(cluster)
    assert not ran_locally(cluster) and cluster.scheduler.state().counters.handoffs == 3


def test_places_of_hand_offs_under_way_are_taken() -> None:
    """One place: another prompt's K and V are on their way there when the next turn comes."""
    cluster = chatting(*PAIR, settings={"max_num_seqs": 1}, page_bytes_per_ms=400.0)
    first_turn(cluster)
    cluster.ask(request("other", range(40, 60), "n", max_tokens=9), at=cluster.now)
    reach(cluster, lambda: list(cluster.scheduler.migrations))
    next_turn(cluster, "a", "b", [50])
    while cluster.scheduler.busy or not cluster.told["b"].events:
        cluster.run_one()
        assert cluster.scheduler.devices["d1"].passing.expected <= 1
    cluster.run()
    cluster.expect()
    assert not ran_locally(cluster) and cluster.scheduler.state().counters.handoffs == 3


@pytest.mark.parametrize("grain", ["request", "chunk", "layer"])
@pytest.mark.parametrize("roles", [PAIR, ("prefill", "prefill", "decode")])
def test_a_longer_next_prompt_computes_only_the_rest_where_prompts_run(roles: Sequence[RoleName], grain: str) -> None:
    """The prompt's full page sets stay there when it is handed off; of the next one's K and V only the rest is sent."""
    decode = DecodeConfig(local_prefill=MOST, grain=grain)  # type: ignore[arg-type]
    placement = "auto" if roles == PAIR else "partition"
    cluster = chatting(*roles, settings={"decode": decode, "prefill_chunk": 8, "placement": placement})
    first_turn(cluster)
    cluster.ask(request("b", [*range(20), *range(60, 80)], "n", max_tokens=5), at=cluster.now)
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    rows = {(start, count) for device, seq, start, count in cluster.ran if seq == "b" and start < 40}
    assert rows == {(20, 8), (28, 8), (36, 4)}
    counters = cluster.scheduler.state().counters
    assert counters.handoff_present_tokens == 20
    assert counters.handoff_bytes == sum(map(cluster.kv_bytes, cluster.requests.values())) - cluster.kv_bytes(
        cluster.requests["a"]
    )


@pytest.mark.parametrize(("margin", "local"), [(0.0, False), (8.0, True)])
def test_a_busy_device_is_left_for_a_freer_one(margin: float, local: bool) -> None:
    cluster = chatting("prefill", "decode", "decode", settings={"owner_margin": margin})
    first_turn(cluster)
    (there,) = {each.path[0].device for each in cluster.scheduler.prefix_cache} - {"d0"}
    for number in range(4):
        cluster.ask(request(f"x{number}", range(30 + number, 39 + number), "n", max_tokens=40), at=cluster.now)
    reach(cluster, lambda: all(len(cluster.told[f"x{number}"].tokens) > 2 for number in range(4)))
    assert {one.path[0].device for one in cluster.scheduler.sequences.values()} == {there}
    next_turn(cluster, "a", "b", [50])
    reach(cluster, lambda: cluster.told["b"].tokens)
    assert (set(ran_locally(cluster)) == {"b"}) is local


@pytest.mark.parametrize("seed", range(6))
def test_deaths_and_aborts_while_a_remainder_runs_lose_nothing(seed: int) -> None:
    cluster = chatting("prefill", "decode", "decode", settings={"prefill_chunk": 2})
    first_turn(cluster)
    next_turn(cluster, "a", "b", range(60, 67), answer=9)
    reach(cluster, lambda: ran_locally(cluster).get("b"))
    (device, *_), rng = ran_locally(cluster)["b"][0], random.Random(seed)
    for _ in range(rng.randrange(12)):
        cluster.run_one()
    if seed % 2:
        cluster.abort("b", cluster.now)
        cluster.run()
        cluster.expect_empty()
        return
    cluster.kill(device)
    cluster.run()
    cluster.expect()
    assert cluster.told["b"].last.finish == "length"


def test_a_device_that_leaves_its_role_begins_no_remainder() -> None:
    cluster = chatting("prefill", "decode", "decode")
    first_turn(cluster)
    (there,) = {each.path[0].device for each in cluster.scheduler.prefix_cache} - {"d0"}
    cluster.scheduler.devices.roles.leaving[there] = "prefill"
    next_turn(cluster, "a", "b", [50], answer=4)
    cluster.run()
    cluster.expect()
    assert not ran_locally(cluster) and cluster.scheduler.state().counters.handoffs == 2


def test_arrivals_in_time_with_other_prompts_keep_their_places() -> None:
    """Turns come while other prompts run: those decode devices run nothing of these."""
    cluster = chatting("prefill", "decode", "decode", settings={"prefill_chunk": 4})
    first_turn(cluster)
    begin = cluster.now
    for number in range(12):
        prompt = [70 + number, *range(random.Random(number).randrange(4, 30))]
        cluster.ask(request(f"x{number}", prompt, "m", max_tokens=8), at=begin + number * MS)
    next_turn(cluster, "a", "b", [50, 51, 52])
    cluster.run()
    cluster.expect()
    expect_roles(cluster)
    assert set(ran_locally(cluster)) == {"b"}
