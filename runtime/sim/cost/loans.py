"""Compute what attention to K and V on another device costs: bytes that travel, and time for each layer (IL-27, IL-29).

    debtor:   queries --> creditor              meanwhile: attention to the tokens here
    creditor: attention to the lent tokens, at its own bandwidth
    debtor:   <-- result, sum and exponent      then both are merged

For each layer a step waits for what the slowest creditor takes beyond the attention here: a maximum, not a sum. Bytes
are those that engines on GPUs send (`engine.attention.away`): queries in 16 bits, results in 32, sums and exponents in
64.

Pulling K and V over instead is priced for comparison (Figure 12). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtime.sim.cost.blocks import TableCost, table_cost
from runtime.sim.cost.hardware import Gpu, LinkSpec
from runtime.sim.models.shapes import ITEM, ModelShape

#: Bytes of a number in results of attention, and of a head's sum and exponent.
_RESULT, _SUMS = 4, 16
#: Time in ns that each layer with lent tokens takes beyond its attention, however much is lent: the creditor's launch,
#: and the merge at the debtor. Assumed: two launches of those that `Gpu.layer_ns` has about ten of.
EXTRA_NS = 12_000


@dataclass(slots=True)
class LentWork:
    """The work of a step that one creditor does for one stage, the same in each layer.

    Fields:
        layers: Attention layers.
        queries: Tokens that are sent.
        read: Lent tokens, counted once for each row.
        pairs: Pairs of a query with a lent token.
    """

    layers: int
    queries: int = 0
    read: int = 0
    pairs: int = 0

    def add_row(self, queries: int, lent: int) -> None:
        """Add a row of some tokens that attends to `lent` tokens there."""
        self.queries += queries
        self.read += lent
        self.pairs += queries * lent


def query_bytes(shape: ModelShape, queries: int) -> int:
    """Return the bytes of one layer's queries."""
    return queries * shape.hidden * ITEM


def result_bytes(shape: ModelShape, queries: int) -> int:
    """Return the bytes of one layer's attention, its sums and exponents, for some queries."""
    return queries * (shape.hidden * _RESULT + shape.heads * _SUMS)


def least_lent(shape: ModelShape) -> int:
    """Return from how many lent tokens on a decoding row sends fewer bytes than K and V have (IL-27)."""
    return -(-(query_bytes(shape, 1) + result_bytes(shape, 1)) // shape.kv_bytes)


def attending_ns(shape: ModelShape, work: LentWork, gpu: Gpu) -> float:
    """Return the ns of a creditor's attention in all layers."""
    layer = _layer_cost(shape, gpu)
    return work.layers * max(layer.kv * work.read, layer.pair * work.pairs)


@lru_cache
def _layer_cost(shape: ModelShape, gpu: Gpu) -> TableCost:
    return table_cost(shape, 1, 3, gpu)


def travel_ns(shape: ModelShape, work: LentWork, link: LinkSpec) -> int:
    """Return the ns in which all layers' queries and results are under way, without the attention between them."""
    out, back = query_bytes(shape, work.queries), result_bytes(shape, work.queries)
    return work.layers * (2 * link.latency + link.busy_ns(out) + link.busy_ns(back))


def waiting_ns(creditors: Sequence[float], here: float, layers: int) -> float:
    """Return by how much a stage takes longer than with the tokens here alone.

    Args:
        creditors: Of each creditor, ns until its results of all layers are there.
        here: ns of all layers' attention to the tokens here, which runs meanwhile.
    """
    return max(0.0, max(creditors) - here) + layers * EXTRA_NS


def pulled_ns(shape: ModelShape, layers: int, lent: int, link: LinkSpec) -> int:
    """Return the ns in which K and V of lent tokens come over a link, layer by layer."""
    return layers * (link.latency + link.busy_ns(lent * shape.kv_bytes))
