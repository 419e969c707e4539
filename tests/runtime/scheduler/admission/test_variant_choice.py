"""Adaptive serving: exact requests always get their own model; adaptive ones keep the variant chosen for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.chains import Variant
from runtime.config import AgentConfig, ClusterConfig
from runtime.control.scheduler_io import WithdrawModel
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line
from runtime.policy.routing.variants import DispatchLimits
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.sim.models.variants import ScoredPair, variants_of
from runtime.types import SequenceRequest
from tests.runtime.scheduler.changing import Changing, serve
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

A = counting_model("a", "1 2* 3 4* 5* 6")
#: Like A except for one block, which is small in V.
V = counting_model("a~v", "1 2* 3 7* 5* 6")
CUT = (1, 3, 4)
SMALL = {
    block.id: replace(block, nbytes=10) for block in V.blocks(*CUT) if block.id not in {b.id for b in A.blocks(*CUT)}
}


def variant_of(exact: IntegerModel, model: IntegerModel, *cuts: int, score: float = 0.99) -> Variant:
    """Return a variant as the offline search makes it, of exactly the blocks in which `model` differs from `exact`."""
    pairs = [
        ScoredPair(own, other, score)
        for own, other in zip(exact.chain(*cuts).uses, model.chain(*cuts).uses, strict=True)
        if own.block != other.block
    ]
    sizes = {block.id: block.nbytes for each in (exact, model) for block in each.blocks(*cuts)}
    made = variants_of(exact.chain(*cuts), pairs, sizes, 0.5, named=lambda version: model.spec.name)
    assert [use.block for use in made[0].chain.uses] == [use.block for use in model.chain(*cuts).uses]
    return made[0]


def cluster_of(
    devices: int = 2, prefer: str = "latency", known: tuple[IntegerModel, ...] = (A, V), **changes
) -> Changing:
    blocks = {block.id: block for block in (*A.blocks(*CUT), *V.blocks(*CUT))} | SMALL
    adaptation = VariantChoice((variant_of(A, V, *CUT),), DispatchLimits(prefer))  # type: ignore[arg-type]
    return Changing(
        chains=[A.chain(*CUT)],
        blocks=list(blocks.values()),
        devices=devices,
        known=known,
        adaptation=adaptation,
        **changes,
    )


def ask(
    cluster: Changing, rng: random.Random, adaptive: float, within: int = 40 * MS, count: int = 24, first: int = 0
) -> None:
    for number in range(first, first + count):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 20))]
        one = request(f"s{number}", prompt, "a", max_tokens=rng.randrange(1, 20))
        cluster.ask(replace(one, adaptive=rng.random() < adaptive), at=rng.randrange(2 * MS, within))


def served(cluster: Changing) -> dict[str, str | None]:
    return {seq: told.last.served for seq, told in cluster.told.items()}


def test_exact_requests_get_the_models_own_tokens_though_a_variant_would_be_faster() -> None:
    cluster = cluster_of()
    ask(cluster, random.Random(1), adaptive=0.0)
    cluster.run()
    cluster.expect()
    assert set(cluster.given.values()) == {"a"} and set(served(cluster).values()) == {None}
    assert cluster.scheduler.state().counters.adapted == 0 and not cluster.trace.named("dispatch.choose")


def test_adaptive_requests_get_the_variants_own_tokens_and_are_told_so() -> None:
    cluster = cluster_of()
    ask(cluster, random.Random(2), adaptive=1.0)
    cluster.run()
    cluster.expect()
    assert set(cluster.given.values()) == {"a~v"} and set(served(cluster).values()) == {"a~v"}
    assert cluster.scheduler.state().counters.adapted == len(cluster.requests)
    chosen = cluster.trace.named("dispatch.choose")
    assert {(event.extra["asked"], event.extra["model"], event.extra["score"]) for event in chosen} == {
        ("a", "a~v", 0.99)
    }


def test_by_accuracy_the_chain_itself_is_taken_as_long_as_there_is_no_limit() -> None:
    cluster = cluster_of(prefer="accuracy")
    ask(cluster, random.Random(3), adaptive=1.0)
    cluster.run()
    cluster.expect()
    assert set(served(cluster).values()) == {None}


@pytest.mark.parametrize("seed", range(15))
def test_both_kinds_together_with_deaths_moves_and_short_pages(seed: int) -> None:
    rng = random.Random(seed)
    cluster = cluster_of(3, pages=rng.choice((60, 200)), page_bytes_per_ms=rng.choice((1e9, 50.0)))
    ask(cluster, rng, adaptive=0.5)
    for _ in range(10):
        cluster.at(rng.randrange(60 * MS), lambda: cluster.migrate_some(rng))
    for _ in range(3):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    cluster.expect()
    for seq, one in cluster.requests.items():
        assert one.adaptive or cluster.given[seq] == "a", "an exact request ran on something else"
        assert cluster.told[seq].last.served == (None if cluster.given[seq] == "a" else "a~v")
    if seed == 0:
        assert set(cluster.given.values()) == {"a", "a~v"}


def test_a_variant_that_cannot_be_loaded_is_given_up_and_nobody_is_hurt() -> None:
    cluster = cluster_of(known=(A,))
    ask(cluster, random.Random(5), adaptive=1.0)
    for number, begin in enumerate((MS // 4, MS // 2)):  # before the devices have reported that it cannot be loaded
        cluster.ask(replace(request(f"early{number}", (1, 2, 3), "a"), adaptive=True), at=begin)
    cluster.run()
    assert "a~v" in cluster.given.values()
    cluster.given = dict.fromkeys(cluster.given, "a")  # the model that served them in the end
    cluster.expect()
    assert set(served(cluster).values()) == {None}
    cluster.expect_only((A, CUT))


def test_a_variant_for_which_there_is_no_room_is_not_served() -> None:
    cluster = cluster_of(1, limits=(6005,))
    ask(cluster, random.Random(6), adaptive=1.0)
    cluster.run()
    cluster.expect()
    assert set(served(cluster).values()) == {None}
    cluster.expect_only((A, CUT))


def test_an_update_takes_the_variants_of_the_old_version_with_it() -> None:
    """The old variants' scores do not hold for the new version; a sequence running on an old variant finishes on it."""
    new, its = counting_model("a-2", "1 2* 3 4* 5* 9"), counting_model("a-2~v", "1 2* 3 8* 5* 9")
    cluster = cluster_of(known=(A, V, new, its))
    variant = variant_of(new, its, *CUT)
    variant = replace(variant, chain=replace(variant.chain, spec=replace(variant.chain.spec, name="a")))
    ask(cluster, random.Random(7), adaptive=0.5, within=60 * MS, count=40)
    tiny = [replace(block, nbytes=10) for block in its.blocks(*CUT)]
    cluster.at(20 * MS, lambda: cluster.tell(serve(new, "a", *CUT, variants=(variant,), blocks=tiny)))
    cluster.run()
    cluster.expect()
    assert set(cluster.given.values()) == {"a", "a~v", "a-2", "a-2~v"}
    assert cluster.loaded() == {"a-2", "a-2~v"}
    cluster.at(cluster.now + MS, lambda: cluster.tell(WithdrawModel("a")))
    cluster.run()
    cluster.expect_only()


