"""The kernels against torch: every function, at sizes that fill their tiles or do not, with 1 and 2 threads."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.operands import Low, Lows, Parts, Pool, PromptChunk, PromptChunks
from runtime.engine.sampling.choice import NO_COLUMNS
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
KERNELS = {} if needs_kernels.args[0] else {threads: Kernels(threads) for threads in (1, 2)}
THREADS = pytest.mark.parametrize("kernels", KERNELS.values(), ids=lambda kernels: f"{kernels.threads} threads")
#: One row, a tile and one more, several blocks, and more rows than the kernel reads in place.
ROWS = (1, 2, 12, 13, 37, 95, 96, 150)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@THREADS
@pytest.mark.parametrize(("out", "inputs"), [(1, 1), (3, 5), (32, 8), (130, 70)])
def test_products(kernels: Kernels, out: int, inputs: int) -> None:
    torch.manual_seed(out)
    one, two, bias = torch.randn(out, inputs), torch.randn(2 * out, inputs), torch.randn(2 * out)
    packed = [kernels.pack(one), kernels.pack(two)]
    assert torch.equal(kernels.unpack(packed[1], 2 * out), two)
    assert torch.equal(kernels.pack(one.t().contiguous().t()), packed[0]), "a weight that is stored turned around"
    parts = Parts(packed, [out, 2 * out], [None, bias])
    for rows in ROWS:
        x, add = torch.randn(1, rows, inputs), torch.randn(1, rows, 3 * out)
        wanted = torch.cat((F.linear(x, one), F.linear(x, two, bias)), dim=-1)
        close(kernels.linear(x, parts), wanted)
        close(kernels.linear(x, parts, add), wanted + add)


@THREADS
def test_rows_are_laid_out_piece_by_piece(kernels: Kernels) -> None:
    """Inputs so wide that few blocks of rows fit into a piece: several pieces, the last one not full.

    Each row is bit for bit what it is alone.
    """
    torch.manual_seed(3)
    weight, x, add = torch.randn(70, 2001) / 45, torch.randn(1, 211, 2001), torch.randn(1, 211, 70)
    parts = Parts([kernels.pack(weight)], [70], [None])
    made = kernels.linear(x, parts, add)
    close(made, (x.double() @ weight.double().t() + add).float())
    for row in (0, 35, 36, 143, 210):
        assert torch.equal(kernels.linear(x[:, row : row + 1], parts, add[:, row : row + 1]), made[:, row : row + 1])


@THREADS
@pytest.mark.parametrize(("out", "inputs"), [(1, 1), (4, 16), (7, 70), (130, 37)])
def test_products_with_weights_as_they_are_stored(kernels: Kernels, out: int, inputs: int) -> None:
    torch.manual_seed(out)
    weight, bias, x = torch.randn(out, inputs), torch.randn(out), torch.randn(1, 37, inputs)
    whole = kernels.stored(x, weight, bias)
    for rows in (1, 2, 5, 6, 7, 37):
        close(kernels.stored(x[:, :rows], weight, None), F.linear(x[:, :rows], weight))
        assert torch.equal(kernels.stored(x[:, :rows], weight, bias), whole[:, :rows]), (
            "a row does not depend on who is beside it"
        )
    assert torch.equal(kernels.linear(x, Parts([kernels.pack(weight)], [out], [bias])), whole), "packed it differs"
    assert torch.equal(kernels.stored(x, weight.repeat(1, 2)[:, :inputs], bias), whole), "rows further apart"
    for wrong in (weight.t().contiguous().t(), weight.double()) if inputs > 1 and out > 1 else ():
        with pytest.raises(ValueError, match=r"where it lies|float32"):
            kernels.stored(x, wrong, None)


@THREADS
def test_gated_products(kernels: Kernels) -> None:
    torch.manual_seed(1)
    gate, up = torch.randn(70, 40), torch.randn(70, 40)
    parts = Parts([kernels.pack(gate), kernels.pack(up)], [70, 70], [None, None])
    for rows in ROWS:
        x = torch.randn(1, rows, 40) * 3
        made = kernels.gated(x, parts)
        torch.testing.assert_close(made, F.silu(F.linear(x, gate)) * F.linear(x, up), rtol=1e-4, atol=1e-3)
        assert torch.equal(kernels.gate(kernels.linear(x, parts)), made), "in two calls it is another number"
    with pytest.raises(ValueError, match="one size"):
        kernels.gate(torch.ones(1, 2, 7))


def test_silu_at_its_ends() -> None:
    """SiLU by way of a product with one: 0 far below zero, the input itself far above, NaN for NaN."""
    kernels = KERNELS[1]
    one = kernels.pack(torch.ones(1, 1))
    x = torch.tensor(
        [0.0, -0.0, 1e-20, -1e-20, 3.0, -3.0, 60.0, -60.0, -86.9, -87.1, 200.0, -200.0, 3e38, float("nan")]
    ).view(1, -1, 1)
    got = kernels.gated(x, Parts([one, kernels.pack(torch.zeros(1, 1))], [1, 1], [None, torch.ones(1)]))
    torch.testing.assert_close(got, F.silu(x), rtol=1e-6, atol=1e-30, equal_nan=True)


def test_a_row_does_not_depend_on_who_is_beside_it() -> None:
    """A row's bits depend neither on the rest of the batch nor on the number of threads."""
    torch.manual_seed(2)
    weight, x = torch.randn(130, 300), torch.randn(1, 150, 300)
    parts = {threads: Parts([kernels.pack(weight)], [130], [None]) for threads, kernels in KERNELS.items()}
    whole = KERNELS[2].linear(x, parts[2])
    for rows in ROWS:
        assert torch.equal(KERNELS[1].linear(x[:, :rows], parts[1]), whole[:, :rows])


