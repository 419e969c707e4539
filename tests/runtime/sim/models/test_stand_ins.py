"""Stand-ins of simulated blocks: which blocks have surrogates or equivalents, and what they gain in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.sim.experiments.run import Played, play
from runtime.sim.experiments.scenario import scenario_of
from runtime.sim.models.family import App, Cutting, family_of
from runtime.sim.models.stand_ins import StandIns, with_stand_ins, with_variants
from zoo.errors import InputError

APPS = (App("plain", "llama-7b", "foundation"), App("lora", "llama-7b", "lora"), App("vicuna", "llama-7b", "full"))
FAMILY = family_of(APPS, Cutting(parts=4))


def test_every_block_but_the_last_has_a_surrogate_half_its_size():
    family, surrogates = with_stand_ins(FAMILY, StandIns(speed=20.0))
    for model, chain in FAMILY.chains.items():
        assert [(each.lo, each.hi) for each in surrogates[model]] == [(use.lo, use.hi) for use in chain.uses[:-1]]
        for at, (each, use) in enumerate(zip(surrogates[model], chain.uses, strict=False)):
            assert each.nbytes == pytest.approx(FAMILY.parts[use.block].block.nbytes / 2, abs=1)
            stand_in = family.chain(each.model).uses[at]
            assert stand_in.block != use.block and family.parts[stand_in.block].speed == 20.0
    assert FAMILY.chains.keys() < family.chains.keys() and all(part.speed == 1.0 for part in FAMILY.parts.values())
    with pytest.raises(InputError):
        StandIns(speed=0.5)


def test_full_fine_tunes_and_foundations_stand_in_for_each_other_and_adapters_stay_with_their_own():
    family, variants = with_variants(FAMILY, 0.98)
    whole = {variant.chain.model: variant for variant in variants if variant.score == pytest.approx(0.998**4)}
    assert whole.keys() == {"plain", "vicuna"} == {variant.chain.model for variant in variants}
    ours, plain = whole["vicuna"].chain, FAMILY.chain("plain")
    assert [(use.block, use.lo, use.hi) for use in ours.uses] == [(use.block, use.lo, use.hi) for use in plain.uses]
    assert family.chain(whole["vicuna"].name) is ours
    assert with_variants(FAMILY, 0.999)[1] == ()


BASE: dict[str, Any] = {
    "placement": "partition",
    "page_layers": 32,
    "page_tokens": 128,
    "control": {"scaling": False, "rearranging": False},
}


def cut(**policy: Any) -> Played:
    """Run one model over three devices, one request at a time."""
    values = {
        "cluster": {"servers": [3], "disk": "nvlink3"},
        "apps": {"count": 1, "foundations": ["llama-7b"]},
        "asked": {"kind": "poisson", "count": 16, "seconds": 60.0, "prompts": "64", "answers": "64"},
        "policies": {"this": {**BASE, "parts": 3, **policy}},
    }
    scenario = scenario_of("cut", values)
    played = play(scenario, "this", scenario.demand(0))
    assert list(played.ledger.tokens) == [64] * 16
    return played


def mean(played: Played) -> float:
    return float(np.mean(np.array(played.ledger.ended) - np.array(played.ledger.arrived)))


def test_a_prediction_that_is_right_saves_its_block_and_a_wrong_one_nothing():
    speculation = {"mode": "similarity", "top": 0.4}
    off = cut()
    right = cut(speculation=speculation, stand_ins={"speed": 50.0, "right": 1.0})
    wrong = cut(speculation={**speculation, "window": 0}, stand_ins={"speed": 50.0, "right": 0.0})
    assert right.counts["speculation_hits"] > 400 and not right.counts["speculation_misses"]
    assert wrong.counts["speculation_misses"] > 400 and not wrong.counts["speculation_hits"]
    assert mean(right) < 0.85 * mean(off), "one of three equal blocks is next to free for most rows"
    assert mean(wrong) > 0.98 * mean(off)


def test_waiting_requests_find_a_second_copy_loaded():
    """Requests wait while their model loads on one device; another device loads a copy, and half move there."""
    values = {
        "cluster": {"servers": [2]},
        "apps": {"count": 1, "foundations": ["llama-7b"]},
        "asked": {"kind": "poisson", "count": 24, "seconds": 1.0, "prompts": "512", "answers": "400"},
        "policies": {"this": {"placement": "eager", "routing": "least-bytes", "page_layers": 32, "page_tokens": 128}},
    }
    scenario = scenario_of("copies", values)
    played = play(scenario, "this", scenario.demand(0))
    assert played.counts["moved"] > 0 and min(played.busy.values()) > 0.5 * max(played.busy.values())
    assert 0 < played.launching < sum(played.busy.values())
