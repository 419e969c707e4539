"""When the recompute step of a move fails, its tokens are copied instead, and the sequence is not affected (BL-16)."""

from __future__ import annotations

import pytest

from runtime.agent.steps.queue import Lane
from runtime.config import AgentConfig, ClusterConfig
from runtime.control.agent_io import StageStep
from runtime.engine.fakes.integer_model import counting_model
from tests.runtime.scheduler.virtual_cluster import MS, Node, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3 4* 5", max_model_len=200)


class Failing(VirtualCluster):
    """A virtual cluster in which every recompute step from the `after`-th on fails before the engine runs."""

    after = 1
    fronts = 0

    def _run(self, node: Node, step: StageStep, lane: Lane) -> None:
        if any("!" in row.seq for row in step.plan.rows):
            self.fronts += 1
            if self.fronts >= self.after:
                node.engine._fail_at |= {step.plan.step}  # type: ignore[attr-defined]
                with pytest.raises(Exception, match="was to fail"):
                    node.engine.run(step.plan, step.inputs)
                node.running.add(lane)
                self.at(self.now + MS, lambda: self._failed(node, lane))
                return
        super()._run(node, step, lane)

    def _failed(self, node: Node, lane: Lane) -> None:
        node.running.discard(lane)
        self.obey(node, node.agent.fail_step("broken", self.now, lane))


def moving(after: int, **ends: bool) -> Failing:
    config = ClusterConfig(devices=2, placement="replicate", prefill_chunk=16)
    cluster = Failing(
        [M],
        devices=2,
        pages=256,
        config=config,
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=1),
        page_bytes_per_ms=100.0,
        latency=MS // 10,
    )
    cluster.after = after
    cluster.ask(request("warm", (1,), "m", max_tokens=1), request("warm-too", (1,), "m", max_tokens=1))
    cluster.run()
    cluster.ask(request("a", range(60), "m", max_tokens=40), at=cluster.now)
    while not (cluster.scheduler.sequences.get("a") and cluster.scheduler.sequences["a"].phase == "decode"):
        cluster.run_one()
    target = next(name for name in ("d0", "d1") if name not in cluster.scheduler.sequences["a"].place.devices)
    assert cluster.migrate("a", range(1), target, **ends) is None
    cluster.run()
    cluster.expect()
    return cluster


@pytest.mark.parametrize("after", [1, 2])
def test_the_back_brings_what_the_front_cannot(after: int) -> None:
    cluster = moving(after)
    assert cluster.fronts == after  # it is not tried again
    (meet,) = cluster.trace.named("kv.meet")
    assert meet.extra["met"] == 8 * (after - 1)
    assert meet.extra["recomputed"] == (((0, 8),) if after > 1 else ())


def test_without_a_back_the_move_is_given_up_with_the_reason() -> None:
    cluster = moving(1, copy=False)
    (abort,) = cluster.trace.named("kv.move.abort")
    assert abort.extra["error"] == "broken" and not cluster.trace.named("kv.meet")
