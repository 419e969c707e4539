"""How tokens are chosen: with torch, and with the kernels."""

from __future__ import annotations

import pytest

from runtime.engine.layers.operations import NativeOperations
from runtime.engine.sampling.choice import StockChoice, TokenChoice
from tests.runtime.engine.compiled import needs_kernels


@pytest.fixture(params=["stock", pytest.param("native", marks=needs_kernels)])
def choice(request) -> TokenChoice:
    if request.param == "stock":
        return StockChoice()
    from runtime.engine.kernels.bindings import Kernels

    return NativeOperations(Kernels())
