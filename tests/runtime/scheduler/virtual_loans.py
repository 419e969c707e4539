"""Loans between the devices of a `virtual_cluster`: creditors are reached without a link, in no time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.agent.steps.queue import Lane
from runtime.chains import Array, StageResult
from runtime.control.agent_io import DropLoan, HoldLoan, StageStep
from runtime.loans import LoanEngine, LoanQuery
from runtime.types import LoanLost, LoansMixed
from tests.runtime.scheduler.virtual_copies import Node

if TYPE_CHECKING:
    from tests.runtime.scheduler.virtual_cluster import VirtualCluster


def carry_out(node: Node, command: HoldLoan | DropLoan) -> None:
    """Carry out an agent's command."""
    assert isinstance(node.engine, LoanEngine)
    if isinstance(command, HoldLoan):
        node.engine.hold_loan(command.loan, command.groups, command.tokens, command.debtor, command.first_layer)
    else:
        node.engine.drop_loan(command.loan)


def run(cluster: VirtualCluster, node: Node, step: StageStep, lane: Lane) -> StageResult | None:
    """Run a step; None if it lost a part of its K and V, and fails one step's time later."""
    try:
        return node.engine.run(step.plan, step.inputs)
    except LoanLost as error:
        failed = error
        cluster.at(cluster.now + cluster.alpha, lambda: fail(cluster, node, failed, lane))
        return None


def fail(cluster: VirtualCluster, node: Node, error: LoanLost, lane: Lane) -> None:
    if node.alive:
        node.running.discard(lane)
        intact = not isinstance(error, LoansMixed)
        cluster.obey(node, node.agent.fail_step(str(error), cluster.now, lane, retry=True, intact=intact))


class DirectLink:
    """`runtime.loans.LoanLink` of one device to the engines of a cluster."""

    def __init__(self, cluster: VirtualCluster, debtor: str) -> None:
        self._cluster, self._debtor = cluster, debtor
        self._answers: list[tuple[Array, ...]] = []

    def send_query(self, creditor: str, query: LoanQuery, arrays: tuple[Array, ...]) -> int:
        node = self._cluster.nodes[creditor]
        if not node.alive:
            raise LoanLost(f"{creditor} is gone")
        assert isinstance(node.engine, LoanEngine)
        self._answers.append(node.engine.attend_loans(query, arrays, self._debtor))
        return len(self._answers) - 1

    def collect(self, ticket: int) -> tuple[Array, ...]:
        return self._answers[ticket]
