"""Lazy partitioning of full fine-tunes (BL-03, BL-04; the paper's Figure 12).

Connected components of two models that are similar enough become a block in each, and the two blocks are equivalent.
Scores are taken component by component; maximal runs above the threshold become blocks. Both chains, and those that
share with them, are recut in the transaction that stores the scores.
"""

from __future__ import annotations

import dataclasses

from surgery.partition.regroup import THRESHOLD, group_around, is_block_pair, regroup
from surgery.scoring.compare import CompareSettings, Progress, records_of, score
from surgery.scoring.comparison import Comparison
from surgery.scoring.runs import Span, equivalent_runs
from surgery.text.text import read_text
from surgery.text.tokenizers import Tokenized
from zoo.catalog import Writer
from zoo.errors import Incomparable, InputError, NotFound
from zoo.manifest import ModelManifest
from zoo.records import Equivalence, ScoredRun
from zoo.store import Store

#: The paper's T.
DEFAULT_THRESHOLD = 0.98


def check_threshold(threshold: float, source: str | None) -> None:
    """Check what can be checked before a model is read.

    Raises InputError for an invalid threshold, or text that cannot be used.
    """
    if not 0.0 <= threshold <= 1.0:
        raise InputError(f"a threshold of similarity lies between 0 and 1, and {threshold} does not")
    if source is not None:
        read_text(source)


def parent_of(manifest: ModelManifest) -> str:
    """Return the base that a model is scored against. Raises Incomparable for a model that is not a full fine-tune."""
    if manifest.kind not in ("full", "bitfit") or manifest.base is None:
        what = (
            f"it is of kind {manifest.kind}"
            if manifest.base
            else "the zoo has no base of it (say which model it is with --base)"
        )
        raise Incomparable(
            f"{manifest.name} was not scored: only full fine-tunes are held against their base, and {what}"
        )
    return manifest.base


def equate(
    store: Store,
    base: Tokenized,
    model: Tokenized,
    threshold: float = DEFAULT_THRESHOLD,
    settings: CompareSettings | None = None,
    progress: Progress | None = None,
) -> tuple[Equivalence, ...]:
    """Cut two models where they stop being similar. Another call with a different threshold moves the cuts.

    Args:
        threshold: A component's similarity must exceed it. At 1 only identical components are shared.
        settings: The probe and the device; the granularity is always components.

    Returns:
        The pairs of blocks, in order. `similarity` is measured after the run's last component, since the next component
        reads its output; the metric `lowest` is the least of its components' similarities.

    Raises:
        Incomparable, InputError, NotServable: As `surgery.scoring.compare.compare`. The chains are unchanged then.
        NotFound: A model was removed or replaced in the meantime.
    """
    check_threshold(threshold, None)
    chosen = dataclasses.replace(
        settings or CompareSettings(control=False), granularity="component", groups=None, matrix=False
    )
    found = score(store, base, model, chosen, progress)
    pairs = _block_pairs(found, base, model, threshold)
    with store.catalog.writing() as writer:
        for each in (base, model):
            _check_unchanged(writer, each)
        _write(writer, found, pairs)
    return pairs


def _block_pairs(found: Comparison, base: Tokenized, model: Tokenized, threshold: float) -> tuple[Equivalence, ...]:
    of_base, of_model = ([placed.component.digest for placed in each.manifest.components] for each in (base, model))
    runs = equivalent_runs(of_base, of_model, [pair.similarity for pair in found.pairs], threshold)
    return tuple(_block_pair(found, run, threshold) for run in runs)


def _block_pair(found: Comparison, run: Span, threshold: float) -> Equivalence:
    last = found.pairs[run.hi - 1]
    lowest = min(pair.similarity for pair in found.pairs[run.lo : run.hi])
    metrics = {**last.metrics, "lowest": lowest, THRESHOLD: threshold}
    a, b = ScoredRun(found.a, run.lo, run.hi), ScoredRun(found.b, run.lo, run.hi)
    return Equivalence("equivalent", a, b, found.probe.digest, last.similarity, last.control, metrics)


def _check_unchanged(writer: Writer, model: Tokenized) -> None:
    if writer.fingerprints().get(model.name) != model.manifest.fingerprint:
        raise NotFound(f"{model.name} was removed or replaced while it was scored")


def _write(writer: Writer, found: Comparison, pairs: tuple[Equivalence, ...]) -> None:
    """Write the scores, the blocks that replace those between these two models, and the chains."""
    group = group_around(writer, [found.a, found.b])  # includes the models that the old blocks were cut for
    both = {found.a, found.b}
    old = [
        pair for pair in writer.equivalences([found.a]) if is_block_pair(pair) and {pair.a.model, pair.b.model} == both
    ]
    writer.drop_equivalences(old)
    writer.put_equivalences(records_of(found))
    writer.put_equivalences(pairs)
    regroup(writer, group)
