"""Bad input: one clear line of the right error class, before anything is written, and nothing left in the store."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_lora
from tests.surgery.helpers import edit_weights, stored
from zoo.errors import MalformedCheckpoint, NotFound, StoreFull, UnknownFamily, UnsafeCheckpoint, ZooError

INDEX = "model.safetensors.index.json"


def _config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in config.items() if value != "REMOVED"}))

    return spoil


def _index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / INDEX
        document = json.loads(path.read_text())
        path.write_text(json.dumps(change(document) or document))

    return spoil


def _point_first_key_at(name: object) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["weight_map"].update({next(iter(document["weight_map"])): name})


def _weights(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return spoil


def _without(*keys: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        save_file({key: tensor for key, tensor in load_file(path).items() if key not in keys}, path, {"format": "pt"})

    return spoil


def _with(key: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        save_file({**load_file(path), key: torch.ones(2)}, path, {"format": "pt"})

    return spoil


def _shape(key: str, *shape: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        import torch

        edit_weights(folder, lambda each, tensor: torch.ones(shape) if each == key else tensor[: len(tensor)].clone())

    return spoil


def _replace(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def _link(name: str, target: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def _fifo(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _oversized(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 40) + data[8:]


#: Fault -> (options of the checkpoint, how to damage it, error, part of the message).
TABLE: dict[str, tuple[dict[str, Any], Callable[[Path], None], type[ZooError], str]] = {
    "header truncated": ({}, _weights(lambda data: data[:100]), MalformedCheckpoint, "model.safetensors"),
    "header oversized": ({}, _weights(_oversized), MalformedCheckpoint, "model.safetensors"),
    "file empty": ({}, _weights(lambda data: b""), MalformedCheckpoint, "model.safetensors"),
    "tensors truncated": ({}, _weights(lambda data: data[:-5]), MalformedCheckpoint, "model.safetensors"),
    "bytes too many": ({}, _weights(lambda data: data + b"x"), MalformedCheckpoint, "model.safetensors"),
    "index leaves the folder": (
        {"shards": "60KB"},
        _index(_point_first_key_at("../../etc/passwd")),
        UnsafeCheckpoint,
        "plain file name",
    ),
    "index absolute": (
        {"shards": "60KB"},
        _index(_point_first_key_at("/etc/passwd")),
        UnsafeCheckpoint,
        "plain file name",
    ),
    "index into a subfolder": (
        {"shards": "60KB"},
        _index(_point_first_key_at("sub/x.safetensors")),
        UnsafeCheckpoint,
        "plain file name",
    ),
    "index with backslash": (
        {"shards": "60KB"},
        _index(_point_first_key_at("..\\x.safetensors")),
        UnsafeCheckpoint,
        "plain file name",
    ),
    "index names a number": ({"shards": "60KB"}, _index(_point_first_key_at(3)), UnsafeCheckpoint, "plain file name"),
    "index names a pickle": (
        {"shards": "60KB"},
        _index(_point_first_key_at("x.bin")),
        MalformedCheckpoint,
        "not a safetensors",
    ),
    "index names a missing shard": (
        {"shards": "60KB"},
        _index(_point_first_key_at("x.safetensors")),
        MalformedCheckpoint,
        "missing",
    ),
    "index without map": (
        {"shards": "60KB"},
        _index(lambda document: {"metadata": {}}),
        MalformedCheckpoint,
        "weight_map",
    ),
    "index empty": ({"shards": "60KB"}, _index(lambda document: {"weight_map": {}}), MalformedCheckpoint, "weight_map"),
    "index not JSON": ({"shards": "60KB"}, _replace(INDEX, "{"), MalformedCheckpoint, INDEX),
    "index promises too much": (
        {"shards": "60KB"},
        _index(lambda document: document["weight_map"].update({"ghost": next(iter(document["weight_map"].values()))})),
        MalformedCheckpoint,
        "ghost",
    ),
    "index forgets a key": (
        {"shards": "60KB"},
        _index(lambda document: document["weight_map"].pop("model.norm.weight") and None),
        MalformedCheckpoint,
        "model.norm.weight",
    ),
    "config missing": ({}, _remove("config.json"), MalformedCheckpoint, "config.json"),
    "config not JSON": ({}, _replace("config.json", "{,"), MalformedCheckpoint, "config.json"),
    "config a list": ({}, _replace("config.json", "[]"), MalformedCheckpoint, "no JSON object"),
    "config not text": (
        {},
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe") and None,
        MalformedCheckpoint,
        "config.json",
    ),
    "config too deep": (
        {},
        _replace("config.json", '{"a":' * 100_000 + "1" + "}" * 100_000),
        MalformedCheckpoint,
        "config.json",
    ),
    "config too large": (
        {},
        _replace("config.json", json.dumps({"x": "y" * (5 << 20)})),
        MalformedCheckpoint,
        "too large",
    ),
    "config with NaN": ({}, _config(rms_norm_eps=float("nan")), MalformedCheckpoint, "NaN"),
    "config with infinity": ({}, _config(rope_theta=float("inf")), MalformedCheckpoint, "Infinity"),
    "config with 1e999": (
        {},
        _replace("config.json", '{"model_type":"llama","rms_norm_eps":1e999}'),
        MalformedCheckpoint,
        "1e999",
    ),
    "config with a huge number": (
        {},
        _replace("config.json", '{"model_type":"llama","vocab_size":' + "9" * 9999 + "}"),
        MalformedCheckpoint,
        "config",
    ),
    "generation config with NaN": (
        {},
        _replace("generation_config.json", '{"temperature": NaN}'),
        MalformedCheckpoint,
        "generation_config",
    ),
    "no family": ({}, _config(model_type="REMOVED"), MalformedCheckpoint, "model_type"),
    "unknown family": ({}, _config(model_type="mamba"), UnknownFamily, "mamba.*known: bloom"),
    "unknown family with code": (
        {},
        _config(model_type="chatglm", auto_map={"AutoModel": "modeling.X"}),
        UnsafeCheckpoint,
        "never run",
    ),
    "quantized": ({}, _config(quantization_config={"quant_method": "bitsandbytes"}), UnknownFamily, "bitsandbytes"),
    "quantized by name only": (
        {},
        _config(quantization_config={"quant_method": "gptq"}),
        MalformedCheckpoint,
        "no quantized weight",
    ),
    "quantized by no object": ({}, _config(quantization_config=[1]), MalformedCheckpoint, "is no object"),
    "too many layers promised": ({}, _config(num_hidden_layers=4), MalformedCheckpoint, "4 layers"),
    "too few layers promised": ({}, _config(num_hidden_layers=2), MalformedCheckpoint, "2 layers"),
    "layers a text": ({}, _config(num_hidden_layers="3"), MalformedCheckpoint, "number of layers"),
    "layers absurd": ({}, _config(num_hidden_layers=10**12), MalformedCheckpoint, "number of layers"),
    "vocabulary wrong": ({}, _config(vocab_size=321), MalformedCheckpoint, "embed_tokens"),
    "width wrong": ({}, _config(hidden_size=32), MalformedCheckpoint, "shape"),
    "heads wrong": ({}, _config(num_attention_heads=8), MalformedCheckpoint, "q_proj"),
    "key-value heads wrong": ({}, _config(num_key_value_heads=4), MalformedCheckpoint, "k_proj"),
    "head width wrong": ({}, _config(head_dim=8), MalformedCheckpoint, "q_proj"),
    "ffn width wrong": ({}, _config(intermediate_size=97), MalformedCheckpoint, "mlp"),
    "sizes of wrong type": ({}, _config(hidden_size=[64]), MalformedCheckpoint, "config"),
    "rope of wrong type": ({}, _config(rope_parameters="x"), MalformedCheckpoint, "config"),
    "family other than the tensors": ({}, _config(model_type="gpt2"), MalformedCheckpoint, "no place|no "),
    "tensor missing": (
        {},
        _without("model.layers.1.self_attn.k_proj.weight"),
        MalformedCheckpoint,
        "layer 1 has no 'self_attn.k_proj.weight'",
    ),
    "tensor missing everywhere": (
        {},
        _without(*(f"model.layers.{i}.mlp.up_proj.weight" for i in range(3))),
        MalformedCheckpoint,
        "up_proj",
    ),
    "head missing": ({}, _without("lm_head.weight"), MalformedCheckpoint, "lm_head"),
    "layer missing": (
        {},
        _without(
            *(f"model.layers.2.self_attn.{p}_proj.weight" for p in "qkvo"), "model.layers.2.input_layernorm.weight"
        ),
        MalformedCheckpoint,
        "attention of layer 2",
    ),
    "tensor too many": ({}, _with("model.vision.weight"), MalformedCheckpoint, "model.vision.weight"),
    "tensor twice": ({}, _with("norm.weight"), MalformedCheckpoint, "two tensors"),
    "norm of the wrong size": ({}, _shape("model.layers.2.input_layernorm.weight", 32), MalformedCheckpoint, "layer 2"),
    "weights missing": ({}, _remove("model.safetensors"), MalformedCheckpoint, "model.safetensors"),
    "pickled": ({}, _pickled, UnsafeCheckpoint, "--allow-pickle"),
    "weights a link outside": ({}, _link("model.safetensors", "/etc/passwd"), UnsafeCheckpoint, "leaves"),
    "side file a link outside": ({}, _link("tokenizer.json", "/etc/passwd"), UnsafeCheckpoint, "leaves"),
    "a folder linked outside": ({}, _link("additional_chat_templates", "/etc"), UnsafeCheckpoint, "leaves"),
    "link to nowhere": ({}, _link("tokenizer.json", "nowhere"), MalformedCheckpoint, "tokenizer.json"),
    "link to itself": ({}, _link("tokenizer.json", "tokenizer.json"), MalformedCheckpoint, "tokenizer.json"),
    "a pipe": ({}, _fifo, UnsafeCheckpoint, "regular"),
}


@pytest.mark.parametrize("what", TABLE)
def test_bad_input_is_refused_before_anything_is_written(zoo, copied, monkeypatch, what):
    options, spoil, error, reason = TABLE[what]
    folder = copied("llama", **options)
    spoil(folder)
    before = stored(zoo.store)
    monkeypatch.setattr(type(zoo.store.objects), "put_many", lambda *_: pytest.fail("bytes were written"))
    with pytest.raises(error, match=reason) as caught:
        zoo.ingest(folder, name="m")
    assert "\n" not in str(caught.value)
    assert stored(zoo.store) == before


def test_a_folder_that_is_no_checkpoint_and_a_source_that_is_nothing(zoo, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(MalformedCheckpoint, match="not a checkpoint"):
        zoo.ingest(tmp_path / "empty")
    with pytest.raises(MalformedCheckpoint, match="is a file"):
        zoo.ingest(tmp_path / "file")
    for text in (str(tmp_path / "nowhere"), "../nowhere", "a/b/c", ""):
        with pytest.raises((NotFound, MalformedCheckpoint)):
            zoo.ingest(text)


class _Evil:
    """A pickle payload that creates a file when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused_even_with_the_switch(zoo, copied, tmp_path):
    folder = copied("llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": _Evil(tmp_path / "ran")}))
    with pytest.raises(UnsafeCheckpoint, match="more than tensors"):
        zoo.ingest(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"nothing"])
