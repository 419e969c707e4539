"""Predicted hops of sequences of which page sets are lent, between real engines in processes (BL-25, IL-04).

The models are Llamas in float32: greedy tokens are those of transformers, sampled ones those of one agent that neither
lends nor predicts. One model runs over several devices, and a hop of it is predicted; the other one is one block, so
that its path is one device, which lends page sets or layers. A wrong page changes the tokens behind it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, ControlConfig, EngineConfig, SpeculationConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.catalog.surrogates import surrogates_of
from runtime.engine.models.registry import half_page
from runtime.lending_config import LendingConfig, LoanShape
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import put_chain
from tests.runtime.cluster.clusters import LIMIT, answered, eventually
from tests.runtime.cluster.loan_kills import lends_layers
from tests.runtime.cluster.real import on_scheduler
from tests.runtime.cluster.test_loans import all_free
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.virtual import ListTrace
from zoo.records import Equivalence, ScoredRun

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
#: Pages of a device: fewer than three sequences take with their stand-in's, and than the other model's one takes.
PAGES, AGENTS = 96, 5
#: Tokens of prompts and answers by model: `split` runs over several devices, `whole` over one.
LENGTHS = {"split": (24, 70), "whole": (160, 60)}
#: Requests at once for the model that runs over several devices.
COUNT = 3
#: Share of noise in the weights of the stand-in: some predictions are right, and some are not.
NOISE = 0.1
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    """Store two models, and a stand-in for the first layer of one of them: that layer with noise."""
    sizes = dict(num_hidden_layers=2, num_key_value_heads=2, initializer_range=0.5)
    # A device has `whole`, another one the embedding and the first layer of `split`, a third one the rest of it.
    bench.family("llama", "split", seed=1, intermediate_size=512, **sizes)
    bench.family("llama", "whole", seed=2, intermediate_size=200, **sizes)
    bench.add("noisy", noisy(bench.folders["split"], bench.root / "noisy"))
    put_chain(bench.store, "near", ("noisy", 0, 1), ("split", 1, 2), embedding="split", head="split")
    with bench.store.catalog.writing() as writer:  # components 1 and 2 are those of its first layer
        writer.put_equivalences(
            [Equivalence("surrogate", ScoredRun("split", 1, 3), ScoredRun("near", 1, 3), "probe", 0.5)]
        )
    return bench


def noisy(folder: Path, to: Path) -> Path:
    """Save a model with noise in the weights of its first layer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for weights in model.model.layers[0].parameters():
            weights += NOISE * weights.std(correction=0) * torch.randn_like(weights)
    model.save_pretrained(to)
    return to


def asked(temperature: float) -> list[SequenceRequest]:
    found = []
    for model, count in (("split", COUNT), ("whole", 1)):
        tokens, answer = LENGTHS[model]
        for number in range(count):
            seq = f"{model}-{number}"
            prompt = tuple(random.Random(seq).choices(range(3, 300), k=tokens))
            sampling = SamplingParams(answer, temperature=temperature, seed=number, ignore_eos=True)
            found.append(SequenceRequest(seq, f"r-{seq}", model, prompt, sampling))
    return found


@contextmanager
def agents(family: Bench, config: ClusterConfig, pages: int, trace: ListTrace) -> Iterator[ClusterDriver]:
    """Run both models over agents in processes. `pages`: of each."""
    half = half_page(family.store, CONFIG, [*LENGTHS, "near"])
    engine = replace(CONFIG, kv_cache_memory_bytes=2 * half * pages)
    pieces = {"split": 1, "whole": 1 << 30}
    described = [describe_chain(family.store, name, engine, half, pieces[name]) for name in LENGTHS]
    staged = {
        "store": str(family.store.root), "database": None, "config": msgspec.to_builtins(engine), "half_page": half,
        "threads": 1,
    }  # fmt: skip
    settings = AgentSettings(report_seconds=0.05, loan_seconds=5.0)
    driver = ClusterDriver(
        [each.chain for each in described],
        list({block.id: block for each in described for block in each.blocks}.values()),
        [f"agent-{at}" for at in range(config.devices)],
        ProcessLauncher(ProcessConfig(Preparation("staged", staged), settings=settings, beat_seconds=0.1)),
        config, trace=trace,
        surrogates={"split": surrogates_of(family.store, "split")} if config.speculation.mode != "off" else {},
    )  # fmt: skip
    try:
        yield driver
    finally:
        assert driver.shutdown(LIMIT)


