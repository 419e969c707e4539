"""Tokenizers read without transformers give the same IDs, text, special tokens and chats as `AutoTokenizer`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime.frontend.tokenizer import adapt, adapt_core
from runtime.frontend.tokenizer_files import TokenizerFiles, read_tokenizer

CORPUS = [
    "Hello world, this is text number 12345.",
    "naïve é 你好 😀 foo's  bar\n\n\tx = y**2",
    "The capital of France is Paris",
] * 4
TEXTS = [
    "Hello world, 12345 foo's",
    "  lead <s>user\nhi</s> tail",
    "naïve é 你好 😀\n\n\t x",
    "</s>",
    "a  b   c",
    "",
    "x = y**2  # Paris\r\n",
    "<tool> in <tool>",
    "e\u0301",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
MESSAGES = [{"role": "user", "content": "hi <s> there"}]
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"


def byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return core


def unigram() -> Tokenizer:
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>"))  # noqa: S106
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return core


def sentence_piece() -> Tokenizer:
    """Return a tokenizer like Llama 2's: pieces with metaspaces, and byte fallback."""
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(256))]
    core.train_from_iterator(
        CORPUS[:1], trainers.BpeTrainer(vocab_size=320, special_tokens=pieces, show_progress=False)
    )
    saved = json.loads(core.to_str())
    saved["added_tokens"] = saved["added_tokens"][: len(SPECIAL)]  # the byte tokens are not special
    core = Tokenizer.from_str(json.dumps(saved))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return core


CORES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "unigram": unigram,
    "sentence-piece": sentence_piece,
}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write(folder: Path, core: Tokenizer, family: str, settings: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, **settings}))
    return folder


def read(folder: Path) -> TokenizerFiles | None:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return read_tokenizer(json.loads(files["config.json"]), files.get, frozenset(files))


def check_same(folder: Path) -> Any:
    """Compare our tokenizer with that of transformers, and return the latter."""
    from transformers import AutoTokenizer

    files, theirs = read(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert files is not None, "it was left to transformers"
    ours, by_them = adapt_core(files.core, files.chat), adapt(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == ids, text
            assert ours.decode(ids) == theirs.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ), text
    known = range(len(theirs) + 3)
    assert [ours.silent(id_) for id_ in known] == [by_them.silent(id_) for id_ in known]
    assert [ours.token_bytes(id_) for id_ in known] == [by_them.token_bytes(id_) for id_ in known]
    assert (ours.byte_fallback, ours.bytewise) == (by_them.byte_fallback, by_them.bytewise)
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.encode_chat(MESSAGES) == theirs(text, add_special_tokens=False)["input_ids"]
    return theirs


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", CORES)
def test_files_as_they_are(tmp_path: Path, kind: str, family: str) -> None:
    if (kind, family) == ("unigram", "qwen2"):
        pytest.skip("transformers reads every tokenizer of this family as a byte-level BPE")
    theirs = check_same(write(tmp_path, CORES[kind](), family, CONFIG))
    assert theirs("Hello")["input_ids"]


@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        ("sentence-piece", "LlamaTokenizer", {}),
        ("sentence-piece", "LlamaTokenizerFast", {"legacy": True}),
        (
            "sentence-piece",
            "LlamaTokenizer",
            {"add_prefix_space": False, "add_bos_token": False, "add_eos_token": True},
        ),
        ("byte-level", "GPT2Tokenizer", {}),
        ("byte-level", "GPT2Tokenizer", {"add_prefix_space": True}),
        ("byte-level", "Qwen2Tokenizer", {"bos_token": None, "pad_token": "<pad>"}),
        ("byte-level", "Qwen2TokenizerFast", {"add_prefix_space": True}),
    ],
)
def test_classes_that_build_their_own_around_the_vocabulary(
    tmp_path: Path, kind: str, name: str, more: dict[str, Any]
) -> None:
    theirs = check_same(write(tmp_path, CORES[kind](), "llama", {**CONFIG, "tokenizer_class": name, **more}))
    assert type(theirs).__name__ == name.removesuffix("Fast")


def token(text: str, special: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "content": text,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": special,
        **more,
    }


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize(
    "more",
    [
        {"additional_special_tokens": ["<tool>", "</s>"]},
        {
            "added_tokens_decoder": {
                **{str(i): token(each) for i, each in enumerate(SPECIAL)},
                "400": token("<tool>", False, lstrip=True),
            }
        },
        {"eos_token": {"__type": "AddedToken", **token("<end>", rstrip=True)}, "pad_token": "<none>"},
        {"clean_up_tokenization_spaces": True, "model_max_length": 3},
    ],
)
def test_tokens_that_only_the_config_has(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    check_same(write(tmp_path, CORES[kind](), "llama", {**CONFIG, **more}))


def test_added_tokens_padding_and_truncation_of_the_file(tmp_path: Path) -> None:
    core = byte_level()
    core.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("<note>", normalized=True)])
    core.add_special_tokens([AddedToken("<think>")])
    core.enable_padding(pad_id=3, pad_token="<pad>", length=40)  # noqa: S106
    core.enable_truncation(2)
    folder = write(tmp_path, core, "llama", CONFIG)
    files = read(folder)
    assert files is not None
    ours = adapt_core(files.core, files.chat)
    assert ours.decode(ours.encode("Hello world, 12345 <tool> and <note>")) == "Hello world, 12345<tool>and <note>"


def test_older_file_of_special_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), "llama", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": token("<s>"), "eos_token": "</s>", "pad_token": "<pad>"})
    )
    theirs = check_same(folder)
    assert theirs.bos_token == "<s>"  # noqa: S105


@pytest.mark.parametrize(
    "template",
    [CHAT, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT}]],
    ids=["one", "named"],
)
@pytest.mark.parametrize("file", [False, True])
def test_where_templates_are(tmp_path: Path, template: Any, file: bool) -> None:
    folder = write(tmp_path, byte_level(), "llama", {**CONFIG, "chat_template": template})
    if file:
        (folder / "chat_template.jinja").write_text("{{ eos_token }}the file")
    check_same(folder)


@pytest.mark.parametrize(
    ("change", "family"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "llama"),
        (lambda folder: (folder / "tekken.json").write_text("{}"), "mistral"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "llama"),
        (lambda folder: reword(folder, tokenizer_class="BertTokenizer"), "llama"),
        (lambda folder: reword(folder, auto_map={"AutoTokenizer": ["x.Y", None]}), "llama"),
        (lambda folder: reword(folder, split_special_tokens=True), "llama"),
        (lambda folder: reword(folder, image_token="<image>"), "llama"),  # noqa: S106
        (
            lambda folder: reword(folder, tokenizer_class="GPT2Tokenizer", added_tokens_decoder={"0": token("<unk>")}),
            "llama",
        ),
        (lambda folder: None, "bert"),
    ],
)
def test_what_is_not_known_to_come_out_the_same_is_left_to_transformers(
    tmp_path: Path, change: Any, family: str
) -> None:
    folder = write(tmp_path, byte_level(), family, CONFIG)
    change(folder)
    assert read(folder) is None


def reword(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_the_words_of_qwen_are_transformers() -> None:
    """Qwen's class splits words by this expression, whatever the tokenizer file contains."""
    from transformers.models.qwen2 import tokenization_qwen2

    from runtime.frontend import tokenizer_files

    assert re.escape(tokenizer_files._QWEN_WORDS) == re.escape(tokenization_qwen2.PRETOKENIZE_REGEX)
