"""Meta's original layout: bit-equal to the Hugging Face twin, the same tokens, the same tokenizer.

Broken input is refused in one line.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surgery.sources import open_source
from surgery.sources.meta import is_meta, open_meta
from tests.surgery import meta_twin

torch = pytest.importorskip("torch")


def held(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same_bits(one: Any, other: Any) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("shards", "kv_heads"), [(1, 2), (2, 2), (4, 4), (8, 8)])
@pytest.mark.parametrize("embedding", ["columns", "rows"])
def test_every_tensor_is_bit_equal_to_the_twin(
    tmp_path: Path, shards: int, kv_heads: int, embedding: str, dtype: str
) -> None:
    model = meta_twin.tiny_llama(num_key_value_heads=kv_heads, dtype=dtype)
    source = open_meta(meta_twin.write_meta(model, tmp_path / "meta", shards=shards, embedding=embedding))
    ours = held(meta_twin.write_source(source, tmp_path / "hf"))
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[key], theirs[key]) for key in theirs)


def test_exported_folder_generates_the_twins_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = meta_twin.tiny_llama()
    source = open_source(str(meta_twin.write_meta(model, tmp_path / "meta", shards=2)))
    folder = meta_twin.write_source(source, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    prompt = AutoTokenizer.from_pretrained(folder)("def f(x):", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(**prompt, **options), model.generate(**prompt, **options))


def test_rotary_permutation_matches_metas_own_arithmetic(tmp_path: Path) -> None:
    """The writer of the twin and the reader could share an error; complex rotary angles on Meta's tensors reveal it."""
    from transformers import AutoModelForCausalLM

    model = meta_twin.tiny_llama()
    source = open_meta(meta_twin.write_meta(model, tmp_path / "meta"))
    loaded = AutoModelForCausalLM.from_pretrained(meta_twin.write_source(source, tmp_path / "hf"))
    tokens = list(range(3, 40))
    with torch.no_grad():
        ours = loaded(torch.tensor([tokens])).logits[0]
        reference = meta_twin.reference_logits(
            torch.load(tmp_path / "meta/consolidated.00.pth", weights_only=True), model.config, tokens
        )
    assert torch.allclose(ours, reference, atol=1e-3), (ours - reference).abs().max()


def test_sentencepiece_ids_are_those_of_the_library(tmp_path: Path) -> None:
    import sentencepiece
    from transformers import AutoTokenizer

    source = open_meta(meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta"))
    ours = AutoTokenizer.from_pretrained(meta_twin.write_source(source, tmp_path / "hf"))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=meta_twin.sentencepiece_model())
    for text in meta_twin.SENTENCES:
        assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)], text
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
    assert (tmp_path / "hf/tokenizer.model").read_bytes() == meta_twin.sentencepiece_model()
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)


def test_llama3_tiktoken_ids_are_those_of_the_library(tmp_path: Path) -> None:
    import tiktoken
    from transformers import AutoTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    rows = meta_twin.RANKS + meta_twin.SPECIALS
    folder = meta_twin.write_meta(
        meta_twin.tiny_llama(vocab_size=rows), tmp_path / "Llama3-tiny-Instruct", shards=2, embedding="rows",
        tokenizer=meta_twin.tiktoken_file(), rope_theta=500000.0, vocab_size=rows,
    )  # fmt: skip
    source = open_meta(folder)
    ours = AutoTokenizer.from_pretrained(meta_twin.write_source(source, tmp_path / "hf"))
    pattern = TikTokenConverter().pattern
    theirs = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=meta_twin.tiktoken_ranks(), special_tokens={})
    for text in meta_twin.SENTENCES:
        assert ours.encode(text) == [meta_twin.RANKS, *theirs.encode(text)], text
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
    assert ours.convert_tokens_to_ids("<|eot_id|>") == meta_twin.RANKS + 9
    assert len(ours) == rows
    assert source.config is not None
    assert source.config["eos_token_id"] == [meta_twin.RANKS + 1, meta_twin.RANKS + 9]
    assert source.config["max_position_embeddings"] == 8192
    chat = ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith(
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
    )
    assert source.side("original/tokenizer.model") == meta_twin.tiktoken_file()


