"""Rewriting chains when a model comes or goes (BL-03, BL-04): inside the caller's transaction, so that no reader sees it half done.

It knows nothing of tensors and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surgery.partition import partition
from zoo.catalog import Writer


def regroup(writer: Writer, group: Mapping[str, Sequence[str]]) -> None:
    """Partition the models of a sharing group anew, and write the chains that changed.

    Args:
        group: model name -> its component digests, in order; whole sharing groups, as `Reader.sharing_group` gives them.
    """
    before = writer.chains(group)
    for name, blocks in partition(group).items():
        if before.get(name) != blocks:
            writer.set_chain(name, blocks)
