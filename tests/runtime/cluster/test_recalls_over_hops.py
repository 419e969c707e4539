"""Lent pages that come back while rows are at any hop of a path, between agents in processes (IL-25).

Engines count, so that one wrong page changes every later token. Pages are brought back from the scheduler's thread all
the time, whatever rows are under way then; some sequences are aborted.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.lending_config import LendingConfig
from runtime.scheduler.scheduler import Scheduler
from runtime.types import SequenceRequest, TokenEvent
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import LIMIT, eventually, request
from tests.runtime.cluster.real import on_scheduler
from tests.runtime.cluster.test_loans import all_free

M = counting_model("org/m", "1* 2* 3* 4* 5* 6*", max_model_len=4000)
#: Pages of a device by the number of hops: 20 page sets of a hop's layers.
PAGES = {2: 60, 3: 40}


class Recalls:
    """Brings pages back of every loan of which some can, and counts recalls whose row is still under way.

    Attributes:
        begun: Looks at recalls with a row under way, by hop that gets the pages back.
        arrived: Those of which the pages had come.
    """

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.begun: Counter[int] = Counter()
        self.arrived: Counter[int] = Counter()

    def bring_back(self, scheduler: Scheduler, now: int) -> None:
        lending = scheduler.lending
        for recall in lending.loans.recalls.values():
            sequence = recall.loan.sequence
            hop = sequence.path.index(recall.loan.hop)
            self.begun[hop] += sequence.flying
            self.arrived[hop] += sequence.flying and recall.arrived
        for loan in list(lending.loans):
            room = lending.recalls.room(loan.debtor) // loan.depth
            if (most := min(room, loan.groups[1] - loan.groups[0])) > 0:
                lending.recalls.start(loan, self.rng.randrange(1, most + 1), now)


def asked(turn: int) -> list[SequenceRequest]:
    """Return two requests that are too long for their path, and short ones beside them."""
    rng = random.Random(turn)
    lengths = [(rng.randrange(50, 70), rng.randrange(40, 70)) for _ in range(2)]
    lengths += [(rng.randrange(8, 24), rng.randrange(4, 12)) for _ in range(4)]
    return [
        request(f"s{turn}-{at}", [rng.randrange(97) for _ in range(tokens)], "org/m", count)
        for at, (tokens, count) in enumerate(lengths)
    ]


@pytest.mark.parametrize("cut", [(3,), (2, 4)])
def test_pages_come_back_while_rows_are_at_other_hops(cut: tuple[int, ...]) -> None:
    hops = len(cut) + 1
    names = [f"d{at}" for at in range(hops + 2)]
    config = ClusterConfig(
        devices=len(names), placement="partition", prefill_chunk=16, prefix_caching="off",
        lending=LendingConfig("planned", 1.0, recall=1.0, shape="tokens", cut_tokens=1),
    )  # fmt: skip
    settings = AgentSettings(report_seconds=0.05, loan_seconds=5.0)
    made = ProcessLauncher(ProcessConfig(counting([M], PAGES[hops], pace=1.0), settings=settings, beat_seconds=0.1))
    driver = ClusterDriver([M.chain(*cut)], M.blocks(*cut), names, made, config)
    try:
        recalls, rng = Recalls(), random.Random(2)
        for turn in range(6):
            ones = asked(turn)
            gone = ones[0].seq if turn % 3 == 2 else ""
            tokens = run(driver, recalls, ones, gone, rng)
            for one in ones:
                if one.seq != gone:
                    assert tokens[one.seq] == expected(M, one.prompt, one.sampling), one.seq
            assert eventually(lambda: all_free(driver) and not len(driver._scheduler.lending.loans))
        counters = driver.state().counters
        print(f"\n{counters.loans} loans, {counters.loan_recalls} recalls, {recalls.begun}, {recalls.arrived}")
        assert counters.loans > 20 and counters.loan_recalls > 10 and not counters.failed_steps
        assert len(+recalls.begun) > 1 and recalls.arrived.total(), "hops that have pages back with a row under way"
    finally:
        assert driver.shutdown(LIMIT)


def run(
    driver: ClusterDriver, recalls: Recalls, ones: list[SequenceRequest], gone: str, rng: random.Random
) -> dict[str, list[int]]:
    """Run requests, bring pages back with each token, and abort one of them in the middle of its answer."""
    tokens: dict[str, list[int]] = {one.seq: [] for one in ones}
    when = rng.randrange(10, 30)
    for event in driver.run(ones):
        take(tokens, event)
        on_scheduler(driver, recalls.bring_back)
        if gone and len(tokens[gone]) == when:
            driver.abort([gone])
    return tokens


def take(tokens: dict[str, list[int]], event: TokenEvent) -> None:
    assert event.error is None, event
    if event.token is not None:
        tokens[event.seq].append(event.token)
