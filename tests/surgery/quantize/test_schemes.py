"""Schemes as pure functions of tensors, against a reference in float64 and against compressed-tensors itself."""

from __future__ import annotations

import importlib

import pytest
import torch

import surgery.quantize.schemes
from surgery.families.quantized import coded_weights
from surgery.quantize.decompress import decompressed
from surgery.quantize.schemes import SCHEMES
from zoo.errors import InputError, MalformedCheckpoint
from zoo.manifest import Component, canonical_json


def component(scheme: str, names: list[str], **changes: object) -> Component:
    form = coded_weights(SCHEMES[scheme].config([]))
    spec = {key: getattr(form, key) for key in ("layout", "bits", "group", "symmetric")}
    return Component(
        "ffn", "llama", canonical_json({"quantization": {**spec, **changes}}), tuple((n, n) for n in names)
    )


def back(scheme: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight that tensors stand for, in a component of this dtype."""
    named = {"norm.weight": torch.ones(3, dtype=dtype), **{f"up.{end}": each for end, each in tensors.items()}}
    return decompressed(component(scheme, list(named)), named)["up.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (33, 64), (8, 130)])
def test_every_weight_is_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[1])
    weight = torch.randn(shape).to(dtype)
    weight[0] *= 100
    made = SCHEMES["int8"].quantize(weight)
    scale = made["weight_scale"].double()
    assert scale.shape == (shape[0], 1) and made["weight_scale"].dtype == dtype
    error = (back("int8", made).double() - weight.double()).abs()
    assert (error <= 0.5 * scale * (1 + 1e-6) + 0.5 * scale / 100).all(), "the last term: a scale that was rounded down"
    near = (back("fp8", SCHEMES["fp8"].quantize(weight)).double() - weight.double()).abs()
    least = weight.double().abs().amax(1, keepdim=True) / 448 * 2**-9
    assert (near <= weight.double().abs() * 2**-4 * 1.01 + least).all()


def test_the_bits_do_not_depend_on_threads_or_on_how_much_is_computed_at_a_time(monkeypatch) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96).bfloat16()
    for scheme in SCHEMES.values():
        whole = scheme.quantize(weight)
        threads = torch.get_num_threads()
        for at_once, count in ((1, 1), (96 * 7, 2)):
            monkeypatch.setattr(surgery.quantize.schemes, "_AT_ONCE", at_once)
            torch.set_num_threads(count)
            again = scheme.quantize(weight)
            torch.set_num_threads(threads)
            assert all(torch.equal(whole[end].view(torch.uint8), again[end].view(torch.uint8)) for end in whole)
        monkeypatch.undo()


def test_rows_of_zeros_and_of_the_smallest_values_stay_finite() -> None:
    weight = torch.zeros(3, 8, dtype=torch.bfloat16)
    weight[1], weight[2, 0] = 1e-40, 1e-38
    for name, scheme in SCHEMES.items():
        made = back(name, scheme.quantize(weight), torch.bfloat16)
        assert torch.isfinite(made).all() and not made[0].any()


@pytest.mark.parametrize(
    "weight",
    [torch.tensor([[1.0, float("nan")]]), torch.tensor([[float("inf"), 0.0]]), torch.ones(4), torch.ones(2, 2).int()],
)
def test_what_cannot_be_quantized_is_refused(weight: torch.Tensor) -> None:
    for scheme in SCHEMES.values():
        with pytest.raises(InputError, match="quantized"):
            scheme.quantize(weight)


def test_codes_are_laid_out_as_compressed_tensors_does_it() -> None:
    """A row of 6 codes by hand: offset by 128, the first in the lowest byte; absent ones are zero bytes."""
    weight = torch.tensor([[127.0, -127.0, 0.0, 1.0, -1.0, 64.0]])
    made = SCHEMES["int8"].quantize(weight)
    assert made["weight_packed"].view(torch.uint8).tolist() == [[255, 1, 128, 129, 127, 192, 0, 0]]
    assert made["weight_shape"].tolist() == [1, 6] and made["weight_packed"].shape == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_compressed_tensors_decompresses_to_the_same_bits(scheme: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors", reason="COMPRESSED-TENSORS IS NOT COMPARED WITH: no such package")
    torch.manual_seed(3)
    made = SCHEMES[scheme].quantize(torch.randn(12, 22).to(dtype))
    module = importlib.import_module("compressed_tensors.compressors")
    config = importlib.import_module("compressed_tensors.quantization").QuantizationConfig.model_validate(
        SCHEMES[scheme].config([])
    )
    layout = module.BaseCompressor.get_value_from_registry(SCHEMES[scheme].layout)
    theirs = layout.decompress(made, config.config_groups["group_0"])["weight"]
    assert torch.equal(theirs, back(scheme, made, dtype))


DAMAGE = {
    "no scale": (lambda t: t.pop("up.weight_scale"), "no codes, no scale"),
    "no codes": (lambda t: t.pop("up.weight_packed"), "no codes, no scale"),
    "a stated shape of another width": (
        lambda t: t["up.weight_shape"].copy_(torch.tensor([4, 99])),
        "states the shape",
    ),
    "a stated shape of another height": (
        lambda t: t["up.weight_shape"].copy_(torch.tensor([5, 8])),
        "states the shape",
    ),
    "a negative shape": (lambda t: t["up.weight_shape"].copy_(torch.tensor([4, -8])), "states the shape"),
    "no stated shape": (lambda t: t.pop("up.weight_shape"), "states the shape"),
    "scales of other rows": (lambda t: t.update({"up.weight_scale": torch.ones(3, 1)}), "are not|is not that"),
    "codes of floats": (lambda t: t.update({"up.weight_packed": torch.ones(4, 2)}), "are not pack-quantized"),
    "scales of integers": (lambda t: t.update({"up.weight_scale": torch.ones(4, 1).int()}), "are not pack-quantized"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tensors_are_refused(damage: str) -> None:
    edit, words = DAMAGE[damage]
    tensors = {f"up.{end}": each for end, each in SCHEMES["int8"].quantize(torch.randn(4, 8)).items()}
    edit(tensors)
    with pytest.raises(MalformedCheckpoint, match=words):
        decompressed(component("int8", list(tensors)), tensors)


def test_codes_that_no_config_mentions_are_refused() -> None:
    tensors = {f"up.{end}": each for end, each in SCHEMES["int8"].quantize(torch.randn(4, 8)).items()}
    exact = Component("ffn", "llama", "{}", ())
    with pytest.raises(MalformedCheckpoint, match="does not say so"):
        decompressed(exact, tensors)
