"""A row has the same bits on any path of devices, beside any rows, and after moves of its pages."""

from __future__ import annotations

import itertools
import random

import pytest

from runtime.config import EngineConfig
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import Sampled, SamplingParams
from tests.chains import manifest_of
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.company import ADAPTED, DTYPES, add_models
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import Bench

pytestmark = needs_kernels
DEVICES, SEEDS, TOKENS = 3, range(4), 8
NAMES = (*ADAPTED, "gpt2")


def path_of(chance: random.Random, length: int) -> list[tuple[int, int, int]]:
    """Return a random path: cuts of a chain at any components, each part on any device."""
    cuts = sorted({0, length, *(chance.randrange(1, length) for _ in range(chance.randrange(4)))})
    return [(chance.randrange(DEVICES), lo, hi) for lo, hi in itertools.pairwise(cuts)]


def scores(sampled: list[Sampled]) -> list[tuple[int, list[tuple[int, str]]]]:
    return [(one.token, [(each.token, each.logprob.hex()) for each in one.top]) for one in sampled]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_log_probability_is_the_same_on_any_path(tmp_path, dtype: str) -> None:
    stored = Bench(tmp_path)
    add_models(stored, dtype)
    config = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4)
    half = half_page(stored.store, config, list(NAMES))
    sampling = SamplingParams(TOKENS, logprobs=1 << 20, ignore_eos=True)
    for seed in SEEDS:
        chance = random.Random(seed)
        carrier = Carrier(*(StagedEngine(stored.store, config, half, f"d{n}") for n in range(DEVICES)))
        asked = []
        for name in chance.sample(NAMES, 4):
            prompt = [chance.randrange(3, 60) for _ in range(chance.choice((1, 5, 30)))]
            length = len(manifest_of(stored.store, name).components)
            asked.append((name, prompt, length))
            carrier.add(name, name, prompt, sampling, path_of(chance, length))
        for _ in range(chance.randrange(2, 6)):
            carrier.step(chance.choice((1, 2, 7, 100)))
        for name, _, _ in asked:
            one = carrier.seqs[name]
            hop, to = chance.randrange(len(one.hops)), chance.randrange(DEVICES)
            if len(one.sampled) < TOKENS and one.hops[hop][0] is not carrier.places[to]:
                carrier.move(name, hop, to)
        carrier.run(chance.choice((1, 7, 100)))
        for name, prompt, length in asked:
            alone = Carrier(StagedEngine(stored.store, config, half))
            alone.add(name, name, prompt, sampling, [(0, 0, length)])
            alone.run()
            assert scores(carrier.seqs[name].sampled) == scores(alone.seqs[name].sampled), f"{name} of seed {seed}"
    stored.store.close()
