"""`zoo export --for vllm`: a folder without weights from which the model's own weights are read, from the store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surgery.vllm.folder import export_for_vllm
from surgery.vllm.stored_weights import FILE, StoredWeights, read_stored_weights
from surgery.vllm.weights import read_weights
from tests import adapters, checkpoints
from tests.bottlenecks import make_bottleneck
from tests.chains import put_chain, put_stitch
from tests.surgery.gguf_twin import tiny_model, write_gguf
from zoo import Zoo
from zoo.errors import InputError, MalformedCheckpoint, NotServable, StoreError


@pytest.fixture
def zoo(made: Callable[..., Path], tmp_path: Path) -> Iterator[Zoo]:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(made("llama"), name="org/a")
        yield zoo


def read(folder: Path) -> dict[str, torch.Tensor]:
    stored = read_stored_weights(folder)
    assert stored is not None
    return dict(read_weights(stored))


def exported(zoo: Zoo, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Export a model, and return the weights that its folder stands for."""
    report = zoo.model(name).export(folder, for_engine="vllm")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert list(report.files) == files and not [path for path in files if path.endswith((".safetensors", ".bin"))]
    assert not {"adapter_config.json", "model.safetensors.index.json"} & set(files)
    assert report.bytes == sum((folder / path).stat().st_size for path in files) < 1 << 20
    return read(folder)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert torch.allclose(found[key].float(), tensor.float(), rtol=0, atol=tolerance), key


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2", "gpt_neox"])
def test_weights_are_those_of_the_checkpoint(made: Callable[..., Path], tmp_path: Path, family: str) -> None:
    folder = made(family, dtype="bfloat16")
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, name="org/m")
        found = exported(zoo, "org/m", tmp_path / "out")
    wanted = load_file(folder / "model.safetensors")
    for tied in found.keys() - wanted.keys():  # a tied head is named, and is the table
        assert "head" in tied and any(torch.equal(found[tied], tensor) for tensor in wanted.values())
        wanted[tied] = found[tied]
    assert_same(found, wanted)
    config = json.loads((tmp_path / "out/config.json").read_text())
    own = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == own["architectures"]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_lora_is_added_to_its_base_as_peft_merges_it(made: Callable[..., Path], tmp_path: Path, family: str) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(made(family), name="org/a")
        zoo.ingest(checkpoints.make_lora(made(family), tmp_path / "lora"), name="org/lora", base="org/a")
        found = exported(zoo, "org/lora", tmp_path / "out")
        plain = exported(zoo, "org/a", tmp_path / "plain")
        model = zoo.model("org/lora").load()
    changed = {key for key in plain if not torch.equal(plain[key], found[key])}
    assert changed
    import peft

    folder = tmp_path / "lora"
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(made(family))
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    assert_same({key: found[key] for key in changed}, {key: merged[key] for key in changed}, 1e-6)
    assert len(changed) == sum("lora_A" in name for name in model.state_dict())


def computed(weights: dict[str, torch.Tensor], like: Any) -> torch.Tensor:
    """Return the logits of a plain Llama with these weights, with the settings of `like`."""
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM(like.config).eval()
    plain.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    with torch.no_grad():
        return plain(IDS).logits  # type: ignore[no-any-return]


IDS = torch.tensor([[5, 6, 7, 8, 9]])


def test_other_kinds_compute_what_they_compute_here(zoo: Zoo, made: Callable[..., Path], tmp_path: Path) -> None:
    """Composed chains of one architecture, low-rank deltas, tuned norms, and a GGUF file."""
    zoo.ingest(made("llama", seed=1), name="org/b", base="org/a")
    parts = [{"model": "org/a", "layer_range": [0, 2]}, {"model": "org/b", "layer_range": [1, 3]}]
    zoo.compose({"slices": [{"sources": [part]} for part in parts]}, "org/composed")
    zoo.delta("org/b", 4, variant="org/delta")
    checkpoints.make_peft(made("llama"), tmp_path / "ln", adapters.KINDS["ln"]("llama"))
    zoo.ingest(tmp_path / "ln", name="org/ln", base="org/a")
    zoo.ingest(write_gguf(tiny_model("llama"), tmp_path / "m.gguf"), name="org/gguf")
    for name in ("composed", "delta", "ln", "gguf"):
        model = zoo.model(f"org/{name}").load()
        with torch.no_grad():
            wanted = model(IDS).logits
        found = computed(exported(zoo, f"org/{name}", tmp_path / f"out-{name}"), model)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-5), name


def test_a_lora_on_a_bfloat16_base_is_added_in_float32(made: Callable[..., Path], tmp_path: Path) -> None:
    """Rounded to bfloat16 it would be lost where it is small, also for a vLLM that computes in float32."""
    base = made("llama", dtype="bfloat16")
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(base, name="org/a")
        zoo.ingest(checkpoints.make_lora(base, tmp_path / "lora"), name="org/lora", base="org/a")
        plain, found = exported(zoo, "org/a", tmp_path / "plain"), exported(zoo, "org/lora", tmp_path / "out")
    added = {key: found[key] - plain[key].float() for key in found if found[key].dtype == torch.float32}
    assert added and all((each != 0).any() for each in added.values())
    rounded = [(plain[key].float() + each).bfloat16().float() - plain[key].float() for key, each in added.items()]
    assert not any(torch.equal(one, two) for one, two in zip(added.values(), rounded, strict=True))


