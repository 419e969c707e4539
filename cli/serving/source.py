"""Give the server access to the catalogue: names, listings, and models with their tokenizers.

transformers is imported only for tokenizers that nothing else can read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli.shared.documents import model_document
from cli.shared.output import say
from runtime.frontend.served_models import ServedModel, defaults_from
from runtime.frontend.stored_tokenizer import config_of, stored_tokenizer, tokenizer_files_of
from runtime.frontend.tokenizer import NoTokenizer, Tokenizer
from runtime.heap import give_back_memory
from runtime.types import ModelSpec
from zoo.errors import InputError, StoreError
from zoo.views.exits import chain_id, exit_ids

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo


def tokenizer_of(model: ModelHandle) -> Tokenizer:
    """Return the model's tokenizer.

    Without a usable one, print a note and return `NoTokenizer` (token ids still work).
    """
    try:
        return stored_tokenizer(model)
    except StoreError:
        raise
    except InputError as error:
        say(f"note: {model.name} takes token ids only: {error}")
        return NoTokenizer()


class ZooSource:
    """The catalogue as `runtime.server.interfaces.ModelSource`."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        #: One tokenizer for all models with equal files and an equal config.
        self._tokenizers: dict[str, Tokenizer] = {}

    def resolve(self, name: str) -> str:
        with self._zoo.store.catalog.reading() as reader:
            return reader.resolve(name)

    def listing(self) -> list[Mapping[str, Any]]:
        return [model_document(model) for model in self._zoo.models()]

    def served(self, spec: ModelSpec) -> ServedModel:
        model = self._zoo.model(spec.name)
        with self._zoo.store.catalog.reading() as reader:
            created = reader.created(model.name)
        return ServedModel(
            spec=spec,
            tokenizer=self._tokenizer(model),
            defaults=defaults_from(model.generation_config),
            created=int(created.timestamp()),
            chain=chain_id(model.manifest.components),
            exits=exit_ids(model.manifest),
        )

    def read_tokenizers(self, names: Sequence[str]) -> None:
        """Read the tokenizers of models ahead of `served`. Raises as that does."""
        for name in names:
            self._tokenizer(self._zoo.model(name))

    def _tokenizer(self, model: ModelHandle) -> Tokenizer:
        key = json.dumps([tokenizer_files_of(model), config_of(model)], sort_keys=True, default=str)
        if key not in self._tokenizers:
            self._tokenizers[key] = tokenizer_of(model)
            give_back_memory()
        return self._tokenizers[key]
