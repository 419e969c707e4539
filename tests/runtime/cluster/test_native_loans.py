"""Devices killed while questions to lent pages pass Python by, between real engines: no token changes (IL-18, IL-27).

    BLOCKZOO_FAULTS=50 pytest -n 0 -s tests/runtime/cluster/test_native_loans.py

Creditors and debtors once each, or `BLOCKZOO_FAULTS` times, one after the other in one cluster. Agents are processes,
the model is a Llama in float32, and its tokens are those of transformers. Agents count which way questions go
(`counted_agents`): at each kill both ends exchange packets natively, and they do so again before the answer's end.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig, ControlConfig
from runtime.engine.models.registry import half_page
from runtime.lending_config import LendingConfig, LoanShape
from runtime.scheduler.lending.loans import Loan
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.cluster.clusters import answered, eventually
from tests.runtime.cluster.counted_agents import Counts, counts_of, sum_of
from tests.runtime.cluster.loan_kills import (
    CHUNK,
    CONFIG,
    COUNT,
    Killing,
    Victim,
    lending,
    lends_layers,
    lost_tokens,
    pid_of,
    put_long,
)
from tests.runtime.cluster.test_loans import SETTINGS, all_free
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import Answers, reference

pytestmark = needs_kernels
TURNS = int(os.environ.get("BLOCKZOO_FAULTS", "1"))
#: Longest wait for a token. Five seconds where many kills are counted, with nothing else running.
RECOVERY_NS = 5e9 if TURNS > 1 else 30e9
#: Longest time in seconds from a token to the kill: about a step's.
LATE = 0.004
#: Pages of a device: more than a layer's K and V of the shorter requests, which lend layers.
PAGES = 100
#: Tokens of prompts by the shape that loans have: longest requests of more than 400 tokens lend tokens.
TOKENS: dict[LoanShape, int] = {"tokens": 400, "layers": 300}
#: (tokens of the prompt, tokens of the answer) of requests that run at once; the short ones need no loans.
MIXED: Sequence[Sequence[tuple[int, int]]] = (
    ((400, 30), (12, 45)),
    ((300, 30), (420, 30), (20, 40)),
    ((300, 40), (30, 30), (130, 8)),
)


def asked(seq: str, tokens: int, count: int = COUNT) -> SequenceRequest:
    prompt = tuple(random.Random(seq).choices(range(3, 90), k=tokens))
    return SequenceRequest(seq, f"r-{seq}", "long", prompt, SamplingParams(count, ignore_eos=True))


class Lenders:
    """A cluster of devices of which one runs the model, and what its agents count.

    Attributes:
        exchanges: For each token and loan of which both ends exchanged packets natively, the number of kills before.
    """

    def __init__(self, driver: ClusterDriver, trace: Killing, folder: Path, answers: Answers) -> None:
        self.driver, self.trace, self.folder, self._answers = driver, trace, folder, answers
        self.exchanges: list[int] = []
        #: By kills, loan, processes and answers in Python: native answers received when these were seen first.
        self._seen: dict[tuple[int, ...], int] = {}
        trace.may = self._exchanges

    def _exchanges(self, loan: Loan) -> bool:
        """Return whether both ends of a loan exchange packets natively since the last kill.

        The debtor's native calls have received answers, and Python has answered none at the creditor meanwhile: but for
        one that was under way when the first of these counts was read, before the other one.
        """
        debtor, creditor = (pid_of(self.driver._scheduler, each) for each in (loan.debtor, loan.creditor))
        kills = len(self.trace.killed)
        received, attended = counts_of(self.folder, debtor).received, counts_of(self.folder, creditor).attended
        first = self._seen.setdefault((kills, loan.number, debtor, creditor, attended), received)
        if received < first + 2:
            return False
        self.exchanges.append(kills)
        return True

    def answer(self, *requests: SequenceRequest) -> Counts:
        """Run requests, compare each token with the model's own, and expect no debts; return what agents have done."""
        before = sum_of(self.folder)
        for seq, events in answered(self.driver, requests).items():
            one = next(each for each in requests if each.seq == seq)
            tokens, count = [event.token for event in events if event.token is not None], one.sampling.max_tokens
            assert [event.finish for event in events if event.finish] == ["length"], events[-1]
            assert self._answers.agreeing(one.prompt, tokens, count) == count
        assert eventually(lambda: all_free(self.driver) and not len(self.driver._scheduler.lending.loans))
        return sum_of(self.folder) - before

    def settled(self) -> Counts:
        """Return the counts of all agents once native calls of creditors have ended."""
        last = Counts()
        while repr(now := sum_of(self.folder)) != repr(last):
            last = now
            time.sleep(0.3)
        return now


