"""The facade: one import for everything that the zoo does with models.

    from zoo import Zoo
    with Zoo("zoo_store") as zoo:
        zoo.ingest("meta-llama/Llama-2-7b")
        model = zoo.model("7b").load()

It stands above the package, with `zoo.handle` and `zoo.integrations`: nothing else in `zoo/` may import these, or
surgery. torch and transformers are imported by what needs them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zoo.catalog import ModelSummary
from zoo.errors import InputError
from zoo.handle import ModelHandle
from zoo.records import Equivalence
from zoo.store import Store
from zoo.upkeep.audit import Audit, audit
from zoo.upkeep.collect import Collected, collect

if TYPE_CHECKING:
    from surgery.deltas.make import DeltaReport
    from surgery.deltas.plan import Carried, Norms
    from surgery.deltas.study import Progress as DeltaProgress
    from surgery.ingest.ingest import IngestReport, Progress
    from surgery.models.put import MadeReport
    from surgery.scoring.compare import CompareSettings as CompareSettings
    from surgery.scoring.comparison import Comparison
    from zoo.packed.pack import PackReport

__all__ = ["ModelHandle", "Zoo"]


class Zoo:
    """A store and what can be done with it. Safe for any number of processes; a context manager."""

    def __init__(
        self, path: str | os.PathLike[str] = "zoo_store", database: str | None = None, create: bool = True
    ) -> None:
        """Open the store in a folder.

        Args:
            database: SQLAlchemy URL of the catalogue, instead of a SQLite file in the folder.
            create: make a new store where there is none.

        Raises:
            StoreError: the folder or the database cannot be used, or there is no store and `create` is off.
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
    ) -> IngestReport:
        """Put a checkpoint into the zoo.

        Args:
            source: a folder (Hugging Face, PEFT or Meta's layout) or a hub id.
            name: what to call it; the hub id or the folder's name when None.
            base: the model it was made from, where that cannot be found out.
            revision: of a hub id.
            allow_pickle: read `*.bin` weights through torch's restricted loader.
            progress: called with (bytes done, bytes in all).

        Raises:
            zoo.errors.ZooError: see `surgery.ingest.ingest.ingest`; nothing is left in the store then.
        """
        from surgery.ingest.ingest import ingest
        from surgery.sources import open_source

        return ingest(self.store, open_source(os.fspath(source), revision, allow_pickle), name, base, progress)

    def compose(self, composition: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None) -> MadeReport:
        """Put a chain of other models' layers into the zoo; it costs no bytes.

        Args:
            composition: a YAML file, or the same document as a mapping; see `surgery.chains.composition`.
            name: what to call it; the file's name when None, needed for a mapping.

        Raises:
            zoo.errors.ZooError: see `surgery.chains.compose.compose`; nothing is left in the store then.
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
        """Write a full fine-tune as its base plus low-rank deltas and keep that beside it.

        Args:
            rank: of the deltas, in the mean; the smallest that reaches `target` when None.
            target: similarity to the exact fine-tune at the head, on held-out text.
            budget: instead of rank and target, at most so many bytes; below 1, this share of what the fine-tune adds to
                its base.
            base: what it was made from, where the catalogue does not know: a fine-tune of which every tensor moved
                shares nothing.
            text: what to weigh and score on; the built-in text when None (see `surgery.text.text.read_text`).
            variant: what to call the result.

        Raises:
            zoo.errors.ZooError: see `surgery.deltas.make.delta`; nothing is left in the store then.
        """
        from surgery.deltas.make import DeltaOptions, delta
        from surgery.deltas.windows import read_windows
        from surgery.families.settings import context_length

        options = DeltaOptions(rank, target, embeddings, norms, device=device, base=base, bytes=budget)
        model = self.model(name)
        windows = read_windows(model, text, context_length(model.config))
        return delta(self.store, model.name, windows, options, variant, progress)

    def models(self) -> list[ModelSummary]:
        """One line per model, sorted by name."""
        with self.store.catalog.reading() as reader:
            return reader.models()

    def model(self, name: str) -> ModelHandle:
        """A model by its name or a unique ending of it. Raises NotFound, AmbiguousName."""
        with self.store.catalog.reading() as reader:
            return ModelHandle(self.store, reader.model(reader.resolve(name)))

    def remove(self, name: str) -> str:
        """Remove a model; its full name. Raises NotFound, AmbiguousName, InUse."""
        from surgery.models.remove import remove

        return remove(self.store, name)

    def compare(
        self, a: str, b: str, settings: CompareSettings | None = None, progress: Progress | None = None
    ) -> Comparison:
        """How alike two models are, part by part (BL-05); the scores are kept. See `surgery.scoring.compare.compare`.

        Args:
            settings: text, granularity, device and so on; layers over the built-in text when None.
            progress: called with (batches done, batches in all).

        Raises:
            NotFound, AmbiguousName: no such model, or several.
            Incomparable: the models' tokenizers differ, or their states cannot be read.
            InputError: the probe cannot be used.
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
        """Cut a full fine-tune and its base where they stop being alike (BL-04); see `surgery.scoring.equate.equate`.

        Args:
            base: what to score it against; the model it was made from when None.
            threshold: similarity that components must exceed to be one equivalent block.

        Raises:
            NotFound, AmbiguousName: no such model, or several.
            Incomparable: the model is no full fine-tune, or as `compare`.
        """
        from surgery.scoring.equate import equate, parent_of

        model = self.model(name)
        return equate(self.store, self.model(base or parent_of(model.manifest)), model, threshold, settings, progress)

    def gc(self, dry_run: bool = False) -> Collected:
        """Remove what no model names. Raises StoreBusy, StoreError."""
        return collect(self.store, dry_run)

    def verify(self) -> Audit:
        """Re-hash everything that is stored."""
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
        """Store full fine-tunes (these, or all) as differences from their bases; see `zoo.packed.pack.pack`."""
        from zoo.packed.pack import pack
        from zoo.packed.writer import Coding

        return pack(self.store, models, Coding(level=level, threads=threads), alone, dry_run, progress)

    def unpack(
        self, models: Collection[str] = (), dry_run: bool = False, progress: Progress | None = None
    ) -> PackReport:
        """Store packed tensors plainly again; see `zoo.packed.pack.unpack`."""
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
