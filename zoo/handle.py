"""`ModelHandle`: one model of the zoo, to describe, load and export it.

`zoo.api.Zoo.model` returns it. Like `zoo.api` it sits above the rest of the package; torch and transformers are
imported only by the methods that need them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zoo.errors import MalformedCheckpoint
from zoo.manifest import ModelKind, ModelManifest
from zoo.store import Store
from zoo.views.blocks import BlockView, chain_of

if TYPE_CHECKING:
    from surgery.models.export import ExportReport, WrittenFile


class ModelHandle:
    """One model of the zoo, as of when the handle was made. Weights are read only by `load` and `export`."""

    def __init__(self, store: Store, manifest: ModelManifest) -> None:
        """Build a handle from a manifest; use `Zoo.model` instead."""
        self._store = store
        self.manifest = manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def kind(self) -> ModelKind:
        return self.manifest.kind

    @property
    def base(self) -> str | None:
        return self.manifest.base

    @property
    def family(self) -> str:
        return self.manifest.family

    @property
    def chain(self) -> tuple[BlockView, ...]:
        """The model's blocks in order, as the catalogue has them now: a later ingest may have cut them finer.

        Raises NotFound if the model was removed.
        """
        with self._store.catalog.reading() as reader:
            return chain_of(reader, self.manifest)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`; an adapter has its base's unless it brought its own.

        Raises MalformedCheckpoint if there is none.
        """
        found = self._json("config.json")
        if found is None:
            raise MalformedCheckpoint(f"{self.name} has no config.json")
        return found

    @cached_property
    def generation_config(self) -> dict[str, Any] | None:
        """The model's `generation_config.json`, or None."""
        return self._json("generation_config.json")

    def side_file(self, path: str) -> bytes | None:
        """Return the bytes of a file beside the weights, own or inherited; None if absent. Raises DamagedObject."""
        for side in self.manifest.side_files:
            if side.path == path:
                return self._store.read_blob(side.blob)
        return None

    def tokenizer(self) -> Any:
        """Return the model's tokenizer (`PreTrainedTokenizerBase`). Code from a checkpoint is never run.

        Raises:
            MalformedCheckpoint: The model has no tokenizer, or transformers cannot read it.
        """
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory(prefix="zoo-tokenizer-") as folder:
            self._lay_out(Path(folder))
            try:
                return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
                line = (str(error).splitlines() or [type(error).__name__])[0].replace(folder, self.name)
                raise MalformedCheckpoint(f"{self.name} has no tokenizer that transformers can read: {line}") from error

    def load(self, device: str = "cpu", dtype: str | None = None) -> Any:
        """Return the model as a `PreTrainedModel` for Trainer, peft, `generate` and lm-eval.

        A model with virtual tokens is returned as peft's model around a `PreTrainedModel`.

        Raises:
            DamagedObject: Stored bytes do not match their digest.
            NotServable: No module can represent the model exactly.
        """
        from surgery.models.load import load_model

        model = load_model(self._store, self.manifest, device=device, dtype=dtype)
        # The name as transformers and peft record it, so that an adapter trained on the model names its base.
        model.name_or_path = model.config._name_or_path = self.name
        return model

    def export(
        self, folder: str | os.PathLike[str], card: bool = False, for_engine: Literal["vllm"] | None = None
    ) -> ExportReport:
        """Write the model's files into `folder`, byte for byte as ingested; see `surgery.models.export.export`.

        Args:
            card: Also write a model card (`zoo.views.card`).
            for_engine: "vllm": a folder without weights, for vLLM with this package's plugin; see
                `surgery.vllm.folder.export_for_vllm`. It has no card.
        """
        if for_engine == "vllm":
            from surgery.vllm.folder import export_for_vllm

            return export_for_vllm(self._store, self.name, Path(folder))
        from surgery.models.export import export

        return export(self._store, self.name, Path(folder), self._card if card else None)

    def _card(self, files: Sequence[WrittenFile]) -> str:
        from zoo.views.card import CardFile, card_facts, render

        chain = self.chain
        with self._store.catalog.reading() as reader:
            facts = card_facts(reader, self.manifest, chain)
        return render(facts, [CardFile(file.path, file.nbytes, file.blake3) for file in files])

    def _json(self, path: str) -> dict[str, Any] | None:
        data = self.side_file(path)
        value = None if data is None else json.loads(data)
        if value is not None and not isinstance(value, dict):
            raise MalformedCheckpoint(f"{self.name}: {path} is not a JSON object")
        return value

    def _lay_out(self, folder: Path) -> None:
        """Write the side files into a folder, for libraries that read folders."""
        for side in self.manifest.side_files:
            path = folder / side.path
            if not path.resolve().is_relative_to(folder.resolve()):
                raise MalformedCheckpoint(
                    f"{self.name}: the catalogue holds the path {side.path!r}, which leaves the folder"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._store.read_blob(side.blob))
