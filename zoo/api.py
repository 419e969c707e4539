"""The facade of the zoo: one class with every operation on stored models.

    from zoo import Zoo
    with Zoo("zoo_store") as zoo:
        zoo.ingest("meta-llama/Llama-2-7b")
        model = zoo.model("7b").load()

This module, `zoo.handle` and `zoo.integrations` sit above the rest of `zoo/`: no other module of the package imports
them or `surgery`. torch and transformers are imported only by the operations that need them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zoo.aliases import roll_back, set_alias
from zoo.catalog import ModelEntry, ModelSummary
from zoo.errors import InputError
from zoo.handle import ModelHandle
from zoo.records import Alias, Equivalence
from zoo.store import Store
from zoo.upkeep.audit import Audit, audit
from zoo.upkeep.collect import Collected, collect

if TYPE_CHECKING:
    from surgery.deltas.make import DeltaReport
    from surgery.deltas.plan import Carried, Norms
    from surgery.deltas.study import Progress as DeltaProgress
    from surgery.evaluation.harness import EvalOptions
    from surgery.evaluation.promotion import Promotion
    from surgery.ingest.ingest import IngestReport, Progress
    from surgery.models.put import MadeReport
    from surgery.scoring.compare import CompareSettings as CompareSettings
    from surgery.scoring.comparison import Comparison
    from zoo.packed.pack import PackReport

__all__ = ["ModelHandle", "Zoo"]


class Zoo:
    """An open store and the operations on it. Safe for any number of processes; a context manager."""

    def __init__(
        self, path: str | os.PathLike[str] = "zoo_store", database: str | None = None, create: bool = True
    ) -> None:
        """Open the store in a folder.

        Args:
            path: The store's folder.
            database: SQLAlchemy URL of the catalogue; None for a SQLite file in the folder.
            create: Create a store if the folder has none.

        Raises:
            StoreError: The folder or the database cannot be used, or there is no store and `create` is off.
        """
        self.store = Store.open(Path(path), database, create=create)

    def ingest(
        self,
        source: str | os.PathLike[str],
        name: str | None = None,
        base: str | None = None,
        revision: str | None = None,
        allow_pickle: bool = False,
        progress: Progress | None = None,
        file: str | None = None,
        dtype: str | None = None,
    ) -> IngestReport:
        """Add a checkpoint to the zoo.

        Args:
            source: A folder (Hugging Face, PEFT or Meta's layout), a GGUF file or a hub id.
            name: Name of the model; None for the hub id, or the name of the folder or file.
            base: The model it was made from, if the checkpoint does not name it.
            revision: Revision of a hub id.
            allow_pickle: Read `*.bin` weights through torch's restricted loader.
            progress: Called with (bytes done, bytes in all).
            file: The GGUF file of a folder or repository that holds several, or other formats too.
            dtype: Dtype in which the tensors of a GGUF file are stored: float32 (when None), bfloat16 or float16.

        Raises:
            zoo.errors.ZooError: See `surgery.ingest.ingest.ingest`; nothing is left in the store then.
        """
        from surgery.ingest.ingest import ingest
        from surgery.sources import GgufChoice, open_source

        opened = open_source(os.fspath(source), revision, allow_pickle, GgufChoice(file, dtype))
        return ingest(self.store, opened, name, base, progress)

    def compose(self, composition: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None) -> MadeReport:
        """Add a chain of other models' layers to the zoo; it costs no bytes.

        Args:
            composition: A YAML file, or the same document as a mapping; see `surgery.chains.composition`.
            name: Name of the model; None for the file's name. Required for a mapping.

        Raises:
            zoo.errors.ZooError: See `surgery.chains.compose.compose`; nothing is left in the store then.
        """
        from surgery.chains.compose import compose
        from surgery.chains.composition import parse, read_composition

        if isinstance(composition, Mapping):
            if name is None:
                raise InputError("a composition that is no file needs a name")
            return compose(self.store, parse(composition), name)
        path = Path(composition)
        return compose(self.store, read_composition(path), path.stem if name is None else name)

    def delta(
        self,
        name: str,
        rank: int | None = None,
        target: float = 0.98,
        *,
        base: str | None = None,
        text: str | None = None,
        variant: str | None = None,
        embeddings: Carried = "exact",
        norms: Norms = "exact",
        device: str = "cpu",
        budget: float | None = None,
        progress: DeltaProgress | None = None,
    ) -> DeltaReport:
        """Write a full fine-tune as its base plus low-rank deltas and store the result as a new model.

        Args:
            rank: Mean rank of the deltas; None for the smallest that reaches `target`.
            target: Similarity to the exact fine-tune at the head, on held-out text.
            budget: Replaces rank and target: at most this many bytes; below 1, this share of the bytes that the
                fine-tune adds to its base.
            base: The model it was made from, if the catalogue does not have it: a fine-tune in which every tensor
                changed shares nothing with its base.
            text: Text for weighting and scoring; None for the built-in text (see `surgery.text.text.read_text`).
            variant: Name of the result.

        Raises:
            zoo.errors.ZooError: See `surgery.deltas.make.delta`; nothing is left in the store then.
        """
        from surgery.deltas.make import DeltaOptions, delta
        from surgery.deltas.windows import read_windows
        from surgery.families.settings import context_length

        options = DeltaOptions(rank, target, embeddings, norms, device=device, base=base, bytes=budget)
        model = self.model(name)
        windows = read_windows(model, text, context_length(model.config))
        return delta(self.store, model.name, windows, options, variant, progress)

    def entries(self) -> list[ModelEntry]:
        """Return all models, sorted by name, without their sizes; much cheaper than `models` in a large store."""
        with self.store.catalog.reading() as reader:
            return reader.entries()

    def models(self) -> list[ModelSummary]:
        """Return one summary per model, sorted by name."""
        with self.store.catalog.reading() as reader:
            return reader.models()

    def model(self, name: str) -> ModelHandle:
        """Return a model by its name or a unique ending of it. Raises NotFound, AmbiguousName."""
        with self.store.catalog.reading() as reader:
            return ModelHandle(self.store, reader.model(reader.resolve(name)))

    def remove(self, name: str) -> str:
        """Remove a model and return its full name. Raises NotFound, AmbiguousName, InUse."""
        from surgery.models.remove import remove

        return remove(self.store, name)

    def aliases(self) -> list[Alias]:
        """Return all aliases, sorted by name."""
        with self.store.catalog.reading() as reader:
            return reader.aliases()

    def set_alias(self, name: str, target: str) -> Alias:
        """Let a name stand for a model, or for several with shares (`a:90,b:10`); servers follow at once.

        Raises InputError, NameTaken, NotFound, AmbiguousName: see `zoo.aliases.set_alias`.
        """
        return set_alias(self.store, name, target)

    def promote(
        self, run: str, alias: str, conditions: Sequence[str], options: EvalOptions | None = None, device: str = "cpu"
    ) -> Promotion:
        """Let an alias point to a model, or a run's newest checkpoint, if it meets conditions such as `arc_easy>=live`.

        Raises as `surgery.evaluation.promotion.promote`.
        """
        from surgery.evaluation.promotion import promote

        return promote(self, run, alias, conditions, options, device)

    def roll_back(self, alias: str) -> Alias:
        """Let an alias point to what it pointed to before. Raises NotFound, InputError."""
        return roll_back(self.store, alias)

    def delete_alias(self, name: str) -> None:
        """Delete an alias; its models and its history stay. Raises NotFound."""
        with self.store.catalog.writing() as writer:
            writer.delete_alias(name)

    def compare(
        self, a: str, b: str, settings: CompareSettings | None = None, progress: Progress | None = None
    ) -> Comparison:
        """Score how similar two models are, part by part (BL-05), and store the scores.

        See `surgery.scoring.compare.compare`.

        Args:
            settings: Text, granularity, device and so on; None for layers over the built-in text.
            progress: Called with (batches done, batches in all).

        Raises:
            NotFound, AmbiguousName: No such model, or several.
            Incomparable: The models' tokenizers differ, or their hidden states cannot be read.
            InputError: The probe cannot be used.
        """
        from surgery.scoring.compare import compare

        return compare(self.store, self.model(a), self.model(b), settings, progress)

    def equate(
        self,
        name: str,
        base: str | None = None,
        threshold: float = 0.98,
        settings: CompareSettings | None = None,
        progress: Progress | None = None,
    ) -> tuple[Equivalence, ...]:
        """Cut a full fine-tune and its base where they stop being similar (BL-04); see `surgery.scoring.equate.equate`.

        Args:
            base: The model to score against; None for the model that it was made from.
            threshold: Similarity that components must exceed to form one equivalent block.

        Raises:
            NotFound, AmbiguousName: No such model, or several.
            Incomparable: The model is not a full fine-tune, or as for `compare`.
        """
        from surgery.scoring.equate import equate, parent_of

        model = self.model(name)
        return equate(self.store, self.model(base or parent_of(model.manifest)), model, threshold, settings, progress)

    def gc(self, dry_run: bool = False) -> Collected:
        """Remove objects and blobs that no model references. Raises StoreBusy, StoreError."""
        return collect(self.store, dry_run)

    def verify(self) -> Audit:
        """Re-hash everything that is stored and return what is damaged."""
        return audit(self.store)

    def pack(
        self,
        models: Collection[str] = (),
        level: int = 1,
        threads: int = 2,
        alone: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> PackReport:
        """Store full fine-tunes (`models`, or all) as differences from their bases; see `zoo.packed.pack.pack`."""
        from zoo.packed.pack import pack
        from zoo.packed.writer import Coding

        return pack(self.store, models, Coding(level=level, threads=threads), alone, dry_run, progress)

    def unpack(
        self, models: Collection[str] = (), dry_run: bool = False, progress: Progress | None = None
    ) -> PackReport:
        """Store packed tensors as plain objects again; see `zoo.packed.pack.unpack`."""
        from zoo.packed.pack import unpack

        return unpack(self.store, models, dry_run, progress)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Zoo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
