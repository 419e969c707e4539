"""Sampling: greedy choice and truncation rules against plain arithmetic; draws depend on seed and index only."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.layers.operations import NativeOperations
from runtime.engine.sampling.choice import SamplingColumns
from runtime.engine.sampling.sampler import Draw, sample, uniform
from runtime.types import SamplingParams
from tests.runtime.engine.compiled import needs_kernels

VOCAB = 12


def draw(seq="s", generated=0, prompt=(), output=(), stops=(), **params) -> Draw:
    return Draw(seq, SamplingParams(max_tokens=8, **params), generated, prompt, output, stops)


def logits(seed=0, rows=1):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def support(row, count=400, **params) -> set[int]:
    draws = [draw(generated=i, temperature=1.0, seed=3, **params) for i in range(count)]
    return {s.token for s in sample(row.expand(count, -1), draws)}


def test_greedy_takes_the_largest():
    rows = logits(rows=5)
    assert [s.token for s in sample(rows, [draw() for _ in range(5)])] == rows.argmax(-1).tolist()


@needs_kernels
def test_a_device_with_kernels_takes_the_same_tokens():
    """Ties, infinities, NaN, biases, sampled beside greedy rows, half precision, another memory order."""
    from runtime.engine.kernels.bindings import Kernels

    rows = logits(rows=40).round(decimals=1)
    rows[1], rows[2], rows[8, -1], rows[4, 5], rows[5, [3, 9]] = 0.5, -math.inf, math.nan, math.inf, 99.0
    draws = [
        draw(temperature=1.0 if at % 4 == 3 else 0.0, seed=at, logit_bias=((at % 7, 4.0),) if at % 5 == 0 else ())
        for at in range(40)
    ]
    for each in (rows, rows.bfloat16(), rows.t().contiguous().t(), rows[:, :7]):
        assert sample(each.clone(), draws, NativeOperations(Kernels())) == sample(each.clone(), draws)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, VOCAB))
def test_top_k_keeps_exactly_the_k_best(seed, k):
    row = logits(seed)
    best = set(torch.topk(row[0], k).indices.tolist())
    assert support(row * 0.2, top_k=k) <= best


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.floats(0.05, 0.95))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed, p):
    row = logits(seed)
    probabilities = sorted(enumerate(torch.softmax(row[0], -1).tolist()), key=lambda pair: -pair[1])
    kept, total = set(), 0.0
    for token, probability in probabilities:
        if total >= p:
            break
        kept.add(token)
        total += probability
    assert support(row, top_p=p) <= kept


def test_min_p_drops_what_is_far_below_the_best():
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert support(row, min_p=0.25) == {0, 1, 2}


def test_draws_follow_the_distribution():
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    count = 20_000
    tokens = Counter(
        s.token
        for s in sample(row.expand(count, -1), [draw(generated=i, temperature=1.0, seed=1) for i in range(count)])
    )
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(tokens[token] / count - probability) < 4 * math.sqrt(probability * (1 - probability) / count)


def test_a_draw_depends_on_seed_and_index_not_on_the_batch():
    rows = logits(rows=6)
    draws = [draw(generated=i, temperature=0.8, seed=i, top_p=0.9) for i in range(6)]
    together = [s.token for s in sample(rows, draws)]
    alone = [sample(rows[i : i + 1], [draws[i]])[0].token for i in range(6)]
    backwards = [s.token for s in sample(rows.flip(0), draws[::-1])][::-1]
    assert together == alone == backwards
    assert uniform(1, 2) != uniform(2, 1) and 0 <= uniform(5, 5) < 1


@pytest.mark.parametrize("logprobs", [None, 2])
def test_penalties_are_openais_and_transformers_arithmetic(choice, logprobs):
    from transformers import RepetitionPenaltyLogitsProcessor

    row = logits(4)
    output, prompt = [3, 3, 5], [1, 5]
    expected = row.clone()
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), expected)
    expected[0, 3] -= 2 * 0.6 + 0.4
    expected[0, 5] -= 0.6 + 0.4
    penalised = dict(repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4, logprobs=logprobs)
    got = sample(row.clone(), [draw(prompt=prompt, output=output, **penalised)], choice)
    assert got[0].token == expected.argmax().item()
    if logprobs:  # of the logits before the penalties
        raw = torch.log_softmax(row[0], -1)
        assert got[0].logprob == pytest.approx(raw[got[0].token].item(), abs=1e-6)
        assert [each.token for each in got[0].top] == torch.topk(raw, 2).indices.tolist()


def test_minimum_length_masks_every_stop_until_it_is_reached():
    row = torch.zeros(1, VOCAB)
    row[0, 2], row[0, 7] = 9.0, 8.0
    assert sample(row.clone(), [draw(min_tokens=3, generated=2, stops=(2, 7))])[0].token not in (2, 7)
    assert sample(row, [draw(min_tokens=3, generated=3, stops=(2, 7))])[0].token == 2


def test_bias_moves_the_choice_but_not_the_logprob():
    row = logits(2)
    worst = int(row.argmin())
    got = sample(row, [draw(logit_bias=((worst, 100.0),), logprobs=2)])[0]
    raw = torch.log_softmax(row[0], -1)
    assert got.token == worst
    assert got.logprob == pytest.approx(raw[worst].item(), abs=1e-6)
    assert [t.token for t in got.top] == torch.topk(raw, 2).indices.tolist()


def test_only_rows_that_ask_get_logprobs():
    rows = logits(rows=2)
    plain, asked = sample(rows, [draw("a"), draw("b", logprobs=0)])
    assert plain.logprob is None and plain.top == ()
    assert asked.logprob == pytest.approx(torch.log_softmax(rows[1], -1).max().item(), abs=1e-6) and asked.top == ()


def test_a_row_that_is_no_number_gets_some_token_and_leaves_the_others_theirs():
    rows = torch.cat([logits(4), torch.full((1, VOCAB), math.nan), logits(5)])
    draws = [draw(temperature=1.0, seed=seed, top_k=3, top_p=0.9) for seed in range(3)]
    got = [each.token for each in sample(rows, draws)]
    assert 0 <= got[1] < VOCAB
    assert [got[0], got[2]] == [sample(rows[at : at + 1], [draws[at]])[0].token for at in (0, 2)]


#: More tokens than are ranked, in rows that are flat, ordinary and steep; not a multiple of a vector.
WIDE, SPREADS = 3001, (0.3, 2.0, 6.0)
CUTS = (
    dict(),
    dict(min_p=0.05),
    dict(min_p=1.0),
    *(dict(top_k=k) for k in (1, 7, 1024, 1025, 2999, 3001, 5000)),
    *(dict(top_p=p) for p in (1e-6, 0.3, 0.95, 0.99999)),
    dict(top_k=40, top_p=0.8),
    dict(top_k=1024, top_p=0.99),
    dict(top_k=2000, top_p=0.9, min_p=0.01),
    dict(top_p=0.9, min_p=0.02),
)


def wide_rows(count: int) -> torch.Tensor:
    rows = torch.randn(count, WIDE, generator=torch.Generator().manual_seed(1))
    return rows * torch.tensor(SPREADS)[torch.arange(count) % len(SPREADS), None]


def left_of(row: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Return each token's probability after the cuts, in float64: the rules, one by one."""
    mass = torch.softmax(row.double() / params.temperature, -1).numpy()
    ranked = np.argsort(-mass, kind="stable")
    keep = np.ones(len(mass), bool)
    if params.top_k:
        keep[ranked[params.top_k :]] = False
    left = np.where(keep, mass, 0.0)
    if params.top_p < 1.0:
        shares = left[ranked] / left.sum()
        keep[ranked[np.cumsum(shares) - shares >= params.top_p]] = False
    keep[mass < params.min_p * mass.max()] = False
    keep[ranked[0]] = True
    left = np.where(keep, mass, 0.0)
    return left / left.sum()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_token_is_where_its_number_falls_in_the_distribution_that_is_left(cut, choice):
    rows = wide_rows(96)
    draws = [draw(temperature=0.9, seed=at, **cut) for at in range(96)]
    dropped = 0
    for row, each, got in zip(rows, draws, sample(rows, draws, choice), strict=True):
        left = left_of(row, each.params)
        up_to, u = left[: got.token + 1].sum(), uniform(each.params.seed, 0)
        # A cut in sums of float32 may fall a token later or earlier than in float64.
        assert up_to - left[got.token] - 2e-3 <= u <= up_to + 2e-3
        dropped += left[got.token] == 0
    assert dropped <= 1


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cuts_leave_the_right_tokens(cut, choice):
    """Numbers all over [0, 1) reach every token that is left, but for a token at the edge."""
    count = 4000
    for row in wide_rows(3)[1:] * 2:
        left = np.flatnonzero(left_of(row, draw(temperature=1.0, **cut).params) > 2 / count)
        by = SamplingColumns(
            range(count), [1.0] * count, [cut.get("top_k", 0)] * count, [cut.get("top_p", 1.0)] * count,
            [cut.get("min_p", 0.0)] * count, [at / count for at in range(count)],
        )  # fmt: skip
        got = set(choice.chosen(row.expand(count, -1).contiguous(), by).tolist())
        assert got >= set(left.tolist())
        most = int((left_of(row, draw(temperature=1.0, **cut).params) > 0).sum())
        assert len(got) <= most + 1