def test_llama31_scales_its_rotary_angles_and_llama32_ties_its_head(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = meta_twin.RANKS + meta_twin.SPECIALS
    options: dict[str, Any] = {"tokenizer": meta_twin.tiktoken_file(), "rope_theta": 500000.0, "use_scaled_rope": True}
    model = meta_twin.tiny_llama(vocab_size=rows)
    plain = open_meta(meta_twin.write_meta(model, tmp_path / "v31", **options))
    config = AutoConfig.from_pretrained(meta_twin.write_source(plain, tmp_path / "hf31"))
    assert config.rope_parameters["rope_type"] == "llama3"
    assert (config.rope_parameters["factor"], config.rope_parameters["rope_theta"]) == (8.0, 500000.0)
    assert config.max_position_embeddings == 131072

    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    tied = open_meta(meta_twin.write_meta(model, tmp_path / "v32", shards=2, embedding="rows", **options))
    folder = meta_twin.write_source(tied, tmp_path / "hf32")
    assert "lm_head.weight" not in held(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.tie_word_embeddings
    assert loaded.config.rope_parameters["factor"] == 32.0
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {"max_position_embeddings": 4096, "rope_theta": 10000.0}),
        ({"norm_eps": 1e-6}, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}),
        ({"rope_theta": 1e6}, {"max_position_embeddings": 16384, "rope_theta": 1e6}),
    ],
)
def test_config_values_by_version(tmp_path: Path, params: dict[str, Any], expected: dict[str, Any]) -> None:
    source = open_meta(meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta", **params))
    assert source.config is not None
    assert {key: source.config[key] for key in expected} == expected
    assert source.config["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple", "expected"),
    [(4096, None, 256, 11008), (5120, None, 256, 13824), (8192, 1.3, 4096, 28672), (4096, 1.3, 1024, 14336)],
)
def test_feed_forward_width_of_the_published_models(
    dim: int, multiplier: float | None, multiple: int, expected: int
) -> None:
    """Checks the published widths of Llama 2 7B, 13B, 70B and Llama 3 8B."""
    from surgery.sources.meta_params import parse_params

    document = {"dim": dim, "n_layers": 32, "n_heads": 32, "norm_eps": 1e-5, "multiple_of": multiple, "vocab_size": -1}
    assert (
        parse_params(document | ({} if multiplier is None else {"ffn_dim_multiplier": multiplier})).intermediate
        == expected
    )


def test_weights_are_split_with_an_index(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = meta_twin.tiny_llama()
    source = open_meta(meta_twin.write_meta(model, tmp_path / "meta"), shard_bytes=200_000)
    folder = meta_twin.write_source(source, tmp_path / "hf")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    reopened = open_source(str(folder))
    assert [tensor.key for tensor in reopened.tensors()] == [tensor.key for tensor in source.tensors()]


def test_files_beside_are_kept_and_the_tokenizer_may_lie_above(tmp_path: Path) -> None:
    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "llama/7B")
    shutil.move(folder / "tokenizer.model", tmp_path / "llama/tokenizer.model")
    source = open_meta(folder)
    assert source.side("LICENSE.txt") == b"a licence"
    assert source.side("original/params.json") == (folder / "params.json").read_bytes()
    assert source.side("tokenizer.model") == meta_twin.sentencepiece_model()
    assert is_meta(folder)
    assert not is_meta(tmp_path / "llama")


