"""Real models with prompts and decoding apart (TI-15): what one device answers, log-probabilities included.

They are two families, an adapter and a stitched chain; requests are greedy, sampled, with penalties, and with
log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, Placement
from runtime.decode_config import DecodeConfig, HandoffGrain
from runtime.role_config import RoleName
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.real_models.test_chains import LENGTHS, MODELS, cluster_of, family  # noqa: F401
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

GREEDY = SamplingParams(12, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.9, top_p=0.8, seed=5),
    "penalized": replace(GREEDY, temperature=0.7, seed=7, repetition_penalty=1.3, presence_penalty=0.5),
    "logprobs": replace(GREEDY, logprobs=3),
}


def ask(cluster: VirtualCluster) -> VirtualCluster:
    """Ask each model for each kind of answer to each prompt, and wait for all of them."""
    number = 0
    for model in MODELS:
        for at, prompt in enumerate(prompts(len(model), LENGTHS)):
            for kind, sampling in KINDS.items():
                seq, number = f"{model}-{at}-{kind}", number + 1
                cluster.ask(SequenceRequest(seq, f"r-{seq}", model, prompt, sampling), at=number * MS // 4)
    cluster.run()
    cluster.expect_empty()
    return cluster


def told(cluster: VirtualCluster) -> dict[str, list[object]]:
    return {seq: [(e.token, e.logprob, e.top, e.finish) for e in each.events] for seq, each in cluster.told.items()}


@pytest.fixture(scope="module")
def alone(family: Bench) -> dict[str, list[object]]:  # noqa: F811
    return told(ask(cluster_of(family, 1, pages=4000)))


@pytest.mark.parametrize(
    ("roles", "placement", "grain"),
    [
        (("prefill", "decode"), "auto", "request"),
        (("prefill", "decode"), "auto", "chunk"),
        (("prefill", "decode"), "auto", "layer"),
        (("prefill", "decode", "decode"), "partition", "request"),
        (("prefill", "decode", "decode"), "partition", "chunk"),
        (("prefill", "decode", "decode"), "partition", "layer"),
        (("prefill", "prefill", "decode"), "partition", "chunk"),
        (("prefill", "prefill", "decode"), "partition", "layer"),
    ],
)  # fmt: skip
def test_answers_are_those_of_one_device(
    family: Bench,  # noqa: F811
    alone: dict[str, list[object]],
    roles: tuple[RoleName, ...],
    placement: Placement,
    grain: HandoffGrain,
) -> None:
    named = tuple((f"d{at}", role) for at, role in enumerate(roles))
    config = ClusterConfig(
        devices=len(roles), placement=placement, roles=named, prefill_chunk=8, decode=DecodeConfig(grain=grain)
    )
    cluster = ask(cluster_of(family, len(roles), pages=4000, config=config))
    assert told(cluster) == alone
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.handoffs_aborted) == (len(alone), 0)
    assert (counters.handoff_transfers > len(alone)) == (grain != "request")
    assert counters.recomputed == 0 and not cluster.trace.named("handoff.none")


@pytest.mark.parametrize("grain", ["request", "chunk", "layer"])
@pytest.mark.parametrize(
    ("roles", "placement"), [(("prefill", "decode"), "auto"), (("prefill", "prefill", "decode"), "partition")]
)
def test_answers_with_the_prefixes_of_earlier_ones_are_those_of_one_device(
    family: Bench,  # noqa: F811
    alone: dict[str, list[object]],
    roles: tuple[RoleName, ...],
    placement: Placement,
    grain: HandoffGrain,
) -> None:
    """All full page sets of their prompts are where they decode, and are not sent again."""
    named = tuple((f"d{at}", role) for at, role in enumerate(roles))
    config = ClusterConfig(
        devices=len(roles), placement=placement, roles=named, prefill_chunk=8, prefix_caching="cached",
        decode=DecodeConfig(grain=grain),
    )  # fmt: skip
    cluster = cluster_of(family, len(roles), pages=4000, config=config)
    for model in MODELS:
        for at, prompt in enumerate(prompts(len(model), LENGTHS)):
            cluster.ask(SequenceRequest(f"{model}-{at}", "r", model, prompt, GREEDY))
    cluster.run()
    before = cluster.scheduler.state().counters
    assert told(ask(cluster)) == told_before(cluster) | alone
    counters = cluster.scheduler.state().counters
    whole = before.handoff_bytes * len(KINDS)
    assert counters.handoff_present_tokens > 0 and counters.handoffs_aborted == 0
    assert counters.handoff_bytes - before.handoff_bytes < whole


def told_before(cluster: VirtualCluster) -> dict[str, list[object]]:
    """Return what the greedy answers were that came first."""
    return {seq: events for seq, events in told(cluster).items() if seq.rpartition("-")[2] not in KINDS}


@pytest.mark.parametrize("grain", ["request", "chunk", "layer"])
@pytest.mark.parametrize(
    ("roles", "placement"), [(("prefill", "decode"), "auto"), (("prefill", "prefill", "decode"), "partition")]
)
def test_answers_that_go_on_until_their_hand_off_are_those_of_one_device(
    family: Bench,  # noqa: F811
    alone: dict[str, list[object]],
    roles: tuple[RoleName, ...],
    placement: Placement,
    grain: HandoffGrain,
) -> None:
    """K and V of tokens that were decoded where the prompt ran go along."""
    named = tuple((f"d{at}", role) for at, role in enumerate(roles))
    decode = DecodeConfig(grain=grain, until_handoff="decode")
    config = ClusterConfig(devices=len(roles), placement=placement, roles=named, prefill_chunk=8, decode=decode)
    cluster = ask(cluster_of(family, len(roles), pages=4000, config=config))
    assert told(cluster) == alone
    counters, counts = cluster.scheduler.state().counters, cluster.scheduler.migrations.counts()
    lengths = sum(len(prompt) for model in MODELS for prompt in prompts(len(model), LENGTHS)) * len(KINDS)
    assert counters.handoffs > 0 and counters.recomputed == 0
    if placement == "auto":
        assert counters.handoffs == len(alone) and counts.copied > lengths


def chat(cluster: VirtualCluster) -> dict[str, list[tuple[int, ...]]]:
    """Hold a chat of three turns with each model; return the answers."""
    answers: dict[str, list[tuple[int, ...]]] = {model: [] for model in MODELS}
    said = {model: prompts(len(model), LENGTHS)[0] for model in MODELS}
    for turn in range(3):
        for model in MODELS:
            one = SequenceRequest(f"{model}-{turn}", f"r-{model}-{turn}", model, said[model], GREEDY)
            cluster.ask(one, at=cluster.now)
        cluster.run()
        for model in MODELS:
            answers[model].append(tuple(cluster.told[f"{model}-{turn}"].tokens))
            said[model] = (*said[model], *answers[model][-1], 5 + turn, 7)
    cluster.expect_empty()
    return answers


@pytest.mark.parametrize("placement", ["auto", "partition"])
def test_next_turns_run_where_they_decode_with_the_answers_of_one_device(
    family: Bench,  # noqa: F811
    placement: Placement,
) -> None:
    """UN-18: of three turns only the first is handed off."""
    alone = chat(cluster_of(family, 1, pages=4000))
    roles: tuple[tuple[str, RoleName], ...] = (("d0", "prefill"), ("d1", "decode"), ("d2", "decode"))
    decode = DecodeConfig(local_prefill=16)
    config = ClusterConfig(devices=3, placement=placement, roles=roles, prefix_caching="cached", decode=decode)
    cluster = cluster_of(family, 3, pages=4000, config=config)
    assert chat(cluster) == alone
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.local_prefills) == (len(MODELS), 2 * len(MODELS))
