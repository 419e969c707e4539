"""GGUF files: tensors are transformers' bit for bit, files come back byte for byte, answers are the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surgery.sources import GgufChoice, open_source
from surgery.sources.gguf.header import GgufEntry
from surgery.sources.gguf.source import open_gguf
from surgery.sources.gguf.tensors import DequantisedTensor, StoredDtype, _cast
from surgery.sources.gguf.types import BLOCK_TYPES
from surgery.tensors.pool import stored_tensor
from tests.surgery.gguf_twin import FAMILIES, tiny_model, write_gguf
from tests.surgery.helpers import files_of
from zoo import Zoo
from zoo.errors import InputError, NameTaken, UnknownFamily

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")


def theirs(path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


def save_twin(path: Path, folder: Path) -> Path:
    """Save what transformers reads from a GGUF file as safetensors."""
    from safetensors.torch import save_file

    model = theirs(path)
    folder.mkdir()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict()
    del config["quantization_config"], config["_model_name_or_path"]  # transformers' notes on where it came from
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored_state(zoo: Zoo, name: str) -> dict[str, Any]:
    """Return canonical key -> tensor of a stored model."""
    parts = {}
    for placed in zoo.model(name).manifest.components:
        prefix = "model." if placed.layer is None else f"model.layers.{placed.layer}."
        for key, digest in placed.component.tensors:
            parts[key if key.startswith("lm_head") else prefix + key] = stored_tensor(zoo.store, digest)
    return parts


def check_same_bits(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        assert ours[key].dtype == tensor.dtype, key
        assert torch.equal(ours[key].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), key


def test_sizes_of_blocks_are_those_of_ggml() -> None:
    for number, block in BLOCK_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == block.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (block.elements, block.nbytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_transformers_bit_for_bit(family: str, zoo: Zoo, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(family), tmp_path / f"{family}.gguf", "Q4_0")
    zoo.ingest(path)
    reference = theirs(path)
    check_same_bits(stored_state(zoo, family), reference.state_dict())
    loaded = zoo.model(family).load()
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, reference(ids).logits)


def test_every_block_type_is_dequantised_as_transformers_does(zoo: Zoo, tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    names = [block.name for block in BLOCK_TYPES.values()]
    given: dict[str, str] = {}

    def kind(name: str) -> str:
        return given.setdefault(name, names[len(given) % len(names)])

    path = write_gguf(model, tmp_path / "all.gguf", kind)
    assert set(given.values()) == set(names)
    zoo.ingest(path)
    check_same_bits(stored_state(zoo, "all"), theirs(path).state_dict())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_dtype_is_rounded_as_torch_rounds(dtype: str, zoo: Zoo, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("gemma2"), tmp_path / "m.gguf", "Q8_0")
    zoo.ingest(path, dtype=dtype)
    check_same_bits(stored_state(zoo, "m"), theirs(path, dtype=getattr(torch, dtype)).state_dict())
    with pytest.raises(NameTaken):
        zoo.ingest(path, dtype="float32")


@pytest.mark.parametrize(("ours", "dtype"), [("BF16", "bfloat16"), ("F16", "float16")])
def test_rounding_equals_torch_for_every_kind_of_number(ours: StoredDtype, dtype: str) -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    edges = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x477FF000, 1]
    numbers = np.concatenate([random, np.array(edges, np.uint32)]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    expected = torch.from_numpy(numbers).to(getattr(torch, dtype)).view(torch.int16).numpy()
    assert (_cast(numbers, ours).view(np.int16) == expected).all()


def test_export_gives_the_file_back(zoo: Zoo, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("qwen2"), tmp_path / "m.gguf", "Q5_1", edit=lambda w: w.add_custom_alignment(256))
    path.write_bytes(path.read_bytes().rstrip(b"\0"))  # a writer that does not pad the last tensor
    padded = write_gguf(
        tiny_model("qwen2"), tmp_path / "padded.gguf", "Q5_1", edit=lambda w: w.add_custom_alignment(256)
    )
    for each in (path, padded):
        zoo.ingest(each)
        zoo.model(each.stem).export(tmp_path / "out" / each.stem)
        assert files_of(tmp_path / "out" / each.stem) == {each.name: each.read_bytes()}
    assert not zoo.verify().damaged


def test_files_share_equal_tensors_with_each_other_and_with_safetensors(zoo: Zoo, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = write_gguf(model, tmp_path / "first.gguf", "Q4_0")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.5)
    second = write_gguf(model, tmp_path / "second.gguf", "Q4_0")
    total = zoo.ingest(first).tensors.total
    report = zoo.ingest(second)
    assert (report.tensors.new, report.tensors.total) == (2, total)  # the changed one: its blocks, and dequantised
    assert (report.kind, report.base) == ("full", "first")
    assert zoo.ingest(save_twin(first, tmp_path / "hf")).tensors.new == 0
    assert zoo.model("hf").chain[0].digest == zoo.model("first").chain[0].digest
    before = zoo.store.usage().objects
    zoo.remove("second")
    zoo.gc()
    assert zoo.store.usage().objects == before - 2
    check_same_bits(stored_state(zoo, "first"), theirs(first).state_dict())


def test_packed_fine_tune_is_still_exported_byte_for_byte(zoo: Zoo, tmp_path: Path) -> None:
    model = tiny_model("llama")
    zoo.ingest(write_gguf(model, tmp_path / "base.gguf", "F16"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 0.5
    path = write_gguf(model, tmp_path / "tuned.gguf", "F16")
    zoo.ingest(path, base="base")
    assert zoo.pack().packed == 1
    check_same_bits(stored_state(zoo, "tuned"), theirs(path).state_dict())
    zoo.model("tuned").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == {"tuned.gguf": path.read_bytes()}
    assert not zoo.verify().damaged


def test_chain_of_gguf_models_is_exported_as_a_checkpoint_with_its_tokenizer(zoo: Zoo, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        zoo.ingest(write_gguf(tiny_model("llama", seed), tmp_path / f"{name}.gguf", "Q8_0"))
    slices = [{"sources": [{"model": name, "layer_range": [number, number + 1]}]} for number, name in enumerate("ab")]
    zoo.compose({"slices": slices}, "mixed")
    zoo.model("mixed").export(tmp_path / "out")
    wanted = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert wanted <= set(files_of(tmp_path / "out"))
    assert zoo.ingest(tmp_path / "out", "back").tensors.new == 0


def test_adapter_finds_its_place_on_a_gguf_base(zoo: Zoo, tmp_path: Path) -> None:
    from tests.checkpoints import make_lora

    path = write_gguf(tiny_model("llama"), tmp_path / "base.gguf", "Q8_0")
    zoo.ingest(path)
    zoo.ingest(make_lora(save_twin(path, tmp_path / "hf"), tmp_path / "lora", base_name="base"))
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert not torch.equal(zoo.model("lora").load()(ids).logits, zoo.model("base").load()(ids).logits)
    zoo.model("lora").export(tmp_path / "out")
    assert set(files_of(tmp_path / "out")) == set(files_of(tmp_path / "lora"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_become_llama3_scaling(factor: float, zoo: Zoo, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=rope)
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2) / 64))
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    zoo.ingest(write_gguf(model, tmp_path / "m.gguf", "F32", extra={"rope_freqs.weight": factors}))
    ids = torch.arange(1, 60)[None]
    with torch.no_grad():
        assert torch.equal(zoo.model("m").load()(ids).logits, model(ids).logits)
    factors[20] *= 1.5
    with pytest.raises(InputError, match="rotary factors"):
        open_gguf(write_gguf(model, tmp_path / "n.gguf", "F32", extra={"rope_freqs.weight": factors}))


def test_folder_brings_its_texts_and_a_file_is_chosen(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(tiny_model("llama"), folder / "a-q4.gguf", "Q4_0")
    (folder / "README.md").write_text("about it")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    report = zoo.ingest(folder)
    assert report.model == "folder" and "config.json" in report.notes[0]
    zoo.model("folder").export(tmp_path / "out")
    assert set(files_of(tmp_path / "out")) == {"README.md", "a-q4.gguf"}
    shutil.copy(folder / "a-q4.gguf", folder / "b.gguf")
    with pytest.raises(InputError, match=r"several GGUF files: say which with --file \(a-q4.gguf, b.gguf\)"):
        open_source(str(folder))
    assert open_source(str(folder), gguf=GgufChoice("b.gguf")).weights[0].path == "b.gguf"
    with pytest.raises(InputError, match=r"holds no c.gguf"):
        open_source(str(folder), gguf=GgufChoice("c.gguf"))
    with pytest.raises(InputError, match="is a file itself"):
        open_source(str(folder / "b.gguf"), gguf=GgufChoice("b.gguf"))
    with pytest.raises(InputError, match="can be stored as float32, bfloat16, float16"):
        open_source(str(folder / "b.gguf"), gguf=GgufChoice(dtype="int8"))


def test_safetensors_take_precedence_and_have_no_dtype_option(made: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(made("llama"), folder)
    write_gguf(tiny_model("llama"), folder / "m.gguf", "Q4_0")
    assert open_source(str(folder)).weights[0].path == "model.safetensors"
    assert open_source(str(folder), gguf=GgufChoice("m.gguf")).weights[0].path == "m.gguf"
    with pytest.raises(InputError, match="--dtype is for GGUF files"):
        open_source(str(folder), gguf=GgufChoice(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda w: w.add_uint16("split.count", 3), InputError, "one part of a split model"),
        (lambda w: w.add_expert_count(8), UnknownFamily, "with experts"),
        (lambda w: w.add_string("general.type", "adapter"), InputError, "'adapter', not a model"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), InputError, "type 'yarn'"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.float32)), InputError, "has no place in a llama"),
        (
            lambda w: w.add_tensor("blk.7.attn_norm.weight", np.zeros(256, np.float32)),
            InputError,
            "beyond the 2 layers",
        ),
    ],
)
def test_what_cannot_be_served_exactly_is_refused(
    edit: Callable[[Any], None], error: type[Exception], message: str, zoo: Zoo, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "F16", edit=edit)
    with pytest.raises(error, match=message) as raised:
        zoo.ingest(path)
    assert "\n" not in str(raised.value)
    assert zoo.models() == [] and zoo.store.usage().objects == 0


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "F16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install 'blockzoo\[gguf\]'"):
        open_gguf(path)


def test_ingest_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "Q4_1")
    program = (
        "import sys; from zoo import Zoo\n"
        f"with Zoo({str(tmp_path / 'store')!r}) as zoo: print(zoo.ingest({str(path)!r}).family)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "llama"), done.stderr


@pytest.mark.parametrize(("kind", "heads"), [("Q4_0", 0), ("Q4_0", 4), ("Q6_K", 4), ("IQ3_S", 0)])
def test_a_tensor_of_any_size_is_dequantised_in_little_memory(kind: str, heads: int, tmp_path: Path) -> None:
    block = next(block for block in BLOCK_TYPES.values() if block.name == kind)
    nbytes = (1 << 22) // block.elements * block.nbytes
    path = tmp_path / "data"
    path.write_bytes(bytes(nbytes))
    entry = GgufEntry("t", block, (2048, 2048), 0, nbytes, nbytes)
    tensor = DequantisedTensor("t", "F32", entry, path, heads)
    next(tensor.chunks(1 << 16))  # imports and tables
    tracemalloc.start()
    try:
        assert sum(len(chunk) for chunk in tensor.chunks(1 << 20)) == tensor.nbytes == 16 << 20
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_end_tokens_are_those_of_the_metadata(zoo: Zoo, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "F16", edit=lambda w: w.add_eot_token_id(7))
    zoo.ingest(path)
    assert zoo.model("m").generation_config == {"bos_token_id": 1, "eos_token_id": [2, 7]}
    side = zoo.model("m").side_file("tokenizer_config.json")
    assert side is not None and json.loads(side)["eos_token"] == "</s>"  # noqa: S105
