"""LoRAs against peft: a stock model with the effective weights from the zoo gives peft's logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from surgery.families.table import FAMILIES
from tests.checkpoints import LORA_TARGETS, make_lora
from tests.surgery.helpers import edit_weights, files_of, spans, stored
from zoo import ModelHandle, Zoo
from zoo.errors import AmbiguousName, MalformedCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import Adapter, Placed

TIED = "llama-tied-bias"

#: Every weight change that peft supports: (base, LoraConfig options).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "rslora": ("llama", {"use_rslora": True, "r": 3}),
    "patterns": (
        "llama",
        {
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 5},
            "alpha_pattern": {"^model.layers.0.*q_proj": 3},
        },
    ),
    "dora": ("llama", {"use_dora": True}),
    "lora_bias": (TIED, {"lora_bias": True}),
    "bias all": (TIED, {"bias": "all"}),
    "bias lora_only": (TIED, {"bias": "lora_only"}),
    "saved head": ("llama", {"modules_to_save": ["lm_head"]}),
    "saved norm": ("llama", {"modules_to_save": ["norm"]}),
    "saved mlp": ("llama", {"modules_to_save": ["mlp"]}),
    "saved embedding and head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied, saved head": (TIED, {"modules_to_save": ["lm_head"]}),
    "tied, saved embedding": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "tied, both tied again": (TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied, embedding": (TIED, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied, head": (TIED, {"target_modules": ["q_proj", "lm_head"]}),
    "tied, both": (TIED, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "expression": ("llama", {"target_modules": r".*layers\.[02]\.self_attn\.(q|v)_proj"}),
    "some layers": ("llama", {"layers_to_transform": [1]}),
    "gpt2": ("gpt2", {"bias": "all"}),
    **{
        family: (family, {})
        for family in (*LORA_TARGETS, "qwen2", "qwen3", "gemma2", "glm4", "olmo2", "mixtral")
        if family != "gpt2"
    },
}


def _tensor(zoo: Zoo, handle: ModelHandle, digest: str) -> Any:
    import torch

    meta = next(tensor for tensor in handle.manifest.tensors if tensor.digest == digest)
    assert meta.dtype == "F32"
    data = bytearray(b"".join(zoo.store.objects.read(digest)))
    return torch.frombuffer(data, dtype=torch.float32).reshape(meta.shape)


def _parameter(model: Any, handle: ModelHandle, placed: Placed, name: str) -> Any:
    family = FAMILIES[handle.family]
    if placed.layer is not None:
        return model.get_parameter(f"{family.prefix}{family.stack}.{placed.layer}.{name}")
    if name.startswith("lm_head."):
        return getattr(model.get_output_embeddings(), name.removeprefix("lm_head."))
    return model.get_parameter(family.prefix + name)


def _merged(zoo: Zoo, handle: ModelHandle, adapter: Adapter, module: str, weight: Any) -> Any:
    """Return a module's weight with the LoRA merged into it."""
    settings = json.loads(adapter.config)["modules"][module]
    parts = {name: _tensor(zoo, handle, digest) for name, digest in adapter.tensors}
    if settings.get("embedding"):
        return (
            weight + settings["scaling"] * (parts[f"{module}.lora_embedding_B"] @ parts[f"{module}.lora_embedding_A"]).T
        )
    delta = settings["scaling"] * parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
    summed = (weight.T if settings["fan_in_fan_out"] else weight) + delta
    if settings.get("dora"):
        summed = summed * (parts[f"{module}.lora_magnitude_vector"] / summed.norm(dim=1))[:, None]
    return summed.T if settings["fan_in_fan_out"] else summed


