"""Model shapes against published sizes, step costs by hand, decode steps in closed form, and Figure 7's split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.profiles import BlockProfile, Grid, Line
from runtime.sim.cost.blocks import BlockWork, ProfileCost, TableCost, table_cost
from runtime.sim.cost.hardware import GPUS, LINKS, Gpu, LinkSpec, ServerSpec, blockllm_cluster, gpu_named, split_gpu
from runtime.sim.models.shapes import SHAPES, shape_named
from zoo.errors import InputError

A100 = GPUS["A100-80GB"]
LLAMA = SHAPES["llama-7b"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-1.1b", 1.10),
        ("chatglm-6b", 6.17),
        ("llama-7b", 6.74),
        ("llama-13b", 13.02),
        ("opt-13b", 12.84),
        ("gpt-neox-20b", 20.55),
        ("llama-65b", 65.29),
        ("llama2-70b", 68.98),
    ],
)
def test_shapes_have_the_published_numbers_of_weights(name: str, billions: float):
    assert SHAPES[name].nbytes / 2e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_a_model_add_up(name: str):
    shape = SHAPES[name]
    for cut in range(1, shape.components):
        parts = ((0, cut), (cut, shape.components))
        assert sum(shape.bytes_of(*part) for part in parts) == shape.bytes_of(0, shape.components)
        assert (
            sum(shape.attentions(*part) for part in parts)
            == sum(shape.feedforwards(*part) for part in parts)
            == shape.layers
        )
    assert (shape.attentions(1, 2), shape.feedforwards(1, 2), shape.attentions(2, 3), shape.feedforwards(2, 3)) == (
        1,
        0,
        0,
        1,
    )


def test_decode_is_bound_by_memory_and_prompts_by_computing():
    cost = table_cost(LLAMA, 0, LLAMA.components, A100)
    one, many = (cost.ns(BlockWork(rows=rows, context=rows * 100)) for rows in (1, 16))
    assert many < 1.3 * one  # sixteen rows read the weights once
    short, long = (
        cost.ns(BlockWork(chunks=1, chunk=chunk, chunk_context=chunk, pairs=chunk * chunk // 2))
        for chunk in (1024, 2048)
    )
    assert 1.9 < long / short < 2.3


def test_a_step_by_hand():
    gpu = Gpu(
        "toy",
        10**9,
        bandwidth=1e9,
        flops=1e12,
        weights_share=1.0,
        attention_share=0.5,
        compute_share=1.0,
        layer_ns=1000,
        part_ns=0,
    )
    cost = table_cost(replace(LLAMA, layers=1), 1, 3, gpu)
    weights = LLAMA.attention + LLAMA.feedforward
    assert cost.ns(BlockWork(rows=2, context=10)) == pytest.approx(weights + 10 * LLAMA.kv_bytes / 0.5 + 1000)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 500))
def test_steps_in_a_row_are_their_sum(steps: int, rows: int, context: int):
    cost = TableCost(weights=100.0, token=7.0, kv=0.5, pair=0.25, fixed=3.0)
    singly = sum(cost.ns(BlockWork(rows=rows, context=rows * (context + step))) for step in range(steps))
    assert cost.ns(BlockWork(rows=rows, context=rows * context), steps) == pytest.approx(singly)


def test_few_tokens_are_slower_than_the_roofline():
    """At `half_tokens` products reach half of the rate of large ones; attention in prompts has a share of its own."""
    gpu = Gpu("toy", 10**9, 1e15, flops=1e12, compute_share=1.0, layer_ns=0, part_ns=0, half_tokens=100.0)
    cost = table_cost(LLAMA, 1, 3, gpu)
    sharp = table_cost(LLAMA, 1, 3, replace(gpu, half_tokens=0.0))
    assert cost._products(100) == pytest.approx(2 * sharp._products(100))
    assert cost._products(10_000) == pytest.approx(1.01 * sharp._products(10_000))
    slow = table_cost(LLAMA, 1, 3, replace(gpu, prompt_share=0.1))
    assert (slow.pair, slow.token, slow.begin) == (pytest.approx(10 * cost.pair), cost.token, cost.begin)


def test_devices_that_split_layers_sum_twice_a_layer() -> None:
    """Products and attention get faster by their number; launches do not, and sums come on top."""
    eight = split_gpu(A100, 8)
    one, many = (table_cost(LLAMA, 1, 3, gpu) for gpu in (A100, eight))
    assert (many.weights, many.token, many.kv, many.pair) == pytest.approx(
        (one.weights / 8, one.token / 8, one.kv / 8, one.pair / 8)
    )
    assert many.fixed - one.fixed == 2 * eight.sum_ns == 2 * 20_000 and one.sums == 0.0
    chunk = BlockWork(chunks=1, chunk=2048, chunk_context=2048, pairs=2048 * 1024)
    moved = 2 * 2048 * LLAMA.hidden * 2 * (2 * 7 / 8) / 200e9 * 1e9
    without = table_cost(LLAMA, 1, 3, replace(eight, sum_bandwidth=0.0))
    assert many.ns(chunk) - without.ns(chunk) == pytest.approx(moved)
    assert split_gpu(A100, 32).sum_ns == 20_000 + 2 * 20_000 and GPUS["8xA100-80GB"] == eight
    with pytest.raises(InputError, match="power of two"):
        split_gpu(A100, 3)


def test_parts_add_up_to_the_whole_on_every_kind_of_device():
    for gpu in GPUS.values():
        whole = table_cost(LLAMA, 0, LLAMA.components, gpu)
        cuts = ((0, 9), (9, 40), (40, LLAMA.components))
        parts = [table_cost(LLAMA, lo, hi, gpu) for lo, hi in cuts]
        joined = parts[0].plus(parts[1]).plus(parts[2])
        for rows in (1, 64, 300):
            work = BlockWork(rows=rows, context=rows * 50)
            assert joined.ns(work, 3) == pytest.approx(whole.ns(work, 3))
            assert sum(part.ns(work, 3) for part in parts) == pytest.approx(whole.ns(work, 3))
            assert joined.faster(2.0).ns(work) == pytest.approx(whole.ns(work) / 2)


def test_work_is_added_up_row_by_row():
    work = BlockWork()
    work.add_row(9, 1)
    work.add_row(4, 3)
    # Tokens 4, 5, 6 attend to 5, 6 and 7 tokens; 7 tokens of K and V are read.
    assert work == BlockWork(rows=1, context=10, chunks=1, chunk=3, chunk_context=7, pairs=18)
    twice = BlockWork()
    twice.add(work)
    twice.add(work)
    assert (twice.rows, twice.tokens, twice.pairs) == (2, 8, 36)


def test_profiles_give_what_was_measured():
    grid = Grid((1, 4), (10, 20), ((1.0, 2.0), (3.0, 4.0)))
    cost = ProfileCost(BlockProfile("b", 100, grid, Line((8, 16), (5.0, 9.0)), 1.0))
    assert cost.ns(BlockWork(rows=4, context=40)) == 3e9
    assert cost.ns(BlockWork(chunks=1, chunk=16)) == 9e9
    assert cost.ns(BlockWork(rows=1, context=10, chunks=1, chunk=8)) == 6e9
    # Three steps from a context of 10 have 11 in the middle.
    assert cost.ns(BlockWork(rows=1, context=10), steps=3) == pytest.approx(3 * 1.1e9)


def test_the_cluster_of_the_paper():
    cluster = blockllm_cluster()
    assert cluster.size == 12
    assert [server for _, server in cluster.devices()] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert LINKS["100gbps"].busy_ns(11_750_000_000) == 10**9


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: gpu_named("abacus"),
        lambda: shape_named("abacus"),
        lambda: replace(A100, memory=0),
        lambda: replace(A100, weights_share=1.2),
        lambda: replace(A100, prompt_share=1.2),
        lambda: replace(A100, half_tokens=-1.0),
        lambda: LinkSpec("none", 0.0, 1),
        lambda: ServerSpec(A100, 0),
        lambda: LLAMA.bytes_of(3, 3),
        lambda: replace(LLAMA, heads=3),
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
