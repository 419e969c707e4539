"""Prompts shared between real models: bit for bit the answers of each model alone, with fewer layers run.

A family whose variants part at different depths: LoRAs on the last layers, a partial fine-tune, and one that differs in
the first layer and so shares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.chains import Array, StageResult
from runtime.config import EngineConfig
from runtime.control.scheduler_io import AbortSequence, AddRequest
from runtime.engine.catalog import describe
from runtime.engine.catalog.describe import DescribedChain, describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest, StepPlan
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import Bench
from tests.runtime.engine.driven import Driven, Limits
from zoo.manifest import Component, ModelManifest

pytestmark = needs_kernels
LAYERS = 4
NAMES = ("base", "lora2", "lora3", "tuned", "ffn", "first")
#: Attention layers that each one has in common with the base.
COMMON = {"lora2": 2, "lora3": 3, "tuned": 2, "ffn": 2, "first": 0}
SYSTEM = tuple((7 * at) % 61 for at in range(50))
SAMPLING = SamplingParams(6, ignore_eos=True, logprobs=3)


def add_family(bench: Bench, dtype: str) -> None:
    """Add a base and its variants."""
    bench.family("llama", "base", num_hidden_layers=LAYERS, num_key_value_heads=2, seed=1, dtype=dtype)
    for first in (2, 3):
        bench.lora("base", f"lora{first}", seed=first, layers_to_transform=list(range(first, LAYERS)))
    for name, tensor in (
        ("tuned", "model.layers.2.self_attn.v_proj.weight"),
        ("ffn", "model.layers.1.mlp.down_proj.weight"),
        ("first", "model.layers.0.self_attn.q_proj.weight"),
    ):
        bench.add(name, changed(bench.folders["base"], bench.root / "hf" / name, tensor), base="base")


def changed(base: Path, folder: Path, tensor: str) -> Path:
    """Copy a checkpoint with one tensor changed."""
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix == ".safetensors":
            held = load_file(file)
            if tensor in held:
                held[tensor] = (held[tensor].float() * 1.5 + 0.01).to(held[tensor].dtype)
            save_file(held, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@dataclass
class CountingEngine:
    """A staged engine that counts the tokens that pass attention layers."""

    engine: StagedEngine
    described: Sequence[DescribedChain]
    layer_tokens: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        for row in plan.rows:
            skipped = -(-max(row.enters - 1, 0) // 2)  # embedding, then attention and FFN in turn
            self.layer_tokens += len(row.tokens) * (LAYERS - skipped)
        return self.engine.run(plan, inputs)


class Side:
    """The family in one dtype."""

    def __init__(self, bench: Bench, dtype: str) -> None:
        self.bench = bench
        self.config = EngineConfig(kv_cache_memory_bytes=256 << 10, page_tokens=4, dtype=dtype)
        self.half = half_page(bench.store, self.config, NAMES)
        self.described = [describe_chain(bench.store, name, self.config, self.half, 1 << 40) for name in NAMES]

    def driven(self, sharing: str = "active", budget: int = 512, config: EngineConfig | None = None) -> Driven:
        engine = StagedEngine(self.bench.store, config or self.config, self.half, "here")
        counting = CountingEngine(engine, self.described)
        return Driven(counting, Limits(max_num_batched_tokens=budget), sharing=sharing)  # type: ignore[arg-type]

    def alone(self, asked: Sequence[SequenceRequest]) -> dict[str, list[object]]:
        """Return the events of each request on an engine of its own."""
        return {one.seq: bits(self.answer([one], "off")[0])[one.seq] for one in asked}

    def answer(self, asked: Sequence[SequenceRequest], sharing: str = "active", **how: int) -> tuple[Driven, int]:
        """Run the first request's prompt, then the others beside it; return the driver, and tokens times layers."""
        driven = self.driven(sharing, **how)
        driven.tell(AddRequest(asked[0]))
        while driven.busy and not driven.out.events.get(asked[0].seq):
            driven.step()
        for one in asked[1:]:
            driven.tell(AddRequest(one))
        while driven.busy:
            driven.step()
        driven.scheduler.check()
        driven.agent.check()
        return driven, driven.engine.layer_tokens


