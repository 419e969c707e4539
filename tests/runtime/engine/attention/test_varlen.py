"""Varlen attention in one call, with plain torch as the kernel, equals the gather path and transformers."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.attention import varlen
from runtime.engine.attention.gathered import GatheredAttention
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.varlen import device_attention, device_page_tokens, page_multiple, varlen_attention
from runtime.engine.step.context import PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool, PageSizes
from tests.runtime.engine.chain_family import COUNT as CHAIN_COUNT
from tests.runtime.engine.chain_family import add_family, agreeing
from tests.runtime.engine.drive import Limits, drive
from tests.runtime.engine.gpu_kernel_fakes import PlainVarlen
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import COUNT, ask, engine, prompts

HEADS, LAYERS = 4, 3


def paging(
    rows: list[tuple[int, int]], page_tokens: int, head_dim: int, kv_heads: int, strangers: bool
) -> PagedMetadata:
    """Make the paged metadata of a frame.

    `rows`: (tokens before this step, tokens in it). `strangers`: Every second token of the frame belongs to no row.
    """
    half = -(-page_tokens * kv_heads * head_dim * 4 // 64) * 64 + 64  # pages are larger than the part in use
    groups = [-(-(start + count) // page_tokens) for start, count in rows]
    pool = PagePool(2 * half * LAYERS * sum(groups), half)
    pool.clear(range(pool.pages))
    ids = random.Random(0).sample(range(pool.pages), LAYERS * sum(groups))
    tables = torch.full((len(rows), LAYERS, max(groups)), pool.padding)
    spans, at = [], 0
    for row, (start, count) in enumerate(rows):
        tables[row, :, : groups[row]] = torch.tensor([ids.pop() for _ in range(LAYERS * groups[row])]).view(LAYERS, -1)
        spans.append(RowSpan(at, at + count, start))
        at += count + strangers
    positions = torch.tensor([p for span in spans for p in range(span.start, span.length)])
    row_of = torch.tensor([i for i, span in enumerate(spans) for _ in range(span.hi - span.lo)])
    made = PagedMetadata(
        pool=pool,
        page_tokens=page_tokens,
        tokens=torch.tensor([t for span in spans for t in range(span.lo, span.hi)]) if strangers else None,
        spans=tuple(spans),
        tables=tables,
        lengths=torch.tensor([span.length for span in spans]),
        token_pages=tables[row_of, :, positions // page_tokens].t().contiguous(),
        token_offsets=positions % page_tokens,
    )
    like = torch.empty(0, kv_heads, head_dim)
    for layer in range(LAYERS):
        for row, (start, _) in enumerate(rows):
            before = torch.arange(start)
            view = made.view(like)
            view.write(
                tables[row, layer, before // page_tokens],
                before % page_tokens,
                *torch.randn(2, start, kv_heads, head_dim),
            )
    return made


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 21), st.sampled_from([1, 1, 1, 2, 7])), min_size=1, max_size=6),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([8, 16]),
    how=st.builds(AttentionSettings, st.sampled_from([None, 1.0]), st.sampled_from([None, 1, 5, 64])),
    strangers=st.booleans(),
    reads=st.sampled_from([(1, False), (1, True), (4, True), (256, True), (0, True)]),
)
def test_the_same_as_gathering(rows, page_tokens, kv_heads, head_dim, how, strangers, reads):
    """The kernel reads pages of any size, of some sizes (others are gathered for it), or none."""
    torch.manual_seed(0)
    pages, plain = paging(rows, page_tokens, head_dim, kv_heads, strangers), PlainVarlen(*reads)
    tokens = pages.spans[-1].hi
    for layer in range(LAYERS):
        query, (key, value) = torch.randn(tokens, HEADS, head_dim), torch.randn(2, tokens, kv_heads, head_dim)
        outs = []
        for maker in (GatheredAttention, varlen_attention(plain.kernel)):
            made = maker(pages)
            made.write_kv(layer, key, value)
            outs.append(torch.zeros(tokens, HEADS, head_dim))
            made.decode(layer, Tokens(query, key, value, how), outs[-1])
            made.chunks(layer, Tokens(query, key, value, how), outs[-1])
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=2e-6)
    assert plain.rows == [len(rows)] * LAYERS, "one call for all rows of a layer, chunks of prompts among them"
    read = reads[0] > 0 and page_tokens % reads[0] == 0
    assert plain.read == [read] * LAYERS, "pages are gathered only for a kernel that cannot read them"


@pytest.mark.parametrize(
    ("head_dim", "how"),
    [(8, AttentionSettings(softcap=2.0)), (12, AttentionSettings()), (264, AttentionSettings())],
)
def test_what_the_kernel_does_not_take_runs_on_torchs_own_operations(head_dim, how):
    torch.manual_seed(0)
    pages, plain = paging([(9, 1), (2, 5)], 4, head_dim, 2, False), PlainVarlen()
    query, (key, value) = torch.randn(6, HEADS, head_dim), torch.randn(2, 6, 2, head_dim)
    outs = []
    for maker in (GatheredAttention, varlen_attention(plain.kernel)):
        made = maker(pages)
        made.write_kv(1, key, value)
        outs.append(torch.zeros(6, HEADS, head_dim))
        made.decode(1, Tokens(query, key, value, how), outs[-1])
        made.chunks(1, Tokens(query, key, value, how), outs[-1])
    assert torch.equal(*outs)
    assert plain.calls == 0


def with_kernel(made, plain: PlainVarlen):
    made._registry.units.attention = varlen_attention(plain.kernel)
    made._registry.units.programs._wanted = False  # which a CPU's kernels alone have
    return made


@pytest.mark.parametrize(
    ("family", "reads"),
    [
        *((name, (1, True)) for name in ("llama", "mistral", "qwen3", "gemma2", "gpt_neox", "opt")),
        ("mistral", (0, True)),
    ],
)
def test_tokens_of_mixed_batches(bench, family, reads):
    """A small pool, chunks of at most six tokens, late arrivals; Gemma 2's soft caps take the gather path."""
    name = bench.family(family, f"{family}.{reads[0]}", seed=3)
    model, plain = reference(bench.folders[name]), PlainVarlen(*reads)
    wanted = prompts(2, (9, 2, 21, 13, 1, 17))
    made = with_kernel(engine(bench, name, pages=3 * 15), plain)
    out = drive(
        made,
        {3 * i: [ask(name, p, f"{i}")] for i, p in enumerate(wanted)},
        Limits(max_num_batched_tokens=6, max_num_seqs=6),
    )
    for i, prompt in enumerate(wanted):
        assert same_tokens(model, prompt, greedy(model, prompt, COUNT), out.tokens(f"{i}")) == len(out.tokens(f"{i}"))
    assert (plain.calls > 0) == (family != "gemma2")


