"""Products with bfloat16 weights and attention over bfloat16 pages, against float64 and the float32 kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import Build
from runtime.engine.kernels.operands import Parts, Pool, PromptChunk, PromptChunks
from runtime.engine.layers.matmul import StoredProduct, plain_product
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
KERNELS = {} if needs_kernels.args[0] else {threads: Kernels(threads) for threads in (1, 2)}
THREADS = pytest.mark.parametrize("kernels", KERNELS.values(), ids=lambda kernels: f"{kernels.threads} threads")
ROWS = (1, 2, 12, 13, 37, 150)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of rounded inputs, in float64."""
    return x.bfloat16().double() @ weight.double().t()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@THREADS
@pytest.mark.parametrize(("out", "inputs"), [(1, 2), (3, 6), (32, 8), (130, 70)])
def test_products(kernels: Kernels, out: int, inputs: int) -> None:
    torch.manual_seed(out)
    one, two, bias = torch.randn(out, inputs).bfloat16(), torch.randn(2 * out, inputs).bfloat16(), torch.randn(2 * out)
    packed = [kernels.pack(one), kernels.pack(two)]
    assert torch.equal(kernels.unpack(packed[1], 2 * out), two)
    assert torch.equal(kernels.pack(one.t().contiguous().t()), packed[0]), "a weight that is stored turned around"
    parts = Parts(packed, [out, 2 * out], [None, bias])
    for rows in ROWS:
        x, add = torch.randn(1, rows, inputs), torch.randn(1, rows, 3 * out)
        wanted = torch.cat((exact(x, one), exact(x, two) + bias.double()), dim=-1)
        made = kernels.linear(x, parts)
        close(made, wanted)
        close(kernels.linear(x, parts, add), wanted + add)
        alone = torch.cat([kernels.linear(x[:, row : row + 1], parts) for row in range(rows)], dim=1)
        assert torch.equal(alone, made), "a row depends on the others"


@THREADS
@pytest.mark.parametrize(("out", "inputs"), [(1, 1), (4, 32), (7, 71), (130, 37)])
def test_products_with_weights_as_they_are_stored(kernels: Kernels, out: int, inputs: int) -> None:
    torch.manual_seed(out)
    weight, bias, x = torch.randn(out, inputs).bfloat16(), torch.randn(out), torch.randn(1, 37, inputs)
    made = kernels.stored(x, weight, bias)
    close(made, exact(x, weight) + bias.double())
    alone = torch.cat([kernels.stored(x[:, row : row + 1], weight, bias) for row in range(37)], dim=1)
    assert torch.equal(alone, made), "a row depends on the others"


@THREADS
def test_a_gate_over_bfloat16_weights(kernels: Kernels) -> None:
    torch.manual_seed(1)
    gate, up, x = torch.randn(40, 66).bfloat16(), torch.randn(40, 66).bfloat16(), torch.randn(1, 13, 66) / 8
    made = kernels.gated(x, Parts([kernels.pack(gate), kernels.pack(up)], [40, 40], [None, None]))
    close(made, torch.nn.functional.silu(exact(x, gate)) * exact(x, up))


def test_weights_with_an_odd_number_of_inputs_are_not_packed() -> None:
    with pytest.raises(RuntimeError, match="pairs"):
        KERNELS[1].pack(torch.zeros(4, 5, dtype=torch.bfloat16))


@given(st.lists(st.floats(width=32), min_size=1, max_size=70))
@settings(max_examples=200, deadline=None)
def test_rounding_is_torch_s(values: list[float]) -> None:
    x = torch.tensor(values)
    wanted = x.bfloat16().float()
    made = KERNELS[1].round_(x.clone())
    assert torch.equal(made.isnan(), wanted.isnan()) and torch.equal(made.nan_to_num(0.5), wanted.nan_to_num(0.5))


