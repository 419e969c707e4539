"""Log-probabilities against torch's in float64; the best ones in their order."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.engine.sampling.scores import prompt_scores


@pytest.mark.parametrize("width", [1, 7, 16, 100, 3001, 49152])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 64, 65])
def test_log_probabilities_are_those_of_the_definition(choice, width, count):
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 5
    rows[1] += 300  # far from 0
    rows[2, : width // 2] = -math.inf  # of a grammar
    chosen = torch.tensor([width - 1, 0, width - 1, width // 2, width // 3])
    exact = torch.log_softmax(rows.double(), -1)
    own, values, ids = choice.scored(rows, chosen, min(count, width))
    assert torch.allclose(own.double(), exact.gather(1, chosen[:, None])[:, 0], atol=1e-5)
    best = torch.topk(exact, min(count, width))
    there = best.values > -math.inf
    assert torch.equal(there, values > -math.inf)
    assert torch.allclose(values[there].double(), best.values[there], atol=1e-5)
    assert torch.equal(ids[there], best.indices[there])


def test_of_equal_logits_the_first_are_the_best_with_kernels(choice):
    if type(choice).__name__ != "NativeOperations":
        pytest.skip("torch gives any of them")
    row = torch.zeros(1, 100)
    row[0, [20, 50, 70]] = 1.0
    assert choice.scored(row, torch.tensor([0]), 5)[2].tolist() == [[20, 50, 70, 0, 1]]


def test_a_row_does_not_depend_on_the_rows_beside_it(choice):
    rows = torch.randn(9, 3001, generator=torch.Generator().manual_seed(1))
    together = prompt_scores(rows, range(9), 3, choice).rows
    assert together == [prompt_scores(rows[at : at + 1], [at], 3, choice).rows[0] for at in range(9)]


def test_chosen_tokens_are_checked(choice):
    if type(choice).__name__ != "NativeOperations":
        pytest.skip("torch raises what it raises")
    with pytest.raises(ValueError, match="2 rows"):
        choice.kernels.logits.scored(torch.zeros(2, 8), torch.tensor([1]), 1)
    for outside in (8, -1):
        assert math.isnan(choice.kernels.logits.scored(torch.zeros(1, 8), torch.tensor([outside]), 1)[0])
    with pytest.raises(ValueError, match="65 best"):
        choice.kernels.logits.scored(torch.zeros(1, 80), torch.tensor([1]), 65)
