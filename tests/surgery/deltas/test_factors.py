"""Factors of one matrix: the full rank restores it, and prefixes are the best approximation on the inputs seen.

The gains of the ranks are the errors that they remove.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.deltas import factors
from surgery.deltas.factors import factorise, regular

SHAPES = [(6, 10), (10, 6), (8, 8)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment_of(inputs: torch.Tensor, kind: str) -> torch.Tensor | None:
    full = inputs.t() @ inputs / len(inputs)
    return {"full": full, "diagonal": full.diagonal(), "plain": None}[kind]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["full", "diagonal", "plain"])
def test_all_ranks_are_the_matrix(shape, kind):
    delta = random(*shape)
    made = factorise(delta, moment_of(random(50, shape[1], seed=1), kind), min(shape))
    torch.testing.assert_close((made.b @ made.a).double(), delta, atol=1e-5, rtol=1e-5)
    assert made.gains.sum() == pytest.approx(1.0)
    assert (made.gains.diff() <= 1e-12).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["full", "diagonal", "plain"])
def test_a_prefix_leaves_the_error_that_its_gains_say(shape, kind):
    delta, inputs = random(*shape), random(500, shape[1], seed=1) * torch.logspace(-2, 1, shape[1], dtype=torch.float64)
    moment = moment_of(inputs, kind)
    weight = regular(moment) if moment is not None else torch.ones(shape[1], dtype=torch.float64)
    weight = torch.diag(weight) if weight.dim() == 1 else weight
    made = factorise(delta, moment, min(shape))
    whole = torch.trace(delta @ weight @ delta.t())
    for rank in range(1, min(shape)):
        left = delta - (made.b[:, :rank] @ made.a[:rank]).double()
        assert float(torch.trace(left @ weight @ left.t()) / whole) == pytest.approx(
            1 - float(made.gains[:rank].sum()), abs=1e-5
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_on_uneven_inputs_knowing_them_beats_the_plain_truncation(shape):
    """The delta is largest where inputs are almost zero, so that plain truncation keeps what no input uses."""
    silent = torch.arange(shape[1]) < shape[1] // 2
    delta = random(*shape) * torch.where(silent, 10.0, 1.0)  # largest where the inputs are almost zero
    inputs, fresh = (random(400, shape[1], seed=seed) * torch.where(silent, 0.01, 1.0) for seed in (1, 2))
    errors = {}
    for kind in ("full", "diagonal", "plain"):
        made = factorise(delta, moment_of(inputs, kind), 2)
        errors[kind] = float((fresh @ (delta - (made.b @ made.a).double()).t()).square().mean())
    assert errors["full"] < 0.7 * errors["plain"] and errors["diagonal"] < 0.7 * errors["plain"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_slices_of_a_large_delta_give_the_same(shape, kind, monkeypatch):
    delta, moment = random(*shape), moment_of(random(50, shape[1], seed=1), kind)
    whole = factorise(delta, moment, 5)
    monkeypatch.setattr(factors, "_AT_ONCE", 3 * min(shape))  # three lines at a time
    cut = factorise(delta, moment, 5)
    torch.testing.assert_close(cut.b @ cut.a, whole.b @ whole.a, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cut.gains, whole.gains)


class Largest(TorchDispatchMode):
    """Records the element count of the largest float64 tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple) else (made,):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                self.elements = max(self.elements, each.numel())
        return made


@pytest.mark.parametrize(
    ("shape", "kind"), [((900, 10), "full"), ((900, 10), "diagonal"), ((900, 10), "plain"), ((10, 900), "diagonal")]
)
def test_heads_and_tables_are_never_whole_in_float64(shape, kind, monkeypatch):
    delta, moment = random(*shape).float(), moment_of(random(50, shape[1], seed=1), kind)
    monkeypatch.setattr(factors, "_AT_ONCE", 400)
    with Largest() as largest:
        factorise(delta, moment, 10)
    assert 100 <= largest.elements <= 900 < delta.numel()


def test_a_delta_of_nothing_has_no_gains_and_stays_finite():
    made = factorise(torch.zeros(4, 6), torch.eye(6), 4)
    assert made.gains.sum() == 0 and made.a.isfinite().all() and made.b.isfinite().all()
    assert torch.count_nonzero(made.b @ made.a) == 0
