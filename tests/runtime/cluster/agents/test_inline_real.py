"""One device with stored models answers alike in all modes: one token at a time, on credit, ahead, and dense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig

from cli.serving.driver import start_driver
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.control.counters import AgentCounters
from runtime.types import SamplingParams, SequenceRequest, TokenEvent
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.test_ahead import EVERYTHING
from zoo.api import Zoo

NAMES = ("base", "lora", "dora", "ia3", "prompt", "prefix", "bottleneck", "other")
#: Pages for some of the sequences at once: the rest wait, and sequences that grow too far are preempted.
TIGHT = ServeOptions(
    kv_cache_memory_bytes="72KiB", max_num_batched_tokens=24, max_num_seqs=8, max_model_len=128, kernels="stock"
)

Told = dict[str, list[TokenEvent]]


@pytest.fixture(scope="module")
def family(bench: Bench) -> Iterator[Zoo]:  # noqa: F811
    bench.family("llama", "base", num_hidden_layers=2, seed=1)
    bench.lora("base", "lora", seed=2)
    bench.lora("base", "dora", seed=3, use_dora=True)
    bench.peft(
        "base",
        "ia3",
        IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        seed=4,
    )
    bench.peft("base", "prompt", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5), seed=5)
    bench.peft("base", "prefix", PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), seed=6)
    bench.bottleneck("base", "bottleneck")
    bench.family("mistral", "other", seed=7)
    with Zoo(bench.root / "store") as zoo:
        yield zoo


def requests() -> list[SequenceRequest]:
    """Return requests for every way of sampling with every model; prompts of a model share a prefix."""
    made = []
    for i, each in enumerate(EVERYTHING):
        params = replace(each, max_tokens=2 * each.max_tokens, ignore_eos=not each.stop_token_ids)
        for n, name in enumerate(NAMES):
            prompt = tuple((5 * n + k) % 60 for k in range(17 + (i + n) % 29))
            made.append(SequenceRequest(f"{name}.{i}", f"r{i}", name, prompt, params))
    return made


def told(
    zoo: Zoo, asked: list[SequenceRequest], options: ServeOptions = TIGHT, **changes: Any
) -> tuple[Told, AgentCounters]:
    """Run the requests with these options; return the events of each, and the counters."""
    got: Told = {one.seq: [] for one in asked}
    executor = "dense" if changes.get("executor") == "dense" else "paged"
    with start_driver(zoo, replace(options, **changes), Chosen(NAMES, (), executor)) as driver:
        for event in driver.run(asked):
            got[event.seq].append(event)
        state = driver.state()
    assert state.running == state.waiting == 0
    return got, state.counters


def words(got: Told) -> dict[str, list[Any]]:
    """Return all token events of each sequence, without their numbers (log probabilities)."""

    def of(event: TokenEvent) -> Any:
        scores = [(part.start + at, one.token) for part in event.prompt_logprobs for at, one in enumerate(part.chosen)]
        return event.index, event.token, event.finish, [one.token for one in event.top], scores

    return {seq: [of(event) for event in events] for seq, events in got.items()}


def numbers(got: Told) -> list[float]:
    events = [event for seq in sorted(got) for event in got[seq]]
    own = [
        value for event in events for value in (event.logprob, *(one.logprob for one in event.top)) if value is not None
    ]
    return own + [one.logprob for event in events for part in event.prompt_logprobs for one in part.chosen]


@pytest.fixture(scope="module")
def alone(family: Zoo) -> tuple[Told, AgentCounters]:
    """The reference answers: one token at a time, without prefix caching."""
    return told(family, requests(), prefix_caching="off")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"decode_credit": 5},
        {"async_scheduling": "on"},
        {"executor": "dense"},
        {"executor": "dense", "decode_credit": 3, "prefix_caching": "cached"},
    ],
    ids=lambda how: " ".join(f"{name}={value}" for name, value in how.items()) or "shared",
)
def test_every_kind_of_model_and_of_sampling_is_answered_alike_with_pages_for_few(
    family: Zoo, alone: tuple[Told, AgentCounters], how: dict[str, Any]
) -> None:
    got, counters = told(family, requests(), **how)
    assert words(got) == words(alone[0])
    assert numbers(got) == pytest.approx(numbers(alone[0]), rel=2e-3, abs=2e-4)
    assert alone[1].preemptions and counters.preemptions, "there were pages for all"
    assert counters.steps and counters.busy and counters.generated_tokens == alone[1].generated_tokens
    assert counters.prompt_tokens == alone[1].prompt_tokens


def test_tenants_share_with_themselves_only(family: Zoo) -> None:
    """One sequence of a tenant runs when requests of both tenants with the same prefix come."""
    prompt = tuple(range(40))
    first = SequenceRequest("first", "r", "lora", prompt, SamplingParams(80, ignore_eos=True), tenant="a")
    later = [
        SequenceRequest(
            f"{tenant}{number}", "r", "lora", (*prompt, number), SamplingParams(9, ignore_eos=True), tenant=tenant
        )
        for number in range(2)
        for tenant in "ab"
    ]

    def run(**changes: Any) -> tuple[dict[str, list[int | None]], AgentCounters]:
        got: dict[str, list[int | None]] = {one.seq: [] for one in (first, *later)}
        with start_driver(
            family, replace(TIGHT, kv_cache_memory_bytes="4MiB", max_num_seqs=4, **changes), Chosen(NAMES, ())
        ) as driver:
            events = driver.run([first])
            got["first"].append(next(events).token)
            for event in (*driver.run(later), *events):
                got[event.seq].append(event.token)
            return got, driver.state().counters

    shared, counters = run(backend="inline")
    off, none = run(backend="inline", prefix_caching="off")
    ahead, counted = run(backend="local", async_scheduling="on")
    assert shared == off == ahead and not none.shared and counted.shared == 3
    width = counters.shared_tokens // counters.shared
    assert counters.prefix_queries == sum(len(one.prompt) for one in (first, *later)) > counters.shared_tokens
    assert not none.prefix_queries
    assert counters.shared == 3 and 0 < width <= 40, "both of the tenant's own, and the other tenant's second one"
