"""Predicted hops: in exact mode the chain's own tokens in every schedule, in similarity mode what the threshold allows; books agree always."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, RelayConfig, SpeculationConfig
from runtime.engine.counted import CountingModel, counting_model, expected, surrogate_of
from runtime.messages import Pass, Verdict
from runtime.stages import Surrogate
from runtime.types import SequenceRequest
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

CUT = (2, 5)
#: Few words, so that a wrong prediction often brings the right token.
M = counting_model("m", "1* 2 3* 4* 5 6* 7 8", vocab_size=3)


def cluster_of(
    misses: int, mode: str = "exact", *, model: CountingModel = M, middle: int = 4, devices: int = 3, focus: bool = True, **others
) -> VirtualCluster:
    """A chain of three hops whose second is predicted by a stand-in that is wrong for one value in `misses` (0: for none)."""
    stand_in = surrogate_of(model, "m~", middle, misses)
    config = ClusterConfig(devices=devices, placing="split", speculation=SpeculationConfig(mode, top=0.4))  # type: ignore[arg-type]
    cluster = VirtualCluster(
        [model], [CUT], devices=devices, config=config, stand_ins=[stand_in], surrogates={"m": [Surrogate("m~", middle, middle + 1, 1)]},
        **others,
    )  # fmt: skip
    block = cluster.scheduler.models() and model.chain(*CUT).uses[1].block
    if focus:
        cluster.at(2 * cluster.latency, lambda: cluster.scheduler.speculation.focus([(block, d) for d in cluster.scheduler.provision.instances[block]]))
    return cluster


def some(count: int, seed: int, **changes: object) -> list[SequenceRequest]:
    rng = random.Random(seed)
    return [
        request(f"s{number}", [rng.randrange(3) for _ in range(rng.randrange(1, 24))], "m", max_tokens=rng.randrange(1, 20), **changes)
        for number in range(count)
    ]


def warm(cluster: VirtualCluster) -> None:
    """The first sequence has the stand-in loaded."""
    cluster.ask(request("warm", (1,), "m", max_tokens=1))


def ask(cluster: VirtualCluster, asked: list[SequenceRequest], rng: random.Random, within: int = 30 * MS) -> None:
    warm(cluster)
    for one in asked:
        cluster.ask(one, at=5 * MS + rng.randrange(within))


def passed(cluster: VirtualCluster, odd: bool) -> int:
    return sum((turn % 2 == 1) is odd for _, _, _, message in cluster.sent if isinstance(message, Pass) for turn in message.turns)


@pytest.mark.parametrize("misses", [0, 1, 2, 5])
def test_exact_tokens_are_the_chains_own_however_often_a_stand_in_is_wrong(misses: int) -> None:
    cluster = cluster_of(misses)
    ask(cluster, some(20, misses), random.Random(misses))
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.speculation.counts()
    assert counts.started > 50 and counts.guesses > 0
    assert (counts.misses > 0, counts.redone > 0) == (misses > 0, misses > 0)
    assert passed(cluster, odd=True) > 50
    if misses == 1:
        assert counts.hits > 0  # by its token