def test_a_chain_of_two_widths_is_read_as_its_own_files_are(
    zoo: Zoo, made: Callable[..., Path], tmp_path: Path
) -> None:
    zoo.ingest(made("qwen3", hidden_size=96), name="org/wide")
    put_stitch(zoo.store, "org/a", "org/wide", name="org/stitch")
    put_chain(zoo.store, "org/chain", ("org/a", 0, 2), ("org/wide", 1, 3))
    found = exported(zoo, "org/chain", tmp_path / "out")
    zoo.model("org/chain").export(tmp_path / "files")
    assert_same(found, load_file(tmp_path / "files/model.safetensors"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["BlockZooChainForCausalLM"]
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (96, 2, 24)


def test_packed_tensors_are_read_as_plain_ones(made: Callable[..., Path], tmp_path: Path) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(made("llama", seed=0, dtype="bfloat16", hidden_size=128), name="org/a")
        near = checkpoints.build("llama", seed=0, dtype="bfloat16", hidden_size=128)
        with torch.no_grad():
            for parameter in near.parameters():
                parameter.mul_(1.01)
        near.save_pretrained(tmp_path / "near")
        zoo.ingest(tmp_path / "near", name="org/near", base="org/a")
        plain = exported(zoo, "org/near", tmp_path / "out")
        wanted = {key: tensor.clone() for key, tensor in plain.items()}
        assert zoo.pack().packed
        assert_same(read(tmp_path / "out"), wanted)


def test_what_is_more_than_weights_is_refused(zoo: Zoo, made: Callable[..., Path], tmp_path: Path) -> None:
    base = made("llama")
    for kind in ("ia3", "prompt", "prefix"):
        checkpoints.make_peft(base, tmp_path / kind, adapters.KINDS[kind]("llama"))
        zoo.ingest(tmp_path / kind, name=f"org/{kind}", base="org/a")
    zoo.ingest(make_bottleneck(base, tmp_path / "bottle"), name="org/bottle", base="org/a")
    zoo.ingest(checkpoints.make_lora(base, tmp_path / "dora", use_dora=True), name="org/dora", base="org/a")
    zoo.ingest(made("gpt2"), name="org/gpt2")
    zoo.ingest(made("mistral"), name="org/window")
    put_stitch(zoo.store, "org/a", "org/a", name="org/stitch")
    put_chain(zoo.store, "org/windows", ("org/a", 0, 1), ("org/window", 1, 3))
    names = ("ia3", "prompt", "prefix", "bottle", "dora", "stitch", "windows")
    for name in names:
        with pytest.raises(NotServable, match=r"vLLM|low-rank"):
            export_for_vllm(zoo.store, f"org/{name}", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("x")
    with pytest.raises(InputError, match="not an empty folder"):
        export_for_vllm(zoo.store, "org/a", tmp_path / "taken")


def test_a_store_that_lacks_what_the_folder_names_is_an_error(zoo: Zoo, tmp_path: Path) -> None:
    exported(zoo, "org/a", tmp_path / "out")
    zoo.remove("org/a")
    zoo.gc()
    with pytest.raises(StoreError, match="org/a cannot be read"):
        read(tmp_path / "out")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreError, match="no store in"):
        read(tmp_path / "out")


def test_a_damaged_tensor_is_an_error(zoo: Zoo, tmp_path: Path) -> None:
    exported(zoo, "org/a", tmp_path / "out")
    stored = read_stored_weights(tmp_path / "out")
    assert stored is not None
    path = zoo.store.objects.path(stored.tensors["model.norm.weight"])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="org/a cannot be read"):
        read(tmp_path / "out")


GOOD: dict[str, Any] = {
    "version": 1,
    "model": "m",
    "store": "/s",
    "tensors": {"w": "a" * 64},
    "low_rank": {"w": {"a": "b" * 64, "b": "c" * 64, "scaling": 0.5, "transposed": False}},
}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"model": None},
        {"store": "relative"},
        {"store": 3},
        {"tensors": ["w"]},
        {"tensors": {"w": "../../etc/passwd"}},
        {"tensors": {"w": "A" * 64}},
        {"tensors": {"w": None}},
        {"tensors": {"": "a" * 64}},
        {"low_rank": {"other": GOOD["low_rank"]["w"]}},
        {"low_rank": {"w": {**GOOD["low_rank"]["w"], "a": "x"}}},
        {"low_rank": {"w": {**GOOD["low_rank"]["w"], "scaling": float("nan")}}},
        {"low_rank": {"w": {**GOOD["low_rank"]["w"], "transposed": 1}}},
        {"low_rank": {"w": 1}},
    ],
)
def test_a_file_that_is_not_as_written_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / FILE).write_text(json.dumps(GOOD))
    stored = read_stored_weights(tmp_path)
    assert stored is not None and stored == StoredWeights("m", Path("/s"), stored.tensors, stored.low_rank)
    assert json.loads(stored.encode()) == GOOD
    (tmp_path / FILE).write_text(json.dumps(GOOD | change))
    with pytest.raises(MalformedCheckpoint):
        read_stored_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"[" * 100_000, b"\xff"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    assert read_stored_weights(tmp_path) is None
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(MalformedCheckpoint):
        read_stored_weights(tmp_path)
