"""Quantised checkpoints from elsewhere: stored, exported byte for byte, computed with or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.engine.models.servable import servable
from tests.surgery.helpers import files_of
from zoo import Zoo
from zoo.errors import MalformedCheckpoint, NotServable, WrongBase

Tensors = dict[str, torch.Tensor]


def written(folder: Path, config: Mapping[str, Any], edit: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]):
    """Rewrite a checkpoint: `edit(module, weight)` gives what stands for the weight of each linear layer."""
    tensors: Tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        linear = "_proj." in key
        made = edit(key.removesuffix(".weight"), tensor) if linear else {key: tensor}
        tensors.update({name: each.contiguous() for name, each in made.items()})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": dict(config)}))
    return folder


def settings(layout: str, **weights: object) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors as its packages write it."""
    every = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": every, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, columns] in int32, by arithmetic on each."""
    per = 32 // bits
    offset = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, -codes.shape[1] % per))
    words = (offset.view(codes.shape[0], -1, per) << (bits * torch.arange(per))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class Foreign:
    """A format: how a weight is written, and what is to be computed with; keeps the weights that codes stand for."""

    def __init__(self, layout: str, bits: int, group: int | None, symmetric: bool, **weights: object) -> None:
        self.layout, self.bits, self.group, self.symmetric = layout, bits, group, symmetric
        strategy = "channel" if group is None else "tensor" if group < 0 else "group"
        size = group if group and group > 0 else None
        self.config = settings(
            layout, num_bits=bits, strategy=strategy, group_size=size, symmetric=symmetric, **weights
        )
        self.stands_for: Tensors = {}

    def write(self, module: str, weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        size = rows * columns if self.group is not None and self.group < 0 else (self.group or columns)
        cut = weight.float().reshape(-1, size) if self.group is not None and self.group < 0 else weight.float()
        groups = [cut.reshape(-1)[None]] if size == rows * columns else list(cut.split(size, dim=1))
        top = 448.0 if self.layout == "float-quantized" else float((1 << (self.bits - 1)) - 1)
        scale = torch.stack([each.abs().amax(1) / top for each in groups], 1).bfloat16()
        zero = torch.zeros_like(scale, dtype=torch.int8)
        if not self.symmetric:
            zero = torch.randint(-3, 4, scale.shape, dtype=torch.int8)
        wide = scale.float() if scale.numel() == 1 else scale.float().repeat_interleave(size, 1)[:, :columns]
        moved = zero.float() if zero.numel() == 1 else zero.float().repeat_interleave(size, 1)[:, :columns]
        low, high = (-top, top) if self.layout == "float-quantized" else (-top - 1, top)
        codes = (weight.float() / wide + moved).clamp(low, high)
        codes = codes.to(torch.float8_e4m3fn) if self.layout == "float-quantized" else codes.round().to(torch.int8)
        self.stands_for[f"{module}.weight"] = ((codes.float() - moved) * wide).bfloat16()
        stored = scale.reshape(1) if scale.numel() == 1 else scale
        made: Tensors = {f"{module}.weight_scale": stored}
        if self.layout == "pack-quantized":
            made[f"{module}.weight_packed"] = packed(codes, self.bits)
            made[f"{module}.weight_shape"] = torch.tensor([rows, columns])
        else:
            made[f"{module}.weight"] = codes
        if not self.symmetric:
            turned = packed(zero.t(), self.bits).t() if self.layout == "pack-quantized" else zero
            made[f"{module}.weight_zero_point"] = turned
        return made


FORMATS = {
    "int4 by group": lambda: Foreign("pack-quantized", 4, 16, True),
    "int4 by group, asymmetric": lambda: Foreign("pack-quantized", 4, 32, False),
    "int4 by channel": lambda: Foreign("pack-quantized", 4, None, True),
    "int8 packed by group": lambda: Foreign("pack-quantized", 8, 16, True),
    "int8 by channel": lambda: Foreign("int-quantized", 8, None, True),
    "int8 by channel, asymmetric": lambda: Foreign("int-quantized", 8, None, False),
    "int8 by tensor": lambda: Foreign("int-quantized", 8, -1, True),
    "fp8 by channel": lambda: Foreign("float-quantized", 8, None, True, type="float"),
    "fp8 by tensor": lambda: Foreign("float-quantized", 8, -1, True, type="float"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_exported_byte_for_byte_and_computed_with(zoo: Zoo, copied, tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    form = FORMATS[name]()
    folder = written(copied("llama", dtype="bfloat16"), form.config, form.write)
    before = files_of(folder)
    zoo.ingest(folder, "m")
    zoo.model("m").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    state = zoo.model("m").load().state_dict()
    assert len(form.stands_for) == 21
    for key, wanted in form.stands_for.items():
        assert torch.equal(state[key], wanted), key
    assert servable(zoo.store, zoo.model("m").manifest, None).dtype == torch.bfloat16


def gptq(module: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{module}.qweight": torch.randint(0, 99, (columns // 8, rows), dtype=torch.int32),
        f"{module}.qzeros": torch.randint(0, 99, (columns // 16, rows // 8), dtype=torch.int32),
        f"{module}.scales": torch.rand(columns // 16, rows).half(),
        f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // 16,
    }


def awq(module: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{module}.qweight": torch.randint(0, 99, (columns, rows // 8), dtype=torch.int32),
        f"{module}.qzeros": torch.randint(0, 99, (columns // 16, rows // 8), dtype=torch.int32),
        f"{module}.scales": torch.rand(columns // 16, rows).half(),
    }


OTHERS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
    "compressed-tensors of format nvfp4": (
        settings("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda module, weight: {
            f"{module}.weight_packed": torch.zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8),
            f"{module}.weight_scale": torch.ones(weight.shape[0], weight.shape[1] // 16).to(torch.float8_e4m3fn),
            f"{module}.weight_global_scale": torch.ones(1),
        },
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_stored_and_exported_and_refused_by_name(zoo: Zoo, copied, tmp_path: Path, name: str) -> None:
    config, edit = OTHERS[name]
    folder = written(copied("llama", dtype="bfloat16"), config, edit)
    before = files_of(folder)
    report = zoo.ingest(folder, "m")
    words = name.rpartition(" ")[2]
    assert any(words in note and "not served" in note for note in report.notes)
    zoo.model("m").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == before and not zoo.verify().damaged
    for use in (lambda: zoo.model("m").load(), lambda: servable(zoo.store, zoo.model("m").manifest, None)):
        with pytest.raises(NotServable, match=f"m: .*{words}.* not served") as raised:
            use()
        assert "\n" not in str(raised.value)


def _edited(key: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = f"model.layers.1.{key}"
        made = change(tensors.pop(name))
        if made is not None:
            tensors[name] = made.contiguous()

    return edit


@pytest.mark.parametrize("name", [*FORMATS, "gptq", "awq"])
def test_parameters_are_counted_as_those_of_the_exact_model(zoo: Zoo, copied, name: str) -> None:
    torch.manual_seed(1)
    zoo.ingest(copied("llama", "exact", dtype="bfloat16"), "exact")
    if name in FORMATS:
        form = FORMATS[name]()
        config, edit = form.config, form.write
    else:
        config, edit = OTHERS[name]
    zoo.ingest(written(copied("llama", dtype="bfloat16"), config, edit), "m")
    found = {model.name: model.params for model in zoo.models()}
    assert found["m"] == found["exact"]


@pytest.mark.parametrize("bits", [[4], {"a": 4}, "4", 4.0, 0, 99, None])
def test_bits_that_say_nothing_leave_parameters_at_elements(zoo: Zoo, copied, bits: object) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16}
    zoo.ingest(written(copied("llama", dtype="bfloat16"), config, gptq), "m")
    (model,), manifest = zoo.models(), zoo.model("m").manifest
    elements = {tensor.digest: tensor.elements for tensor in manifest.tensors}
    named = [pair for placed in manifest.components for pair in placed.component.tensors]
    counted = {digest for name, digest in named if not name.endswith((".qzeros", ".scales", ".g_idx"))}
    assert model.params == sum(elements[digest] for digest in counted)


DAMAGED = {
    "no scale": (_edited("mlp.up_proj.weight_scale", lambda t: None), "up_proj.weight_scale"),
    "scales of other groups": (_edited("mlp.up_proj.weight_scale", lambda t: t[:, :1]), "has shape"),
    "codes of other inputs": (_edited("mlp.up_proj.weight_packed", lambda t: t[:, 1:]), "has shape"),
    "a shape of three": (_edited("mlp.up_proj.weight_shape", lambda t: torch.tensor([1, 2, 3])), "has shape"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_checkpoints_are_refused_before_they_are_stored(zoo: Zoo, copied, damage: str) -> None:
    edit, words = DAMAGED[damage]
    form = FORMATS["int4 by group"]()
    folder = written(copied("llama", dtype="bfloat16"), form.config, form.write)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MalformedCheckpoint, match=words) as raised:
        zoo.ingest(folder, "m")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"group_size": 0}, MalformedCheckpoint),
        ({"group_size": -5}, MalformedCheckpoint),
        ({"group_size": 1 << 40}, MalformedCheckpoint),
        ({"group_size": "16"}, MalformedCheckpoint),
        ({"num_bits": "4"}, MalformedCheckpoint),
        ({"symmetric": "yes"}, MalformedCheckpoint),
        ({"group_size": 24}, MalformedCheckpoint),
    ],
    ids=str,
)
def test_damaged_configs_are_refused(zoo: Zoo, copied, changes: dict[str, object], kind: type[Exception]) -> None:
    form = FORMATS["int4 by group"]()
    form.config["config_groups"]["group_0"]["weights"].update(changes)
    folder = written(copied("llama", dtype="bfloat16"), form.config, form.write)
    with pytest.raises(kind) as raised:
        zoo.ingest(folder, "m")
    assert "\n" not in str(raised.value)


def test_an_adapter_that_replaces_a_quantized_weight_is_refused(zoo: Zoo, copied, made, tmp_path: Path) -> None:
    form = FORMATS["int4 by group"]()
    zoo.ingest(written(copied("llama", dtype="bfloat16"), form.config, form.write), "m")
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["nothing"], "bias": "none",
                    "task_type": "CAUSAL_LM", "modules_to_save": ["up_proj"], "base_model_name_or_path": "m"})
    )  # fmt: skip
    key = "base_model.model.model.layers.0.mlp.up_proj.weight"
    save_file({key: torch.zeros(96, 64)}, lora / "adapter_model.safetensors")
    with pytest.raises(WrongBase, match="quantized"):
        zoo.ingest(lora, "lora", "m")
