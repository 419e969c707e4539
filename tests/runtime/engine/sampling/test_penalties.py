"""Penalties against their definitions; tokens that are counted from step to step are those counted anew."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from runtime.engine.sampling.penalties import RowPenalties, SeenTokens
from runtime.types import SamplingParams

WIDTH = 500
PENALTIES = (
    dict(repetition_penalty=1.3),
    dict(repetition_penalty=0.8, frequency_penalty=0.3),
    dict(frequency_penalty=0.7),
    dict(presence_penalty=-0.5),
    dict(repetition_penalty=1.1, frequency_penalty=-0.2, presence_penalty=0.9),
)


def penalised(row: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The definitions, token by token, in float64."""
    out, counts = row.astype(np.float64), Counter(output)
    for token in {*prompt, *output} if params.repetition_penalty != 1.0 else ():
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in counts.items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


@pytest.mark.parametrize("given", PENALTIES, ids=str)
def test_rows_are_penalised_by_definition_and_no_others_change(choice, given):
    draw, params = random.Random(1), SamplingParams(max_tokens=8, **given)
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2)) * 4
    expected, penalties = rows.double().numpy().copy(), list[RowPenalties]()
    for row in (0, 3, 5):
        prompt, output = ([draw.randrange(WIDTH) for _ in range(count)] for count in (row * 40, 90))
        penalties.append(SeenTokens(params, prompt).penalties(row, output))
        expected[row] = penalised(rows[row].numpy(), params, prompt, output)
    choice.penalise_(rows, penalties)
    assert torch.allclose(rows.double(), torch.from_numpy(expected), atol=1e-5)
    assert torch.equal(rows[[1, 2, 4]], torch.from_numpy(expected[[1, 2, 4]]).float())


@pytest.mark.parametrize("given", PENALTIES, ids=str)
def test_counts_that_are_kept_are_those_counted_anew(given):
    """Outputs that grow token by token and by many, that shrink, and that change: speculation, a start from tokens."""
    draw, params = random.Random(3), SamplingParams(max_tokens=8, **given)
    prompt = [draw.randrange(WIDTH) for _ in range(30)]
    kept, output = SeenTokens(params, prompt), list[int]()
    for step in range(400):
        kind = draw.random()
        if kind < 0.9:
            output += [draw.randrange(WIDTH) for _ in range(1 if kind < 0.8 else 40)]
        elif kind < 0.95:
            del output[draw.randrange(len(output) + 1) :]
        elif output:
            output[draw.randrange(len(output))] = draw.randrange(WIDTH)
        one, anew = kept.penalties(step, output), SeenTokens(params, prompt).penalties(step, output)
        counts = dict(zip(one.ids.tolist(), one.counts.tolist(), strict=True))
        wanted = dict.fromkeys(prompt, 0) if "repetition_penalty" in given else {}
        wanted |= Counter(output)
        assert counts == wanted
        assert counts == dict(zip(anew.ids.tolist(), anew.counts.tolist(), strict=True))
        assert one.row == step


def test_tokens_outside_the_logits_change_nothing_with_kernels(choice):
    if type(choice).__name__ != "NativeOperations":
        pytest.skip("torch raises")
    rows = torch.ones(2, 8)
    ids, counts = np.array([3, 8, 12, -1]), np.array([1, 1, 1, 1])
    choice.penalise_(rows, [RowPenalties(0, ids, counts, 1.0, 1.0, 0.0)])
    assert rows.sum() == 15 and rows[0, 3] == 0
