"""Products with int8 weights: near float64, the same bits in any company, on every kind of processor."""

from __future__ import annotations

import pytest
import torch

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import Build
from runtime.engine.kernels.operands import Parts
from surgery.quantize.schemes import SCHEMES
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.kernels.test_paths import BUILDS, compiled_for

pytestmark = needs_kernels
KERNELS = {} if needs_kernels.args[0] else {threads: Kernels(threads) for threads in (1, 2)}
ROWS = (1, 2, 3, 4, 6, 7, 12, 13, 37, 150)


def packed(kernels: Kernels, out: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed weight, and the weight that it stands for in float64."""
    weight = torch.randn(out, inputs) * torch.rand(out, 1) * 3
    made = SCHEMES["int8"].quantize(weight)
    codes, scale = made["weight_packed"], made["weight_scale"]
    bytes_ = codes.view(torch.uint8)[:, :inputs].to(torch.int16) - 128
    return kernels.pack_coded(codes, inputs, scale.reshape(-1)), bytes_.double() * scale.double()


@pytest.mark.parametrize("build", [None, *BUILDS], ids=str)
@pytest.mark.parametrize(("out", "inputs"), [(1, 1), (3, 6), (48, 32), (130, 70), (33, 257)])
def test_products(build: Build | None, out: int, inputs: int) -> None:
    kernels = KERNELS[2] if build is None else compiled_for(build)
    torch.manual_seed(out)
    (one, exact), (two, other) = packed(kernels, out, inputs), packed(kernels, 2 * out, inputs)
    bias = torch.randn(2 * out)
    torch.testing.assert_close(kernels.unpack(two, 2 * out).double(), other, rtol=1e-6, atol=1e-7)
    parts = Parts([one, two], [out, 2 * out], [None, bias])
    gate = Parts([one, one], [out, out], [None, bias[:out].contiguous()])
    for rows in ROWS:
        x, add = torch.randn(1, rows, inputs), torch.randn(1, rows, 3 * out)
        wide = x.double()
        wanted = torch.cat((wide @ exact.t(), wide @ other.t() + bias.double()), dim=-1)
        made, gated = kernels.linear(x, parts), kernels.gated(x, gate)
        torch.testing.assert_close(made.double(), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kernels.linear(x, parts, add).double(), wanted + add, rtol=1e-4, atol=1e-4)
        silu = torch.nn.functional.silu(wide @ exact.t()) * (wide @ exact.t() + bias[:out])
        torch.testing.assert_close(gated.double(), silu, rtol=1e-3, atol=1e-3)
        for run, whole in ((lambda x: kernels.linear(x, parts), made), (lambda x: kernels.gated(x, gate), gated)):
            alone = torch.cat([run(x[:, row : row + 1]) for row in range(rows)], dim=1)
            assert torch.equal(alone, whole), "a row depends on the others"


@pytest.mark.skipif(not KERNELS, reason="no kernels")
def test_threads_do_not_change_the_bits() -> None:
    torch.manual_seed(2)
    one, _ = packed(KERNELS[1], 200, 96)
    x = torch.randn(1, 20, 96)
    assert torch.equal(*(each.linear(x, Parts([one], [200], [None])) for each in KERNELS.values()))


@pytest.mark.skipif(not KERNELS, reason="no kernels")
def test_both_layouts_of_codes_pack_to_the_same() -> None:
    kernels = KERNELS[1]
    made = SCHEMES["int8"].quantize(torch.randn(40, 23))
    codes, scale = made["weight_packed"], made["weight_scale"].reshape(-1)
    plain = (codes.view(torch.uint8)[:, :23] ^ 128).view(torch.int8)
    assert torch.equal(kernels.pack_coded(codes, 23, scale), kernels.pack_coded(plain, 23, scale))
    with pytest.raises(ValueError, match="no codes"):
        kernels.pack_coded(codes, 25, scale)
    with pytest.raises(ValueError, match="no codes"):
        kernels.pack_coded(codes, 23, scale[1:])
    with pytest.raises(ValueError, match="same input"):
        Parts([kernels.pack_coded(plain, 23, scale), kernels.pack(torch.randn(4, 23))], [40, 4], [None, None])