@needs_kernels
def test_a_device_with_kernels_draws_the_same_tokens():
    from runtime.engine.kernels.bindings import Kernels

    rows = wide_rows(510).bfloat16()  # with many ties
    draws = [draw(temperature=0.2 + at % 9 / 5, seed=at, **CUTS[at % len(CUTS)]) for at in range(510)]
    stock, native = sample(rows, draws), sample(rows, draws, NativeOperations(Kernels()))
    assert sum(one.token != other.token for one, other in zip(stock, native, strict=True)) <= 1


def test_a_token_does_not_depend_on_how_the_rows_beside_it_are_cut(choice):
    rows = wide_rows(64)
    draws = [draw(temperature=1.3, seed=at, **CUTS[at % len(CUTS)]) for at in range(63)] + [draw()]
    together = [each.token for each in sample(rows, draws, choice)]
    assert together == [sample(rows[at : at + 1], draws[at : at + 1], choice)[0].token for at in range(64)]


def test_ties_with_the_last_token_that_a_cut_leaves_are_left_too(choice):
    row = torch.full((1, WIDE), -9.0)
    row[0, [11, 700, 2999]] = 2.0
    row[0, 40] = 3.0
    count = 400
    for cut in (dict(top_k=2), dict(top_p=0.6), dict(min_p=0.3)):
        draws = [draw(temperature=1.0, seed=at, **cut) for at in range(count)]
        assert {each.token for each in sample(row.expand(count, -1), draws, choice)} == {11, 40, 700, 2999}


