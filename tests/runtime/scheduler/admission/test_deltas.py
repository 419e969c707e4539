"""A full fine-tune or its low-rank delta, by profiles and by what runs: worked out by hand (BL-21)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.chains import Chain, Rewriting, Variant
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line
from runtime.policy.routing.variants import DispatchLimits
from runtime.scheduler.admission.variant_choice import VariantChoice
from tests.runtime.scheduler.admission.test_variant_choice import variant_of
from tests.runtime.scheduler.changing import Changing
from tests.runtime.virtual import request

BASE = counting_model("base", "1 2* 3", max_model_len=64)
LORA = counting_model("lora", "1 2* 3", kind="lora", base="base")
FINE = counting_model("fine", "4 5* 6", kind="full", base="base")
NEAR = counting_model("near", "1 2* 3", kind="delta", base="base")
FAR = counting_model("far", "1 2* 3", kind="delta", base="base")
ON_FINE = counting_model("on fine", "4 5* 6", kind="lora", base="fine")
OTHER = counting_model("other", "7 8* 9")
COMPOSED = counting_model("fine~v", "4 5* 3", kind="composed")
ADDED = 50
DELTAS = {"near": Rewriting("fine", 0.9), "far": Rewriting("fine", 0.8)}
MODELS = (BASE, LORA, FINE, NEAR, FAR, ON_FINE, OTHER)


def chain_of(model: IntegerModel) -> Chain:
    """A version of its own, though deltas have their base's blocks; a delta adds bytes to them."""
    chain, rewriting = model.chain(), DELTAS.get(model.spec.name)
    uses = tuple(replace(use, adapter_bytes=ADDED if rewriting else 0) for use in chain.uses)
    return replace(chain, version=f"{model.spec.name}#1", uses=uses, rewriting=rewriting)


def profile(name: str, first: float, more: float) -> BlockProfile:
    """A whole chain: `first` seconds for one row and `more` for each further one, whatever the context."""
    rows = (1, 2, 3, 4)
    grid = Grid(rows, (1, 100), tuple((first + more * (row - 1),) * 2 for row in rows))
    return BlockProfile(f"{name}#1", 100, grid, Line((1,), (1.0,)), 7.0)


EXACT, DELTA = profile("fine", 1.0, 0.1), profile("near", 1.5, 0.2)


def cluster_of(
    *profiles: BlockProfile,
    models: tuple[IntegerModel, ...] = MODELS,
    limits: DispatchLimits | None = None,
    variants: tuple[Variant, ...] = (),
) -> Changing:
    chosen = VariantChoice(variants, limits or DispatchLimits(), DeviceProfile("d", profiles, ()))
    blocks = {block.id: block for model in (*MODELS, COMPOSED) for block in model.blocks()}
    chains = [chain_of(model) for model in models]
    made = Changing(
        chains=chains, blocks=list(blocks.values()), devices=1, known=(*MODELS, COMPOSED), adaptation=chosen
    )
    made.run()
    return made


def taken(cluster: Changing, asks: str = "fine", adaptive: bool = True, **alive: int) -> str | None:
    """What a request gets while so many sequences of these models are alive."""
    state = cluster.scheduler._state
    state.users.update({name.replace("_", " "): count for name, count in alive.items()})
    asked = replace(request("s", range(9), asks), adaptive=adaptive)
    variant = cluster.scheduler._admission._adaptive.choose(asked, state.chains[asks], 0)
    return None if variant is None else variant.name


@pytest.mark.parametrize(
    ("alive", "served", "terms"),
    [
        ({}, None, ((0, 1.0), (0, 1.5))),  # nothing runs: the faster one
        ({"base": 3}, "near", ((1.2, 1.0), (0, 2.1))),  # the base's batch runs anyway: joining costs less than one more
        ({"fine": 3}, None, ((0, 1.3), (1.9, 1.5))),  # the exact one's runs anyway
        ({"fine": 1, "base": 3}, None, ((1.2, 1.1), (1.5, 2.1))),  # both do
        ({"base": 1, "lora": 1, "near": 1}, "near", ((1.2, 1.0), (0, 2.1))),  # adapters run in their base's batch
        ({"on_fine": 3, "other": 9}, None, ((0, 1.3), (1.9, 1.5))),  # and other models' rows in neither
    ],
)
def test_the_batch_that_runs_anyway_is_joined_when_that_costs_less(alive, served, terms) -> None:
    cluster = cluster_of(EXACT, DELTA)
    assert taken(cluster, **alive) == served
    candidates, chosen = (event.extra for event in cluster.trace.events if event.ev.startswith("dispatch."))
    assert [each["model"] for each in candidates["candidates"]] == ["fine", "near"]
    found = [(each["queue"], each["compute"]) for each in candidates["candidates"]]
    assert found == [pytest.approx(each) for each in terms]
    assert all((each["transfer"], each["load"]) == (0, 0) for each in candidates["candidates"])
    assert (chosen["asked"], chosen["model"], chosen["rule"]) == ("fine", served or "fine", "latency")


def test_of_equals_the_exact_one_is_taken_and_another_table_is_another_choice() -> None:
    assert taken(cluster_of(EXACT, profile("near", 1.0, 0.1))) is None
    assert taken(cluster_of(EXACT, profile("near", 0.9, 0.1))) == "near"


def test_only_adaptive_requests_for_the_model_that_a_delta_rewrites_get_it() -> None:
    cluster = cluster_of()
    assert [taken(cluster, asks) for asks in ("fine", "base", "near", "on fine")] == ["near", None, None, None]
    assert taken(cluster, adaptive=False) is None


@pytest.mark.parametrize("alive", [{}, {"fine": 40}, {"base": 40}, {"fine": 40, "lora": 40}])
@pytest.mark.parametrize("profiles", [(), (EXACT,), (DELTA,)])
def test_without_profiles_of_both_the_delta_is_taken_whatever_runs(profiles, alive) -> None:
    assert taken(cluster_of(*profiles), **alive) == "near"


def test_of_several_that_are_served_the_nearest_is_taken() -> None:
    assert taken(cluster_of(profile("fine", 2, 0), profile("near", 1, 0), profile("far", 0.5, 0))) == "near"
    assert taken(cluster_of(models=(BASE, FINE, FAR))) == "far"
    assert taken(cluster_of(models=(BASE, FINE))) is None


def test_a_delta_of_another_vocabulary_or_too_short_a_context_is_none() -> None:
    short, other = (
        replace(NEAR, spec=replace(NEAR.spec, **field)) for field in ({"max_model_len": 8}, {"vocab_size": 96})
    )
    for model in (short, other):
        assert taken(cluster_of(models=(BASE, FINE, model))) is None


@pytest.mark.parametrize(("limit", "served"), [(None, None), (2.5, None), (1.9, "near")])
def test_by_accuracy_the_delta_is_taken_only_where_the_model_itself_takes_too_long(limit, served) -> None:
    cluster = cluster_of(EXACT, DELTA, limits=DispatchLimits("accuracy", limit=limit))
    assert taken(cluster, base=3) == served  # 2.2 s, or 2.1 s


def test_a_composed_variant_is_weighed_beside_the_delta() -> None:
    composed = replace(variant_of(FINE, COMPOSED), of="fine#1")
    measured = (EXACT, DELTA)
    assert taken(cluster_of(*measured, variants=(composed,)), base=3) == "near", "nothing is known of the variant"
    for seconds, served in ((0.5, "fine~v"), (1.2, None)):
        table = replace(profile("", seconds, 0.1), block=composed.chain.version)
        assert taken(cluster_of(*measured, table, variants=(composed,))) == served