def bits(driven: Driven) -> dict[str, list[object]]:
    """Return tokens and log-probabilities of each sequence, to be compared exactly."""
    return {
        seq: [(event.token, event.logprob, event.top) for event in events] for seq, events in driven.out.events.items()
    }


def asked_of(names: Sequence[str], sampling: SamplingParams = SAMPLING) -> list[SequenceRequest]:
    long = SamplingParams(40, ignore_eos=True, logprobs=3)
    return [
        SequenceRequest(f"{at}.{name}", "r", name, (*SYSTEM, at, 5), sampling if at else long)
        for at, name in enumerate(names)
    ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.set_num_threads(1)
    bench = Bench(tmp_path_factory.mktemp("family"))
    add_family(bench, request.param)
    yield Side(bench, request.param)
    bench.store.close()


def test_domains_are_equal_up_to_the_first_difference(side: Side) -> None:
    chains = {each.chain.model: each.chain for each in side.described}
    base = chains["base"]
    assert [each.layers for each in base.boundaries] == [1, 1, 2, 2, 3, 3]
    for name, layers in COMMON.items():
        same = [mine for mine, theirs in zip(base.boundaries, chains[name].boundaries, strict=True)
                if mine.domain == theirs.domain]  # fmt: skip
        assert max((each.layers for each in same), default=0) == layers, name
        assert same == list(base.boundaries[: len(same)])


@pytest.mark.parametrize("budget", [512, 13])
def test_answers_are_those_of_each_model_alone_bit_for_bit(side: Side, budget: int) -> None:
    asked = asked_of(NAMES)
    driven, ran = side.answer(asked, budget=budget)
    assert bits(driven) == side.alone(asked)
    counters = driven.scheduler.state().counters
    assert counters.shared_prompts == 4, "all but the first one and the one that differs in its first layer"
    assert counters.shared_prompt_tokens == 4 * (len(SYSTEM) // 4 * 4)
    whole = side.answer(asked, "off", budget=budget)[1]
    assert whole - ran == len(SYSTEM) // 4 * 4 * sum(COMMON.values())


def test_preempted_sequences_share_again_and_keep_their_bits(side: Side) -> None:
    config = EngineConfig(kv_cache_memory_bytes=220 * 2 * side.half, page_tokens=4, dtype=side.config.dtype)
    asked = asked_of(["base", "lora2", "lora3", "tuned"] * 2, SamplingParams(30, ignore_eos=True, logprobs=3))
    driven = side.driven(config=config)
    for one in asked:
        driven.tell(AddRequest(one))
        for _ in range(4):
            driven.step()
    while driven.busy:
        driven.step()
    counters = driven.scheduler.state().counters
    assert counters.preemptions and counters.shared_prompts > 1
    assert bits(driven) == side.alone(asked)


def test_the_donor_may_go_while_its_pages_are_used(side: Side) -> None:
    asked = asked_of(["base", "lora2", "tuned"])
    driven = side.driven(budget=13)
    driven.tell(AddRequest(asked[0]))
    while not driven.out.events.get(asked[0].seq):
        driven.step()
    for one in asked[1:]:
        driven.tell(AddRequest(one))
    driven.step()
    driven.tell(AbortSequence(asked[0].seq))
    while driven.busy:
        driven.step()
    assert driven.scheduler.state().counters.shared_prompts == 2
    alone, told = side.alone(asked[1:]), bits(driven)
    assert {seq: told[seq] for seq in alone} == alone


def test_a_domain_without_what_is_upstream_would_change_answers(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the domain of each component alone, a model that differs in its first layer shares."""

    def wrong(manifest: ModelManifest, found: object):
        components = [placed.component for placed in manifest.components]
        own = [type("Placed", (), {"component": _Renamed(each)}) for each in components]
        return boundaries(type("Manifest", (), {"components": own})(), found)  # type: ignore[arg-type]

    boundaries = describe.boundaries_of
    monkeypatch.setattr(describe, "boundaries_of", wrong)
    other = Side(side.bench, str(side.config.dtype))
    asked = asked_of(["base", "first"])
    driven, _ = other.answer(asked)
    assert driven.scheduler.state().counters.shared_prompts == 1
    assert bits(driven) != side.alone(asked)


class _Renamed:
    """A component with a digest that ignores its weights."""

    def __init__(self, component: Component) -> None:
        self.kind, self.digest = component.kind, component.kind
