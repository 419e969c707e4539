"""Prompts shared between chains: the tokens of each model, fewer layers run, pages there once, states within a limit.

Every token of the integer engines depends on all pages and hidden states, and their engine refuses rows that write
pages of another sequence. So a page or state of a wrong domain changes tokens or raises.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.config import AgentConfig, ClusterConfig, PrefixCaching
from runtime.control.scheduler_io import AddRequests, PauseSequence, ResumeSequence, WithdrawModel
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from runtime.scheduler.kv import shared_prompts
from tests.runtime.scheduler.changing import Changing, as_version, serve
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import Told, request

#: B parts from A behind three attention layers, C behind one, D with the first part.
A = counting_model("a", "1 2* 3 4* 5* 6 7* 8")
B = counting_model("b", "1 2* 3 4* 5* 9 7* 8")
C = counting_model("c", "1 2* 9 4* 5* 6 7* 8")
D = counting_model("d", "9 2* 3 4* 5* 6 7* 8")
MODELS = (A, B, C, D)
SYSTEM = tuple(range(20, 36))  # four page sets
#: Bytes of the states of a page set.
STATE = 4 * 8


def cluster_of(
    caching: PrefixCaching = "active", models: tuple[IntegerModel, ...] = MODELS, states: int = 1 << 20, **changes
) -> VirtualCluster:
    limits = {name: changes.pop(name) for name in ("prefill_chunk", "devices") if name in changes}
    config = ClusterConfig(**({"devices": 1} | limits), prefix_caching=caching, shared_prompt_bytes=states)
    return VirtualCluster(models, devices=config.devices, config=config, **changes)


def entered(cluster: VirtualCluster) -> dict[str, tuple[str, int, int]]:
    """Return, by sequence, the sequence or cached prefix that it starts from, how many tokens, and how many layers."""
    events = cluster.trace.named("kv.enter")
    return {each.seq or "": (each.extra["of"], each.extra["tokens"], each.extra["layers"]) for each in events}


def states(cluster: VirtualCluster) -> int:
    """Return the bytes of states, on which the scheduler and the agent must agree."""
    counters = cluster.scheduler.state().counters
    there = cluster.nodes["d0"].agent.prompt_states.nbytes
    assert there == counters.saved_state_bytes - counters.dropped_state_bytes
    return there


# -- what is shared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caching", "limit"), [("off", 1 << 20), ("active", 0), ("active", 1 << 20), ("cached", 1 << 20)]
)
def test_shared_layers_run_once_and_their_pages_are_there_once(caching: PrefixCaching, limit: int) -> None:
    cluster = cluster_of(caching, states=limit)
    cluster.ask(request("first", (*SYSTEM, 1, 2), "a", max_tokens=30))
    for at, name in enumerate("bcd"):
        cluster.ask(request(name, (*SYSTEM, 3, at), name, max_tokens=20), at=15 * MS)
    cluster.run(until=25 * MS)
    on = caching != "off" and limit > 0
    alone = sum(sequence.pages.groups * A.spec.kv_layers for sequence in cluster.scheduler.sequences.values())
    assert len(cluster.scheduler.sequences) == 4
    assert cluster.scheduler.devices["d0"].pages.used == alone - (4 * (3 + 1) if on else 0)
    cluster.run()
    cluster.expect()
    assert entered(cluster) == ({"b": ("first", 16, 3), "c": ("first", 16, 1)} if on else {})
    counters = cluster.scheduler.state().counters
    assert (counters.shared_prompts, counters.shared_prompt_tokens) == ((2, 32) if on else (0, 0))
    assert states(cluster) == 0, "states stay only with pages"
    # A's states at both boundaries; C's own system prompt is not saved again.
    assert counters.saved_state_bytes == (2 * 4 * STATE if on else 0)


def test_chains_share_with_those_that_have_shared_themselves() -> None:
    """B starts from A's pages and states; then A has gone, and the next A starts from B's."""
    cluster = cluster_of()
    cluster.ask(request("first", (*SYSTEM, 1, 2), "a", max_tokens=10))
    cluster.ask(request("second", (*SYSTEM, 3), "b", max_tokens=40), at=10 * MS)
    cluster.ask(request("third", (*SYSTEM, 4), "a", max_tokens=5), at=40 * MS)
    cluster.ask(request("fourth", (*SYSTEM, 5), "c", max_tokens=5), at=41 * MS)
    cluster.run()
    cluster.expect()
    assert entered(cluster) == {"second": ("first", 16, 3), "third": ("second", 16, 3), "fourth": ("second", 16, 1)}


def test_its_own_chains_prefix_is_preferred_if_more_is_shared() -> None:
    cluster = cluster_of()
    cluster.ask(request("own", (*SYSTEM[:8], 1), "b", max_tokens=40))
    cluster.ask(request("other", (*SYSTEM, 1), "a", max_tokens=40), at=10 * MS)
    cluster.ask(request("b8", (*SYSTEM[:8], 2), "b", max_tokens=5), at=25 * MS)  # 8 tokens of 4 layers, or of 3
    cluster.ask(request("b16", (*SYSTEM, 2), "b", max_tokens=5), at=25 * MS)  # 8 tokens of 4 layers, or 16 of 3
    cluster.run()
    cluster.expect()
    assert entered(cluster) == {"other": ("own", 8, 3), "b16": ("other", 16, 3)}


def test_tenants_share_nothing_with_each_other() -> None:
    cluster = cluster_of("cached")
    cluster.ask(replace(request("first", SYSTEM, "a", max_tokens=20), tenant="t"))
    cluster.ask(request("b", (*SYSTEM, 1), "b", max_tokens=5), at=15 * MS)
    cluster.ask(replace(request("bt", (*SYSTEM, 1), "b", max_tokens=5), tenant="t"), at=16 * MS)
    cluster.run()
    cluster.expect()
    assert entered(cluster) == {"bt": ("first", 16, 3)}


def test_prompts_with_scores_and_virtual_tokens_are_run_whole() -> None:
    virtual = counting_model("v", "1 2* 3 4* 5* 9 7* 9", virtual_tokens=4)
    cluster = cluster_of(models=(A, B, virtual))
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.ask(request("scores", (*SYSTEM, 1), "b", max_tokens=5, prompt_logprobs=0), at=15 * MS)
    cluster.ask(request("virtual", (*SYSTEM, 1), "v", max_tokens=5), at=15 * MS)
    cluster.run()
    cluster.expect()
    assert not entered(cluster)


def test_nothing_is_shared_over_several_devices() -> None:
    cluster = cluster_of(devices=2)
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.ask(request("b", (*SYSTEM, 1), "b", max_tokens=5), at=15 * MS)
    cluster.run()
    cluster.expect()
    assert not entered(cluster) and not cluster.scheduler.state().counters.saved_state_bytes


@pytest.mark.parametrize("wrong", [False, True])
def test_a_domain_that_ignored_what_is_upstream_would_give_foreign_tokens(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong:  # negative control: boundaries at the same depth count as the same
        monkeypatch.setattr(
            IntegerModel, "_boundaries",
            lambda model, real=IntegerModel._boundaries: (replace(each, domain=f"{each.at}") for each in real(model)),
        )  # fmt: skip
    cluster = cluster_of(models=(A, D))
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.ask(request("d", (*SYSTEM, 1), "d", max_tokens=9), at=15 * MS)
    cluster.run()
    if wrong:
        with pytest.raises(AssertionError, match=r"d$"):
            cluster.expect()
    else:
        cluster.expect()
    assert bool(entered(cluster)) == wrong


# -- waiting for a prompt that runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_prompts_that_come_together_wait_for_the_first_one(together: bool) -> None:
    cluster = cluster_of()
    asked = [request(f"{name}{at}", (*SYSTEM, at), name, max_tokens=9) for at, name in enumerate("aabbcd")]
    if together:
        cluster.requests |= {one.seq: one for one in asked}
        cluster.told |= {one.seq: Told() for one in asked}
        cluster.at(5 * MS, lambda: cluster.tell(AddRequests(tuple(asked))))
    else:
        cluster.ask(*asked, at=5 * MS)
    cluster.run()
    cluster.expect()
    # C saves one layer of four, which is just enough. D has nothing in common with the rest. A's second one shares all.
    assert entered(cluster) == {"b2": ("a0", 16, 3), "b3": ("a0", 16, 3), "c4": ("a0", 16, 1)}
    assert [each.seq for each in cluster.trace.named("kv.ref")] == ["a1"]


@pytest.mark.parametrize("end", ["abort", "pause", "kill"])
def test_a_prompt_that_stops_is_not_waited_for(end: str) -> None:
    cluster = cluster_of(agent_config=AgentConfig(max_num_batched_tokens=4, chunk_prefill=True), prefill_chunk=8)
    cluster.ask(request("a", SYSTEM, "a", max_tokens=9), at=5 * MS)
    cluster.ask(request("b", (*SYSTEM, 1), "b", max_tokens=9), at=6 * MS)
    if end == "abort":
        cluster.abort("a", 9 * MS)
    elif end == "pause":
        cluster.at(9 * MS, lambda: cluster.tell(PauseSequence("a")))
    else:
        cluster.at(9 * MS, lambda: cluster.kill("d0"))
    cluster.run(until=200 * MS)
    assert cluster.told["b"].last.finish == "length"
    if end == "pause":
        cluster.tell(ResumeSequence("a"))
    cluster.run()
    if end == "abort":
        del cluster.requests["a"]
    cluster.expect()


# -- what may happen meanwhile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 5, 7, 64])
def test_chunks_need_not_end_with_page_sets(tokens: int) -> None:
    agent = AgentConfig(max_num_batched_tokens=tokens, chunk_prefill=True)
    cluster = cluster_of(agent_config=agent, prefill_chunk=2048)
    cluster.ask(request("first", (*SYSTEM, 1), "a", max_tokens=30))
    cluster.ask(request("b", (*SYSTEM, 3, 4), "b", max_tokens=20), at=25 * MS)
    cluster.ask(request("c", (*SYSTEM, 5, 4), "c", max_tokens=20), at=27 * MS)
    cluster.run()
    cluster.expect()
    assert entered(cluster) == {"b": ("first", 16, 3), "c": ("first", 16, 1)}


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_prompts_sent_in_parts_are_saved_and_shared(chunk: int) -> None:
    cluster = cluster_of(prefill_chunk=chunk)
    cluster.ask(request("first", (*SYSTEM, 1), "a", max_tokens=30))
    cluster.ask(request("b", (*SYSTEM, 3, 4), "b", max_tokens=20), at=35 * MS)
    cluster.run()
    cluster.expect()
    assert entered(cluster) == {"b": ("first", 16, 3)}


@pytest.mark.parametrize("at", range(14, 24, 2))
def test_the_donor_may_be_aborted_at_any_time(at: int) -> None:
    cluster = cluster_of(agent_config=AgentConfig(max_num_batched_tokens=4, chunk_prefill=True))
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.ask(request("b", (*SYSTEM, 1, 2), "b", max_tokens=9), at=13 * MS)
    cluster.abort("first", at * MS)
    cluster.run()
    del cluster.requests["first"]
    cluster.expect()
    assert entered(cluster) == {"b": ("first", 16, 3)}
    assert states(cluster) == 0


def test_states_leave_for_newer_ones_and_their_prompts_are_run_again() -> None:
    """There is room for the states of one prompt at one boundary."""
    cluster = cluster_of("cached", models=(A, B), states=4 * STATE)
    other = tuple(range(50, 66))
    for at, (seq, prompt, model) in enumerate(
        [("a1", SYSTEM, "a"), ("a2", other, "a"), ("b1", SYSTEM, "b"), ("b2", other, "b"), ("a3", SYSTEM, "a")]
    ):
        cluster.ask(request(seq, (*prompt, at), model, max_tokens=3), at=at * 30 * MS)
    cluster.run()
    assert states(cluster) == 4 * STATE
    cluster.expect()
    # a2's states displace a1's; b1 finds none and displaces a2's; b2 finds none. a3 finds its own chain's prefix.
    assert not entered(cluster)
    cluster = cluster_of("cached", models=(A, B), states=8 * STATE)
    for at, (seq, prompt, model) in enumerate([("a1", SYSTEM, "a"), ("a2", other, "a"), ("b1", SYSTEM, "b")]):
        cluster.ask(request(seq, (*prompt, at), model, max_tokens=3), at=at * 30 * MS)
    cluster.run()
    cluster.expect()
    assert set(entered(cluster)) == {"b1"}


def test_states_that_do_not_fit_are_not_saved() -> None:
    cluster = cluster_of(states=4 * STATE - 1, models=(A, B))
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.ask(request("b", (*SYSTEM, 1), "b", max_tokens=5), at=15 * MS)
    cluster.run()
    cluster.expect()
    assert not entered(cluster) and not cluster.scheduler.state().counters.saved_state_bytes


def test_a_sequence_whose_states_are_missing_runs_its_whole_prompt() -> None:
    cluster = cluster_of()
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.at(12 * MS, lambda: cluster.nodes["d0"].agent._states._states.clear())
    cluster.ask(request("b", (*SYSTEM, 1), "b", max_tokens=5), at=15 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.sequences == {} and cluster.scheduler.state().counters.preemptions == 1


def test_a_model_may_be_withdrawn_while_its_prompt_is_shared() -> None:
    cluster = cluster_of()
    cluster.ask(request("first", SYSTEM, "a", max_tokens=30))
    cluster.ask(request("b", (*SYSTEM, 1), "b", max_tokens=20), at=15 * MS)
    cluster.at(18 * MS, lambda: cluster.tell(WithdrawModel("a")))
    cluster.ask(request("c", (*SYSTEM, 1), "c", max_tokens=5), at=20 * MS)
    cluster.run()
    cluster.expect()
    assert entered(cluster)["b"] == ("first", 16, 3)
    assert states(cluster) == 0


def test_a_model_that_comes_later_shares_too() -> None:
    chains = [as_version(A, "a")]
    config = ClusterConfig(devices=1)
    cluster = Changing(known=(A, B), chains=chains, blocks=list(A.blocks()), devices=1, config=config)
    cluster.ask(request("early", SYSTEM, "a", max_tokens=60))
    cluster.at(12 * MS, lambda: cluster.tell(serve(B, "b")))
    cluster.ask(request("late", (*SYSTEM, 1), "a", max_tokens=40), at=20 * MS)
    cluster.ask(request("b", (*SYSTEM, 2), "b", max_tokens=5), at=25 * MS)
    cluster.run()
    cluster.expect()
    assert not entered(cluster), "the pages of the first ones are not cut where it parts from them"
    cluster.ask(request("next", (*SYSTEM, 3), "a", max_tokens=20), at=cluster.now)
    cluster.ask(request("b2", (*SYSTEM, 4), "b", max_tokens=5), at=cluster.now + 10 * MS)
    cluster.run()
    cluster.expect()
    assert entered(cluster) == {"b2": ("next", 16, 3)}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_together(seed: int) -> None:
    """Few pages, few states, chunks of any size, aborts, deaths: each model's own tokens, and counts that agree."""
    rng = random.Random(seed)
    cluster = cluster_of(
        rng.choice(("active", "cached")), pages=rng.choice((64, 96, 400)), states=rng.choice((2, 6, 40)) * STATE,
        agent_config=AgentConfig(max_num_batched_tokens=rng.choice((3, 16, 64)), chunk_prefill=rng.random() < 0.7),
        prefill_chunk=rng.choice((5, 2048)), restart=5 * MS,
    )  # fmt: skip
    systems = [tuple(rng.randrange(90) for _ in range(length)) for length in (4, 9, 16)]
    for number in range(30):
        prompt = (*rng.choice(systems), *(rng.randrange(90) for _ in range(rng.randrange(6))))
        one = request(f"s{number}", prompt, rng.choice("abcdab"), max_tokens=rng.randrange(1, 30))
        cluster.ask(one, at=rng.randrange(150) * MS)
        if rng.random() < 0.15:
            cluster.abort(one.seq, rng.randrange(200) * MS)
            del cluster.requests[one.seq]
    for _ in range(rng.choice((0, 0, 2))):
        cluster.at(rng.randrange(150) * MS, lambda: cluster.kill("d0"))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.shared_prompts, "nothing was shared"


def test_preempted_sequences_run_again_with_what_is_shared() -> None:
    cluster = cluster_of(pages=80, models=(A, B))
    for number in range(6):
        cluster.ask(request(f"s{number}", (*SYSTEM, number), "ab"[number % 2], max_tokens=30), at=(1 + 8 * number) * MS)
    cluster.run()
    cluster.expect()
    counters = cluster.scheduler.state().counters
    assert counters.preemptions and counters.shared_prompts > 1


def test_keys_depend_on_domain_tenant_and_page_size() -> None:
    boundary = next(iter(A._boundaries()))
    realms = {
        shared_prompts._realm(boundary, 4, ""), shared_prompts._realm(boundary, 8, ""),
        shared_prompts._realm(boundary, 4, "t"), shared_prompts._realm(replace(boundary, domain="x"), 4, ""),
    }  # fmt: skip
    assert len({shared_prompts._salt(realm) for realm in realms}) == 4
