"""Steps of a `virtual_cluster` in which pages go as soon as their layer is written (TI-15).

The layers of a step take equal parts of its time. While it runs, pages that it has not written yet must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runtime.types import Row, StepPlan
from tests.runtime.scheduler.virtual_copies import Node

if TYPE_CHECKING:
    from tests.runtime.scheduler.virtual_cluster import VirtualCluster


def watch(cluster: VirtualCluster, node: Node, plan: StepPlan, busy: int) -> None:
    """Let an agent see, between the layers of a step of `busy` ns that begins now, how far it is."""
    tables = node.agent._tables
    if not any(len(row.tokens) > 1 for row in plan.rows):
        return
    depths = {row.seq: tables.spec(row.seq).kv_layers for row in plan.rows}
    node.unwritten = {row.seq: _pages(node, row) for row in plan.rows}
    most = max(depths.values())
    for layer in range(1, most + 1):
        passed = {seq: min(layer, depth) for seq, depth in depths.items()}
        cluster.at(cluster.now + busy * layer // (most + 1), lambda passed=passed: _pass(cluster, node, plan, passed))


def end(node: Node) -> None:
    """Record that the step of a device is over: all of its pages may be read."""
    node.unwritten = {}


def check_read(node: Node, pages: Sequence[int], answer: Any) -> None:
    """Assert that the step under way has written these pages, or does not write them.

    The first tokens of its first page set may be there already.
    """
    for key, layers in node.unwritten.items():
        early = {page for some in layers for page in some} & set(pages)
        there = key.split("#")[0] == answer.seq and answer.hi <= node.agent._tables.book.tokens_of(key)
        assert there or not early, f"{node.name}: pages {sorted(early)} of {key} are read before they are written"


def _pass(cluster: VirtualCluster, node: Node, plan: StepPlan, passed: dict[str, int]) -> None:
    if not node.alive or node.agent._steps.number != plan.step or not node.running:
        return
    for seq, layers in node.unwritten.items():
        node.unwritten[seq] = [[] if at < passed[seq] else some for at, some in enumerate(layers)]
    cluster.obey(node, node.agent.layers_written(passed))


def _pages(node: Node, row: Row) -> list[list[int]]:
    """Return the pages that a row writes, by layer."""
    tables = node.agent._tables
    width, first = tables.spec(row.seq).page_tokens, tables.book.tokens_of(row.seq)
    groups = tables.book.groups_of(row.seq, first // width, -(-(first + len(row.tokens)) // width))
    return [list(some) for some in zip(*groups, strict=True)]
