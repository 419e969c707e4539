"""Many models wait for a load on few devices: an event tries few of them again, and decides as if it tried all."""

from __future__ import annotations

import random

import pytest

from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.admission.admission import Admission
from runtime.scheduler.routing.router import Router
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

MODELS = 24


def played(seed: int, devices: int = 1) -> VirtualCluster:
    """Return a run of many models of which a device holds three, with kills, aborts, failed loads, too long prompts."""
    rng = random.Random(seed)
    models = [
        counting_model(f"m{at}", f"1* 2 {at + 10}* {at + 50} {at + 90}", max_model_len=64) for at in range(MODELS)
    ]
    broken = counting_model("broken", "1* 2 7* 8* 9", max_model_len=64)  # devices do not have it
    config = ClusterConfig(devices=devices, residency="swap", swap_patience_ms=5, max_num_seqs=4)
    cluster = VirtualCluster(
        models, cuts=[(2,)] * MODELS, chains=[broken.chain(2)], blocks=broken.blocks(2), devices=devices,
        limits=[11_000] * devices, config=config, pages=60, loading=lambda: 3 * MS,
    )  # fmt: skip
    for at in range(100):
        name = f"m{min(int(rng.paretovariate(0.3)) - 1, MODELS - 1)}"
        name = "broken" if at % 10 == 9 else name
        prompt = [rng.randrange(97) for _ in range(rng.choice((3, 9, 60)))]
        cluster.ask(request(f"s{at}", prompt, name, max_tokens=rng.randrange(1, 12)), at=rng.randrange(60 * MS))
    for at in rng.sample(range(100), 5):
        cluster.abort(f"s{at}", at=rng.randrange(20 * MS, 120 * MS))
    if seed % 2:
        cluster.at(rng.randrange(40 * MS, 90 * MS), lambda: cluster.kill("d0"))
    cluster.ticks(10 * MS, 600 * MS)
    cluster.run()
    return cluster


@pytest.mark.parametrize(("seed", "devices"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_decisions_are_those_of_trying_all(seed: int, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = played(seed, devices)
    assert few.trace.named("stage.unload"), "nothing was swapped"
    monkeypatch.setattr(Admission, "_awaits_load", lambda self, sequence: False)
    assert few.trace.text() == played(seed, devices).trace.text()


def test_few_routes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = {"now": 0}
    route = Router.route

    def counted(self: Router, *args, **options):
        searched["now"] += 1
        return route(self, *args, **options)

    monkeypatch.setattr(Router, "route", counted)
    played(0)
    few, searched["now"] = searched["now"], 0
    monkeypatch.setattr(Admission, "_awaits_load", lambda self, sequence: False)
    played(0)
    assert few < searched["now"] / 2, (few, searched["now"])
