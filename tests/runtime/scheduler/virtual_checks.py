"""Check the books of a `virtual_cluster` after each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.messages import SCHEDULER
from tests.runtime.scheduler import virtual_copies as copies
from tests.runtime.scheduler.virtual_copies import Node

if TYPE_CHECKING:
    from tests.runtime.scheduler.virtual_cluster import VirtualCluster

#: Every so many checks everything is checked, also what did not act.
EVERYTHING = 50


@dataclass
class Checks:
    """What is checked next.

    The books of a device and of the scheduler change only when it acts. What a test does to them itself is found by the
    check of everything, which every `EVERYTHING`th check is, and any behind an event in which nothing acted.

    Fields:
        acted: What has acted since the last check: devices, and the scheduler.
    """

    acted: set[str] = field(default_factory=set)
    _count: int = 0

    def run(self, cluster: VirtualCluster) -> None:
        """Check what has acted, and that no agent holds more pages than the scheduler counts."""
        self._count += 1
        everything = not self.acted or self._count % EVERYTHING == 0
        if everything or SCHEDULER in self.acted:
            cluster.scheduler.check()
        for node in cluster.living():
            if everything or node.name in self.acted:
                node.agent.check()
                copies.check(cluster, node)
            _check_counts(cluster, node)
        self.acted.clear()


def _check_counts(cluster: VirtualCluster, node: Node) -> None:
    device = cluster.scheduler.devices.get(node.name)
    if device is not None and device.alive and not (node.coming or node.running or node.copying):
        counts = node.agent.pages()
        assert counts.capacity - counts.free <= device.pages.used, (node.name, counts, device.pages.used)
