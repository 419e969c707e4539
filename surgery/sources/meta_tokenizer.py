"""Convert Meta's `tokenizer.model` to `tokenizer.json`: SentencePiece (Llama 1, 2, Code Llama) or tiktoken (Llama 3).

The pieces and merges come from transformers' own converters. The rest (marking of spaces, position of <s>) is set to
the behaviour of the original libraries, so that both give the same ids for any text.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.sources.base import SourceSide
from surgery.sources.meta_params import TokenizerKind
from zoo.errors import InputError, MalformedCheckpoint

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,9}")
_SPECIALS = 256


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """Result of a conversion.

    Fields:
        eos: Every token that ends an answer, the base model's first.
        size: Number of ids.
        sides: The files to store.
    """

    kind: TokenizerKind
    bos: int
    eos: tuple[int, ...]
    size: int
    sides: tuple[SourceSide, ...]


def tokenizer_kind(data: bytes) -> TokenizerKind:
    """Return the kind: tiktoken ranks are lines of base64 and a number; SentencePiece is a protocol buffer."""
    return "tiktoken" if _RANK_LINE.fullmatch(data.split(b"\n", 1)[0].strip()) else "sentencepiece"


def convert_tokenizer(data: bytes, *, scaled_rope: bool, context: int, instruct: bool) -> ConvertedTokenizer:
    """Convert the bytes of a `tokenizer.model`.

    Args:
        scaled_rope: Llama 3.1 or later, which names its reserved tokens differently from Llama 3.
        context: Positions, for `model_max_length`.
        instruct: Tuned for chat: a chat template is added, and the end of turn becomes the tokenizer's eos token.

    Raises:
        InputError: The library that reads SentencePiece files is not installed.
        MalformedCheckpoint: The file is damaged.
    """
    if tokenizer_kind(data) == "tiktoken":
        return _from_tiktoken(data, scaled_rope, context, instruct)
    return _from_sentencepiece(data, context, instruct)


def _from_sentencepiece(data: bytes, context: int, instruct: bool) -> ConvertedTokenizer:
    from tokenizers import normalizers, processors

    tokenizer = _sentencepiece_backend(data)
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    if bos is None or eos is None:
        raise MalformedCheckpoint("tokenizer.model has no <s> or no </s>")
    # transformers 5 marks the first word by a pre-tokenizer that leaves texts with leading spaces one mark short.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.model.unk_token = "<unk>"  # noqa: S105
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", bos)]
    )
    config = _config("<s>", "</s>", context) | {"unk_token": "<unk>"}
    sides = _sides(tokenizer.to_str(), config, _LLAMA2_CHAT if instruct else None)
    return ConvertedTokenizer(
        "sentencepiece", bos, (eos,), tokenizer.get_vocab_size(), (*sides, SourceSide("tokenizer.model", data))
    )


def _sentencepiece_backend(data: bytes) -> Any:
    """Return the `tokenizers.Tokenizer` that transformers makes of the pieces."""
    try:
        importlib.import_module("sentencepiece")
        decode_error = importlib.import_module("google.protobuf.message").DecodeError
    except ImportError as error:
        reason = f"this checkpoint's tokenizer is a SentencePiece file, and {error.name} is not installed"
        raise InputError(f"{reason}: pip install 'blockzoo[meta]'") from None
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.model")
        path.write_bytes(data)
        try:
            # Parse first: transformers would take a damaged file for another format and report that at length.
            pieces = len(SentencePieceExtractor(str(path)).proto.pieces)
        except decode_error:
            pieces = 0
        if pieces < 3:
            raise MalformedCheckpoint("tokenizer.model is neither a SentencePiece model nor tiktoken ranks")
        return LlamaTokenizer.from_pretrained(folder).backend_tokenizer


def _from_tiktoken(data: bytes, scaled_rope: bool, context: int, instruct: bool) -> ConvertedTokenizer:
    from tokenizers import processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks, specials = _ranks(data), _llama3_specials(scaled_rope)
    converter = TikTokenConverter(vocab_file="", extra_special_tokens=specials)
    # tiktoken's own reader caches by file name, so it could return another file of that name.
    converter.load_tiktoken_bpe = lambda _: ranks
    tokenizer = converter.converted()
    start, ends = (
        "<|begin_of_text|>",
        [end for end in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>") if end in specials],
    )
    bos = tokenizer.token_to_id(start)
    template = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start}:0 $A:0 {start}:1 $B:1", special_tokens=[(start, bos)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    config = _config(start, ends[-1] if instruct else ends[0], context)
    sides = _sides(tokenizer.to_str(), config, _LLAMA3_CHAT if instruct else None)
    # Not beside tokenizer.json, where tools would read it as SentencePiece; Hugging Face's repositories use this path
    # too.
    kept = SourceSide("original/tokenizer.model", data)
    eos = tuple(tokenizer.token_to_id(end) for end in ends)
    return ConvertedTokenizer("tiktoken", bos, eos, tokenizer.get_vocab_size(), (*sides, kept))


def _ranks(data: bytes) -> dict[bytes, int]:
    """Return token bytes -> rank from lines of base64, a space and the rank; ranks are consecutive from 0."""
    ranks: dict[bytes, int] = {}
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise MalformedCheckpoint(f"tokenizer.model: {line[:40]!r} is not a token and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise MalformedCheckpoint("tokenizer.model: the ranks are not 0, 1, 2, ... once each")
    return ranks


def _llama3_specials(scaled_rope: bool) -> list[str]:
    """Return the 256 special tokens that follow the ranks, in order of id (Llama 3, or 3.1 and later)."""
    names = ["begin_of_text", "end_of_text", "RESERVED", "RESERVED"]
    if scaled_rope:
        names += [
            "finetune_right_pad_id",
            "RESERVED",
            "start_header_id",
            "end_header_id",
            "eom_id",
            "eot_id",
            "python_tag",
        ]
    else:
        names += ["RESERVED", "RESERVED", "start_header_id", "end_header_id", "RESERVED", "eot_id"]
    names += ["RESERVED"] * (_SPECIALS - len(names))
    numbers = iter(range(_SPECIALS))
    return [f"<|reserved_special_token_{next(numbers)}|>" if name == "RESERVED" else f"<|{name}|>" for name in names]


def _config(bos: str, eos: str, context: int) -> dict[str, Any]:
    # This class uses tokenizer.json as it is; LlamaTokenizer would build its own pre-tokenizer around the pieces.
    return {
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _sides(tokenizer: str, config: dict[str, Any], template: str | None) -> list[SourceSide]:
    sides = [
        SourceSide("tokenizer.json", tokenizer.encode()),
        SourceSide("tokenizer_config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()),
    ]
    if template is not None:
        sides.append(SourceSide("chat_template.jinja", template.encode()))
    return sides


_LLAMA2_CHAT = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, user, ...') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + ((system if loop.first else '') + message['content']) | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

_LLAMA3_CHAT = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + "
    "'<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
