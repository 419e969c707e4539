"""Measure, in virtual time, how long a migration of a chain's last blocks takes with and without kept block inputs.

    python -m benchmarks.cluster.boundaries [--model llama-7b] [--tokens 512 4096] [--parts 2 4 8] [--output FILE]

The real scheduler and agents run over simulated A100s, each on its own server. A chain is cut into `parts` over as many
devices. A sequence of `tokens` tokens is paused, and its last part migrates to the first device.

- `off`: no hidden states are kept (`activation_cache_bytes` 0, the baseline). A recompute would need the upstream
  blocks again, so K and V are copied.
- `on`: they are kept, and the destination recomputes from the front what it does not copy from the back (BL-16).

Printed for each: milliseconds from the start of the migration to its commit, recomputed tokens, and the bytes of K, V
and hidden states that were sent.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from runtime.agent.agent import Agent
from runtime.config import AgentConfig, ClusterConfig, ControlConfig
from runtime.control.scheduler_io import MoveSequence, PauseSequence, ResumeSequence
from runtime.scheduler.scheduler import Scheduler
from runtime.sim.cost.hardware import GPUS, LINKS, ClusterHardware, LinkSpec, ServerSpec
from runtime.sim.models.family import App, Cutting, SimulatedFamily, family_of
from runtime.sim.run.clock import EventClass
from runtime.sim.run.engine import SimEngine
from runtime.sim.run.loading import Host, Loader
from runtime.sim.run.network import Network
from runtime.sim.run.node import Node
from runtime.sim.run.simulation import Simulation
from runtime.types import SamplingParams, SequenceRequest, TraceEvent

_LINKS = (LINKS["100gbps"], LINKS["25gbps"], LinkSpec("10gbps", 0.94 * 1.25e9, 30_000))
_PAGES = 1 << 15
_MS = 1_000_000


@dataclass
class _Told:
    """A trace sink that records the events of one migration.

    Fields:
        start: When the migration started, in ns.
        meet: The event of its commit.
        fed: Bytes of hidden states that were sent.
        paused: Whether the sequence has been paused.
    """

    start: int = 0
    meet: TraceEvent | None = None
    fed: int = 0
    paused: bool = False

    def emit(self, event: TraceEvent) -> None:
        if event.ev == "kv.move.start":
            self.start = event.t
        elif event.ev == "kv.recompute":
            self.fed = event.bytes or 0
        elif event.ev == "kv.meet":
            self.meet = event


def moved(family: SimulatedFamily, parts: int, link: LinkSpec, tokens: int, boundary_bytes: int) -> dict[str, Any]:
    """Run one migration and return its duration and amounts."""
    server = ServerSpec(GPUS["A100-80GB"], 1)
    cluster, told = ClusterHardware((server,) * parts, link), _Told()
    names = [name for name, _ in cluster.devices()]
    agent = AgentConfig(max_num_batched_tokens=512, recompute_chunk=256, activation_cache_bytes=boundary_bytes)
    config = ClusterConfig(devices=parts, placement="partition", prefill_chunk=512, control=ControlConfig.off())
    (chain,) = family.chains.values()
    scheduler = Scheduler([chain], family.blocks(), config, told)
    nodes = {name: _node(name, server, family, agent) for name in names}
    simulation = Simulation(scheduler, nodes, Network(cluster))
    asked = SequenceRequest("a", "a", chain.model, (0,) * tokens, SamplingParams(256, ignore_eos=True))

    def look() -> None:
        """Pause the sequence after its first token, migrate it once the needed stages are loaded, then let it end."""
        sequence = scheduler.sequences.get("a")
        if told.meet is not None:
            simulation._handle_at_scheduler(ResumeSequence("a"))
            return
        if sequence is not None and sequence.output and not told.paused:
            told.paused = True
            simulation._handle_at_scheduler(PauseSequence("a"))
        elif sequence is not None and told.paused and not told.start:
            simulation._handle_at_scheduler(MoveSequence("a", parts - 1, parts, sequence.path[0].device))
        simulation.clock.at(simulation.clock.now + 5 * _MS, EventClass.TICK, (look,))

    simulation.clock.at(5 * _MS, EventClass.TICK, (look,))
    simulation.run([asked])
    if told.meet is None:
        raise RuntimeError("the move did not end")
    spans = told.meet.extra["recomputed"]
    return {
        "ms": round((told.meet.t - told.start) / _MS, 2),
        "recomputed": sum(hi - lo for lo, hi in spans),
        "bytes": (told.meet.bytes or 0) + told.fed,
    }


def _node(name: str, server: ServerSpec, family: SimulatedFamily, agent: AgentConfig) -> Node:
    engine = SimEngine(name, server.gpu, family, _PAGES)
    return Node(Agent(name, _PAGES, agent, strides=True), engine, Loader(engine, Host(server, 1 << 40)), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for parts in given.parts:
        app = App(given.model, given.model, "foundation")
        family = family_of([app], Cutting(parts=parts, max_model_len=max(given.tokens) + 512))
        layers = family.chain(given.model).uses[-1].kv_layers
        for link in _LINKS:
            for tokens in given.tokens:
                off, on = (moved(family, parts, link, tokens, kept) for kept in (0, 1 << 40))
                rows.append({"layers": layers, "link": link.name, "tokens": tokens, "off": off, "on": on})
    deliver({"model": given.model, "moves": rows}, given.output)


if __name__ == "__main__":
    main()
