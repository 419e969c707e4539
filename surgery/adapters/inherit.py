"""Choose the side files that an adapter's model inherits from its base: config, generation config and tokenizer.

A tokenizer consists of several files: an adapter that brings any of them inherits none. Works on paths only.
"""

from __future__ import annotations

from collections.abc import Iterable

from zoo.manifest import SideFile

#: A folder with one of these has a tokenizer of its own.
_TOKENIZER_MARKS = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"})
_SINGLE = frozenset({"config.json", "generation_config.json"})
_TOKENIZER_FILES = frozenset(
    [
        *(
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "vocab.json",
            "vocab.txt",
            "merges.txt",
            "spiece.model",
        ),
        *(
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.jinja",
            "chat_template.json",
            "sentencepiece.bpe.model",
        ),
    ]
)
_TOKENIZER_FOLDER = "additional_chat_templates/"


def inherited(base: Iterable[SideFile], own: Iterable[str]) -> tuple[SideFile, ...]:
    """Return the base's side files that the adapter's model uses, marked as inherited.

    Args:
        own: Paths of the adapter's own files.
    """
    mine = set(own)
    brings_tokenizer = not mine.isdisjoint(_TOKENIZER_MARKS)

    def wanted(path: str) -> bool:
        if path in mine:
            return False
        return path in _SINGLE or (not brings_tokenizer and _is_tokenizer_file(path))

    return tuple(SideFile(side.path, side.blob, side.nbytes, inherited=True) for side in base if wanted(side.path))


def _is_tokenizer_file(path: str) -> bool:
    return path in _TOKENIZER_FILES or path.startswith(_TOKENIZER_FOLDER) or path.endswith(".tiktoken")