def test_what_goes_takes_nothing_that_a_variant_on_its_way_needs() -> None:
    """Withdrawing A keeps the block of A's variant while B's variant, which shares it, is loading."""
    other, its = counting_model("b", "21 2* 23 4* 5* 26"), counting_model("b~v", "21 2* 23 7* 5* 26")
    cluster = cluster_of(known=(A, V, other, its))
    variant = variant_of(other, its, *CUT)
    variant = replace(variant, chain=replace(variant.chain, spec=replace(variant.chain.spec, name="b")))
    blocks = [SMALL.get(block.id, block) for block in its.blocks(*CUT)]
    assert not {block.id for block in blocks}.isdisjoint(SMALL)
    cluster.at(20 * MS, lambda: cluster.tell(serve(other, "b", *CUT, variants=(variant,), blocks=blocks)))
    cluster.at(20 * MS + 1, lambda: cluster.tell(WithdrawModel("a")))
    cluster.ask(replace(request("s", (1, 2, 3), "b"), adaptive=True), at=40 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.given == {"s": "b~v"} and cluster.loaded() == {"b", "b~v"}


# -- accuracy under load (BL-29) ---------------------------------------------------------------------------------------

LARGE, MEDIUM, TINY = (
    counting_model("x", "1* 2 3* 4* 5* 6"),
    counting_model("x~m", "1* 2 9"),
    counting_model("x~s", "8*"),
)
STEPS = {"x": 0.004, "x~m": 0.002, "x~s": 0.001}


def scaling_cluster() -> Changing:
    """A cluster with three sizes of one model, each on a device of its own; requests name the large one."""
    models = (LARGE, MEDIUM, TINY)
    own, blocks = LARGE.chain().uses[0], [block for model in models for block in model.blocks()]
    sizes = {block.id: block.nbytes for block in blocks}
    variants = [
        variants_of(
            LARGE.chain(),
            [ScoredPair(own, model.chain().uses[0], score)],
            sizes,
            0.5,
            named=lambda version, model=model: model.spec.name,
        )[0]
        for model, score in ((MEDIUM, 0.9), (TINY, 0.8))
    ]
    line = Line((1.0,), (0.001,))
    profiles = [
        BlockProfile(model.chain().uses[0].block, 1, Grid((1.0, 9.0), (0.0,), ((step,), (2 * step,))), line, 0.0)
        for model, step in zip(models, STEPS.values(), strict=True)
    ]
    limits = DispatchLimits("accuracy", equivalent=0.5, limit=0.010)
    adaptation = VariantChoice(tuple(variants), limits, DeviceProfile("d", tuple(profiles), ()))
    return Changing(
        chains=[LARGE.chain()],
        blocks=blocks,
        devices=3,
        known=models,
        limits=(6000, 3000, 1000),
        adaptation=adaptation,
        pages=400,
        config=ClusterConfig(devices=3, max_num_seqs=8),
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=1, batch_wait_us=0),
    )


