"""The tokenizer of a stored model. transformers is imported only for files that nothing else can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from runtime.frontend.tokenizer import Tokenizer, adapt, adapt_core
from runtime.frontend.tokenizer_files import read_tokenizer
from zoo.errors import InputError
from zoo.manifest import ModelManifest


class StoredModelFiles(Protocol):
    """What is needed of a stored model (`zoo.handle.ModelHandle`)."""

    manifest: ModelManifest

    @property
    def config(self) -> Mapping[str, Any]: ...

    def side_file(self, path: str) -> bytes | None: ...

    def tokenizer(self) -> Any: ...


#: Files that contain a vocabulary; tokenizer_config.json alone has none.
_TOKENIZER_FILES = frozenset(
    [
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tekken.json",
    ]
)


def stored_tokenizer(model: StoredModelFiles) -> Tokenizer:
    """Return the model's tokenizer. Raises InputError if it brought none, or none that can be used; StoreError."""
    if not any(side.path in _TOKENIZER_FILES or side.path.endswith(".tiktoken") for side in model.manifest.side_files):
        # transformers would make an empty tokenizer of the family's class, which turns every text into no tokens.
        raise InputError("it brought no tokenizer")
    files = read_tokenizer(
        config_of(model), model.side_file, frozenset(side.path for side in model.manifest.side_files)
    )
    return adapt(model.tokenizer()) if files is None else adapt_core(files.core, files.chat)


def config_of(model: StoredModelFiles) -> Mapping[str, Any]:
    """Return the model's config, empty if it has none that can be read, such as an adapter without its base."""
    try:
        return model.config
    except (InputError, ValueError):
        return {}


def tokenizer_files_of(model: StoredModelFiles) -> list[tuple[str, str]]:
    """Return path and digest of the files that may be of the tokenizer, sorted: not configs of weights, no README."""
    return sorted(
        (side.path, side.blob)
        for side in model.manifest.side_files
        if not side.path.endswith(("config.json", "README.md")) or side.path.endswith("tokenizer_config.json")
    )
