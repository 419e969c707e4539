"""Prefix caching: the same tokens with fewer computed, and shared pages counted once.

Models and tenants never share with each other. A wrong page changes every later token of the counting engines, so
comparing tokens with the model's own proves the pages too.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.chains import Surrogate
from runtime.config import AgentConfig, ClusterConfig, PrefixCaching, SpeculationConfig, SpeculationMode
from runtime.control.scheduler_io import Tick
from runtime.engine.fakes.integer_model import counting_model, surrogate_of
from runtime.policy.kv.duplicates import PERIOD
from runtime.policy.migration.order import order_moves
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.types import SequenceRequest
from tests.runtime.scheduler.changing import Changing, as_version, serve
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3 4* 5* 6")
#: Has the same first parts as M.
N = counting_model("n", "1 2* 3 4* 8 9", page_tokens=4)
CUTS = [(1, 3, 4), (1, 3, 4)]
SYSTEM = tuple(range(20, 36))  # four page groups


def cluster_of(sharing: PrefixCaching = "active", devices: int = 2, **changes) -> VirtualCluster:
    fields = {name: changes.pop(name) for name in ("placement", "owner_margin", "watermark") if name in changes}
    config = ClusterConfig(devices=devices, prefix_caching=sharing, **({"placement": "partition"} | fields))
    return VirtualCluster([M, N], CUTS, devices=devices, config=config, **changes)


def computed(cluster: VirtualCluster) -> int:
    """Return the tokens that went through first hops."""
    return sum(sum(message.counts) for _, _, _, message in cluster.sent if type(message).__name__ == "RunRows")


def refs(cluster: VirtualCluster) -> dict[str, tuple[str, int]]:
    """Return, by sequence, the sequence or cached prefix it shares pages with, and how many tokens."""
    return {event.seq or "": (event.extra["of"], event.extra["tokens"]) for event in cluster.trace.named("kv.ref")}


def began(cluster: VirtualCluster) -> dict[str, int]:
    """Return, by sequence with a token, the position at which the run of its prompt began that gave the first one."""
    first: dict[str, int] = {}
    told: dict[str, int] = {}
    for event in cluster.trace.events:
        seq = event.seq or ""
        if event.ev in ("batch.insert", "batch.resume"):
            first.pop(seq, None)
        elif event.ev == "block.hop" and event.extra["hop"] == 0:
            first.setdefault(seq, event.extra["start"])
        elif event.ev == "token":
            told.setdefault(seq, first[seq])
    return told


def said(cluster: VirtualCluster) -> dict[str, int]:
    """Return, by sequence with a token, how many tokens of its prompt its client was told not to be computed."""
    assert not any(event.cached for told in cluster.told.values() for event in told.events[1:])
    return {seq: told.events[0].cached for seq, told in cluster.told.items() if told.tokens}


# -- what is shared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sharing", "spared"), [("off", 0), ("active", 16), ("cached", 16)])
def test_a_beginning_is_computed_once_and_its_pages_are_there_once(sharing: PrefixCaching, spared: int) -> None:
    cluster = cluster_of(sharing)
    cluster.ask(request("a", (*SYSTEM, 1, 2), "m", max_tokens=20))
    cluster.ask(request("b", (*SYSTEM, 3, 4, 5), "m", max_tokens=20), at=30 * MS)
    cluster.run(until=33 * MS)
    assert set(cluster.scheduler.sequences) == {"a", "b"}
    alone = sum(sequence.pages.groups * M.spec.kv_layers for sequence in cluster.scheduler.sequences.values())
    assert sum(device.pages.used for device in cluster.scheduler.devices) == alone - spared // 4 * M.spec.kv_layers
    cluster.run()
    cluster.expect()
    assert computed(cluster) == 18 + 19 + 2 * 19 - spared
    assert cluster.scheduler.sharing().tokens == spared
    assert said(cluster) == began(cluster) == {"a": 0, "b": spared}
    assert cluster.scheduler.sharing().queried == (18 + 19 if sharing != "off" else 0)


def test_one_token_runs_at_least_and_only_whole_groups_are_shared() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", SYSTEM, "m", max_tokens=20))
    cluster.ask(request("same", SYSTEM, "m", max_tokens=5), at=25 * MS)
    cluster.ask(request("half", SYSTEM[:11], "m", max_tokens=5), at=25 * MS)
    cluster.ask(request("other", (1, *SYSTEM), "m", max_tokens=5), at=25 * MS)
    cluster.run()
    cluster.expect()
    assert refs(cluster) == {"same": ("a", 12), "half": ("a", 8)}


def test_answers_are_beginnings_too() -> None:
    """The next turn of a conversation computes only its new tokens."""
    cluster = cluster_of("cached")
    cluster.ask(request("a", SYSTEM, "m", max_tokens=9))
    cluster.run()
    turn = (*SYSTEM, *cluster.told["a"].tokens, 7, 8, 9)
    cluster.ask(request("b", turn, "m", max_tokens=9), at=cluster.now)
    cluster.run()
    cluster.expect()
    assert refs(cluster)["b"] == ("~1", 24)
    assert said(cluster)["b"] == 24


def test_what_was_shared_with_a_device_that_died_before_the_first_token_is_not_told() -> None:
    cluster = cluster_of("cached", placement="replicate")
    cluster.ask(request("a", SYSTEM, "m", max_tokens=9))
    cluster.run()
    cluster.ask(request("b", (*SYSTEM, *range(9)), "m", max_tokens=9), at=cluster.now)
    while "b" not in refs(cluster):
        cluster.run(until=cluster.now + MS // 10)
    cluster.kill(cluster.scheduler.sequences["b"].path[0].device)
    assert not cluster.told["b"].tokens
    cluster.run()
    cluster.expect()
    assert said(cluster) == began(cluster) and said(cluster)["b"] == 0


def test_scores_of_a_prompt_are_had_by_running_it() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", SYSTEM, "m", max_tokens=20))
    cluster.ask(request("b", (*SYSTEM, 1), "m", max_tokens=5, prompt_logprobs=0), at=25 * MS)
    cluster.run()
    cluster.expect()
    assert not refs(cluster)


def test_models_with_virtual_tokens_share_nothing() -> None:
    model = counting_model("v", "1 2* 3 4*", virtual_tokens=3)
    cluster = VirtualCluster(
        [model], [(2,)], config=ClusterConfig(devices=2, placement="partition", prefix_caching="cached")
    )
    cluster.ask(request("a", SYSTEM, "v", max_tokens=20))
    cluster.ask(request("b", SYSTEM, "v", max_tokens=5), at=25 * MS)
    cluster.run()
    cluster.expect()
    assert not refs(cluster) and not len(cluster.scheduler.prefix_cache)


def test_tenants_share_nothing_with_each_other() -> None:
    cluster = cluster_of("cached")
    cluster.ask(replace(request("a", SYSTEM, "m", max_tokens=20), tenant="t"))
    cluster.ask(request("b", (*SYSTEM, 1), "m", max_tokens=5), at=25 * MS)
    cluster.ask(replace(request("c", (*SYSTEM, 1), "m", max_tokens=5), tenant="t"), at=26 * MS)
    cluster.run()
    cluster.expect()
    assert refs(cluster) == {"c": ("a", 16)}


@pytest.mark.parametrize("wrong", [False, True])
def test_models_share_nothing_with_each_other_or_their_tokens_would_not_be_theirs(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong:  # negative control: versions are not distinguished
        monkeypatch.setattr(ScheduledSequence, "realm", property(lambda sequence: ("any", sequence.request.tenant)))
    other = counting_model("n", "1 2* 3 4* 5* 7")
    third = counting_model("n", "1 9* 3 4* 5* 7")
    for second in (other, third):
        cluster = VirtualCluster(
            [M, second], [(3,), (3,)], config=ClusterConfig(devices=1, prefix_caching="active"), devices=1
        )
        cluster.ask(request("a", SYSTEM, "m", max_tokens=20))
        cluster.ask(request("b", (*SYSTEM, 1), "n", max_tokens=8), at=15 * MS)
        cluster.run()
        assert bool(refs(cluster)) is wrong
        if wrong and second is third:
            with pytest.raises(AssertionError):
                cluster.expect()
        else:
            cluster.expect()


def warm(cluster: VirtualCluster) -> None:
    """Have all chains loaded on all devices: new sequences only go to devices where the stages are loaded."""

    def ask() -> None:
        state = cluster.scheduler._state
        for chain in state.chains.values():
            for device in state.devices:
                state.ask_for(chain, device.name, chain.stage(0, chain.length))
        cluster.carry_out(cluster.scheduler.handle(Tick(), cluster.now))

    cluster.at(2 * MS, ask)


# -- which path a new sequence takes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("margin", "shares"), [(8.0, True), (float("inf"), True), (0.0, False)])
def test_a_newcomer_goes_where_its_beginning_lies_unless_that_is_too_dear(margin: float, shares: bool) -> None:
    cluster = cluster_of("active", placement="replicate", owner_margin=margin)
    warm(cluster)
    cluster.ask(request("a", SYSTEM, "m", max_tokens=40))
    cluster.ask(request("b", (*SYSTEM, 1), "m", max_tokens=5), at=25 * MS)
    cluster.run(until=28 * MS)
    sequences = cluster.scheduler.sequences
    assert (sequences["a"].path == sequences["b"].path) is shares is bool(refs(cluster))
    cluster.run()
    cluster.expect()


def test_without_room_there_it_goes_elsewhere() -> None:
    cluster = cluster_of("active", placement="replicate", pages=36)
    cluster.ask(request("a", (*SYSTEM, *range(24)), "m", max_tokens=8))
    cluster.ask(request("b", (*SYSTEM, *range(40, 56)), "m", max_tokens=5), at=6 * MS)
    cluster.run(until=8 * MS)
    sequences = cluster.scheduler.sequences
    assert sequences["a"].path != sequences["b"].path and not refs(cluster)
    cluster.run()
    cluster.expect()


# -- cached prefixes ---------------------------------------------------------------------------------------------------


def test_donors_give_way_the_least_recently_used_first_before_anybody_is_preempted() -> None:
    cluster = cluster_of("cached", devices=1, pages=60)
    for number in range(3):
        cluster.ask(
            request(f"old-{number}", [number * 30 + at for at in range(17)], "m", max_tokens=1), at=number * 10 * MS
        )
    cluster.ask(request("again", range(18), "m", max_tokens=1), at=40 * MS)
    cluster.run()
    assert refs(cluster) == {"again": ("~1", 16)}
    assert [cached_prefix.name for cached_prefix in cluster.scheduler.prefix_cache] == ["~2", "~3", "~1"]
    cluster.ask(request("large", [96 - at for at in range(33)], "m", max_tokens=12), at=cluster.now)
    cluster.run(until=cluster.now + 3 * MS)
    assert "~2" not in cluster.scheduler.prefix_cache and "~1" in cluster.scheduler.prefix_cache
    cluster.run()
    counts, counters = cluster.scheduler.prefix_cache.counts(), cluster.scheduler.state().counters
    assert (counts.evicted, counters.preemptions) == (1, 0)
    cluster.expect()


def test_of_two_where_one_begins_as_the_other_the_longer_stays() -> None:
    cluster = cluster_of("cached")
    cluster.ask(request("a", SYSTEM, "m", max_tokens=1))
    cluster.ask(request("b", (*SYSTEM, *range(9)), "m", max_tokens=1), at=30 * MS)
    cluster.ask(request("c", (*SYSTEM, *range(5)), "m", max_tokens=1), at=60 * MS)
    cluster.run()
    assert [cached_prefix.known for cached_prefix in cluster.scheduler.prefix_cache] == [6]
    assert cluster.scheduler.prefix_cache.counts().displaced == 1
    cluster.expect()


def test_a_device_takes_its_donors_along() -> None:
    cluster = cluster_of("cached", devices=3)
    cluster.ask(request("a", SYSTEM, "m", max_tokens=1))
    cluster.run()
    path = next(iter(cluster.scheduler.prefix_cache)).path
    cluster.at(cluster.now, lambda: cluster.kill(path[0].device))
    cluster.ask(request("b", (*SYSTEM, 1), "m", max_tokens=5), at=cluster.now + 200 * MS)
    cluster.run()
    assert not refs(cluster)
    cluster.expect()


def test_a_name_that_a_donor_has_is_taken() -> None:
    cluster = cluster_of("cached")
    cluster.ask(request("~1", SYSTEM, "m", max_tokens=30))
    cluster.ask(request("a", SYSTEM[:8], "m", max_tokens=1))
    cluster.run(until=15 * MS)
    assert [cached_prefix.name for cached_prefix in cluster.scheduler.prefix_cache] == ["~2"]
    cluster.run()
    cluster.expect()


def test_an_old_version_takes_its_donors_along() -> None:
    cluster = cluster_of("cached")
    cluster.ask(request("a", SYSTEM, "m", max_tokens=1), request("b", SYSTEM, "n", max_tokens=1))
    cluster.run()
    cluster.scheduler.prefix_cache.remove_version(M.chain(1, 3, 4).version)
    cluster.carry_out(cluster.scheduler.handle(Tick(), cluster.now))
    cluster.run()
    assert [cached_prefix.shelf.realm[0] for cached_prefix in cluster.scheduler.prefix_cache] == [
        N.chain(1, 3, 4).version
    ]
    cluster.expect()


def test_once_a_minute_duplicates_that_nobody_used_go() -> None:
    """BL-27: the same prefix is cached on two devices; the copy used later stays."""
    cluster = cluster_of("cached", placement="replicate", owner_margin=0.0)
    warm(cluster)
    cluster.ask(request("a", SYSTEM, "m", max_tokens=30), at=10 * MS)
    cluster.ask(request("b", SYSTEM, "m", max_tokens=30), at=11 * MS)
    cluster.run()
    assert len({cached_prefix.path for cached_prefix in cluster.scheduler.prefix_cache}) == 2
    before = sum(device.pages.used for device in cluster.scheduler.devices)
    for minutes, left in ((0.5, 2), (1.0, 1), (2.0, 1)):
        cluster.at(
            int(minutes * PERIOD) + cluster.now,
            lambda: cluster.carry_out(cluster.scheduler.handle(Tick(), cluster.now)),
        )
        cluster.run()
        assert len(cluster.scheduler.prefix_cache) == left
    counts = cluster.scheduler.prefix_cache.counts()
    assert (counts.swept, counts.swept_pages) == (
        1,
        before - sum(device.pages.used for device in cluster.scheduler.devices),
    )
    cluster.expect()


# -- moves -------------------------------------------------------------------------------------------------------------


def test_what_moves_is_a_copy_and_those_that_share_least_go_first() -> None:
    cluster = cluster_of("active", devices=3, placement="partition")
    cluster.ask(request("a", (*SYSTEM, 1), "m", max_tokens=40))
    cluster.ask(
        request("b", (*SYSTEM, 2), "m", max_tokens=40), request("c", range(60, 70), "m", max_tokens=40), at=25 * MS
    )
    cluster.ask(request("d", (*SYSTEM[:8], 2), "m", max_tokens=40), at=25 * MS)
    cluster.run(until=30 * MS)
    sequences = cluster.scheduler.sequences
    source = sequences["a"].path[0].device
    shared = {each.mover.seq: each.shared for each in order_moves(cluster.scheduler.movers(source))}
    layers = dict(sequences["a"].place.weights)[source]
    assert list(shared) == ["c", "d", "a", "b"] and list(shared.values()) == [0, 2 * layers, 4 * layers, 4 * layers]
    devices = cluster.scheduler.devices
    target = next(device.name for device in devices if device.name != source)
    blocks = range(2)
    cluster.migrate("b", blocks, target)  # its stage is loaded there first
    cluster.run(until=34 * MS)
    cluster.migrate("b", blocks, target)
    cluster.run(until=45 * MS)
    counts = cluster.scheduler.migrations.counts()
    assert counts.committed == 1 and sequences["b"].path[0].device == target
    grown = {seq: sequences[seq].pages.groups for seq in sequences}
    moved = sum(use.kv_layers for use in M.chain(1, 3, 4).uses[:2])
    alone = sum(groups * M.spec.kv_layers for groups in grown.values())
    spared = 4 * (M.spec.kv_layers - moved) + 2 * M.spec.kv_layers  # those of b's blocks that did not move, and d's
    assert sum(device.pages.used for device in devices) == alone - spared
    cluster.run()
    cluster.expect()


# -- with updates and speculation --------------------------------------------------------------------------------------


def test_a_new_version_is_not_held_up_by_donors_and_shares_nothing_with_the_old_one() -> None:
    old, new = counting_model("m-1", "1 2* 3 4* 5* 6"), counting_model("m-2", "1 2* 3 7* 5* 9")
    cut, asked = (1, 3, 4), [request(f"s{number}", (*SYSTEM, number), "m", max_tokens=6) for number in range(12)]
    config = ClusterConfig(devices=2, placement="partition", prefix_caching="cached")
    cluster = Changing(chains=[as_version(old, "m", *cut)], blocks=old.blocks(*cut), known=[old, new], config=config)
    for number, one in enumerate(asked):
        cluster.ask(one, at=number * 8 * MS)
    cluster.at(40 * MS, lambda: cluster.tell(serve(new, "m", *cut)))
    cluster.run()
    assert {cluster.given[seq] for seq in refs(cluster)} == {"m-1", "m-2"}
    assert {cached_prefix.shelf.realm[0] for cached_prefix in cluster.scheduler.prefix_cache} == {
        new.chain(*cut).version
    }
    cluster.expect()
    cluster.expect_only((new, cut))


@pytest.mark.parametrize("mode", ["exact", "similarity"])
def test_what_is_predicted_is_nobodys_beginning(mode: SpeculationMode) -> None:
    """UN-13: K and V of speculated hops may be wrong for a while, or for good."""
    model = counting_model("m", "1* 2 3* 4* 5 6* 7 8", vocab_size=3)
    config = ClusterConfig(
        devices=3, placement="partition", prefix_caching="cached", speculation=SpeculationConfig(mode, top=0.4)
    )
    cluster = VirtualCluster(
        [model], [(2, 5)], devices=3, config=config, stand_ins=[surrogate_of(model, "m~", 4, 2)],
        surrogates={"m": [Surrogate("m~", 4, 5, 1)]},
    )  # fmt: skip
    cluster.scheduler.speculation.pin([(model.chain(2, 5).uses[1].block, f"d{at}") for at in range(3)])
    cluster.ask(request("warm", (1,), "m", max_tokens=1))
    prompt = [at % 3 for at in range(12)]
    for number in range(6):
        cluster.ask(request(f"s{number}", (*prompt, number % 3), "m", max_tokens=12), at=(10 + number * 3) * MS)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.speculation.counts().started > 0
    assert not refs(cluster) and not len(cluster.scheduler.prefix_cache)


# -- random schedules --------------------------------------------------------------------------------------------------


def alike(count: int, rng: random.Random) -> list[SequenceRequest]:
    """Return requests that share a few prefixes, of two models and two tenants."""
    systems = [tuple(rng.randrange(97) for _ in range(length)) for length in (8, 13, 16)]
    systems.append((*systems[0], *(rng.randrange(97) for _ in range(8))))
    asked = []
    for number in range(count):
        own = [rng.randrange(97) for _ in range(rng.randrange(0, 12))]
        prompt = (*rng.choice(systems), *own)
        one = request(
            f"s{number}", prompt, rng.choice("mmn"), max_tokens=rng.randrange(1, 16), priority=rng.randrange(2)
        )
        asked.append(replace(one, tenant=rng.choice(("", "", "t"))))
    return asked


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_tokens_are_the_models_own_and_books_agree(seed: int) -> None:
    rng = random.Random(seed)
    sharing: PrefixCaching = rng.choice(("active", "cached", "cached"))
    cluster = cluster_of(
        sharing,
        devices=3,
        placement=rng.choice(("partition", "replicate")),
        pages=rng.choice((40, 70, 300)),
        owner_margin=rng.choice((0.0, 8.0)),
        agent_config=AgentConfig(
            recompute_chunk=rng.choice((4, 16)), fetch_window=rng.choice((1, 3)), page_timeout_ms=200
        ),
        page_bytes_per_ms=rng.choice((1e9, 100.0)),
    )
    asked = alike(18, rng)
    for one in asked:
        cluster.ask(one, at=rng.randrange(60 * MS))
    for _ in range(rng.choice((0, 30))):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.migrate_some(rng))
    for _ in range(rng.choice((0, 3))):
        cluster.at(rng.randrange(120 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    aborted = {one.seq for one in asked if rng.random() < 0.1}
    for seq in aborted:
        cluster.abort(seq, rng.randrange(80 * MS))
    cluster.run()
    cluster.requests = {seq: one for seq, one in cluster.requests.items() if seq not in aborted}
    tenants = {one.seq: one.tenant for one in asked}
    assert all(tenants[seq] == tenants.get(of, tenants[seq]) for seq, (of, _) in refs(cluster).items())
    cluster.expect()
    assert said(cluster) == began(cluster)


def test_random_schedules_do_share() -> None:
    """The schedules contain shared prefixes, so that the test above proves something."""
    cluster = cluster_of("cached", devices=3)
    for one in alike(12, random.Random(1)):
        cluster.ask(one, at=random.Random(one.seq).randrange(60 * MS))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.sharing().matches > 3
