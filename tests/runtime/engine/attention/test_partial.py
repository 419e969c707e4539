"""Attention to parts of a sequence, merged, equals attention to all of it (IL-01, IL-02)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from runtime.chains import Array
from runtime.config import EngineConfig
from runtime.engine.attention.gathered import GatheredAttention
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.partial import PartialAttention, attend_partly, merge
from runtime.engine.attention.varlen import varlen_attention
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.layers.operations import NativeOperations, StockOperations
from runtime.engine.models.registry import kernels_for
from runtime.engine.step.context import PagedMaker, PagedMetadata, RowSpan
from runtime.kv.pool import PagePool
from runtime.types import LoanLost
from tests.runtime.engine.gpu_kernel_fakes import PlainVarlen

BACKENDS = ("gathered", "native", "varlen")
#: Random partitions, over all back ends.
CASES = 2000


def maker(name: str) -> PagedMaker:
    if name == "native":
        kernels = kernels_for(EngineConfig())
        if kernels is None:
            pytest.skip("NO NATIVE KERNELS: their partial attention is not tested")
        return native_attention(kernels)
    return GatheredAttention if name == "gathered" else varlen_attention(PlainVarlen().kernel)


@dataclass
class Rows:
    """Sequences whose last tokens attend.

    `counts`: tokens of each that attend; `q`: [all of these, heads, dim]; `k`, `v`: per row [tokens, kv_heads, dim].
    """

    counts: list[int]
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    how: AttentionSettings

    @classmethod
    def drawn(cls, rng: random.Random, dtype: torch.dtype = torch.float32) -> Rows:
        kv_heads, dim = rng.choice([1, 2, 4]), rng.choice([8, 12, 64])
        heads = kv_heads * rng.choice([1, 3])
        counts = [rng.choice([1, 1, 2, 9, 40]) for _ in range(rng.randint(1, 2))]
        lengths = [count + rng.randint(0, rng.choice([3, 40, 300])) for count in counts]
        k, v = ([torch.randn(n, kv_heads, dim).to(dtype) for n in lengths] for _ in range(2))
        how = AttentionSettings(rng.choice([None, 0.1]), None, rng.choice([None, None, 5.0]))
        return cls(counts, torch.randn(sum(counts), heads, dim), k, [x.clamp(-1, 1) for x in v], how)

    def exact(self) -> Tensor:
        """Attention to all tokens, in float64."""
        outs, at = [], 0
        for count, k, v in zip(self.counts, self.k, self.v, strict=True):
            q = self.q[at : at + count].double().transpose(0, 1)
            k, v = (x.double().transpose(0, 1).repeat_interleave(q.shape[0] // x.shape[1], 0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * self.how.factor(q.shape[2])
            if self.how.softcap is not None:
                scores = torch.tanh(scores / self.how.softcap) * self.how.softcap
            seen = torch.ones(count, k.shape[1], dtype=torch.bool).tril(k.shape[1] - count)
            outs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
            at += count
        return torch.cat(outs)

    def part(self, make: PagedMaker, which: Sequence[Sequence[int]], page_tokens: int) -> PartialAttention:
        """Attend to these tokens of each row; those among the ones that attend are consecutive, and the last."""
        pages = [-(-len(some) // page_tokens) for some in which]
        half = -(-page_tokens * self.k[0][0].numel() * self.k[0].element_size() // 64) * 64
        pool = PagePool(2 * half * max(sum(pages), 1), half)
        tables = torch.full((len(which), 1, max(*pages, 1)), pool.padding)
        free, spans, at = list(range(sum(pages)))[::-1], [], 0
        for row, some in enumerate(which):
            for group in range(pages[row]):
                tables[row, 0, group] = free.pop()
            before = len(self.k[row]) - self.counts[row]
            behind = [t for t in some if t >= before]
            # The first one that attends sees what is before it: all but those behind, or less if the part begins later.
            start = len(some) - len(behind) - (behind[0] - before if behind else 0)
            spans.append(RowSpan(at, at + self.counts[row], start))
            at += self.counts[row]
        meta = PagedMetadata(
            pool=pool, page_tokens=page_tokens, tokens=None, spans=tuple(spans), tables=tables,
            lengths=torch.tensor([min(s.length, len(some)) for s, some in zip(spans, which, strict=True)]),
            token_pages=torch.empty(1, 0, dtype=torch.int64), token_offsets=torch.empty(0, dtype=torch.int64),
            held=tuple(len(some) for some in which),
        )  # fmt: skip
        view = meta.view(self.k[0])
        for row, some in enumerate(which):
            index = torch.arange(len(some))
            chosen = torch.tensor(list(some), dtype=torch.int64)
            place = tables[row, 0, index // page_tokens], index % page_tokens
            view.write(*place, self.k[row][chosen], self.v[row][chosen])
        none = torch.empty(0, *self.k[0].shape[1:], dtype=self.k[0].dtype)
        return attend_partly(make(meta), 0, Tokens(self.q, none, none, self.how))


def cut(rng: random.Random, rows: Rows, parts: int) -> list[list[list[int]]]:
    """Cut every row into parts: tokens that no query comes before in any order, the rest where it is cut."""
    made: list[list[list[int]]] = [[] for _ in range(parts)]
    for count, k in zip(rows.counts, rows.k, strict=True):
        length, order = len(k), list(range(len(k) - count))
        if rng.random() < 0.5:
            rng.shuffle(order)
        order += range(length - count, length)
        ends = sorted(rng.randint(0, length) for _ in range(parts - 1))
        for at, (lo, hi) in enumerate(zip([0, *ends], [*ends, length], strict=True)):
            made[at].append(order[lo:hi])
    return made


def merge_parts(parts: Mapping[int, PartialAttention] | Sequence[PartialAttention]) -> PartialAttention:
    """Merge parts in the order in which they are given, or of the tokens that they begin with."""
    given = [parts[at] for at in sorted(parts)] if isinstance(parts, Mapping) else list(parts)
    return merge(torch.stack([each.values for each in given]), torch.stack([each.sums for each in given]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_partitions_give_what_all_tokens_give(backend: str) -> None:
    rng, make, worst = random.Random(7), maker(backend), 0.0
    torch.manual_seed(7)
    for _ in range(CASES // len(BACKENDS) + 1):
        rows = Rows.drawn(rng)
        made = [
            (at, rows.part(make, which, rng.choice([1, 4, 16])))
            for at, which in enumerate(cut(rng, rows, rng.choice([1, 2, 2, 3, 3, 4, 5, 5, 7, 37])))
        ]
        merged = merge_parts(dict(made))
        worst = max(worst, float((merged.out - rows.exact()).abs().max()))
        rng.shuffle(made)
        again = merge_parts(dict(made))
        assert torch.equal(again.out, merged.out) and torch.equal(again.sums, merged.sums), "in order of arrival"
    assert worst <= 1e-6, worst


@pytest.mark.parametrize("backend", ["gathered", "native"])
def test_parts_of_bfloat16_pages(backend: str) -> None:
    """Their weights are rounded; parts are rounded alike, so that merging adds no error of its own."""
    rng, make = random.Random(3), maker(backend)
    torch.manual_seed(3)
    for _ in range(60):
        rows = Rows.drawn(rng, torch.bfloat16)
        rows.q = rows.q.bfloat16().float() if backend == "native" else rows.q.bfloat16()
        whole = rows.part(make, [range(len(k)) for k in rows.k], 16)
        parts = merge_parts([rows.part(make, which, 16) for which in cut(rng, rows, rng.choice([2, 5]))])
        assert float((parts.out - whole.out).abs().max()) <= 1e-2
        assert float((whole.out - rows.exact()).abs().max()) <= 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_are_zeros_and_minus_infinity(backend: str) -> None:
    rows = Rows.drawn(random.Random(1))
    nothing = rows.part(maker(backend), [()] * len(rows.k), 4)
    assert not nothing.out.any() and bool(nothing.sums[..., 1].isneginf().all())
    both = merge_parts({0: nothing, 5: nothing})
    assert not both.out.any() and bool(both.sums[..., 1].isneginf().all())
    whole = rows.part(maker(backend), [range(len(k)) for k in rows.k], 4)
    merged = merge_parts({0: nothing, 1: whole, 2: nothing})
    torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=2e-7)


def test_what_cannot_be_merged_or_cut_is_refused() -> None:
    rows = Rows.drawn(random.Random(1))
    one = rows.part(GatheredAttention, [range(len(k)) for k in rows.k], 4)
    with pytest.raises(ValueError, match="at least one"):
        merge(one.values[None][:0], one.sums[None][:0])
    rows.how = AttentionSettings(window=4)
    with pytest.raises(ValueError, match="sliding window"):
        rows.part(GatheredAttention, [range(len(k)) for k in rows.k], 4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("length", [8191, 8192, 8193, 32767, 32768, 32769])
def test_parts_are_exact_on_both_sides_of_the_papers_classes_of_lengths(name: str, length: int) -> None:
    """Normal to 8,192 tokens, long to 32,768, very long behind: one kernel for all of them here (IL-02)."""
    torch.manual_seed(length)
    k, v = torch.randn(length, 1, 8), torch.randn(length, 1, 8).clamp(-1, 1)
    rows, half = Rows([1], torch.randn(1, 2, 8), [k], [v], AttentionSettings()), length // 2
    made = maker(name)
    parts = {0: rows.part(made, [range(half)], 16), half: rows.part(made, [range(half, length)], 16)}
    assert (merge_parts(parts).out.double() - rows.exact()).abs().max() < 1e-6
    assert (rows.part(made, [range(length)], 16).out.double() - rows.exact()).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["stock", "native"])
def test_merges_of_stacked_parts(name: str) -> None:
    """As in float64; parts without tokens change nothing; a row has the same bits in any company."""
    kernels = kernels_for(EngineConfig())
    if kernels is None and name == "native":
        pytest.skip("NO NATIVE KERNELS: their merge is not tested")
    operations = StockOperations() if kernels is None or name == "stock" else NativeOperations(kernels)

    def merged(values: Tensor, sums: Tensor) -> PartialAttention:
        whole, out = (
            PartialAttention(torch.empty_like(values[0]), torch.empty_like(sums[0])),
            torch.empty(values.shape[1:]),
        )
        operations.merge(values, sums, whole.values, whole.sums)
        operations.merge(values, sums, out, None)
        assert torch.equal(out, whole.out), "divided, or not yet"
        return whole

    rng = torch.Generator().manual_seed(2)
    for parts, tokens, heads, width in ((1, 1, 1, 8), (2, 3, 4, 12), (5, 7, 2, 64), (37, 2, 9, 5)):
        values = torch.randn(parts, tokens, heads, width, generator=rng, dtype=torch.float64)
        totals = torch.rand(parts, tokens, heads, generator=rng, dtype=torch.float64) + 0.5
        exponents = torch.randint(-40, 40, (parts, tokens, heads), generator=rng).double()
        gone = torch.rand(parts, tokens, heads, generator=rng) < 0.3
        values[gone], totals[gone], exponents[gone] = 0.0, 0.0, -torch.inf
        sums = torch.stack((totals, exponents), -1)
        made = merged(values, sums)
        scaled = torch.exp2(exponents)
        total = (totals * scaled).sum(0)
        wanted = (values * scaled[..., None]).sum(0) / total.where(total > 0, 1.0)[..., None]
        assert (wanted - made.out).abs().max() < 1e-6
        torch.testing.assert_close(total, made.sums[..., 0] * torch.exp2(made.sums[..., 1]), rtol=1e-12, atol=0)
        for token in range(tokens):
            alone = merged(values[:, token : token + 1].contiguous(), sums[:, token : token + 1].contiguous())
            assert torch.equal(alone.values[0], made.values[token]) and torch.equal(alone.sums[0], made.sums[token])
        nothing = rows_of_nothing(values, sums)
        more = merged(torch.cat((values, nothing.values)), torch.cat((sums, nothing.sums)))
        assert torch.equal(more.values, made.values) and torch.equal(more.sums, made.sums)


def rows_of_nothing(values: Tensor, sums: Tensor) -> PartialAttention:
    """Return one part without tokens."""
    none = torch.zeros_like(sums[:1])
    none[..., 1] = -torch.inf
    return PartialAttention(torch.zeros_like(values[:1]), none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("peak", [1.0, 30.0])
def test_parts_cut_at_blocks_of_64_keys_have_the_bits_of_all_keys(dtype: torch.dtype, peak: float) -> None:
    """However many parts, in whatever order they are added: with the kernels, in decode steps and in chunks."""
    make, rng = maker("native"), random.Random(5)
    torch.manual_seed(5)
    for count in (1, 1, 1, 9, 40):
        length = count + 64 * rng.randint(9, 24) + rng.randint(0, 63)
        k, v = ((torch.randn(length, 2, 64) * scale).to(dtype) for scale in (peak, 1.0))
        rows = Rows([count], torch.randn(count, 6, 64), [k], [v], AttentionSettings())
        whole = rows.part(make, [range(length)], 16)
        before = (length - count) // 64
        for parts in (2, 3, 7, before):
            blocks = list(range(before))
            if parts > 2:
                rng.shuffle(blocks)  # a holder's blocks need not lie side by side
            ends = [0, *sorted(rng.sample(range(1, before), parts - 2)), before]
            held = [[t for b in blocks[lo:hi] for t in range(64 * b, 64 * b + 64)] for lo, hi in pairwise(ends)]
            made = [rows.part(make, [some], 16) for some in (*held, range(64 * before, length))]
            rng.shuffle(made)
            merged = merge_parts(made)
            assert torch.equal(merged.out, whole.out), (count, length, parts)


def test_answers_of_another_shape_are_refused() -> None:
    query = torch.zeros(2, 3, 4)
    made = PartialAttention(torch.randn(2, 3, 4).double(), torch.rand(2, 3, 2).double())
    values, sums = (Array("float64", tuple(each.shape), each.numpy().tobytes()) for each in (made.values, made.sums))
    found = PartialAttention.of_arrays([values, sums], query)
    assert torch.equal(found.values, made.values) and torch.equal(found.sums, made.sums)
    narrow = Array("float32", values.shape, made.values.float().numpy().tobytes())
    assert torch.equal(PartialAttention.of_arrays([narrow, sums], query).values, made.values.float().double())
    for wrong in ([values], [sums, values], [values, values], [values, sums, sums]):
        with pytest.raises(LoanLost, match="another shape"):
            PartialAttention.of_arrays(wrong, query)
    for at in range(2):
        cut = [values, sums]
        cut[at] = Array("float64", cut[at].shape, cut[at].data[:-8])
        with pytest.raises(LoanLost, match="cannot be used"):
            PartialAttention.of_arrays(cut, query)