@THREADS
def test_adapters(kernels: Kernels) -> None:
    """Each row meets its own adapter only, of any rank, with and without bias, on some of the weights.

    Another adapter's infinity does not reach it.
    """
    torch.manual_seed(3)
    sizes, inputs = (40, 33, 7), 50
    parts = Parts([kernels.pack(torch.randn(size, inputs)) for size in sizes], sizes, [None] * 3)

    def adapter(*ranks: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None]:
        return [
            (torch.randn(rank, inputs), torch.randn(size, rank), torch.randn(size) if rank == 3 else None)
            if rank
            else None
            for rank, size in zip(ranks, sizes, strict=True)
        ]

    adapters = [adapter(8, 0, 3), adapter(0, 0, 0), adapter(40, 1, 3), adapter(4, 4, 4)]
    adapters[3] = [(torch.full((4, inputs), float("inf")), b, bias) for _, b, bias in adapters[3]]  # type: ignore[misc]
    packed = [Low(kernels, each) for each in adapters]
    for low, each in zip(packed, adapters, strict=True):
        for at, (part, size) in enumerate(zip(each, sizes, strict=True)):
            assert part is None or (torch.equal(low.a(at), part[0]) and torch.equal(low.b(at, size), part[1])), (
                "unpacked it is another one"
            )
    lows = Lows(packed)
    bounds = [0, 5, 5, 9, 11, 40, 40, 41]
    x = torch.randn(1, 41, inputs)
    out = torch.randn(1, 41, sum(sizes))
    wanted = out.clone()
    for at, each in enumerate(adapters):
        mine = x[:, bounds[2 * at] : bounds[2 * at + 1]]
        made = [torch.zeros(1, mine.shape[1], n) if part is None else F.linear(mine @ part[0].t(), part[1], part[2])
                for part, n in zip(each, sizes, strict=True)]  # fmt: skip
        wanted[:, bounds[2 * at] : bounds[2 * at + 1]] += torch.cat(made, dim=-1)
    import ctypes

    kernels.adapt_(out, x, parts, lows, (ctypes.c_int64 * len(bounds))(*bounds))
    torch.testing.assert_close(out[:, :40], wanted[:, :40], rtol=1e-4, atol=1e-3)
    assert not out[:, 40].isfinite().all() and out[:, :40].isfinite().all()


def test_more_weights_than_an_adapter_can_lie_on() -> None:
    with pytest.raises(ValueError, match="at most"):
        Low(KERNELS[1], [None] * 5)