def test_a_broken_pickle_is_one_line(zoo, copied, content):
    folder = copied("llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises((MalformedCheckpoint, UnsafeCheckpoint), match=r"pytorch_model\.bin"):
        zoo.ingest(folder, allow_pickle=True)


def test_the_hub_cache_links_to_its_own_blobs_only(zoo, made, tmp_path):
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(made("llama").iterdir())):
        (repository / "blobs" / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    report = zoo.ingest(snapshot)
    assert report.model == "org/tiny"
    (tmp_path / "secret").write_text("secret")
    (snapshot / "README.md").symlink_to("../../../secret")
    with pytest.raises(UnsafeCheckpoint, match="leaves"):
        zoo.ingest(snapshot, name="m")
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("x")
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to("../../../models--org--other/blobs/x")
    with pytest.raises(UnsafeCheckpoint, match="leaves"):
        zoo.ingest(snapshot, name="m")


def test_code_named_by_a_known_family_is_kept_and_never_run(zoo, copied, tmp_path):
    folder = copied("llama")
    _config(auto_map={"AutoModelForCausalLM": "evil.Evil"})(folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    report = zoo.ingest(folder, name="m")
    assert any("never run" in note for note in report.notes)
    zoo.model("m").tokenizer()
    assert zoo.model("m").side_file("evil.py") is not None
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(zoo, made, monkeypatch):
    zoo.ingest(made("gpt2"), name="first")
    before = stored(zoo.store)
    original = os.fsync
    left = [20]

    def failing(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreFull):
        zoo.ingest(made("llama"), name="m")
    monkeypatch.undo()
    assert stored(zoo.store) == before
    assert zoo.gc().objects_removed == 0
    assert zoo.ingest(made("llama"), name="m").tensors.new > 0


def test_a_source_that_shrinks_while_it_is_read_leaves_nothing(zoo, copied, monkeypatch):
    folder = copied("llama")
    before = stored(zoo.store)

    def progress(done: int, total: int) -> None:
        os.truncate(folder / "model.safetensors", 40_000)

    monkeypatch.setattr("zoo.objects.sources.BATCH_TENSORS", 2)
    with pytest.raises(MalformedCheckpoint, match="ends inside"):
        zoo.ingest(folder, name="m", progress=progress)
    assert stored(zoo.store) == before


def test_an_adapters_own_config_must_be_its_bases(zoo, made, tmp_path):
    from zoo.errors import WrongBase

    zoo.ingest(made("llama"), name="base")
    folder = make_lora(made("llama"), tmp_path / "lora")
    config = json.loads((made("llama") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    zoo.ingest(folder, name="same")
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(WrongBase, match="another model"):
        zoo.ingest(folder, name="other")