def tokens_of(driver: ClusterDriver, requests: Sequence[SequenceRequest]) -> Tokens:
    """Run requests at once, each to its last token."""
    found = {}
    for seq, events in answered(driver, requests).items():
        assert [event.finish for event in events if event.finish] == ["length"], events[-1]
        found[seq] = [event.token for event in events if event.token is not None]
    return found


@pytest.fixture(scope="module")
def alone(family: Bench) -> dict[float, Tokens]:
    """Return the tokens of one agent that has room for all of it, by temperature; greedy ones are `generate`'s."""
    config = ClusterConfig(devices=1, prefix_caching="off", prefill_chunk=16)
    with agents(family, config, 2000, ListTrace()) as driver:
        found = {temperature: tokens_of(driver, asked(temperature)) for temperature in (0.0, 0.9)}
    stock = {model: reference(family.folders[model]) for model in LENGTHS}
    for one in asked(0.0):
        count, model = one.sampling.max_tokens, stock[one.model]
        model.generation_config.eos_token_id = None
        own = greedy(model, one.prompt, count)
        assert same_tokens(model, one.prompt, own, found[0.0][one.seq]) == count
    assert found[0.0] != found[0.9]
    return found


@contextmanager
def predicting(family: Bench, shape: LoanShape, trace: ListTrace) -> Iterator[ClusterDriver]:
    """Run agents that lend, with the stand-in loaded wherever its hop is."""
    config = ClusterConfig(
        devices=AGENTS, placement="partition", prefix_caching="off", prefill_chunk=16,
        lending=LendingConfig("planned", 1.0, recall=1.0, shape=shape), control=ControlConfig(scaling=False),
        speculation=SpeculationConfig("exact"),
    )  # fmt: skip
    with agents(family, config, PAGES, trace) as driver:
        (chain,) = (each for each in driver._scheduler.chains() if each.model == "split")
        block = next(use.block for use in chain.uses if use.lo < 3 and use.hi > 1)
        names = [each.name for each in driver._scheduler.devices]
        on_scheduler(driver, lambda scheduler, now: scheduler.speculation.pin([(block, name) for name in names]))
        warm = SequenceRequest("warm", "r-warm", "split", (3,), SamplingParams(1, ignore_eos=True))

        def loaded() -> bool:
            tokens_of(driver, [replace(warm, seq=f"warm-{len(trace.events)}")])
            stages = [stage.model for each in driver._scheduler.devices for stage in each.stages.loaded]
            return any(model.startswith("near") for model in stages)

        assert eventually(loaded)
        yield driver


@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_predicted_hops_over_lent_pages_give_the_tokens_of_one_agent(
    family: Bench, alone: dict[float, Tokens], shape: LoanShape
) -> None:
    trace = ListTrace()
    with predicting(family, shape, trace) as driver:
        for temperature, expected in alone.items():
            begun, before = len(trace.events), driver.view.speculation()
            loans = driver.state().counters.loans
            assert tokens_of(driver, asked(temperature)) == expected
            assert eventually(lambda: all_free(driver))
            now = driver.view.speculation()
            done = Counter(outcomes(trace, begun))
            print(f"\n{shape} {temperature}: {done}, {now}, {driver.state().counters.loans - loans} loans")
            assert driver.state().counters.loans > loans
            assert now.guesses > before.guesses
            assert now.hits > before.hits and now.misses > before.misses and now.redone > before.redone
            assert min(done["spec.hit"], done["spec.miss"]) > 5, "of sequences with loans, behind their first one"
        # What runs over several devices lends page sets of all layers there.
        assert lends_layers(trace, "whole-0") == (shape == "layers")
        assert not any(lends_layers(trace, f"split-{number}") for number in range(COUNT))


def outcomes(trace: ListTrace, begun: int) -> Iterator[str]:
    """Yield the outcomes of predictions of sequences that had lent pages before, from an event on."""
    lend = set[str]()
    for event in trace.events[begun:]:
        if event.ev == "kv.lend":
            lend.add(event.extra["seq"])
        elif event.ev in ("spec.hit", "spec.miss") and event.seq in lend:
            yield event.ev