@THREADS
@pytest.mark.parametrize("width", [5, 64, 130])
def test_norms(kernels: Kernels, width: int) -> None:
    x, weight = torch.randn(1, 90, width), torch.randn(width)
    close(kernels.norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5))
    heads = torch.randn(30, 7, width)
    wanted = heads.clone()
    wanted[:, 2:5] = F.rms_norm(heads[:, 2:5], (width,), weight, 1e-6)
    kernels.norm_heads_(heads[:, 2:5], weight, 1e-6)
    close(heads, wanted)


@THREADS
def test_rotary_positions(kernels: Kernels) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    both = torch.randn(40, 9, 24)
    angles = torch.randn(40, 12).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    query, _ = apply_rotary_pos_emb(
        both[None, :, :6].transpose(1, 2), both[None, :, 6:].transpose(1, 2), cos[None], sin[None]
    )
    wanted = both.clone()
    wanted[:, :6] = query[0].transpose(0, 1)
    kernels.rotate_(both[:, :6], cos, sin)
    close(both, wanted)


@THREADS
def test_pages_are_written(kernels: Kernels) -> None:
    k, v = torch.zeros(9, 4, 2, 6), torch.zeros(9, 4, 2, 6)
    pool = Pool(k, v, torch.zeros(1, 1, dtype=torch.int64))
    qkv = torch.randn(5, 8, 6)
    pages, offsets = torch.tensor([3, 0, 8, 3, 1]), torch.tensor([0, 3, 1, 2, 0])
    kernels.write_kv(pool, pages, offsets, qkv[:, 4:6], qkv[:, 6:8])
    wanted_k, wanted_v = torch.zeros_like(k), torch.zeros_like(v)
    wanted_k[pages, offsets], wanted_v[pages, offsets] = qkv[:, 4:6], qkv[:, 6:8]
    assert torch.equal(k, wanted_k) and torch.equal(v, wanted_v)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, cap: float) -> torch.Tensor:
    """Compute the expected attention of one row: query [heads, dim], key and value [tokens, kv_heads, dim]."""
    if window:
        key, value = key[-window:], value[-window:]
    group = query.shape[0] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    scores = (query[:, None] @ key.transpose(1, 2)) * 0.3
    scores = torch.tanh(scores / cap) * cap if cap else scores
    return (torch.softmax(scores, dim=-1) @ value)[:, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 1100), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (4, 4), (8, 2), (6, 3), (5, 1)]),
    st.sampled_from([4, 16, 20, 64, 128]),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([0, 1, 5, 600]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.integers(0, 999),
)
def test_decoding_over_pages(lengths, heads, dim, page_tokens, window, cap, threads, some, seed) -> None:
    """Rows of any length, all or some of a frame's, grouped heads, windows, soft caps; unused pages hold NaN."""
    torch.manual_seed(seed)
    count, kv = heads
    groups = -(-max(lengths) // page_tokens)
    k, v = (torch.full((len(lengths) * groups + 1, page_tokens, kv, dim), float("nan")) for _ in "kv")
    tables = torch.randperm(len(lengths) * groups).view(len(lengths), groups)
    rows = torch.randperm(len(lengths))
    tokens = torch.randperm(2 * len(lengths))[: len(lengths)] if some else None
    query = torch.randn(2 * len(lengths) if some else len(lengths), count + 3, dim)[:, 1 : count + 1]
    out = torch.full((query.shape[0], count, dim), 7.0)
    wanted = out.clone()
    for at, row in enumerate(rows.tolist()):
        length = lengths[at]
        key, value = torch.randn(length, kv, dim), torch.randn(length, kv, dim)
        for t in range(length):
            k[tables[row, t // page_tokens], t % page_tokens], v[tables[row, t // page_tokens], t % page_tokens] = (
                key[t],
                value[t],
            )
        token = at if tokens is None else int(tokens[at])
        wanted[token] = attended(query[token], key, value, window, cap)
    KERNELS[threads].decode(query, Pool(k, v, tables), torch.tensor(lengths), out, 0.3, window, cap, tokens, rows)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_attention_of_a_row_does_not_depend_on_who_is_beside_it() -> None:
    torch.manual_seed(4)
    lengths = torch.tensor([1300, 40, 513, 7, 90])
    k, v, tables = torch.randn(501, 16, 2, 64), torch.randn(501, 16, 2, 64), torch.randperm(500)[:425].view(5, 85)
    query = torch.randn(5, 8, 64)
    together = torch.empty_like(query)
    KERNELS[2].decode(query, Pool(k, v, tables), lengths, together, 0.1)
    for row in range(5):
        alone = torch.empty(1, 8, 64)
        KERNELS[1].decode(query[row : row + 1], Pool(k, v, tables[row : row + 1]), lengths[row : row + 1], alone, 0.1)
        assert torch.equal(alone[0], together[row])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 1300),
    st.sampled_from([(1, 1), (4, 4), (8, 2), (6, 3), (5, 1)]),
    st.sampled_from([4, 15, 16, 20, 64, 96, 128]),
    st.sampled_from([0, 1, 5, 600]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 999),
)
def test_a_token_has_the_same_bits_in_a_decode_step_and_in_any_chunk(
    length, heads, dim, window, cap, dtype, seed
) -> None:
    """The last tokens of a row, each alone as in a decode step, and in prompts cut at random places."""
    torch.manual_seed(seed)
    (count, kv), pages, tail = heads, -(-length // 16), min(length, 70)
    k, v = (torch.randn(pages, 16, kv, dim).to(dtype) for _ in "kv")
    table = torch.randperm(pages)[None]
    query, start = torch.randn(tail, count, dim) * 3, length - tail
    alone, chunked = torch.empty_like(query), torch.empty_like(query)
    pool, lengths = Pool(k, v, table.expand(tail, -1).contiguous()), torch.arange(start + 1, length + 1)
    KERNELS[2].decode(query, pool, lengths, alone, 0.3, window, cap)
    cuts = sorted({0, tail, *torch.randint(0, tail + 1, (3,)).tolist()})
    chunks = [PromptChunk(lo, hi - lo, start + lo, 0) for lo, hi in itertools.pairwise(cuts)]
    for chunk in chunks:  # one by one: the pages of a real chunk end with it
        KERNELS[1].chunks(query, Pool(k, v, table), PromptChunks([chunk]), chunked, 0.3, window, cap)
    assert torch.equal(alone, chunked)
    KERNELS[2].chunks(query, Pool(k, v, table), PromptChunks(chunks), chunked, 0.3, window, cap)
    assert torch.equal(alone, chunked)


@THREADS
@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_the_largest(kernels: Kernels, width: int) -> None:
    x = torch.randn(40, width).round(decimals=1)
    x[1], x[2], x[3, -1], x[4, width // 2] = 0.5, float("-inf"), float("nan"), float("inf")
    x[5, 0] = x[5, -1] = 99.0
    assert torch.equal(kernels.logits.chosen(x, NO_COLUMNS, {}), x.argmax(-1))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 1, 31, 70])), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (4, 4), (6, 3)]),
    st.sampled_from([4, 20, 64]),
    st.sampled_from([7, 16]),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([1, 2]),
    st.integers(0, 999),
)
def test_chunks_over_pages(chunks, heads, dim, page_tokens, window, cap, threads, seed) -> None:
    """Every token of a chunk attends to its row's earlier tokens and the chunk up to itself, and to nothing else."""
    torch.manual_seed(seed)
    count, kv = heads
    groups = -(-max(n + start for n, start in chunks) // page_tokens)
    k, v = (torch.full((len(chunks) * groups + 1, page_tokens, kv, dim), float("nan")) for _ in "kv")
    tables = torch.randperm(len(chunks) * groups).view(len(chunks), groups)
    query = torch.randn(sum(n for n, _ in chunks) + 2, count + 1, dim)[:, 1:]
    out = torch.full((query.shape[0], count, dim), 7.0)
    wanted, made, token = out.clone(), [], 1
    for row, (n, start) in enumerate(chunks):
        key, value = torch.randn(n + start, kv, dim), torch.randn(n + start, kv, dim)
        for t in range(n + start):
            k[tables[row, t // page_tokens], t % page_tokens], v[tables[row, t // page_tokens], t % page_tokens] = (
                key[t],
                value[t],
            )
        for i in range(n):
            wanted[token + i] = attended(query[token + i], key[: start + i + 1], value[: start + i + 1], window, cap)
        made.append(PromptChunk(token, n, start, row))
        token += n
    KERNELS[threads].chunks(query, Pool(k, v, tables), PromptChunks(made), out, 0.3, window, cap)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