@pytest.mark.parametrize("without", ["sort topk", "sort"])
def test_the_vocabulary_is_sorted_only_where_a_row_needs_it(without, monkeypatch):
    for name in without.split():
        monkeypatch.delattr(torch, name)
    rows = wide_rows(48)[2::3]
    for cut in (dict(), dict(min_p=0.1)) if "topk" in without else (dict(top_k=40, top_p=0.9),):
        draws = [draw(temperature=1.0, seed=at, **cut) for at in range(16)]
        assert len({each.token for each in sample(rows, draws)}) > 1


def test_numbers_at_both_ends_take_tokens_that_have_mass(choice, monkeypatch):
    rows = torch.full((2, WIDE), -math.inf)
    rows[0, [2100, 2105]], rows[1, 3] = 1.0, 0.0
    for number, first in ((0.0, 2100), (1.0 - 2.0**-53, 2105)):
        monkeypatch.setattr("runtime.engine.sampling.sampler.uniform", lambda seed, index, number=number: number)
        for cut in (dict(), dict(top_p=0.9), dict(min_p=0.1), dict(top_k=4)):
            draws = [draw(temperature=1.0, **cut)] * 2
            assert [each.token for each in sample(rows, draws, choice)] == [first, 3], cut


def test_a_row_without_a_number_gets_a_token_of_the_vocabulary(choice):
    for cut in CUTS:
        for value in (math.nan, -math.inf, math.inf):
            row = torch.full((1, WIDE), value)
            assert 0 <= sample(row, [draw(temperature=1.0, **cut)], choice)[0].token < WIDE


