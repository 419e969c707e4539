"""Products of bfloat16 matrices: the same numbers on CPUs with instructions for them and without."""

from __future__ import annotations

import pytest
import torch

from surgery.tensors import half_products
from surgery.tensors.half_products import fast_products, linear


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_float64_to_the_last_place(
    monkeypatch: pytest.MonkeyPatch, fast: bool, biased: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(half_products, "multiplies_half_fast", lambda: fast)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 5, 48), (30, 48), (30,)))
    got = linear(x, weight, bias if biased else None)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert got.dtype == dtype and got.shape == (2, 5, 30)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_only_products_that_the_cpu_lacks_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    seen: list[torch.dtype] = []

    def recorded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x.dtype)
        return x @ weight.T

    monkeypatch.setattr(half_products, "multiplies_half_fast", lambda: fast)
    monkeypatch.setattr(half_products.F, "linear", recorded)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert linear(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype)).dtype == dtype
    assert seen == [torch.float32, torch.bfloat16 if fast else torch.float32, torch.float64]


@pytest.mark.parametrize("fast", [True, False])
def test_layers_of_a_model_are_computed_so_meanwhile(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(half_products, "multiplies_half_fast", lambda: fast)
    seen: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(x.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr(half_products, "linear", counted)
    layer, x = torch.nn.Linear(3, 4, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)

    @fast_products()
    def run() -> torch.Tensor:
        return layer(x)

    plain = layer(x)
    assert seen == []
    for _ in range(2):
        torch.testing.assert_close(run(), plain, rtol=2**-7, atol=2**-7)
    assert seen == ([] if fast else [2, 2])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_are_those_of_float64_to_the_last_place(
    monkeypatch: pytest.MonkeyPatch, biased: bool, frozen: bool
) -> None:
    """With frozen weights, as where a stitch is trained between two models, the input has a gradient alone."""
    monkeypatch.setattr(half_products, "multiplies_half_fast", lambda: False)
    torch.manual_seed(0)
    given = [torch.randn(*shape).bfloat16() for shape in ((2, 5, 48), (30, 48), (30,))][: 2 + biased]
    half = [each.clone().requires_grad_(at == 0 or not frozen) for at, each in enumerate(given)]
    exact = [each.double().requires_grad_() for each in given]
    wanted = torch.randn(2, 5, 30).bfloat16()
    torch.autograd.backward(linear(*half), wanted)
    torch.autograd.backward(torch.nn.functional.linear(*exact), wanted.double())
    for one, other in zip(half, exact, strict=True):
        if one.requires_grad:
            assert one.grad is not None and other.grad is not None and one.grad.dtype == torch.bfloat16
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=2**-7, atol=2**-7)
        else:
            assert one.grad is None


def test_no_copy_in_float32_is_kept_until_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "multiplies_half_fast", lambda: False)
    kept: list[torch.dtype] = []

    def keep(each: torch.Tensor) -> torch.Tensor:
        kept.append(each.dtype)
        return each

    x, weight = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True), torch.ones(5, 4, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        linear(x, weight)
    assert kept and set(kept) == {torch.bfloat16}