def test_tensors_that_share_a_storage_are_read_at_their_offsets(tmp_path: Path) -> None:
    """Meta's own files keep several tensors of a layer in one storage."""
    model = meta_twin.tiny_llama()
    folder = meta_twin.write_meta(model, tmp_path / "meta")
    state = meta_twin.meta_state(model)
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    at, views = 0, {}
    for name, tensor in state.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    torch.save(views, folder / "consolidated.00.pth")
    ours = held(meta_twin.write_source(open_meta(folder), tmp_path / "hf"))
    assert all(same_bits(ours[key], tensor) for key, tensor in model.state_dict().items())


MEMORY = """
import sys
import zipfile
from pathlib import Path
from surgery.sources.meta import open_meta

def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

source = open_meta(Path(sys.argv[1]))
tensors = list(source.tensors())
largest = max(tensor.nbytes for tensor in tensors)
for chunk in tensors[0].chunks(1 << 20):
    pass
before = peak = resident()
for tensor in tensors:
    for chunk in tensor.chunks(1 << 20):
        peak = max(peak, resident())
print(largest, peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_joining_holds_chunks_not_tensors(tmp_path: Path) -> None:
    """Two shards of tensors of 25 MB: reading all of them in chunks of 1 MB takes the memory of a few chunks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=24000, hidden_size=512, intermediate_size=1376, num_hidden_layers=1, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = meta_twin.write_meta(model, tmp_path / "meta", shards=2, multiple_of=32)
    child = subprocess.run([sys.executable, "-c", MEMORY, str(folder)], capture_output=True, text=True, check=True)
    largest, grown = map(int, child.stdout.split())
    assert largest == 24000 * 512 * 2
    assert grown < largest / 3


def test_safetensors_beside_metas_files_are_taken_first(tmp_path: Path) -> None:
    model = meta_twin.tiny_llama()
    folder = meta_twin.write_meta(model, tmp_path / "both")
    assert open_source(str(folder)).notes[0].startswith("Meta's layout")
    (folder / "config.json").write_text("{}")
    assert open_source(str(folder)).notes[0].startswith("Meta's layout")
    model.save_pretrained(folder)
    source = open_source(str(folder))
    assert source.weights[0].path == "model.safetensors"
    assert source.side("original/params.json") is None


def test_the_twin_shares_everything_with_metas_checkpoint(tmp_path: Path) -> None:
    """Both have equal components: the second ingest adds nothing, and both load as the same model."""
    from zoo import Zoo

    model = meta_twin.tiny_llama(dtype="bfloat16")
    model.save_pretrained(tmp_path / "twin")
    meta_twin.write_meta(model, tmp_path / "meta", shards=2)
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(str(tmp_path / "twin"), name="hf")
        report = zoo.ingest(str(tmp_path / "meta"), name="meta")
        assert (report.tensors.new, report.bytes.new) == (0, 0)
        components = [
            [placed.component.digest for placed in zoo.model(name).manifest.components] for name in ("hf", "meta")
        ]
        assert components[0] == components[1]
        loaded = zoo.model("meta").load()
        prompt = zoo.model("meta").tokenizer()("def f(x):", return_tensors="pt")
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(loaded.generate(**prompt, **options), model.generate(**prompt, **options))
        again = zoo.ingest(str(tmp_path / "meta"), name="meta")
        assert again.tensors.new == 0
        zoo.model("meta").export(tmp_path / "export")
    assert all(same_bits(tensor, model.state_dict()[key]) for key, tensor in held(tmp_path / "export").items())


def test_llama2_chat_gets_its_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = open_meta(
        meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "models--meta-llama--Llama-2-7b-chat/snapshots/0123")
    )
    tokenizer = AutoTokenizer.from_pretrained(meta_twin.write_source(source, tmp_path / "hf"))
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "bye")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], tokenize=False
    )
    assert text == "<s>[INST] <<SYS>>\nbe kind\n<</SYS>>\n\nhi [/INST] hello </s><s>[INST] bye [/INST]"
    plain = open_meta(meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "Llama-2-7b"))
    assert plain.side("chat_template.jinja") is None
