"""Lent pages that come back while rows of their sequence are under way at other hops of a path (IL-25).

Every token depends on every page, so a step that attends to pages that have left or come back changes the answer. Each
question to a creditor is compared with the scheduler's books, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.chains import Array
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import Tick
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import counting_model
from runtime.lending_config import LendingConfig
from runtime.loans import LoanQuery
from runtime.messages import (
    FinishMigration,
    ForwardRows,
    MigrationReady,
    PageData,
    PageRequest,
    RowsDone,
    RowsLost,
    RunRows,
)
from runtime.types import LoanLost
from tests.runtime.scheduler.lending.test_lending import prompt
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Pages of a device by the number of hops: 20 page sets of a hop's layers.
PAGES = {2: 60, 3: 40}
#: Two models of six attention layers that share nothing: each has devices of its own.
MODELS = (
    counting_model("m", "1* 2* 3* 4* 5* 6*", max_model_len=4000),
    counting_model("n", "11* 12* 13* 14* 15* 16*", max_model_len=4000),
)


class Watched(IntegerEngine):
    """Counts, and asserts that only what is lent is asked for: as much of a loan as the scheduler's books say."""

    over: Hops

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        self.over.see_question(query, debtor)
        if self.over.fails and self.over.rng.random() < self.over.fails:
            raise LoanLost("the link is cut for a moment")
        return super().attend_loans(query, arrays, debtor)


class Hops(VirtualCluster):
    """Brings pages back wherever it can be, at each boundary of a step, and notes where rows are then.

    Attributes:
        at_hop: The hop at which the row of each sequence is; -1: the scheduler has it.
        seen: What has happened, by what and hop.
        slow: Extra time (ns) of messages of the scheduler, by device.
        exact: Whether questions are compared with the scheduler's books.
        recalls: Whether pages are brought back at each boundary.
        fails: Share of questions that are not answered.
    """

    def watch(self, seed: int, slow: dict[str, int]) -> None:
        self.at_hop: dict[str, int] = {}
        self.seen: Counter[Any] = Counter()
        self.slow, self.recalls, self.exact = slow, True, not slow
        self.rng, self.fails = random.Random(f"{seed} recalls"), 0.0
        #: Orders of the scheduler by device that have not arrived, by sequence.
        self.due: dict[str, list[str]] = {}

    def see_question(self, query: LoanQuery, debtor: str) -> None:
        for (number,), (tokens,) in zip(query.loans, query.tokens, strict=True):
            loan = self.scheduler.lending.loans.get(number)
            self.seen["questions"] += 1
            if self.exact:
                assert loan is not None and loan.standing and loan.debtor == debtor, number
                assert tokens == 4 * (loan.groups[1] - loan.groups[0]), (number, tokens, loan.groups)

    def post(self, sender: str, to: str, message: Any, arrays: Sequence[Array], extra: int = 0) -> None:
        if isinstance(message, RunRows | ForwardRows):
            hops = message.hops if isinstance(message, ForwardRows) else (0,) * len(message.seqs)
            self.at_hop |= dict(zip(message.seqs, hops, strict=True))
        latency = self.latency
        if sender == "scheduler":
            self.latency += self.slow.get(to, 0)
            if isinstance(message, FinishMigration) and message.commit:
                self.due.setdefault(to, []).append(message.seq)
        super().post(sender, to, message, arrays, extra)
        self.latency = latency

    def deliver(self, node: Any, message: Any, arrays: Sequence[Array]) -> None:
        due = self.due.get(node.name, [])
        if isinstance(message, FinishMigration) and message.commit:
            due.remove(message.seq)
            self.seen["ends in its step"] += bool(node.running) and self.at_hop.get(message.seq, -1) >= 1
        elif isinstance(message, ForwardRows):
            self.seen["row first"] += any(seq in due for seq in message.seqs)
        elif isinstance(message, PageRequest):
            self.seen["request first"] += message.seq in due
        super().deliver(node, message, arrays)
        if isinstance(message, ForwardRows):
            self.bring_back()

    def tell(self, event: Any) -> None:
        loans = self.scheduler.lending.loans
        if isinstance(event, MigrationReady) and (recall := loans.recalls.get(event.move)) is not None:
            sequence = recall.loan.sequence
            lent, here = sequence.path.index(recall.loan.hop), self.at_hop.get(sequence.seq, -1)
            self.seen["ready", lent, here if sequence.flying else -1] += 1
        if isinstance(event, RowsDone):
            self.at_hop |= dict.fromkeys(event.seqs, -1)
        super().tell(event)
        if isinstance(event, RowsDone):
            self.bring_back()

    def count_recall(self, seq: str) -> None:
        """Count whether pages of a sequence come back now."""
        self.seen["under way"] += any(
            each.loan.sequence.seq == seq for each in self.scheduler.lending.loans.recalls.values()
        )

    def bring_back(self) -> None:
        """Start to bring back pages of every loan of which some can."""
        lending, started = self.scheduler.lending, 0
        for loan in list(lending.loans) if self.recalls else ():
            room = lending.recalls.room(loan.debtor) // loan.depth
            if (most := min(room, loan.groups[1] - loan.groups[0])) > 0:
                started += lending.recalls.start(loan, self.rng.randrange(1, most + 1), self.now) is not None
        if started:
            self.carry_out(self.scheduler.handle(Tick(), self.now))


