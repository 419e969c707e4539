"""The table of a tied head is counted once on a device, as it is held once."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import manifest_of
from tests.runtime.engine.test_sharing import fine_tune
from zoo.api import Zoo

NAMES = ("base", "tuned")


@pytest.fixture(scope="module")
def family(bench):
    """A model whose table is a third of its bytes and whose norms differ, and a fine-tune of its first layer."""
    bench.family("llama", "raw", num_hidden_layers=3, vocab_size=512, seed=9, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(bench.folders["raw"])
    with torch.no_grad():
        for number, parameter in enumerate(each for each in model.parameters() if each.dim() == 1):
            parameter.add_(number / 100)
    model.save_pretrained(bench.root / "hf" / "base")
    bench.add("base", bench.root / "hf" / "base")
    fine_tune(bench, "base", "tuned", 0)
    return bench


def distinct(family, *names: str) -> int:
    return sum({t.digest: t.nbytes for name in names for t in manifest_of(family.store, name).tensors}.values())


def ask(driver, name: str) -> tuple[int, str]:
    """Return the number of tokens, and the error."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    events = list(driver.run([SequenceRequest(name, name, name, (5, 6, 7), params)]))
    return sum(event.token is not None for event in events), events[-1].error or ""


def test_models_are_loaded_beside_each_other_in_exactly_their_bytes(family):
    options = ServeOptions(kv_cache_memory_bytes="1MiB", agent_weights=distinct(family, *NAMES))
    with Zoo(family.store.root) as zoo, start_driver(zoo, options, choose(zoo, NAMES)) as driver:
        assert [ask(driver, name) for name in NAMES] == [(4, "")] * 2
        counts = driver._scheduler.residency.counts
        assert not counts.unloads
        assert driver.memory().weights == distinct(family, *NAMES)


def test_a_model_that_lacks_a_byte_is_refused(family):
    for lacking in (0, 1):
        options = ServeOptions(kv_cache_memory_bytes="1MiB", agent_weights=distinct(family, "base") - lacking)
        with Zoo(family.store.root) as zoo, start_driver(zoo, options, choose(zoo, ["base"])) as driver:
            tokens, error = ask(driver, "base")
            assert tokens == (0 if lacking else 4) and ("fits no device" in error) == bool(lacking)
