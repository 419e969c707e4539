"""Moves of blocks in the middle of a chain with kept inputs take the time of BL-16's formula, within one page group.

The link carries hidden states for the front and pages for the back. The tests count its bytes, and the upstream work
that no device has to repeat.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from runtime.chains import StageEngine
from runtime.config import AgentConfig, ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.policy.migration.cost import finish_time
from runtime.types import StepPlan
from tests.runtime.recomputing import costs, recompute_time, seconds
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Two blocks; the second has four layers. A token has 64 bytes of K and V there, and 8 bytes of hidden states as input.
M = counting_model("m", "1 2* 3* 4* 5* 6", page_tokens=4, max_model_len=4096)
CUT = (1,)
LAYERS, GROUP_BYTES, INPUT_BYTES = 4, 4 * 64, 4 * 8
MIDDLE = range(1, 2)


def cluster_of(
    tokens: int, recompute_ms: float, copy_ms: float, kept: int = 1 << 30, chunk: int = 4, **changes: object
) -> VirtualCluster:
    """Return a cluster with a held sequence of so many tokens.

    A page group takes `recompute_ms` to recompute and `copy_ms` to copy.
    """
    fields = dict(
        devices=3,
        pages=600,
        config=ClusterConfig(devices=3, placement="partition", prefill_chunk=64),
        latency=0,
        alpha=0,
        beta=int(recompute_ms * MS / 4),
        agent_config=AgentConfig(recompute_chunk=chunk, fetch_window=1, activation_cache_bytes=kept),
        page_bytes_per_ms=GROUP_BYTES / copy_ms,
    )
    cluster = VirtualCluster([M], [CUT], **(fields | changes))  # type: ignore[arg-type]
    cluster.ask(request("a", [number % 97 for number in range(tokens)], "m", max_tokens=4))
    while not cluster.told["a"].tokens:
        cluster.run_one()
    rest(cluster)
    return cluster


def rest(cluster: VirtualCluster) -> None:
    sequence = cluster.scheduler.sequences["a"]
    sequence.hold(True)
    while sequence.flying:
        cluster.run_one()
    assert len(sequence.path) == 2


def move(cluster: VirtualCluster, target: str = "d2", **ends: bool) -> None:
    while cluster.migrate("a", MIDDLE, target, **ends) is not None:
        cluster.run_one()


def moved(tokens: int, recompute_ms: float, copy_ms: float, kept: int = 1 << 30, **ends: bool) -> VirtualCluster:
    cluster = cluster_of(tokens, recompute_ms, copy_ms, kept)
    move(cluster, **ends)
    cluster.run()
    cluster.expect()
    return cluster


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 63, 400])
@pytest.mark.parametrize(("recompute_ms", "copy_ms"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 50.0), (50.0, 1.0)])
def test_two_ends_take_what_the_formula_says(tokens: int, recompute_ms: float, copy_ms: float) -> None:
    cluster = moved(tokens, recompute_ms, copy_ms)
    took, counts = seconds(cluster.trace), cluster.scheduler.migrations.counts()
    both = counts.copied + counts.recomputed
    priced = costs(recompute_ms, copy_ms, INPUT_BYTES / GROUP_BYTES)
    page = max(recompute_ms, copy_ms) / 1e3
    groups = -(-both // 4)
    ideal = finish_time(both, priced).seconds
    # Recomputing alone waits for the first group's inputs, or for those of each group where the link is the slower one.
    alone = priced.inputs_group + max(recompute_time(both, priced), groups * priced.inputs_group)
    assert both in (tokens, tokens + 1)  # the token after the prompt may have run
    # A last group that is not full has fewer hidden states than the formula assumes.
    assert ideal - priced.inputs_group - 1e-9 <= took <= ideal + page + 1e-9
    assert took <= min(alone, priced.back(groups)) + page + 1e-9


@pytest.mark.parametrize(("recompute_ms", "copy_ms"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_both_ends_work(recompute_ms: float, copy_ms: float) -> None:
    cluster = moved(61, recompute_ms, copy_ms)
    (meet,), (front,), (back,) = (cluster.trace.named(name) for name in ("kv.meet", "kv.recompute", "kv.copy"))
    spans = sorted([*meet.extra["copied"], *meet.extra["recomputed"]])
    assert spans[0][0] == 0 and spans[-1][1] >= 61 and all(before[1] == after[0] for before, after in pairwise(spans))
    assert front.extra["front"] == "inputs" and (front.extra["spans"], back.extra["spans"]) == (
        meet.extra["recomputed"],
        meet.extra["copied"],
    )
    assert front.n + back.n == spans[-1][1] and back.extra["reason"] == "both ends met"
    # The link carried eight bytes for each recomputed token, and nothing more.
    assert cluster.fed_bytes == front.bytes == 8 * front.n and back.bytes == -(-back.n // 4) * GROUP_BYTES


@pytest.mark.parametrize("ends", [{"copy": False}, {"recompute": False}], ids=["recompute", "copy"])
def test_one_end_takes_its_own_time(ends: dict[str, bool]) -> None:
    cluster = moved(100, 2.0, 3.0, **ends)
    counts = cluster.scheduler.migrations.counts()
    groups = -(-(counts.copied + counts.recomputed) // 4)
    each = 2.0 if "copy" in ends else 3.0
    assert abs(seconds(cluster.trace) - groups * each / 1e3) <= each / 1e3
    assert (counts.copied == 0) == ("copy" in ends)


def test_where_the_link_is_slower_than_the_device_recomputing_takes_what_the_inputs_take() -> None:
    cluster = moved(100, 0.1, 80.0, copy=False)
    counts = cluster.scheduler.migrations.counts()
    assert counts.copied == 0 and counts.inputs == 8 * counts.recomputed
    assert abs(seconds(cluster.trace) - counts.inputs / (GROUP_BYTES / 0.08)) <= 1e-3


class Counted:
    """An engine that counts the work it has run, in tokens times components, by the first component of the stage."""

    def __init__(self, engine: StageEngine, work: Counter[tuple[str, int]]) -> None:
        self._engine, self._work = engine, work

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def run(self, plan: StepPlan, inputs: object) -> object:
        for row in plan.rows:
            lo, hi = row.model.partition("[")[2].rstrip("]").split(":")
            self._work[self._engine.device, int(lo)] += len(row.tokens) * (int(hi) - int(lo))
        return self._engine.run(plan, inputs)  # type: ignore[arg-type]


def counted(kept: int) -> tuple[VirtualCluster, Counter[tuple[str, int]]]:
    """Return a cluster with a held sequence of 61 tokens, and the counter of its devices' work from now on."""
    cluster = cluster_of(61, 1.0, 1.0, kept)
    work: Counter[tuple[str, int]] = Counter()
    for node in cluster.nodes.values():
        node.engine = Counted(node.engine, work)  # type: ignore[assignment]
    return cluster, work


