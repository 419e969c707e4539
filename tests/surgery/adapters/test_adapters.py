"""Every kind of PEFT adapter adds only its own bytes, is exported unchanged, and loads as peft loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import adapters
from tests.bottlenecks import make_bottleneck
from tests.checkpoints import make_lora, make_peft
from tests.surgery.helpers import files_of, stored
from zoo.errors import MalformedCheckpoint, NotServable, UnsupportedAdapter, WrongBase

TIED = "llama-tied-bias"

#: kind of model -> (base, folder of the adapter).
_Maker = Callable[[Path, Path], Path]


def _made(config: Callable[[], Any]) -> _Maker:
    return lambda base, folder: make_peft(base, folder, config())


VARIANTS: dict[str, tuple[str, str, _Maker]] = {
    "lora": ("lora", "llama", lambda base, folder: make_lora(base, folder)),
    "ia3": ("ia3", "llama", _made(lambda: adapters.ia3("llama"))),
    "ia3 saved head": ("ia3", "llama", _made(lambda: adapters.ia3("llama", modules_to_save=["lm_head"]))),
    "ia3 tied, saved embedding": ("ia3", TIED, _made(lambda: adapters.ia3("llama", modules_to_save=["embed_tokens"]))),
    "ia3 defaults": ("ia3", "qwen2", _made(lambda: adapters.peft("IA3Config"))),
    "ia3 expression": (
        "ia3",
        "llama",
        _made(
            lambda: adapters.peft(
                "IA3Config", target_modules=r".*\.(k_proj|down_proj)", feedforward_modules=r".*down_proj"
            )
        ),
    ),
    "ia3 on the head": (
        "ia3",
        TIED,
        _made(lambda: adapters.peft("IA3Config", target_modules=["lm_head"], feedforward_modules=[])),
    ),
    "ia3 gpt2": ("ia3", "gpt2", _made(lambda: adapters.ia3("gpt2"))),
    "ln": ("ln", "llama", _made(lambda: adapters.ln("llama"))),
    "ln opt": ("ln", "opt", _made(lambda: adapters.ln("opt"))),
    "ln saved head": ("ln", TIED, _made(lambda: adapters.ln("llama", modules_to_save=["lm_head"]))),
    "prompt": ("prompt", "llama", _made(lambda: adapters.prompt("llama"))),
    "prompt gemma2": ("prompt", "gemma2", _made(lambda: adapters.prompt("gemma2"))),
    "p_tuning": ("prompt", "llama", _made(lambda: adapters.p_tuning("llama"))),
    "p_tuning lstm": (
        "prompt",
        "gpt2",
        _made(lambda: adapters.p_tuning("gpt2", encoder_reparameterization_type="LSTM")),
    ),
    "prefix": ("prefix", "llama", _made(lambda: adapters.prefix("llama"))),
    "prefix projected": (
        "prefix",
        "llama",
        _made(lambda: adapters.prefix("llama", prefix_projection=True, encoder_hidden_size=24)),
    ),
    "prefix qwen3": ("prefix", "qwen3", _made(lambda: adapters.prefix("qwen3"))),
    "prefix gpt_neox": ("prefix", "gpt_neox", _made(lambda: adapters.prefix("gpt_neox"))),
    "ln on linear layers": (
        "ln",
        "llama",
        _made(lambda: adapters.peft("LNTuningConfig", target_modules=["k_proj", "norm"])),
    ),
}


def _content(tensor: Any) -> tuple[tuple[int, ...], bytes]:
    return tuple(tensor.shape), tensor.numpy().tobytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_adapter(zoo, made, tmp_path, variant):
    """Added bytes are the adapter's, base components are shared, the export equals the folder, logits are peft's."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    kind, base, maker = VARIANTS[variant]
    folder = maker(made(base), tmp_path / "pe")
    zoo.ingest(made(base), name="base")
    before = stored(zoo.store)["objects"]
    report = zoo.ingest(folder)
    assert (report.kind, report.base, zoo.model("pe").kind) == (kind, "base", kind)
    theirs = {_content(tensor) for path in made(base).glob("*.safetensors") for tensor in load_file(path).values()}
    own = {_content(tensor) for tensor in load_file(folder / "adapter_model.safetensors").values()} - theirs
    assert report.bytes.new == sum(len(data) for _, data in own)
    assert len(stored(zoo.store)["objects"] - before) == report.tensors.new == len(own)
    assert zoo.ingest(folder).tensors.new == 0
    zoo.model("pe").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made(base)), folder).eval()
    ids = torch.arange(40).reshape(2, 20) * 7 % 320
    with torch.no_grad():
        theirs = reference(ids).logits
        ours = zoo.model("pe").load()(ids).logits
        plain = zoo.model("base").load()(ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(plain, theirs[:, -20:], atol=0.05), (
        "the adapter must do something for this test to mean anything"
    )


def test_an_ia3_leaves_its_bases_units_as_they_are(zoo, made, tmp_path):
    """The adapter changes components 1 to 6 (attention and FFN of three layers), not embedding (0) and head (7)."""
    zoo.ingest(made("llama"), name="base")
    zoo.ingest(make_peft(made("llama"), tmp_path / "pe", adapters.ia3("llama")))
    base, mine = ([p.component for p in zoo.model(name).manifest.components] for name in ("base", "pe"))
    assert [b.base_digest for b in base] == [m.base_digest for m in mine]
    assert [b.digest == m.digest for b, m in zip(base, mine, strict=True)] == [True, *[False] * 6, True]
    assert {m.adapter.kind for m in mine if m.adapter} == {"ia3"}


def _edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def _rename(folder: Path, old: str, new: str) -> Path:
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({key.replace(old, new): tensor for key, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


#: (case, kind of adapter, base that it is ingested on, changes of its config, renamed keys, error, part of the message)
REFUSED = [
    ("wrong family", "ia3", ("gpt2", {}), {}, None, WrongBase, "gpt2"),
    ("wrong width", "ia3", ("llama", {"intermediate_size": 80}), {}, None, WrongBase, "down_proj has shape"),
    ("wrong depth", "ia3", ("llama", {"num_hidden_layers": 2}), {}, None, WrongBase, "layers.2"),
    ("ia3 side", "ia3", ("llama", {}), {"feedforward_modules": []}, None, WrongBase, "must be"),
    (
        "ia3 untargeted",
        "ia3",
        ("llama", {}),
        {"target_modules": ["q_proj"]},
        None,
        MalformedCheckpoint,
        "target_modules",
    ),
    ("ia3 names", "ia3", ("llama", {}), {"feedforward_modules": [1]}, None, MalformedCheckpoint, "feedforward_modules"),
    ("ia3 pattern", "ia3", ("llama", {}), {"feedforward_modules": "(a+)+$"}, None, MalformedCheckpoint, "too complex"),
    (
        "ia3 no pattern",
        "ia3",
        ("llama", {}),
        {"feedforward_modules": "a)|(b"},
        None,
        MalformedCheckpoint,
        "regular expression",
    ),
    ("ia3 unsaved", "ia3", ("llama", {}), {"modules_to_save": ["lm_head"]}, None, MalformedCheckpoint, "lm_head"),
    ("ia3 key", "ia3", ("llama", {}), {}, ("ia3_l", "ia3_x"), MalformedCheckpoint, "not a key"),
    ("ia3 whole", "ia3", ("llama", {}), {}, ("ia3_l", "weight"), MalformedCheckpoint, "modules_to_save"),
    ("ia3 prefix", "ia3", ("llama", {}), {}, ("base_model.model.", ""), MalformedCheckpoint, "begin with"),
    ("ln wrong width", "ln", ("llama", {"hidden_size": 32}), {}, None, WrongBase, "shape"),
    ("ln wrong family", "ln", ("gpt2", {}), {}, None, WrongBase, "gpt2"),
    ("ln base_layer", "ln", ("llama", {}), {}, ("ln_tuning_layers", "base_layer"), UnsupportedAdapter, "base_layer"),
    ("ln untargeted", "ln", ("llama", {}), {"target_modules": ["other"]}, None, MalformedCheckpoint, "target_modules"),
    ("ln unsaved", "ln", ("llama", {}), {"modules_to_save": ["mlp"]}, None, MalformedCheckpoint, "mlp"),
    ("prompt width", "prompt", ("llama", {"hidden_size": 32}), {}, None, WrongBase, "must be .5, 32."),
    (
        "prompt count",
        "prompt",
        ("llama", {}),
        {"num_virtual_tokens": 4},
        None,
        MalformedCheckpoint,
        "num_virtual_tokens 4",
    ),
    (
        "prompt no count",
        "prompt",
        ("llama", {}),
        {"num_virtual_tokens": None},
        None,
        MalformedCheckpoint,
        "num_virtual_tokens",
    ),
    ("prompt task", "prompt", ("llama", {}), {"task_type": "SEQ_CLS"}, None, UnsupportedAdapter, "SEQ_CLS"),
    (
        "prompt saved",
        "prompt",
        ("llama", {}),
        {"modules_to_save": ["lm_head"]},
        None,
        UnsupportedAdapter,
        "modules_to_save",
    ),
    ("prompt key", "prompt", ("llama", {}), {}, ("prompt_", "promp_"), MalformedCheckpoint, "promp_embeddings"),
    ("prefix of another width", "prefix", ("llama", {"num_key_value_heads": 4}), {}, None, WrongBase, "2 heads"),
    ("prefix of another depth", "prefix", ("llama", {"num_hidden_layers": 2}), {}, None, WrongBase, "3 layers"),
    (
        "prefix shape",
        "prefix",
        ("llama", {}),
        {"num_layers": None, "token_dim": None, "num_virtual_tokens": 6.0},
        None,
        MalformedCheckpoint,
        "6.0",
    ),
    (
        "prefix encoder",
        "prefix",
        ("llama", {}),
        {"num_transformer_submodules": 2},
        None,
        UnsupportedAdapter,
        "submodules",
    ),
    ("prefix as prompt", "prefix", ("llama", {}), {"peft_type": "PROMPT_TUNING"}, None, WrongBase, "must be .6, 64."),
    ("another kind", "ia3", ("llama", {}), {"peft_type": "BOFT"}, None, UnsupportedAdapter, "BOFT"),
    ("no kind", "ia3", ("llama", {}), {"peft_type": ["IA3"]}, None, UnsupportedAdapter, "IA3"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("what", "kind", "base", "changes", "rename", "error", "reason"), REFUSED, ids=[each[0] for each in REFUSED]
)
def test_what_cannot_be_run_exactly_is_refused_and_leaves_nothing(
    zoo, made, tmp_path, what, kind, base, changes, rename, error, reason
):
    folder = _edit_config(make_peft(made("llama"), tmp_path / "pe", adapters.KINDS[kind]("llama")), **changes)
    if rename is not None:
        _rename(folder, *rename)
    zoo.ingest(made(base[0], **base[1]), name="base")
    before = stored(zoo.store)
    with pytest.raises(error, match=reason):
        zoo.ingest(folder, base="base")
    assert stored(zoo.store) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ia3", "ln", "adapter", "prompt", "prefix"])
def test_as_components_or_not_at_all(zoo, made, tmp_path, kind):
    """Block measurements and training run the same model; virtual tokens belong to no block, so they are refused."""
    import torch

    from surgery.modules.stack import open_stack

    zoo.ingest(made("llama"), name="base")
    zoo.ingest(
        make_bottleneck(made("llama"), tmp_path / "pe")
        if kind == "adapter"
        else _of(kind, made("llama"), tmp_path / "pe")
    )
    manifest = zoo.model("pe").manifest
    if kind in ("prompt", "prefix"):
        with pytest.raises(NotServable, match="virtual tokens"):
            open_stack(zoo.store, manifest)
        return
    ids = torch.arange(20)[None] * 7 % 320
    with torch.no_grad():
        torch.testing.assert_close(
            open_stack(zoo.store, manifest)(ids), zoo.model("pe").load()(ids).logits, rtol=1e-5, atol=1e-5
        )


def _of(kind: str, base: Path, folder: Path) -> Path:
    return make_peft(base, folder, adapters.KINDS[kind]("llama"))
