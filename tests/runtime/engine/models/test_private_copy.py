"""`weight_sharing="models"`: models have nothing in common, and answer as ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.serving.options import ServeOptions
from runtime.chains import Stage
from runtime.config import EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from tests.chains import manifest_of
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.test_equality import ask, prompts
from tests.runtime.engine.test_sharing import fine_tune

CONFIG = EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4)
NAMES = ["base", "tuned", "lora"]
_WHOLE = 1 << 62


@pytest.fixture(scope="module")
def family(bench):
    """A base with a tied head, a fine-tune that shares all but one layer, and a LoRA."""
    bench.family("llama", "base", num_hidden_layers=4, seed=9, tie_word_embeddings=True)
    fine_tune(bench, "base", "tuned", 3)
    bench.lora("base", "lora")
    return bench


def stage_of(family, name: str) -> Stage:
    return Stage(name, 0, len(manifest_of(family.store, name).components))


@pytest.mark.parametrize("kernels", ["stock", pytest.param("native", marks=needs_kernels)])
def test_models_that_share_all_but_one_layer_take_their_whole_bytes(family, kernels):
    def held(sharing: str, *names: str) -> int:
        config = replace(CONFIG, kernels=kernels, weight_sharing=sharing)
        engine = StagedEngine(family.store, config, half_page(family.store, config, NAMES))
        for name in names:
            engine.prepare(stage_of(family, name))
            engine.load(stage_of(family, name))
        weights = engine.memory().weights
        for name in names:
            engine.unload(stage_of(family, name))
        assert engine.memory().weights == 0
        return weights

    for name in NAMES:
        assert held("models", name) == held("blocks", name), "a model by itself takes the same"
    assert held("models", "base", "tuned") == held("blocks", "base") + held("blocks", "tuned")
    assert held("models", "base", "lora") == held("blocks", "base") + held("blocks", "lora")
    assert held("blocks", "base", "tuned") < 1.5 * held("blocks", "base")


def test_the_scheduler_counts_whole_models(family):
    def described(sharing: str) -> list[dict[str, int]]:
        config = replace(CONFIG, weight_sharing=sharing)
        half = half_page(family.store, config, NAMES)
        chains = [describe_chain(family.store, name, config, half, _WHOLE) for name in NAMES]
        return [{block.id: block.nbytes for block in chain.blocks} for chain in chains]

    together, apart = described("blocks"), described("models")
    assert [sum(blocks.values()) for blocks in together] == [sum(blocks.values()) for blocks in apart]
    assert set(together[0]) & set(together[1]) and set(together[0]) == set(together[2])
    assert not set(apart[0]) & set(apart[1]) and not set(apart[0]) & set(apart[2])


def test_answers_are_the_same_and_no_batch_has_two_models(family):
    wanted = {name: prompts(number, (5, 12)) for number, name in enumerate(NAMES)}
    made = {}
    for sharing in ("blocks", "models"):
        engine = PagedDevice(family.store, replace(CONFIG, weight_sharing=sharing, trace_segments=True), NAMES)
        requests = [ask(name, prompt, f"{name}-{i}") for name in NAMES for i, prompt in enumerate(wanted[name])]
        out = drive(engine, {0: requests}, Limits(max_num_batched_tokens=64))
        most = max(len(set(segment.models)) for step in out.steps for segment in step.segments)
        assert most == (len(NAMES) if sharing == "blocks" else 1)
        made[sharing] = [out.tokens(request.seq) for request in requests]
    assert made["models"] == made["blocks"]


def test_the_option_reaches_the_engine():
    assert ServeOptions().engine().weight_sharing == "blocks"
    assert ServeOptions(weight_sharing="models").engine().weight_sharing == "models"
    with pytest.raises(ValueError, match="blocks, models"):
        EngineConfig(weight_sharing="layers")
