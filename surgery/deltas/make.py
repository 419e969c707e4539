"""Rewrite a full fine-tune as base + low-rank deltas, stored as a model of its own (an addition to the papers).

The process finds the smallest rank that keeps the predictions similar enough on held-out text, writes the result as a
PEFT folder, ingests it, and stores its scores as a relation of the two models. The exact model is unchanged. Costly
intermediate results are kept under `<store>/work/` until the variant is stored, so an interrupted run resumes, also
with another rank, target or name.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.deltas.curve import Allocation, Curve, CurvePoint, Ranks, compare_stacks, sizes_of
from surgery.deltas.folder import write_folder
from surgery.deltas.plan import Carried, DeltaPlan, Norms, plan_deltas
from surgery.deltas.ranks import smallest
from surgery.deltas.score import DeltaScore
from surgery.deltas.study import Progress, Studied, StudySettings, layer_ends, rank_limit, study
from surgery.deltas.trial import Trial
from surgery.ingest.ingest import IngestReport, ingest
from surgery.modules.stack import open_stack
from surgery.scoring.twins import random_twin
from surgery.sources import open_source
from surgery.text.text import Probe
from surgery.training.checkpoint import TaskFolder
from zoo.catalog.names import check_name
from zoo.errors import InputError
from zoo.manifest import ModelManifest
from zoo.records import Equivalence, ScoredRun
from zoo.store import Store

#: Format version of a task's folder.
_VERSION = 1


@dataclass(frozen=True)
class Windows:
    """Token ids [windows, tokens] and the digest of what the result is scored on.

    Fields:
        train: Windows that weight the deltas.
        held: Windows that score the result.
    """

    train: Tensor
    held: Tensor
    digest: str


@dataclass(frozen=True)
class DeltaOptions:
    """Options of `delta`.

    Fields:
        rank: Rank to use; None for the smallest that reaches `target`.
        bytes: Replaces rank and target: at most this many bytes; below 1, this share of the bytes that the exact
            fine-tune adds to its base.
        base: Base of a fine-tune that shares too little for its base to be known.
        embeddings: See `surgery.deltas.plan`, as for `norms`.
        aware: See `study.StudySettings`, as for `diagonal`.
        allocation: See `Curve`.
    """

    rank: int | None = None
    target: float = 0.98
    embeddings: Carried = "exact"
    norms: Norms = "exact"
    allocation: Allocation = "spread"
    aware: bool = True
    diagonal: bool = False
    device: str = "cpu"
    base: str | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise InputError(f"a rank is at least 1, not {self.rank}")
        if not 0.0 < self.target <= 1.0:
            raise InputError(f"the target is a similarity in (0, 1], not {self.target}")
        if self.bytes is not None and (self.rank is not None or not 0 < self.bytes < math.inf):
            raise InputError("a budget of bytes is above 0 and stands in place of a rank")


@dataclass(frozen=True)
class DeltaReport:
    """The result of `delta`. Bytes are of tensors that the base does not have.

    Fields:
        similarity: Mean over held-out tokens (BL-05).
        base_similarity: Similarity of the base itself.
        control: Similarity of a randomly initialised twin.
        curve: Every rank that was scored, in order.
    """

    variant: str
    model: str
    base: str
    rank: int
    ranks: dict[str, int]
    similarity: float
    score: DeltaScore
    base_similarity: float
    control: float
    bytes: int
    bytes_exact: int
    curve: tuple[CurvePoint, ...]
    layers: tuple[float, ...]
    probe: str
    tokens: int


def delta(
    store: Store,
    name: str,
    windows: Windows,
    options: DeltaOptions,
    variant: str | None = None,
    progress: Progress | None = None,
) -> DeltaReport:
    """Rewrite a full fine-tune and store the result.

    Args:
        name: The fine-tune's name or a unique ending of it.
        variant: Name of the result; `<model>@delta-r<rank>` when None.

    Raises:
        InputError: The model is not a full fine-tune, nothing can be saved, no smaller rewriting reaches the target,
            values are not finite, or `variant` is not a valid name.
        WrongBase: Base and fine-tune have different structures.
        NotFound, AmbiguousName, NameTaken, StoreError: As an ingest does.
    """
    if variant is not None:
        check_name(variant)
    with store.keeping(), opened(store, name, windows, options, progress) as work:
        ranks = _ranks(work, options)
        point = work.curve.score(ranks)
        layers = work.curve.layers(ranks)
        called = variant if variant is not None else f"{work.exact.name}@delta-{_label(ranks, options)}"
        _ingest(store, work, ranks, called)
        of_base, of_twin = _others(store, work, windows.held, options.device)
        pairs = _pairs(work, called, point, layers, windows.digest, of_base, of_twin)
        with store.catalog.writing() as writer:
            writer.put_equivalences(pairs)
    return DeltaReport(
        variant=called,
        model=work.exact.name,
        base=work.base.name,
        rank=ranks.rank,
        ranks={matrix.path: each for matrix, each in zip(work.plan.matrices, ranks.each, strict=True)},
        similarity=point.score.similarity,
        score=point.score,
        base_similarity=of_base.similarity,
        control=of_twin[max(of_twin)].similarity,
        bytes=point.bytes,
        bytes_exact=work.bytes_exact,
        curve=work.curve.points,
        layers=tuple(score.similarity for score in layers.values()),
        probe=windows.digest,
        tokens=windows.held.numel(),
    )


@dataclass(frozen=True)
class DeltaWork:
    """A decomposed fine-tune, ready to be scored at any rank."""

    exact: ModelManifest
    base: ModelManifest
    plan: DeltaPlan
    studied: Studied
    trial: Trial
    curve: Curve
    bytes_exact: int


@contextmanager
def opened(
    store: Store, name: str, windows: Windows, options: DeltaOptions, progress: Progress | None = None
) -> Iterator[DeltaWork]:
    """Decompose a fine-tune.

    The factors are kept in a folder of the store, which is removed when the context ends without an error.

    Raises as `delta`; StoreBusy if another process runs the same task.
    """
    with store.catalog.reading() as reader:
        exact = reader.model(reader.resolve(name))
        named = exact.base if options.base is None else reader.resolve(options.base)
        base = None if named is None else reader.model(named)
    plan = plan_deltas(exact, base, options.embeddings, options.norms)
    parent = exact if base is None else base
    how = StudySettings(options.aware, options.diagonal, options.allocation == "spread", options.device, options.rank)
    task = TaskFolder(store.root, "delta", _described(exact, parent, plan, windows, how))
    with task.held():
        studied = study(store, exact, plan, windows.train, windows.held, task, how, progress)
        trial = Trial(store, exact, plan, studied.factors, options.device)
        sizes = sizes_of(exact, parent, plan)
        curve = Curve(exact, plan, studied, trial, windows.held, sizes, options.allocation, task)
        yield DeltaWork(exact, parent, plan, studied, trial, curve, sizes.exact)
        task.remove_folder()


def _described(
    exact: ModelManifest, base: ModelManifest, plan: DeltaPlan, windows: Windows, how: StudySettings
) -> dict[str, Any]:
    """Return everything that factors and scores depend on: not the requested rank, target, bytes or name."""
    return {
        "version": _VERSION,
        "models": [exact.fingerprint, base.fingerprint],
        "plan": repr(plan),
        "limits": [rank_limit(matrix, how.rank) for matrix in plan.matrices],
        "windows": [Probe("", "", part).digest for part in (windows.train, windows.held)],
        "how": [how.aware, how.diagonal, how.effects, how.device.partition(":")[0]],
        "torch": torch.__version__,
    }


def _ranks(work: DeltaWork, options: DeltaOptions) -> Ranks:
    if options.bytes is not None:
        return work.curve.by_bytes(int(options.bytes if options.bytes >= 1 else options.bytes * work.bytes_exact))
    return work.curve.by_rank(options.rank if options.rank is not None else _found(work, options.target))


def _label(ranks: Ranks, options: DeltaOptions) -> str:
    """Return the label in the name of a variant that was given none."""
    if options.bytes is None:
        return f"r{ranks.rank}"
    return f"{options.bytes * 100:g}pct" if options.bytes < 1 else f"{int(options.bytes)}b"


def _found(work: DeltaWork, target: float) -> int:
    """Return the smallest rank that reaches the target.

    Raises InputError if no rewriting smaller than the exact fine-tune does.
    """
    highest = work.curve.highest
    rank = smallest(lambda each: work.curve.at(each).score.similarity >= target, highest)
    if rank is not None:
        return rank
    if highest < 1:
        raise InputError(
            f"what {work.exact.name} carries whole takes all its bytes: no low-rank delta is smaller (see "
            "--embeddings lowrank)"
        )
    best = work.curve.at(highest)
    raise InputError(
        f"no rewriting of {work.exact.name} that is smaller than itself reaches {target}: at rank {highest} it is at "
        f"{best.score.similarity:.4f} with {best.bytes:,} of {work.bytes_exact:,} bytes; --rank stores it all the same"
    )


def _ingest(store: Store, work: DeltaWork, ranks: Ranks, called: str) -> IngestReport:
    with tempfile.TemporaryDirectory(prefix="zoo-delta-") as folder:
        write_folder(Path(folder), store, work.exact, work.base.name, work.plan, work.studied.factors, ranks.each)
        source = dataclasses.replace(open_source(folder), origin=f"delta of {work.exact.name}, rank {ranks.rank}")
        return ingest(store, source, called, work.base.name, kind="delta")


@torch.inference_mode()
def _others(store: Store, work: DeltaWork, held: Tensor, device: str) -> tuple[DeltaScore, dict[int, DeltaScore]]:
    """Return the scores of the base at the head, and of a randomly initialised twin after every layer."""
    ends = layer_ends(work.exact)
    of_base = compare_stacks(work.studied, open_stack(store, work.base, device), held, ends[-1:])[ends[-1]]
    return of_base, compare_stacks(work.studied, random_twin(store, work.exact, device=device), held, ends)


def _pairs(
    work: DeltaWork,
    variant: str,
    point: CurvePoint,
    layers: dict[int, DeltaScore],
    probe: str,
    of_base: DeltaScore,
    of_twin: dict[int, DeltaScore],
) -> list[Equivalence]:
    """Return the pair of whole chains, and one pair per layer with the score of the chain's output up to that layer."""
    name, end = work.exact.name, len(work.exact.components)
    extra = {
        "rank": float(point.rank),
        "bytes": float(point.bytes),
        "base": of_base.similarity,
        **_metrics(point.score),
    }
    runs = ScoredRun(name, 0, end), ScoredRun(variant, 0, end)
    pairs = [Equivalence("delta", *runs, probe, point.score.similarity, of_twin[max(of_twin)].similarity, extra)]
    for hi, score in layers.items():
        layer = work.exact.components[hi].layer
        lo = next(at for at, placed in enumerate(work.exact.components) if placed.layer == layer)
        runs = ScoredRun(name, lo, hi + 1), ScoredRun(variant, lo, hi + 1)
        pairs.append(Equivalence("delta", *runs, probe, score.similarity, of_twin[hi].similarity, _metrics(score)))
    return pairs


def _metrics(score: DeltaScore) -> dict[str, float]:
    values: dict[str, Any] = dataclasses.asdict(score)
    del values["similarity"]
    return values