@pytest.mark.parametrize("dim", [64, 24])
@pytest.mark.parametrize("window", [0, 9])
def test_attention_over_bfloat16_pages_is_that_over_their_values(dim: int, window: int) -> None:
    """Without a dot product of pairs: bit for bit that of the float32 kernels, for decode rows and a prompt's chunk."""
    kernels = Kernels(2, Build("widen"))
    torch.manual_seed(dim)
    heads, kv_heads, page, pages = 4, 2, 4, 40
    k, v = (torch.randn(pages, page, kv_heads, dim).bfloat16() for _ in range(2))
    tables = torch.randperm(pages)[:36].view(2, 18).contiguous()
    lengths, query = torch.tensor([70, 5]), torch.randn(2, heads, dim)
    narrow, wide = Pool(k, v, tables), Pool(k.float(), v.float(), tables)
    outs = [torch.empty_like(query) for _ in range(2)]
    for pool, out in zip((narrow, wide), outs, strict=True):
        kernels.decode(query, pool, lengths, out, 0.3, window)
    assert torch.equal(*outs)
    prompt, chunks = torch.randn(13, heads, dim), PromptChunks([PromptChunk(0, 13, 20, 0)])
    outs = [torch.empty_like(prompt) for _ in range(2)]
    for pool, out in zip((narrow, wide), outs, strict=True):
        kernels.chunks(prompt, pool, chunks, out, 0.3, window)
    assert torch.equal(*outs)


@THREADS
@pytest.mark.parametrize("dim", [64, 24, 7])
@pytest.mark.parametrize("window", [0, 45])
@pytest.mark.parametrize("length", [67, 530])
def test_a_token_has_the_same_bits_in_a_decode_step_and_in_a_chunk(
    kernels: Kernels, dim: int, window: int, length: int
) -> None:
    """Over bfloat16 pages, at each of the last 30 positions; near attention in float64 over rounded queries."""
    torch.manual_seed(dim)
    heads, kv_heads, page, first = 6, 2, 4, length - 30
    pages = -(-length // page)
    k, v = (torch.randn(pages, page, kv_heads, dim).bfloat16() for _ in range(2))
    pool, query = Pool(k, v, torch.randperm(pages).view(1, pages)), torch.randn(30, heads, dim)
    chunk = torch.empty_like(query)
    kernels.chunks(query, pool, PromptChunks([PromptChunk(0, 30, first, 0)]), chunk, 0.2, window)
    parts = torch.empty_like(query)
    kernels.chunks(query, pool, PromptChunks([PromptChunk(0, 11, first, 0)]), parts, 0.2, window)
    kernels.chunks(query, pool, PromptChunks([PromptChunk(11, 19, first + 11, 0)]), parts, 0.2, window)
    assert torch.equal(parts, chunk), "a chunk's bits depend on where it was cut"
    for at in range(30):
        out = torch.empty(1, heads, dim)
        kernels.decode(query[at : at + 1], pool, torch.tensor([first + at + 1]), out, 0.2, window)
        assert torch.equal(out[0], chunk[at])
    places = torch.arange(length)
    seen = places <= places[first:, None]
    if window:
        seen &= places > places[first:, None] - window
    keys, values = (
        each[pool.tables[0]]
        .reshape(pages * page, kv_heads, dim)[:length]
        .double()
        .repeat_interleave(3, 1)
        .transpose(0, 1)
        for each in (k, v)
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.bfloat16().double().transpose(0, 1), keys, values, attn_mask=seen, scale=0.2
    ).transpose(0, 1)
    torch.testing.assert_close(chunk.double(), wanted, rtol=0.01, atol=0.01)


def test_k_and_v_of_another_dtype_are_not_written() -> None:
    pool = Pool(*(torch.zeros(2, 4, 1, 8).bfloat16() for _ in range(2)), torch.zeros(1, 1, dtype=torch.int64))
    places, heads = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="cannot be written"):
        KERNELS[1].write_kv(pool, places, places, heads, heads)


def test_a_head_as_stored_gives_each_row_the_same_bits_beside_any_number() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(50, 64).bfloat16(), torch.randn(1, 73, 64)
    product = StoredProduct(KERNELS[1], plain_product(weight, None))
    together = product.multiply(x)
    assert torch.equal(KERNELS[1].linear(x, Parts([KERNELS[1].pack(weight)], [50], [None])), together), (
        "packed it differs"
    )
    assert torch.equal(torch.cat([product.multiply(x[:, row : row + 1]) for row in range(x.shape[1])], dim=1), together)
