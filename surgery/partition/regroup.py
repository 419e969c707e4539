"""Rewriting chains when a model or an equivalence comes or goes (BL-03, BL-04): inside the caller's transaction, so
that no reader sees it half done.

Runs that were found equivalent at a threshold (`surgery.scoring.equate`) are kept whole beside each other: both chains
are cut at their ends. It knows nothing of tensors and files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from surgery.partition.partition import partition
from zoo.catalog import Reader, Writer
from zoo.records import Equivalence

#: The metric that marks a pair as two blocks, not only a score: the threshold that it exceeded.
THRESHOLD = "threshold"


def regroup(writer: Writer, group: Mapping[str, Sequence[str]]) -> None:
    """Partition the models of a sharing group anew, and write the chains that changed.

    Args:
        group: model name -> its component digests, in order; whole sharing groups, as `Reader.sharing_group` gives
            them.
    """
    before = writer.chains(group)
    for name, blocks in partition(group, cuts_of(writer.equivalences(group), group)).items():
        if before.get(name) != blocks:
            writer.set_chain(name, blocks)


def cuts_of(pairs: Iterable[Equivalence], group: Mapping[str, Sequence[str]]) -> set[tuple[str, str]]:
    """Pairs of components that an end of an equivalent run lies between, in the chains of a group."""
    cuts: set[tuple[str, str]] = set()
    for pair in pairs:
        for run in (pair.a, pair.b) if is_block_pair(pair) else ():
            chain = group.get(run.model, ())
            cuts.update((chain[edge - 1], chain[edge]) for edge in (run.lo, run.hi) if 0 < edge < len(chain))
    return cuts


def is_block_pair(pair: Equivalence) -> bool:
    """Whether a scored pair stands for two equivalent blocks."""
    return pair.relation == "equivalent" and THRESHOLD in pair.metrics


def group_around(reader: Reader, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The sharing groups of these models and of the models that have blocks equivalent to theirs: what a change to them
    may rewrite.
    """
    block_pairs = [pair for pair in reader.equivalences(names) if is_block_pair(pair)]
    touched = {*names, *(run.model for pair in block_pairs for run in (pair.a, pair.b))}
    return reader.sharing_group({digest for chain in reader.component_digests(touched).values() for digest in chain})
