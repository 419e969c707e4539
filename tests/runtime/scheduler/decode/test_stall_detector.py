"""A row lost between devices is detected from their reports, and its sequence runs again.

Rows that a device still works on are waited for, however long it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from runtime.chains import Array
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import SCHEDULER, ForwardRows, MigrationReady, RowsDone
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3* 4", max_model_len=128)
S = 1000 * MS
LIMIT = 2.0


class Leaky(VirtualCluster):
    """A virtual cluster in which some messages from devices are lost, as `loses` selects.

    Devices report and the scheduler checks twice a second.
    """

    loses: Callable[[Any], bool] = staticmethod(lambda message: False)

    def post(self, sender: str, to: str, message: Any, arrays: Sequence[Array], extra: int = 0) -> None:
        if sender == SCHEDULER or not self.loses(message):
            super().post(sender, to, message, arrays, extra)

    def watch(self, until: int) -> None:
        self.ticks(S // 4, until)
        for when in range(S // 2, until, S // 2):
            self.at(when, self.report)

    def report(self) -> None:
        """Send the reports of idle devices: an agent sends none while a step runs."""
        for node in self.living():
            if not node.running:
                self.tell(node.agent.report())


def leaky(loses: Callable[[Any], bool], seconds: float = LIMIT, **fields: Any) -> Leaky:
    config = ClusterConfig(devices=2, placement="partition", row_timeout_s=seconds)
    cluster = Leaky([M], [(2,)], config=config, **fields)
    cluster.loses = loses
    return cluster


class Nth:
    """A predicate: whether a message is the n-th of its kind, counted from 1."""

    def __init__(self, kind: type, number: int) -> None:
        self._kind, self._left = kind, number

    def __call__(self, message: Any) -> bool:
        self._left -= isinstance(message, self._kind)
        lost, self._left = self._left == 0 and isinstance(message, self._kind), self._left
        return lost


@pytest.mark.parametrize("kind", [ForwardRows, RowsDone])
@pytest.mark.parametrize("number", [1, 4])
def test_a_lost_row_runs_again_and_nobody_notices(kind: type, number: int) -> None:
    cluster = leaky(Nth(kind, number))
    cluster.ask(request("a", range(9), "m", max_tokens=12))
    cluster.watch(6 * S)
    cluster.run()
    cluster.expect()
    (fault,) = cluster.trace.named("fault")
    assert LIMIT <= fault.t / 1e9 <= LIMIT + 2.0 and "no device has its row" in str(fault.extra)


def test_without_a_limit_it_waits_on() -> None:
    cluster = leaky(Nth(RowsDone, 2), seconds=0.0)
    cluster.ask(request("a", range(9), "m", max_tokens=12))
    cluster.watch(60 * S)
    cluster.run()
    assert cluster.scheduler.sequences["a"].flying and not cluster.trace.named("fault")


def test_rows_that_are_always_lost_end_their_sequence_with_the_reason() -> None:
    cluster = leaky(lambda message: isinstance(message, RowsDone) and "bad" in message.seqs)
    cluster.ask(request("bad", range(9), "m", max_tokens=12))
    cluster.ask(request("good", range(5), "m", max_tokens=12), at=S)
    cluster.watch(20 * S)
    cluster.run()
    last = cluster.told["bad"].last
    assert last.finish == "error" and "the 4th in a row" in (last.error or "")
    del cluster.requests["bad"]
    cluster.expect()


def test_a_token_between_begins_the_count_anew() -> None:
    lost: list[int] = []

    def loses(message: Any) -> bool:
        """Lose every second answer."""
        if isinstance(message, RowsDone):
            lost.append(len(lost) % 2)
            return lost[-1] == 1
        return False

    cluster = leaky(loses)
    cluster.ask(request("a", range(3), "m", max_tokens=12))
    cluster.watch(60 * S)
    cluster.run()
    cluster.expect()
    assert len(cluster.trace.named("fault")) == sum(lost) > 4


def test_steps_take_as_long_as_they_take() -> None:
    """A step takes ten times the limit on devices that had been idle before: no row counts as lost."""
    cluster = leaky(lambda message: False, costs=lambda plan: int(10 * LIMIT * S))
    cluster.watch(400 * S)
    cluster.ask(request("a", range(9), "m", max_tokens=3), at=5 * S)
    cluster.run()
    cluster.expect()
    assert not cluster.trace.named("fault")


def test_a_move_that_nothing_comes_of_is_given_up_and_the_sequence_goes_on() -> None:
    cluster = leaky(Nth(MigrationReady, 1), devices=3)
    cluster.ask(request("a", range(40), "m", max_tokens=12))
    while not cluster.told["a"].tokens:
        cluster.run_one()
    sequence = cluster.scheduler.sequences["a"]
    target = next(name for name in ("d0", "d1", "d2") if name not in sequence.place.devices)
    while cluster.migrate("a", range(1), target, hold=True) is not None:
        cluster.run_one()
    cluster.watch(40 * S)
    cluster.run()
    cluster.expect()
    (gone,) = cluster.trace.named("kv.move.abort")
    assert gone.t / 1e9 >= 10 * LIMIT and "nothing has come of it for 20 s" in str(gone.extra | {"cause": gone.cause})


def test_a_limit_is_a_number_of_seconds() -> None:
    with pytest.raises(ValueError, match="row_timeout_s"):
        ClusterConfig(row_timeout_s=float("nan"))