def _in_effect(zoo: Zoo, handle: ModelHandle, base: Path) -> Any:
    """Return the stock base model, untied, with the weights that the zoo holds for the adapter's model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base).eval()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    plain = {(p.component.kind, p.layer): p.component for p in zoo.model(str(handle.base)).manifest.components}
    with torch.no_grad():
        for placed in handle.manifest.components:
            component = placed.component
            if component == plain[component.kind, placed.layer]:
                continue
            for name, digest in component.tensors:
                _parameter(model, handle, placed, name).copy_(_tensor(zoo, handle, digest))
            for module in json.loads(component.adapter.config)["modules"] if component.adapter else ():
                weight = _parameter(model, handle, placed, f"{module}.weight")
                weight.copy_(_merged(zoo, handle, component.adapter, module, weight.clone()))
                bias = dict(component.adapter.tensors).get(f"{module}.lora_B.bias")
                if bias is not None:
                    scaling = json.loads(component.adapter.config)["modules"][module]["scaling"]
                    _parameter(model, handle, placed, f"{module}.bias").add_(scaling * _tensor(zoo, handle, bias))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_in_effect_is_what_peft_computes(zoo, made, tmp_path, variant):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, options = VARIANTS[variant]
    folder = make_lora(made(base), tmp_path / "lora", **options)
    zoo.ingest(made(base), name="base")
    report = zoo.ingest(folder)
    assert (report.kind, report.base) == ("lora", "base")
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made(base)), folder).eval()
    ids = torch.arange(40).reshape(2, 20) * 7 % 320
    with torch.no_grad():
        theirs = reference(ids).logits
        ours = _in_effect(zoo, zoo.model("lora"), made(base))(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(made(base))(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(plain, theirs, atol=0.05), "the adapter must do something for this test to mean anything"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "variant", ["plain", "rslora", "patterns", "bias all", "bias lora_only", "saved head", "embedding", "dora"]
)
def test_an_adapters_folder_comes_back_byte_for_byte(zoo, made, tmp_path, variant):
    base, options = VARIANTS[variant]
    folder = make_lora(made(base), tmp_path / "lora", **options)
    zoo.ingest(made(base), name="base")
    before = stored(zoo.store)["objects"]
    report = zoo.ingest(folder)
    zoo.model("lora").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    assert len(stored(zoo.store)["objects"] - before) == report.tensors.new, (
        "a LoRA adds its own tensors and nothing else"
    )
    assert report.bytes.new <= (folder / "adapter_model.safetensors").stat().st_size
    assert zoo.ingest(folder).tensors.new == 0


def test_a_lora_on_attention_of_one_layer_shares_all_else(zoo, made, tmp_path):
    """Components: 0 embedding, 1 to 6 attention and FFN of three layers, 7 head; the adapter changes 3."""
    zoo.ingest(made("llama"), name="base")
    zoo.ingest(make_lora(made("llama"), tmp_path / "lora", layers_to_transform=[1]))
    assert spans(zoo, "lora") == spans(zoo, "base") == [(0, 3), (3, 4), (4, 8)]
    assert [block.shared_with for block in zoo.model("lora").chain] == [("base",), (), ("base",)]
    base, lora = (zoo.model(name).manifest.components[3].component for name in ("base", "lora"))
    assert base.base_digest == lora.base_digest != lora.digest


def test_an_adapter_uses_its_bases_config_and_tokenizer_unless_it_brings_its_own(zoo, made, tmp_path):
    zoo.ingest(made("llama"), name="base")
    folder = make_lora(made("llama"), tmp_path / "lora")
    zoo.ingest(folder, name="plain")
    plain, base = zoo.model("plain"), zoo.model("base")
    assert plain.config == base.config
    assert plain.side_file("tokenizer.json") == base.side_file("tokenizer.json")
    assert plain.tokenizer()("def f(x):").input_ids == base.tokenizer()("def f(x):").input_ids
    assert {side.path for side in plain.manifest.side_files if not side.inherited} == {
        "README.md",
        "adapter_config.json",
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made("llama") / name, folder / name)
    (folder / "chat_template.jinja").write_text("mine")
    zoo.ingest(folder, name="own")
    own = {side.path: side.inherited for side in zoo.model("own").manifest.side_files}
    assert own["tokenizer.json"] is False
    assert own["chat_template.jinja"] is False
    assert own["config.json"] is True
    zoo.model("own").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)


def _edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_a_base_is_found_by_name_by_ending_by_origin_or_as_told(zoo, made, tmp_path):
    zoo.ingest(made("llama"), name="org/base-7b")
    folder = make_lora(made("llama"), tmp_path / "lora")
    for number, text in enumerate(["org/base-7b", "base-7b", str(made("llama"))]):
        assert zoo.ingest(_edit_config(folder, base_model_name_or_path=text), name=f"l{number}").base == "org/base-7b"
    _edit_config(folder, base_model_name_or_path="elsewhere/unknown")
    with pytest.raises(WrongBase, match="--base"):
        zoo.ingest(folder, name="x")
    assert zoo.ingest(folder, name="x", base="7b").base == "org/base-7b"
    _edit_config(folder, base_model_name_or_path=None)
    with pytest.raises(WrongBase, match="--base"):
        zoo.ingest(folder, name="y")
    with pytest.raises(WrongBase, match="weights of its own"):
        zoo.ingest(folder, name="y", base="l0")
    zoo.ingest(made("llama"), name="second/base-7b")
    _edit_config(folder, base_model_name_or_path="base-7b")
    with pytest.raises(AmbiguousName, match="--base"):
        zoo.ingest(folder, name="y")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (("llama", {"num_hidden_layers": 2}), "layers.2.self_attn.o_proj"),
        (("llama", {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}), "shape"),
        (("gpt2", {}), "gpt2"),
        (("phi3", {}), "q_proj|o_proj"),
    ],
)
def test_a_wrong_base_is_refused_with_the_first_mismatch(zoo, made, tmp_path, other, reason):
    folder = make_lora(made("llama"), tmp_path / "lora")
    zoo.ingest(made(other[0], **other[1]), name="other")
    before = stored(zoo.store)
    with pytest.raises(WrongBase, match=reason):
        zoo.ingest(folder, base="other")
    assert stored(zoo.store) == before


def test_an_expression_for_target_modules_is_not_matched_against_anything(zoo, made, tmp_path):
    """Matching an untrusted expression could run forever; the keys of the file tell where the adapter applies."""
    import torch

    ids = torch.arange(20)[None] * 7 % 320
    folder = make_lora(made("llama"), tmp_path / "lora")
    zoo.ingest(made("llama"), name="base")
    zoo.ingest(folder, name="named")
    zoo.ingest(
        _edit_config(folder, target_modules="no module", exclude_modules=".*", layers_pattern="no layer"),
        name="expression",
    )
    with torch.no_grad():
        named, expression = (zoo.model(name).load()(ids).logits for name in ("named", "expression"))
    assert torch.equal(named, expression)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"peft_type": "PREFIX_TUNING"}, MalformedCheckpoint, "num_virtual_tokens"),
        ({"peft_type": "ADALORA"}, UnsupportedAdapter, "ADALORA"),
        ({"peft_type": "IA3"}, MalformedCheckpoint, "lora_A"),
        ({"peft_type": None}, UnsupportedAdapter, "peft_type"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, UnsupportedAdapter, "target_parameters"),
        ({"trainable_token_indices": [1]}, UnsupportedAdapter, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, UnsupportedAdapter, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, UnsupportedAdapter, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedAdapter, "pissa"),
        ({"r": 8}, WrongBase, "must be"),
        ({"r": 0}, MalformedCheckpoint, "rank"),
        ({"r": True}, MalformedCheckpoint, "rank"),
        ({"lora_alpha": "16"}, MalformedCheckpoint, "number"),
        ({"use_dora": True}, MalformedCheckpoint, "lora_magnitude_vector"),
        ({"lora_bias": True}, MalformedCheckpoint, "lora_B.bias"),
        ({"target_modules": ["k_proj"]}, MalformedCheckpoint, "target_modules"),
        ({"target_modules": [1]}, MalformedCheckpoint, "target_modules"),
        ({"modules_to_save": ["lm_head"]}, MalformedCheckpoint, "lm_head"),
        ({"rank_pattern": {"(a+)+$": 4}}, MalformedCheckpoint, "too complex"),
        ({"rank_pattern": {"(.|.)" * 30 + "x": 4}}, MalformedCheckpoint, "too complex"),
        ({"rank_pattern": {"(?x:(.+)#\n+)x": 4}}, MalformedCheckpoint, "too complex"),
        ({"rank_pattern": {f".*a.*b.*c.*{i}": 4 for i in range(9)}}, MalformedCheckpoint, "too complex"),
        ({"rank_pattern": {".*" * 45: 4}}, MalformedCheckpoint, "too complex"),
        ({"rank_pattern": {"(": 4}}, MalformedCheckpoint, "regular expression"),
        ({"rank_pattern": {"q)|(k": 4}}, MalformedCheckpoint, "regular expression"),
        ({"rank_pattern": {"q{99999999999999999999}": 4}}, MalformedCheckpoint, "regular expression"),
        ({"modules_to_save": ["(.+)+"]}, MalformedCheckpoint, "no module's name"),
        ({"alpha_pattern": [1]}, MalformedCheckpoint, "alpha_pattern"),
    ],
)
def test_configs_that_cannot_be_run_exactly_are_refused(zoo, made, tmp_path, changes, error, reason):
    zoo.ingest(made("llama"), name="base")
    before = stored(zoo.store)
    folder = _edit_config(make_lora(made("llama"), tmp_path / "lora"), **changes)
    with pytest.raises(error, match=reason):
        zoo.ingest(folder)
    assert stored(zoo.store) == before


@pytest.mark.parametrize(
    ("rename", "reason"),
    [
        (("base_model.model.", "transformer."), "begin with"),
        (("lora_A", "lora_C"), "not a key"),
        ((".lora_B.weight", ".lora_E"), "not a key"),
        (("layers.2.", "layers.9."), "layers.9"),
        (("q_proj.lora_A", "q_proj.lora_B.default"), "two tensors"),
    ],
)
def test_keys_that_peft_does_not_write_are_refused(zoo, made, tmp_path, rename, reason):
    from safetensors.torch import load_file, save_file

    zoo.ingest(made("llama"), name="base")
    folder = make_lora(made("llama"), tmp_path / "lora")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key.replace(*rename): tensor for key, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises((MalformedCheckpoint, WrongBase), match=reason):
        zoo.ingest(folder)


def test_other_spellings_of_saved_modules_are_read(zoo, made, tmp_path):
    from safetensors.torch import load_file, save_file

    zoo.ingest(made("llama"), name="base")
    folder = make_lora(made("llama"), tmp_path / "lora", modules_to_save=["lm_head"])
    zoo.ingest(folder, name="peft")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(
        {
            key.replace("lm_head.weight", "lm_head.modules_to_save.default.weight").replace(
                "lora_A.weight", "lora_A.default.weight"
            ): value
            for key, value in tensors.items()
        },
        path,
        {"format": "pt"},
    )
    zoo.ingest(folder, name="other")
    assert [p.component.digest for p in zoo.model("other").manifest.components] == [
        p.component.digest for p in zoo.model("peft").manifest.components
    ]


def test_a_pickled_adapter_needs_the_switch(zoo, made, tmp_path):
    import torch
    from safetensors.torch import load_file

    from zoo.errors import UnsafeCheckpoint

    zoo.ingest(made("llama"), name="base")
    folder = make_lora(made("llama"), tmp_path / "lora")
    zoo.ingest(folder, name="safe")
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsafeCheckpoint, match="--allow-pickle"):
        zoo.ingest(folder, name="m")
    zoo.ingest(folder, name="m", allow_pickle=True)
    assert zoo.model("m").manifest.components == zoo.model("safe").manifest.components


def test_a_fine_tune_may_be_a_base(zoo, made, copied, tmp_path):
    zoo.ingest(made("llama"), name="base")
    tuned = copied("llama", "tuned")
    edit_weights(tuned, lambda key, tensor: tensor + 0.5 if ".layers.1." in key else tensor)
    zoo.ingest(tuned)
    report = zoo.ingest(make_lora(tuned, tmp_path / "lora"))
    assert (report.kind, report.base) == ("lora", "tuned")