@contextmanager
def lenders(bench: Bench, folder: Path, devices: int, native: bool, warm: bool) -> Iterator[Lenders]:  # noqa: F811
    """Run so many agents. `warm`: a process stands by."""
    mib = 400 / CONFIG.page_tokens * 2 * half_page(bench.store, CONFIG, ["long"]) / (1 << 20)
    config = ClusterConfig(
        devices=devices, placement="on-demand", prefill_chunk=CHUNK, prefix_caching="off",
        lending=LendingConfig("planned", 1.0, recall=1.0, layer_mib=mib), control=ControlConfig(scaling=False),
    )  # fmt: skip
    settings, trace = replace(SETTINGS, loan_native=native), Killing()
    program = (sys.executable, "-m", "tests.runtime.cluster.counted_agents", str(folder))
    model = reference(bench.folders["long"])
    model.generation_config.eos_token_id = None
    with lending(bench, trace, config, settings, PAGES, program=program, warm=warm) as driver:
        yield Lenders(driver, trace, folder, Answers(model))


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    put_long(bench)
    return bench


@pytest.fixture(scope="module")
def cluster(family: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lenders]:
    with lenders(family, tmp_path_factory.mktemp("counts"), 4, native=True, warm=True) as made:
        yield made


@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("victim", ["creditor", "debtor"])
def test_a_kill_in_the_exchange_costs_no_token_and_leaves_no_debt(
    cluster: Lenders, victim: Victim, shape: LoanShape
) -> None:
    driver, trace, slowest, done = cluster.driver, cluster.trace, 0, Counts()
    trace.victim = victim
    for turn in range(TURNS):
        before, known, kills = driver.state().counters, len(trace.named("kv.lost")), len(trace.killed)
        rng, one = random.Random(f"{victim} {turn}"), asked(f"{victim} {shape} {turn}", TOKENS[shape])
        trace.after, trace.delay = rng.randrange(2, COUNT - 12), rng.uniform(0.0, LATE)
        done += cluster.answer(one)
        now = driver.state().counters
        assert len(trace.killed) == kills + 1 and lends_layers(trace, one.seq) == (shape == "layers")
        assert {kills, kills + 1} <= set(cluster.exchanges), "packets are exchanged natively up to it, and again"
        slowest = max(slowest, took := longest_wait(trace, one.seq))
        assert took < RECOVERY_NS
        if victim == "creditor":
            assert now.recoveries == before.recoveries + 1 and now.mends == before.mends + 1
            assert now.loss_restarts == before.loss_restarts
            assert now.mended_tokens - before.mended_tokens <= lost_tokens(trace, 4, known) + CHUNK
    print(f"\n{victim} {shape}: {TURNS} kills, slowest token {slowest / 1e6:.0f} ms; {done}")
    assert not done.misplaced


def longest_wait(trace: Killing, seq: str) -> int:
    """Return the longest time in ns between two tokens of a sequence."""
    return max(b - a for a, b in pairwise(event.t for event in trace.named("token") if event.seq == seq))


@pytest.mark.parametrize("lengths", MIXED, ids=str)
def test_rows_without_lent_pages_are_beside(cluster: Lenders, lengths: Sequence[tuple[int, int]]) -> None:
    """They decode in the same steps, or their prompts run in chunks: native calls attend to these meanwhile.

    Each question has one answer.
    """
    for turn in range(8):  # where a round trip takes longer than a step, rows that were apart may stay so
        before, named = cluster.settled(), enumerate(lengths)
        cluster.answer(*(asked(f"mixed {turn} {at} {tokens}", tokens, count) for at, (tokens, count) in named))
        done = cluster.settled() - before
        print(f"\n{done}")
        assert done.received > 0 == done.misplaced
        assert done.sent + done.asked == done.attended + done.answered
        if done.beside:
            return
    pytest.fail("no step had rows without lent pages beside others")


def test_without_native_code_nothing_is_counted_as_native(family: Bench, tmp_path: Path) -> None:
    with lenders(family, tmp_path, 2, native=False, warm=False) as one:
        one.answer(asked("a", 300))
        done = one.settled()
    assert not one.exchanges
    assert done.received == done.left == done.sent == done.answered == 0 < done.attended == done.asked