class Allowing:
    """A constraint that allows one token of a wide vocabulary, and remembers how many tokens it was asked to follow."""

    def __init__(self, token: int) -> None:
        self.token, self.asked = token, list[int]()

    def allowed(self, count):
        self.asked.append(count)
        words = np.zeros(self.token // 32 + 1, np.uint32)
        words[-1] = 1 << self.token % 32
        return words


@pytest.mark.parametrize("token", [0, 5, 31, 32, 1700, WIDE - 1])
def test_a_row_with_a_grammar_takes_what_it_allows_and_no_other_row_changes(choice, token):
    constraint = Allowing(token)
    for temperature in (0.0, 1.0):
        bound = draw(output=[1, 2], grammar="g", logprobs=2, temperature=temperature)
        bound = msgspec.structs.replace(bound, constraint=constraint)
        for beside in (draw(logprobs=2), draw(temperature=1.0, logprobs=2)):
            got = sample(wide_rows(3), [beside, bound, beside], choice)
            assert got[0] == sample(wide_rows(3)[:1], [beside], choice)[0]
            assert got[2] == sample(wide_rows(3)[2:], [beside], choice)[0]
            assert got[1].token == token and got[1].logprob == 0.0 and [each.token for each in got[1].top] == [token]
    assert constraint.asked == [2] * 4


def test_masks_allow_what_their_bits_say(choice):
    """Any rows of a step, masks of any length, NaN and infinities under them."""
    random = np.random.default_rng(1)
    rows = wide_rows(8)
    rows[3, 40], rows[3, 41], rows[5, 100] = math.nan, math.inf, math.nan
    masks = {row: random.integers(0, 2**32, count, dtype=np.uint32) for row, count in ((1, 94), (3, 60), (5, 200))}
    masks[3][1] = 0xFFFFFFFF
    expected = rows.clone()
    for row, words in masks.items():
        for token in range(WIDE):
            if token // 32 >= len(words) or not int(words[token // 32]) >> token % 32 & 1:
                expected[row, token] = -math.inf
    choice.allow_(rows, masks)
    assert torch.equal(rows.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))


def masks_for(width: int) -> dict[int, np.ndarray]:
    """Masks by row, three of each kind: random ones of many and few bits, ones that end before the row or behind it, a
    single token at either end, none, all.
    """
    random, count = np.random.default_rng(width), -(-width // 32)

    def one(length: int, share: float) -> np.ndarray:
        bits = random.random((length, 32)) < share
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)[:, 0].copy()

    def only(token: int) -> np.ndarray:
        words = np.zeros(count, np.uint32)
        words[token // 32] = 1 << token % 32
        return words

    kinds = [
        lambda: one(count, 0.5), lambda: one(count, 0.01), lambda: one(count, 0.99), lambda: one(count + 3, 0.5),
        lambda: one(count // 2, 0.3), lambda: only(0), lambda: only(width - 1),
        lambda: np.zeros(count, np.uint32), lambda: np.full(count, 0xFFFFFFFF, np.uint32),
    ]  # fmt: skip
    return {row: kinds[row // 4]() for row in range(4 * len(kinds)) if row % 4}


@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 47, 64, 100, 1000, WIDE])
def test_tokens_under_masks_are_those_of_rows_set_to_minus_infinity(choice, width):
    """Rows with ties, NaN and infinities, inside and outside of what is allowed, drawn ones among greedy ones."""
    rows = torch.randn(36, width, generator=torch.Generator().manual_seed(width)).mul(3).round(decimals=1)
    for row, value in ((1, math.nan), (2, math.inf), (5, math.inf), (6, math.nan), (9, math.nan), (10, -math.inf)):
        rows[row, row % width :: 17] = value
    rows[14], rows[17] = math.nan, -math.inf
    masks, masked = masks_for(width), rows.clone()
    choice.allow_(masked, masks)
    for drawn in ([], [*range(0, 36, 5)], [*range(0, 36, 3)], [*range(36)]):
        cuts = [CUTS[at % len(CUTS)] for at in drawn]
        by = SamplingColumns(
            drawn, [0.8 + at % 3 for at in drawn], [cut.get("top_k", 0) for cut in cuts],
            [cut.get("top_p", 1.0) for cut in cuts], [cut.get("min_p", 0.0) for cut in cuts],
            [uniform(at, 1) for at in drawn],
        )  # fmt: skip
        got = choice.chosen(rows.clone(), by, masks).tolist()
        assert got == choice.chosen(masked.clone(), by).tolist()
        for row in set(range(36)).difference(drawn):
            assert got[row] == masked[row].argmax().item(), row
        alone = [choice.chosen(rows[row : row + 1].clone(), masks={0: masks[row]}).item() for row in (1, 6, 9, 13, 25)]
        assert alone == [masked[row].argmax().item() for row in (1, 6, 9, 13, 25)]


def test_columns_are_those_of_the_drawn_rows(choice):
    """A draw at a temperature near 0 takes the best token, one at a high temperature with this number the last."""
    rows = wide_rows(4)
    by = SamplingColumns([3, 1], [1e-4, 1e6], [0, 0], [1.0, 1.0], [0.0, 0.0], [0.5, 1.0 - 2.0**-53])
    assert choice.chosen(rows.clone(), by).tolist() == [
        rows[0].argmax().item(), WIDE - 1, rows[2].argmax().item(), rows[3].argmax().item()
    ]  # fmt: skip
