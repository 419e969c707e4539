"""Two kinds of tokenizer for tests of text: byte-level BPE, and SentencePiece with byte fallback and leading spaces."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.checkpoints import tokenizer_files


@functools.lru_cache(maxsize=1)
def byte_level(folder: Path) -> Any:
    """Return the tests' byte-level BPE as transformers loads it."""
    from transformers import AutoTokenizer

    tokenizer_files(folder)
    return AutoTokenizer.from_pretrained(folder)


@functools.lru_cache(maxsize=1)
def sentence_piece() -> Any:
    """Return a tokenizer shaped like Llama 2's: metaspace pieces, 256 byte tokens, its decoder and its BOS."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += [
        "\u2581",
        *"abcdehlorw.,!é你",
        "\u2581h",
        "\u2581he",
        "ll",
        "\u2581hell",
        "or",
        "\u2581w",
        "\u2581\u2581",
        "\ufffd",
    ]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    merges = [
        ("\u2581", "h"),
        ("\u2581h", "e"),
        ("l", "l"),
        ("\u2581he", "ll"),
        ("o", "r"),
        ("\u2581", "w"),
        ("\u2581", "\u2581"),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")  # noqa: S106


def byte_level_with_added(folder: Path, *texts: str) -> Any:
    """Return the byte-level tokenizer with added tokens, none of them special."""
    from transformers import AutoTokenizer

    tokenizer_files(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(texts))
    return tokenizer
