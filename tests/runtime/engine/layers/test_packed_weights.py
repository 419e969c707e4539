"""Packed weights, in oneDNN's layout and in the kernels': the same tokens, one copy of each weight.

The copy is freed with the last model that uses it; weights that cannot be packed stay plain.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runtime.chains import Array, Stage
from runtime.config import EngineConfig
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.layers import packed_weights as packing
from runtime.engine.layers.matmul import OneDnn, Panels
from runtime.engine.layers.packed_weights import PackedWeights
from runtime.engine.models.registry import half_page
from runtime.types import Opened, Row, SamplingParams, SequenceRequest, StepPlan
from tests.chains import manifest_of, width_of
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import COUNT, ask, prompts
from tests.runtime.engine.test_sharing import fine_tune
from zoo.manifest import Placed

KERNELS = ("stock", pytest.param("native", marks=needs_kernels))


def engine(bench, *names: str, weights: str = "packed", kernels: str = "auto") -> PagedDevice:
    return PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, weights=weights, kernels=kernels), names
    )


def units(made: PagedDevice):
    return made._registry.units


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "opt", "mixtral", "phi3"])
def test_tokens_are_those_of_transformers(bench, family, kernels):
    """Fused and stock layers, biases, transposed weights, tied heads, experts; chunked prefill beside decode."""
    name = bench.family(family, f"{family}-packed", seed=5)
    model, made = reference(bench.folders[name]), engine(bench, name, kernels=kernels)
    assert units(made).packs.nbytes > 0
    wanted = prompts(6, (1, 7, 33, 12))
    out = drive(
        made, {3 * i: [ask(name, prompt, f"{i}")] for i, prompt in enumerate(wanted)}, Limits(max_num_batched_tokens=9)
    )
    for i, prompt in enumerate(wanted):
        assert same_tokens(model, prompt, greedy(model, prompt, COUNT), out.tokens(f"{i}")) == len(out.tokens(f"{i}"))


def test_half_precision(bench):
    name = bench.family("llama", "packed-bf16", dtype="bfloat16", seed=5)
    model, made = reference(bench.folders[name]), engine(bench, name)
    wanted = prompts(7, (4, 9, 17))
    out = drive(made, {0: [ask(name, prompt, f"{i}") for i, prompt in enumerate(wanted)]})
    agreed = [
        same_tokens(model, prompt, greedy(model, prompt, COUNT), out.tokens(f"{i}")) for i, prompt in enumerate(wanted)
    ]
    assert sum(agreed) >= COUNT, "hardly a token agrees"


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_copy_of_each_weight_while_it_is_used(bench, kernels):
    base = bench.family("llama", "packed-base", num_hidden_layers=3, seed=9)
    names = [base, fine_tune(bench, base, "packed-tune", 1), bench.lora(base, "packed-lora")]
    made, plain = engine(bench, *names, kernels=kernels), engine(bench, *names, weights="plain")
    packs, pool = units(made).packs, units(made).pool
    copies, whole = packs.nbytes + pool.nbytes, units(plain).pool.nbytes
    assert copies == whole if kernels == "stock" else whole <= copies < 1.1 * whole, (
        "panels pad a weight's outputs, and hold no second copy"
    )
    assert packs.nbytes > pool.nbytes
    for name in names:
        made.unload(name)
    assert packs.nbytes == pool.nbytes == 0


def test_a_head_that_is_the_embedding_stays_plain(bench):
    name = bench.family("qwen2", "packed-tied", seed=2)
    made = engine(bench, name)
    placed: list[Placed] = list(made._registry.models[made.stage(name)].manifest.components)
    ((_, table),) = placed[0].component.tensors
    assert table in dict(placed[-1].component.tensors).values()
    assert units(made).pool.users(table) == 2


def test_small_weights_stay_plain_where_a_call_costs_more(bench, monkeypatch):
    monkeypatch.setattr(packing, "faster", lambda layout, dtype, threads: True)
    name = bench.family("llama", "packed-small", seed=4)
    assert units(engine(bench, name, weights="auto", kernels="stock")).packs.nbytes == 0
    assert units(engine(bench, name, weights="plain")).packs.nbytes == 0


@pytest.fixture
def measured() -> Iterator[None]:
    """Clear the cached choice of the faster layout, before and after."""
    packing.faster.cache_clear()
    yield
    packing.faster.cache_clear()


@pytest.mark.parametrize(("ratio", "packed"), [(0.7, True), (1.2, False)])
def test_the_faster_of_both_is_taken_where_there_are_no_kernels(monkeypatch, measured, ratio, packed):
    monkeypatch.setattr(packing, "_measured", lambda layout, dtype: ratio)
    made = PackedWeights("auto", torch.device("cpu")).acquire("a", torch.ones(1024, 512))
    assert (made is not None and made.layout.name == "oneDNN") == packed


@needs_kernels
def test_ours_is_taken_where_there_are_kernels_and_the_dtype_is_theirs(monkeypatch, measured):
    monkeypatch.setattr(packing, "_measured", lambda layout, dtype: 0.1)
    packs = PackedWeights("auto", torch.device("cpu"), Kernels())
    half = "oneDNN" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else None  # not supported by every processor
    for dtype, name in ((torch.float32, "panels"), (torch.bfloat16, half)):
        made = packs.acquire(f"{dtype}", torch.ones(1024, 512, dtype=dtype))
        assert (None if made is None else made.layout.name) == name


def test_a_build_without_the_layout_stays_plain(monkeypatch, measured):
    def missing(self: OneDnn, weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(OneDnn, "pack", missing)
    for wanted in ("auto", "packed"):
        assert PackedWeights(wanted, torch.device("cpu")).acquire("a", torch.ones(1024, 512)) is None


@pytest.mark.parametrize(
    "layout", [OneDnn, pytest.param(lambda: Panels(Kernels()), marks=needs_kernels)], ids=["oneDNN", "panels"]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (130, 70)])
def test_a_product_is_that_of_the_plain_weight(shape, layout):
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    made = layout()
    product = made.product(made.pack(weight), shape[0], bias)
    assert torch.equal(product.weight, weight) and product.outputs == shape[0]
    for rows in (1, 2, 17, 300):
        x = torch.randn(1, rows, shape[1])
        torch.testing.assert_close(
            product.multiply(x), torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4
        )


def test_a_way_that_is_not_offered_is_refused():
    with pytest.raises(ValueError, match="auto, plain, packed"):
        EngineConfig(weights="folded")
    with pytest.raises(ValueError, match="auto, stock, native"):
        EngineConfig(kernels="best")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_a_head_that_came_before_its_table_is_one_with_it_as_soon_as_that_comes(bench, kernels, family):
    """Tied stages of one model loaded in any order: the table is resident once, and tokens stay the same."""
    name = bench.family(family, f"{family}-tied-{kernels}", seed=2, tie_word_embeddings=True)
    manifest = manifest_of(bench.store, name)
    first, last = ({digest for _, digest in manifest.components[at].component.tensors} for at in (0, -1))
    (table,) = first & last
    end = len(manifest.components)
    config = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4, weights="packed", kernels=kernels)
    head, embedding = Stage(name, end - 1, end), Stage(name, 0, 1)
    one, other, alone = (StagedEngine(bench.store, config, half_page(bench.store, config, [name])) for _ in range(3))
    for stage in (head, embedding):
        one.load(stage)
    for stage in (embedding, head):
        other.load(stage)
    alone.load(head)
    ours, theirs, only = (each._registry.units for each in (one, other, alone))
    assert any(key.partition("/")[0] == table for key in only.packs._layout_of), "a head by itself is packed"
    assert (ours.pool.users(table), ours.nbytes) == (theirs.pool.users(table), theirs.nbytes)
    assert table not in ours.packs._counted
    opened = Opened(SequenceRequest("s@1", "r", head.id, (1, 2), SamplingParams(4, logprobs=2)))
    hidden = Array(
        "float32", (2, width_of(bench.store, name)), bytes(torch.randn(2, width_of(bench.store, name)).numpy())
    )
    plan = StepPlan(1, (Row("s@1", head.id, (0, 0), 0, ((),)),), (opened,))
    results = [each.run(plan, {"s@1": hidden}).result.sampled[0] for each in (one, other, alone)]
    assert results[0] == results[1]
    assert results[0].token == results[2].token
    for engine_ in (one, other):
        for stage in (head, embedding):
            engine_.unload(stage)
        assert engine_._registry.units.pool.nbytes == engine_._registry.units.packs.nbytes == 0
