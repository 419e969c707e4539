"""Products of bfloat16 matrices on CPUs with and without instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@cache
def multiplies_half_fast() -> bool:
    """Return whether this CPU has instructions for bfloat16 products; without them they are slower than float32's."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias in their dtype: [.., width], [n, width], [n] -> [.., n].

    On a CPU without instructions for bfloat16 products they are computed in float32 and rounded, which differs by the
    order of sums only.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or multiplies_half_fast():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return cast(Tensor, _WideLinear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return _wide(x, weight, bias)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class _WideLinear(torch.autograd.Function):
    """The product, with gradients that are computed in float32, too. It keeps no float32 copy until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        wide = grad.float()
        rows = wide.flatten(0, -2)
        return (
            (wide @ weight.float()).to(x.dtype) if of_x else None,
            (rows.T @ x.float().flatten(0, -2)).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )


@contextmanager
def fast_products() -> Iterator[None]:
    """Compute the linear layers of any model by `linear` meanwhile, on this thread; as a decorator, during a call."""
    if multiplies_half_fast():
        yield
    else:
        with _Linear():
            yield


class _Linear(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return linear(*args) if func is F.linear and not kwargs else func(*args, **(kwargs or {}))