def hops(
    seed: int, cut: Sequence[int], slow: dict[str, int] | None = None, both: bool = False, until: int = 900 * MS,
    **changes: Any,
) -> Hops:  # fmt: skip
    """Return requests that are too long for a path of several devices. `both`: of two models on paths of their own."""
    rng = random.Random(f"{seed} {cut}")
    models, pages = MODELS[: 1 + both], 72 if both else PAGES[len(cut) + 1]
    names = [model.spec.name for model in models]
    devices = (len(cut) + 1) * len(models) + (0 if both else 2)
    settings: dict[str, Any] = {"recall": 1.0, "circle_pages": 0}
    lending = LendingConfig("planned", shape="tokens", cut_tokens=1, **settings | changes)
    config = ClusterConfig(devices=devices, placement="partition", prefill_chunk=8, lending=lending)
    one = Hops(
        models, [tuple(cut)] * len(models), devices=devices, pages=pages, config=config,
        make_engine=lambda name: engine(one, name, pages), costs=lambda plan: rng.choice((MS // 2, MS, 3 * MS)),
    )  # fmt: skip
    one.watch(seed, slow or {})
    one.delay = lambda: rng.randrange(MS // 4)
    for number in range(2 * len(models)):
        words = prompt(rng.randrange(50, 70), number)
        one.ask(
            request(f"s{number}", words, names[number % len(models)], max_tokens=rng.randrange(30, 50), ignore_eos=True)
        )
    for number in range(8):
        words, tokens = prompt(rng.randrange(8, 24), number), rng.randrange(4, 10)
        one.ask(
            request(f"beside{number}", words, names[number % len(models)], max_tokens=tokens, ignore_eos=True),
            at=(20 + 30 * number + rng.randrange(10)) * MS,
        )
    one.ticks(MS, until)
    return one


def engine(one: Hops, name: str, pages: int) -> Watched:
    made = Watched(MODELS, pages, device=name, rewrites=True)
    made.over = one
    return made


@pytest.mark.parametrize("cut", [(3,), (2, 4)])
def test_pages_come_back_at_every_boundary_while_rows_are_at_each_hop(cut: tuple[int, ...]) -> None:
    seen: Counter[Any] = Counter()
    for seed in range(8):
        one = hops(seed, cut)
        one.run()
        one.expect()
        counters = one.scheduler.state().counters
        assert not counters.failed_steps and not any(isinstance(message, RowsLost) for _, _, _, message in one.sent)
        seen += one.seen
        seen["recalls"] += counters.loan_recalls
    assert seen["recalls"] > 100 and seen["questions"] > 1000, seen
    places = range(len(cut) + 1)
    assert all(seen["ready", lent, here] for lent in places for here in places), (
        seen
    )  # (hop with loans, hop with the row)


@pytest.mark.parametrize("cut", [(3,), (2, 4)])
def test_sequences_are_aborted_while_their_pages_come_back(cut: tuple[int, ...]) -> None:
    gone = 0
    for seed in range(4):
        plain = hops(seed, cut)
        plain.run()
        begun = plain.trace.named("kv.recall.start")
        rng = random.Random(seed)
        for event in rng.sample(begun, 3):
            one = hops(seed, cut)
            one.exact = False  # what devices do until they hear of it is not compared with the books
            seq, at = event.extra["seq"], event.t + rng.randrange(MS)
            one.at(at, lambda one=one, seq=seq: one.count_recall(seq))
            one.abort(seq, at)
            del one.requests[seq]
            one.run()
            one.expect()
            gone += one.seen["under way"]
    assert gone > 6


def test_circles_of_debts_of_paths_of_several_hops() -> None:
    seen: Counter[Any] = Counter()
    for seed in range(5):
        one = hops(seed, (3,), both=True, circle_pages=2, reclaim=False)
        one.recalls = False
        one.run()
        one.expect()
        seen += one.seen
        seen["circles"] += one.scheduler.state().counters.circles
        seen["moved"] += sum(event.extra["moved"] for event in one.trace.named("kv.circle.end"))
    assert seen["circles"] > 3 and seen["moved"] > 10, seen


@pytest.mark.parametrize("cut", [(3,), (2, 4)])
def test_orders_that_are_slower_than_rows_and_requests_of_other_devices(cut: tuple[int, ...]) -> None:
    """Links of the scheduler to later hops are slow: pages that have come back are a sequence's later than it thinks.

    Rows come over the hops before, and a creditor asks for pages again, before the order. No sequence gives way for it.
    """
    seen: Counter[Any] = Counter()
    for seed in range(12):
        slow = {f"d{at + 1}": 5 * MS // 2 for at in range(len(cut))}
        one = hops(seed, cut, slow)
        one.run()
        one.expect()
        assert not one.scheduler.state().counters.failed_steps
        assert all(message.intact for _, _, _, message in one.sent if isinstance(message, RowsLost))
        assert not any("other devices" in each.error for _, _, _, each in one.sent if isinstance(each, PageData))
        seen += one.seen
    assert min(seen["row first"], seen["request first"], seen["ends in its step"]) > 0, seen


def test_pages_come_back_while_a_sequence_waits_for_news_of_its_creditors() -> None:
    """A creditor that lives has not answered: what waits for news of a death goes on, and its recall is completed."""
    waited = 0
    for seed in range(10):
        one = hops(seed, (3,), until=2500 * MS)
        one.fails = 0.004
        began: set[int] = set()
        while one._heap:
            one.run_one()
            recalls = one.scheduler.lending.loans.recalls.values()
            began |= {each.number for each in recalls if each.began < one.now - 900 * MS}
        one.expect()
        waited += len(began)
    assert waited > 0
