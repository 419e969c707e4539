"""Host memory of the devices of a `virtual_cluster`: copies there and back, now or later, some of which fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.agent.agent import Agent
from runtime.agent.steps.queue import Lane
from runtime.chains import StageEngine
from runtime.control.agent_io import CopiedIn, CopiedOut, CopyIn, CopyOut, ShareHostMemory
from runtime.control.scheduler_io import Tick

if TYPE_CHECKING:
    from tests.runtime.scheduler.virtual_cluster import VirtualCluster


@dataclass
class Node:
    """One incarnation of a device."""

    name: str
    agent: Agent
    engine: StageEngine
    running: set[Lane] = field(default_factory=set)
    alive: bool = True
    coming: int = 0
    copying: int = 0
    host_kv: int = 0
    #: By page table: pages of each layer that the step under way has not written yet (`virtual_layers`).
    unwritten: dict[str, list[list[int]]] = field(default_factory=dict)


def carry_out(cluster: VirtualCluster, node: Node, command: CopyOut | CopyIn | ShareHostMemory) -> None:
    """Carry out an agent's command."""
    match command:
        case CopyOut(key, _, pages):
            data = None if cluster.spoil(key) else node.engine.read_pages(pages)
            took = cluster.copying()
            _report(cluster, node, CopiedOut(key, data, max(took, 1000)), took)
        case CopyIn(_, _, pages, data):
            error = "spoilt" if cluster.spoil(command.key) else ""
            if not error:
                node.engine.write_pages(pages, data)
            took = cluster.copying()
            _report(cluster, node, CopiedIn(command.key, max(took, 1000), error), took)
        case ShareHostMemory(change):
            node.host_kv += change


def check(cluster: VirtualCluster, node: Node) -> None:
    """Assert that the agent has told how much it holds, and holds no more than the scheduler has booked."""
    device, held = cluster.scheduler.devices.get(node.name), node.agent.host_copies.nbytes
    assert node.host_kv == held
    if device is not None and device.alive and not (node.coming or node.copying):
        assert held <= device.host_used, (node.name, held, device.host_used)


def expect_none(node: Node) -> None:
    """Assert that a device holds no K and V in host memory."""
    assert not node.agent.host_copies.nbytes and not len(node.agent.host_copies), node.name


def _report(cluster: VirtualCluster, node: Node, event: CopiedOut | CopiedIn, took: int) -> None:
    if not took:
        cluster.obey(node, node.agent.handle(event, (), cluster.now))
        return
    node.copying += 1

    def report() -> None:
        node.copying -= 1
        cluster.deliver(node, event, ())

    cluster.at(cluster.now + took, report)


def expect_cached_prefixes(cluster: VirtualCluster) -> None:
    """Assert that scheduler and agents agree that cached prefixes have all used pages; then drop them."""
    for node in cluster.living():
        device, counts = cluster.scheduler.devices[node.name], node.agent.pages()
        assert counts.capacity - counts.free == device.pages.used == device.pages.idle, (
            node.name,
            counts,
            device.pages.used,
            device.pages.idle,
        )
    cluster.scheduler.prefix_cache.clear()
    cluster.carry_out(cluster.scheduler.handle(Tick(), cluster.now))
    cluster.run()
