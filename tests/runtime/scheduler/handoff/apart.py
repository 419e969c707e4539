"""A virtual cluster with roles that records which device ran which tokens of which sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from runtime.agent.steps.queue import Lane
from runtime.config import ClusterConfig
from runtime.control.agent_io import StageStep
from runtime.control.scheduler_io import AgentDown
from runtime.kv.pages import groups_for
from runtime.messages import StartMigration
from runtime.role_config import RoleName
from runtime.types import SequenceRequest
from tests.runtime.scheduler.test_scheduler import CUTS, M, N
from tests.runtime.scheduler.virtual_cluster import MS, Node, VirtualCluster


class Apart(VirtualCluster):
    """A cluster of counting models M and N; `roles` in the order of its devices.

    `ran`: device, sequence, position of the first token, and number of tokens of each row of each step.
    """

    def __init__(self, *roles: RoleName, models: Sequence[Any] = (M, N), cuts: Any = CUTS, **changes: Any) -> None:
        self.ran: list[tuple[str, str, int, int]] = []
        self.roles = {f"d{at}": role for at, role in enumerate(roles)}
        settings = changes.pop("settings", {})
        config = ClusterConfig(devices=len(roles), roles=tuple(self.roles.items()), **settings)
        super().__init__(models, cuts, devices=len(roles), config=config, **changes)

    def _run(self, node: Node, step: StageStep, lane: Lane) -> None:
        for row in step.plan.rows:
            self.ran.append((node.name, row.seq.split("#")[0].split("!")[0], row.start, len(row.tokens)))
        super()._run(node, step, lane)

    def final(self, name: str) -> None:
        """Tell the scheduler that a dead device is not replaced."""
        self.at(self.now + 2 * self.latency, lambda: self.tell(AgentDown(name, "killed", final=True)))

    def expect_phases(self) -> None:
        """Assert that prompts ran only on devices for prompts, and all behind them only on devices that decode."""
        for device, seq, start, count in self.ran:
            prompt, role = len(self.requests[seq].prompt), self.roles[device]
            if start >= prompt:
                assert role != "prefill", (device, seq, start)
            else:
                assert role != "decode" and start + count <= prompt, (device, seq, start, count)

    def handed_off(self) -> list[SequenceRequest]:
        """Return the requests with answers of more than one token: those that need a hand-off."""
        return [one for seq, one in self.requests.items() if len(self.told[seq].tokens) > 1]

    def kv_bytes(self, one: SequenceRequest) -> int:
        """Return the bytes of the pages with K and V of a request's prompt."""
        model = next(each for each in self.models if each.spec.name == one.model)
        page_bytes = next(iter(self.nodes.values())).engine.page_bytes
        return groups_for(model.spec, len(one.prompt)) * model.spec.kv_layers * page_bytes

    def shared_bytes(self) -> int:
        """Return the bytes of pages that devices shared instead of having them sent, in all hand-offs that began."""
        orders = (each for *_, each in self.sent if isinstance(each, StartMigration) and each.shared is not None)
        moves = {each.move: each for each in orders}
        page_bytes = next(iter(self.nodes.values())).engine.page_bytes
        return sum(
            each.shared[1] // each.page_tokens * (each.layers[1] - each.layers[0]) * page_bytes
            for each in moves.values()
            if each.shared is not None
        )

    def expect_one_transfer_each(self) -> None:
        """Assert that each sequence was handed off once, with what was missing of the K and V of its prompt."""
        went = self.handed_off()
        starts = [event.extra["seq"] for event in self.trace.named("dispatch.choose") if event.cause == "TI-02"]
        assert sorted(starts) == sorted(one.seq for one in went)
        counters = self.scheduler.state().counters
        assert (counters.handoffs, counters.handoffs_aborted) == (len(went), 0)
        assert counters.handoff_bytes == sum(map(self.kv_bytes, went)) - self.shared_bytes()
        assert self.scheduler.migrations.counts().recomputed == 0


def run_disturbed(cluster: Apart, requests: Sequence[SequenceRequest], devices: int, rng: random.Random) -> None:
    """Run requests that come at random times, of which every fifth is aborted, while devices die or none does."""
    for one in requests:
        cluster.ask(one, at=rng.randrange(80 * MS))
    for one in requests[::5]:
        cluster.abort(one.seq, rng.randrange(120 * MS))
        del cluster.requests[one.seq]
    for _ in range(rng.choice((0, 3))):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(devices)}"))
    cluster.run()
    cluster.expect()
