"""Tokenizers from GGUF metadata give the ids of the libraries that the models were trained with."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.frontend.tokenizer import adapt, adapt_core
from runtime.frontend.tokenizer_files import read_tokenizer
from surgery.sources.gguf.source import open_gguf
from tests.surgery import meta_twin
from tests.surgery.gguf_twin import byte_level_vocabulary, spaced_vocabulary, tiny_model, write_gguf
from zoo import Zoo
from zoo.errors import MalformedCheckpoint

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")

TEXTS = (
    *meta_twin.SENTENCES,
    "I'LL they're x1234567890y 3.14",
    "HelloWorld fooBAR iPhone",
    "x\r\n\r\n  y\t\t z   ",
    "e\u0301 \u00e9 ½ ٣",
    "!!!\n\n??/ // a-b_c",
    "<|start|>user\nhi<|end|>",
)
SPECIAL = ("<|start|>", "<|end|>")


def ours(tokenizer: dict[str, Any], tmp_path: Path, family: str = "llama") -> Any:
    """Return the tokenizer that serving builds from a file with this vocabulary."""
    path = write_gguf(tiny_model(family), tmp_path / "m.gguf", "F16", tokenizer)
    source = open_gguf(path)
    assert source.config is not None
    config = {**source.config, "model_type": "llama"} if family == "phi3" else source.config  # else by transformers
    files = read_tokenizer(config, source.side, frozenset(side.path for side in source.sides))
    assert files is not None, "serving would need transformers"
    return adapt_core(files.core, files.chat)


@functools.cache
def trained(pre_tokenizer: Any = None, composed: bool = False) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if composed:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = Path(functools.__file__).read_text().splitlines()
    core.train_from_iterator([*text, *TEXTS * 20], trainers.BpeTrainer(vocab_size=620, initial_alphabet=alphabet))
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return core


def llama3() -> Any:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TikTokenConverter("").pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def test_sentencepiece_ids_are_those_of_the_library(tmp_path: Path) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_proto=meta_twin.sentencepiece_model())
    tokenizer = ours(spaced_vocabulary(), tmp_path)
    for text in TEXTS:
        expected = library.encode(text)
        assert tokenizer.encode(text) == [1, *expected], text
        assert tokenizer.decode(expected) == library.decode(expected), text


def test_no_space_is_put_before_the_text_where_the_metadata_say_so(tmp_path: Path) -> None:
    tokenizer = ours({**spaced_vocabulary(), "add_space_prefix": False, "add_bos_token": False}, tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.encode(" hello") != tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("pre", "splitter", "starts"),
    [
        ("gpt-2", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), False),
        (
            "smollm",
            lambda: pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            False,
        ),
        ("llama-bpe", llama3, True),
        ("dbrx", llama3, False),
    ],
)
def test_byte_level_ids_are_those_of_the_original(pre: str, splitter: Any, starts: bool, tmp_path: Path) -> None:
    original = trained(splitter())
    tokenizer = ours(byte_level_vocabulary(original, pre, SPECIAL), tmp_path)
    start = [original.token_to_id(SPECIAL[0])] if starts else []
    for text in TEXTS:
        ids = original.encode(text).ids
        assert tokenizer.encode(text) == start + ids, text
        assert tokenizer.decode(ids) == original.decode(ids), text


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_ids_are_those_of_transformers_own_class(family: str, tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    core = trained(llama3(), composed=True)
    model = json.loads(core.to_str())["model"]
    original = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(each) for each in model["merges"]])
    tokenizer = ours(byte_level_vocabulary(core, "qwen2", SPECIAL), tmp_path, family)
    for text in TEXTS[:-1]:  # the last has special tokens, which that class numbers anew
        assert tokenizer.encode(text) == original.encode(text), text


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_cased_words_split_where_capitals_begin(pre: str, tmp_path: Path) -> None:
    from surgery.sources.gguf.tokenizer import SPLITS

    split = pre_tokenizers.Split(Regex(SPLITS[pre].expressions[0]), behavior="isolated")
    words = [word for word, _ in split.pre_tokenize_str("HelloWorld fooBAR I'll 1234 x//\n")]
    assert words[:4] == ["Hello", "World", " foo", "BAR"]
    assert (
        words[4:]
        == {
            "tekken": [" I", "'ll", " ", "1", "2", "3", "4", " x", "//\n"],
            "gpt-4o": [" I'll", " ", "123", "4", " x", "//\n"],
        }[pre]
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_transformers_reads_the_same_ids_from_the_files(family: str, zoo: Zoo, tmp_path: Path) -> None:
    tokenizer = {**spaced_vocabulary(), "add_space_prefix": family == "llama"}
    zoo.ingest(write_gguf(tiny_model(family), tmp_path / "m.gguf", "F16", tokenizer))
    theirs = adapt(zoo.model("m").tokenizer())
    mine = ours(tokenizer, tmp_path)
    for text in TEXTS:
        assert theirs.encode(text) == mine.encode(text), text


def test_phi3s_special_tokens_take_the_space_behind_them(tmp_path: Path) -> None:
    vocabulary = spaced_vocabulary()
    vocabulary["tokens"][-1], vocabulary["token_type"][-1] = "<|user|>", 3
    phi, llama = (ours(vocabulary, tmp_path, family) for family in ("phi3", "llama"))
    assert phi.encode("<|user|>\nhi") == phi.encode("<|user|>hi")
    assert llama.encode("<|user|>\nhi") != llama.encode("<|user|>hi")


def test_the_chat_template_is_the_files(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer = ours({**byte_level_vocabulary(trained(), "gpt-2", SPECIAL), "chat_template": template}, tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == trained().encode("<|start|>hi<|end|>").ids
    assert tokenizer.silent(trained().token_to_id("<|end|>"))


@pytest.mark.parametrize("change", [{"pre": "of-another-world"}, {"model": "bert"}])
def test_an_unknown_kind_gives_no_tokenizer(change: dict[str, str], tmp_path: Path) -> None:
    vocabulary = {**byte_level_vocabulary(trained(), "gpt-2", SPECIAL), **change}
    source = open_gguf(write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "F16", vocabulary))
    assert source.side("tokenizer.json") is None
    assert "prompts are token ids" in source.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": ["a"]}, "does not have two sides"),
        ({"merges": ["a \u2603\u2603"]}, "cannot be used"),
        ({"merges": [1, 2]}, "not an array of strings"),
        ({"tokens": ["a"] * 641}, "641 tokens"),
        ({"token_type": [1, 2]}, "one per token"),
        ({"add_bos_token": 3}, "not a bool"),
        ({"chat_template": 3}, "chat_template is not a text"),
    ],
)
def test_a_damaged_vocabulary_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    vocabulary = {**byte_level_vocabulary(trained(), "gpt-2", SPECIAL), **change}
    with pytest.raises(MalformedCheckpoint, match=message) as raised:
        open_gguf(write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "F16", vocabulary))
    assert "\n" not in str(raised.value)