def arrivals(
    rng: random.Random, rate: float, begin: float, end: float, first: int
) -> list[tuple[SequenceRequest, int]]:
    """Return requests with Poisson arrivals at `rate` per second, with their arrival times in ns."""
    out, at = [], begin
    while (at := at + rng.expovariate(rate)) < end:
        one = request(f"s{first + len(out)}", [rng.randrange(97) for _ in range(5)], "x", max_tokens=8)
        out.append((replace(one, adaptive=True), int(at * 1e9)))
    return out


def test_accuracy_falls_as_the_rate_rises_and_comes_back_when_it_falls() -> None:
    """BL-29: requests go to the most accurate chain unless that would take too long."""
    rng, cluster = random.Random(8), scaling_cluster()
    rates, length, count = (100.0, 600.0, 1500.0, 600.0, 100.0), 0.12, 0
    phases: list[list[str]] = []
    for number, rate in enumerate(rates):
        came = arrivals(rng, rate, 0.05 + number * length, 0.05 + (number + 1) * length, count)
        count += len(came)
        phases.append([one.seq for one, _ in came[len(came) // 4 :]])  # after the change of rate has settled
        for one, at in came:
            cluster.ask(one, at=at)
    cluster.every = 16
    cluster.run()
    cluster.expect()
    scores = {"x": 1.0, "x~m": 0.9, "x~s": 0.8}
    means = [sum(scores[cluster.given[seq]] for seq in phase) / len(phase) for phase in phases]
    assert means[0] == means[4] == 1.0
    assert means[0] > means[1] > means[2] + 0.05 and means[2] + 0.05 < means[3] < means[4], means