def test_nothing_upstream_runs_again_where_inputs_are_kept() -> None:
    cluster, work = counted(1 << 30)
    move(cluster, copy=False)
    while not (meet := cluster.trace.named("kv.meet")):
        cluster.run_one()
    ((lo, hi),) = meet[0].extra["recomputed"]
    assert work == {("d2", 1): (hi - lo) * 5}
    cluster.run()
    cluster.expect()


def test_upstream_is_charged_where_none_are_kept() -> None:
    """Where no inputs are kept, a recompute is charged the tokens times components before the moved blocks.

    The charge equals the work that a second cluster counts when it computes K and V from the tokens alone.
    """
    cluster, work = counted(0)
    sequence = cluster.scheduler.sequences["a"]
    held, prompt = sequence.computed, sequence.first(sequence.computed)
    assert "would run again" in (cluster.migrate("a", MIDDLE, "d2", copy=False) or "")  # refused, with the reason
    move(cluster)
    cluster.run()
    cluster.expect()
    (back,) = cluster.trace.named("kv.copy")
    assert not cluster.trace.named("kv.recompute") and cluster.fed_bytes == 0
    assert back.extra["upstream"] == held * 1 and "1 components would run again" in back.extra["reason"]
    work.clear()
    again = VirtualCluster([M], [CUT], devices=2, latency=0)  # computes K and V from the tokens alone
    again.ask(request("a", prompt, "m", max_tokens=1))
    again.run_one()
    while len(again.nodes) < 2 or not again.scheduler.sequences.get("a") or not again.scheduler.sequences["a"].path:
        again.run_one()
    for node in again.nodes.values():
        node.engine = Counted(node.engine, work)  # type: ignore[assignment]
    again.run()
    upstream = sum(done for (_, lo), done in work.items() if lo == 0)
    assert upstream == back.extra["upstream"]


def test_few_layers_behind_wide_hidden_states_are_copied() -> None:
    """One layer's K and V (16 bytes a token) are no larger than its input (16 bytes), so they are copied."""
    thin = counting_model("m", "1 2* 3", page_tokens=4, max_model_len=4096)
    chain = thin.chain(1)
    wide = (
        chain.uses[0],
        type(chain.uses[1])(*[getattr(chain.uses[1], name) for name in chain.uses[1].__slots__[:-1]], 16),
    )  # type: ignore[misc]
    cluster = VirtualCluster(
        chains=[type(chain)(chain.spec, chain.version, wide)],
        blocks=thin.blocks(1),
        stand_ins=[thin],
        devices=3,
        config=ClusterConfig(devices=3, placement="partition"),
        agent_config=AgentConfig(activation_cache_bytes=1 << 20),
    )
    cluster.ask(request("a", range(40), "m", max_tokens=4))
    while not cluster.told["a"].tokens:
        cluster.run_one()
    rest(cluster)
    move(cluster)
    cluster.run()
    assert cluster.scheduler.migrations.counts().recomputed == 0 and cluster.fed_bytes == 0
    assert "16 bytes a token" in cluster.trace.named("kv.copy")[0].extra["reason"]
