"""Recut chains when a model or an equivalence is added or removed (BL-03, BL-04), within the caller's transaction.

Readers therefore never see a partial change. Runs found equivalent at a threshold (`surgery.scoring.equate`) are kept
whole: both chains are cut at their ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from surgery.partition.partition import partition
from zoo.catalog import Reader, Writer
from zoo.records import Equivalence

#: The metric that marks a pair as two equivalent blocks, not only a score; its value is the threshold that was
#: exceeded.
THRESHOLD = "threshold"


def regroup(writer: Writer, group: Mapping[str, Sequence[str]]) -> None:
    """Partition the models of a sharing group again, and write the chains that changed.

    Args:
        group: Model name -> its component digests, in order; whole sharing groups, as `Reader.sharing_group` returns
            them.
    """
    before = writer.chains(group)
    for name, blocks in partition(group, cuts_of(writer.equivalences(group), group)).items():
        if before.get(name) != blocks:
            writer.set_chain(name, blocks)


def cuts_of(pairs: Iterable[Equivalence], group: Mapping[str, Sequence[str]]) -> set[tuple[str, str]]:
    """Return the pairs of components on either side of an equivalent run's end, in the chains of a group."""
    cuts: set[tuple[str, str]] = set()
    for pair in pairs:
        for run in (pair.a, pair.b) if is_block_pair(pair) else ():
            chain = group.get(run.model, ())
            cuts.update((chain[edge - 1], chain[edge]) for edge in (run.lo, run.hi) if 0 < edge < len(chain))
    return cuts


def is_block_pair(pair: Equivalence) -> bool:
    """Return whether a scored pair represents two equivalent blocks."""
    return pair.relation == "equivalent" and THRESHOLD in pair.metrics


def group_around(reader: Reader, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the sharing groups of these models and of models with blocks equivalent to theirs.

    These are the chains that a change to the models may recut.
    """
    block_pairs = [pair for pair in reader.equivalences(names) if is_block_pair(pair)]
    touched = {*names, *(run.model for pair in block_pairs for run in (pair.a, pair.b))}
    return reader.sharing_group({digest for chain in reader.component_digests(touched).values() for digest in chain})