def test_tokens_of_layers_at_other_depths_and_pages_of_other_sizes(bench):
    add_family(bench)
    names = ["narrow", "lora", "stitched", "pruned", "shifted", "repeated and stitched"]
    plain = PlainVarlen()
    made = with_kernel(engine(bench, *names), plain)
    assert len({spec.page_tokens for spec in made.models()}) > 1
    wanted = {name: [(f"{name}.{i}", p) for i, p in enumerate(prompts(n, (4, 11)))] for n, name in enumerate(names)}
    requests = [ask(name, p, seq, ignore_eos=True) for i in range(2) for name in names for seq, p in [wanted[name][i]]]
    out = drive(made, {i // 3: requests[i : i + 3] for i in range(0, len(requests), 3)}, Limits(24, max_num_seqs=14))
    for name in names:
        out.events.update({seq: out.events[seq][:CHAIN_COUNT] for seq, _ in wanted[name]})
        assert agreeing(bench, name, wanted[name], out, torch.float32) == 2 * CHAIN_COUNT, name
    assert plain.calls > 0


def test_no_kernel_without_a_gpu():
    assert device_attention(torch.device("cpu")) is GatheredAttention
    assert (device_page_tokens(torch.device("cpu"), torch.bfloat16), page_multiple(torch.device("cpu"))) == (16, 1)


def test_pages_of_a_gpu_suit_torchs_kernel(monkeypatch):
    """Flash Attention 2 reads pages of 256 tokens; float32, and a torch that reads no pages, gather smaller ones."""
    gpu = torch.device("cuda")
    wanted = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 64}
    assert {dtype: device_page_tokens(gpu, dtype) for dtype in wanted} == wanted and page_multiple(gpu) == 256
    assert PageSizes(1 << 30, 256 * 4096, 256).page_tokens(Geometry(8, 128, torch.bfloat16)) == 512
    assert PageSizes(1 << 30, 256 * 4096, 256).page_tokens(Geometry(12, 128, torch.bfloat16)) == 256, "341 would fit"
    assert PageSizes(1 << 30, 16 * 4096, 256).page_tokens(Geometry(16, 128, torch.bfloat16)) == 16
    monkeypatch.setattr(varlen, "_paged_call", lambda: None)
    assert (device_page_tokens(gpu, torch.bfloat16), page_multiple(gpu)) == (64, 1)


@pytest.mark.parametrize("heads", [HEADS, 8])
def test_torchs_own_operators_take_these_arguments(heads):
    """Torch's operators run on the meta device, without data: a renamed or missing argument fails here."""
    with torch.device("meta"):
        query, starts, used = torch.empty(5, heads, 16, dtype=torch.bfloat16), *torch.empty(2, 3, dtype=torch.int32)
        pool, table = torch.empty(9, 256, HEADS, 16, dtype=torch.bfloat16), torch.empty(2, 4, dtype=torch.int32)
    how = dict(scale=0.25, window_size=(-1, 0), enable_gqa=heads != HEADS, seqused_k=used[:2])
    paged = varlen._paged_call()
    assert paged is not None, "torch 2.12 and later read pages"
    assert paged(query, pool, pool, starts, starts, 4, 1024, block_table=table, **how).shape == query.shape
    slots = pool.flatten(0, 1)
    for call in (paged, varlen.flash_attention):
        assert call(query, slots, slots, starts, starts, 4, 1024, block_table=None, **how).shape == query.shape
    with pytest.raises(ValueError, match="reads no pages"):
        varlen.flash_attention(query, pool, pool, starts, starts, 4, 1024, block_table=table, **how)
