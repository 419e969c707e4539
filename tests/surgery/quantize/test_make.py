"""Quantised models in a store: what they share, what they compute, what an export of them is to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import surgery.quantize.make
from surgery.modules.stack import open_stack
from surgery.quantize.make import quantize
from tests.checkpoints import make_lora
from tests.surgery.helpers import edit_weights, files_of, stored
from zoo import Zoo
from zoo.errors import InputError, NameTaken, NotFound

FAMILIES = ("llama", "qwen2", "gemma2", "gpt_neox", "mixtral", "opt", "phi3")


def fine_tune(folder: Path, layers: tuple[int, ...]) -> None:
    """Change the weights of some layers."""
    torch.manual_seed(sum(layers))

    def edit(key: str, tensor: torch.Tensor) -> torch.Tensor:
        changed = any(f"layers.{layer}." in key for layer in layers) and tensor.dim() > 1
        return tensor + 0.01 * torch.randn_like(tensor) if changed else tensor

    assert edit_weights(folder, edit)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_a_quantized_model_computes_nearly_the_same(zoo: Zoo, made, family: str, scheme: str) -> None:
    zoo.ingest(made(family, dtype="bfloat16"), "m")
    report = quantize(zoo.store, "m", scheme)
    assert report.model == f"m-{scheme}" and report.tensors and not report.reused
    ids = torch.arange(40).view(2, 20) * 7 % 320
    with torch.no_grad():
        exact, near = (zoo.model(name).load(dtype="float32")(ids).logits for name in ("m", report.model))
        chain = open_stack(zoo.store, zoo.model(report.model).manifest, dtype="float32")(ids)
    cosine = torch.nn.functional.cosine_similarity(exact.softmax(-1), near.softmax(-1), dim=-1)
    assert cosine.mean() > 0.995 and not torch.equal(exact, near)
    torch.testing.assert_close(chain, near, rtol=1e-4, atol=1e-4)
    manifest = zoo.model(report.model).manifest
    assert manifest.kind == "quantized" and manifest.base == "m" and manifest.family == family
    exact_tables = dict(zoo.model("m").manifest.components[0].component.tensors)
    assert dict(manifest.components[0].component.tensors) == exact_tables, "the table of embeddings is exact"
    assert manifest.components[0].component.digest == zoo.model("m").manifest.components[0].component.digest


def test_fine_tunes_share_what_was_derived_from_equal_tensors(zoo: Zoo, copied, monkeypatch) -> None:
    base = copied("llama", "base", dtype="bfloat16")
    zoo.ingest(base, "base")
    for number, layers in enumerate(((1,), (1, 2))):
        folder = copied("llama", f"tuned{number}", dtype="bfloat16")
        fine_tune(folder, layers)
        zoo.ingest(folder, f"tuned{number}")
    derived = []
    kept = surgery.quantize.make.keep_tensors
    monkeypatch.setattr(surgery.quantize.make, "keep_tensors", lambda *a: derived.append(a) or kept(*a))
    first = quantize(zoo.store, "base", "int8")
    assert (first.tensors, first.reused, len(derived)) == (22, 0, 22), "3 layers of 7 matrices, and the head"
    second = quantize(zoo.store, "tuned0", "int8")
    assert (second.tensors, second.reused, len(derived)) == (22, 15, 29)
    third = quantize(zoo.store, "tuned1", "int8")
    assert (third.reused, len(derived)) == (8, 43), "layer 1 of the two is not equal"
    layer = sum(m.nbytes for m in zoo.model("tuned0-int8").manifest.tensors) - second.bytes_new
    assert second.bytes_new < first.bytes_new / 2 < layer
    shared = [block.shared_with for block in zoo.model("tuned0-int8").chain]
    assert any("base-int8" in names for names in shared)
    zoo.remove("base-int8")
    again = quantize(zoo.store, "base", "int8", "once-more")
    assert again.reused == 15, "what was derived is found through the models that are left, and only there"


def test_the_bits_do_not_depend_on_the_model_that_is_quantized_first(zoo: Zoo, copied, tmp_path: Path) -> None:
    names = ("base", "tuned")
    folders = [copied("llama", name, dtype="bfloat16") for name in names]
    fine_tune(folders[1], (2,))
    exports = []
    for order in (names, names[::-1]):
        with Zoo(tmp_path / f"store-{order[0]}") as other:
            for name, folder in zip(names, folders, strict=True):
                other.ingest(folder, name)
            for name in order:
                quantize(other.store, name, "int8")
            for name in names:
                other.model(f"{name}-int8").export(tmp_path / f"out-{order[0]}" / name)
        exports.append(files_of(tmp_path / f"out-{order[0]}"))
    assert exports[0] == exports[1]


def test_what_nothing_references_is_collected(zoo: Zoo, made) -> None:
    zoo.ingest(made("llama", dtype="bfloat16"), "m")
    before = stored(zoo.store)
    quantize(zoo.store, "m", "int8")
    zoo.remove("m-int8")
    zoo.gc()
    assert stored(zoo.store) == before
    report = quantize(zoo.store, "m", "int8")
    assert not report.reused and not zoo.verify().damaged


def test_the_exact_model_may_go_first(zoo: Zoo, made, tmp_path: Path) -> None:
    zoo.ingest(made("qwen2", dtype="bfloat16"), "m")
    quantize(zoo.store, "m", "int8")
    zoo.model("m-int8").export(tmp_path / "out")
    before = files_of(tmp_path / "out")
    with Zoo(tmp_path / "other") as other:
        other.ingest(tmp_path / "out", "back")
        assert other.model("back").manifest.kind == "foundation"
        other.model("back").export(tmp_path / "again")
        mine = [p.component.digest for p in zoo.model("m-int8").manifest.components]
        assert [p.component.digest for p in other.model("back").manifest.components] == mine
    assert files_of(tmp_path / "again") == before and "blockzoo_quantized.json" not in before


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_an_export(zoo: Zoo, made, tmp_path: Path, family: str, scheme: str, head: bool) -> None:
    """With compressed-tensors; the logits are those of the model that is decompressed here. qwen2 has a tied head."""
    pytest.importorskip("compressed_tensors", reason="EXPORTS ARE NOT READ BY TRANSFORMERS: no compressed-tensors")
    from transformers import AutoModelForCausalLM

    zoo.ingest(made(family, dtype="bfloat16"), "m")
    quantize(zoo.store, "m", scheme, head=head)
    folder = tmp_path / "out"
    zoo.model(f"m-{scheme}").export(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ([] if head else ["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(40).view(2, 20) * 7 % 320
    with torch.no_grad():
        ours = zoo.model(f"m-{scheme}").load()(ids).logits
        assert torch.equal(theirs(ids).logits, ours)


def test_what_cannot_be_quantized_is_refused_in_one_line(zoo: Zoo, made, tmp_path: Path) -> None:
    zoo.ingest(made("llama", dtype="bfloat16"), "m")
    zoo.ingest(made("gpt2"), "turned")
    quantize(zoo.store, "m", "int8")
    lora = make_lora(made("llama", dtype="bfloat16"), tmp_path / "lora")
    zoo.ingest(lora, "lora", "m")
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: quantize(zoo.store, "m", "int3"), InputError, "no scheme; there are int8, fp8"),
        (lambda: quantize(zoo.store, "m-int8", "int8"), InputError, "quantized already"),
        (lambda: quantize(zoo.store, "turned", "int8"), InputError, "transposed"),
        (lambda: quantize(zoo.store, "lora", "int8"), InputError, "quantize its base"),
        (lambda: quantize(zoo.store, "none", "int8"), NotFound, "none"),
        (lambda: quantize(zoo.store, "m", "fp8", "m-int8"), NameTaken, "m-int8"),
        (lambda: quantize(zoo.store, "m", "fp8", "-x"), InputError, "cannot be a model's name"),
    ]
    before = stored(zoo.store)
    for call, kind, words in refused:
        with pytest.raises(kind, match=words) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert stored(zoo.store)["models"] == before["models"]


def test_a_lora_lies_on_a_quantized_base(zoo: Zoo, made, tmp_path: Path) -> None:
    zoo.ingest(made("llama", dtype="bfloat16"), "m")
    quantize(zoo.store, "m", "int8")
    zoo.ingest(make_lora(made("llama", dtype="bfloat16"), tmp_path / "lora"), "lora", "m-int8")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        plain, adapted = (zoo.model(name).load()(ids).logits for name in ("m-int8", "lora"))
    assert not torch.equal(plain, adapted)
