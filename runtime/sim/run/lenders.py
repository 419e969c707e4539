"""Let simulated devices attend to K and V for each other: how long a step waits, and what that delays (IL-27, IL-29).

A creditor attends to lent tokens beside its own steps. Both read from one memory, so its step under way ends later by
the time of that attention; a creditor without a step loses nothing. What several debtors ask for at a time is done at
the creditor's whole bandwidth: no step ends before its creditors have attended to all that was asked until then.
Queries and results are counted as traffic of their links; they do not wait behind pages that are sent there.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.sim.cost.loans import LentWork, attending_ns, query_bytes, result_bytes, travel_ns, waiting_ns
from runtime.sim.models.shapes import ModelShape
from runtime.sim.run.clock import VirtualClock
from runtime.sim.run.network import Network
from runtime.sim.run.node import Node


class LenderTimes:
    """The creditors of one simulation; implements `sim.run.pages_away.Lenders`. `nodes`: its devices, as they are."""

    def __init__(self, clock: VirtualClock, network: Network, nodes: Mapping[str, Node]) -> None:
        self._clock, self._network, self._nodes = clock, network, nodes

    def wait(self, debtor: str, shape: ModelShape, asked: Mapping[str, LentWork], here: float, busy: int) -> int:
        now, ready, free = self._clock.now, [], 0
        for creditor, work in asked.items():
            node = self._nodes[creditor]
            attending = attending_ns(shape, work, node.engine.gpu)
            ready.append(attending + travel_ns(shape, work, self._network.link(debtor, creditor)))
            nbytes = work.layers * (query_bytes(shape, work.queries) + result_bytes(shape, work.queries))
            self._network.count(debtor, creditor, 2 * work.layers, nbytes, round(ready[-1] - attending))
            free = max(free, node.attend(round(attending), now))
        layers = max(work.layers for work in asked.values())
        return max(round(waiting_ns(ready, here, layers)), free - now - busy)
