"""A destination that handles messages between its steps: its front rests while the back alone is faster (BL-16)."""

from __future__ import annotations

import heapq
import math
from collections import deque
from itertools import count

import pytest

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.migration.destination import IncomingMigrations
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import QueuedRow
from runtime.chains import Array, Stage
from runtime.config import AgentConfig
from runtime.control.agent_io import (
    ActivationsVerified,
    AgentCommand,
    PagesWritten,
    Send,
    VerifyActivations,
    WritePages,
)
from runtime.messages import FinishMigration, MigrationReady, PageData, PageRequest, StartMigration
from runtime.policy.migration.cost import Costs, finish_time
from runtime.types import ModelSpec, SamplingParams, SequenceRequest

MS = 1_000_000
#: Tokens of a page set; page sets that are under way at once.
B, MOST = 16, 8
SPEC = ModelSpec("m", 1, B, 4096, 97)
CONFIG = AgentConfig(recompute_chunk=64, fetch_window=4, max_inflight_fetches=2)


class Destination:
    """One destination in virtual time, and a source that answers requests after `turn` and `group` per page set.

    A row of the front takes `row` for each page set. `between_steps`: answers wait until no row runs. `fed`: the front
    starts from hidden states of the source, not from token ids.
    """

    def __init__(self, row: float, turn: float, group: float, between_steps: bool = True, fed: bool = False) -> None:
        self.row, self.turn, self.group, self.between_steps, self.fed = row, turn, group, between_steps, fed
        tables = SequencePageTables(1 << 12)
        self.moves = IncomingMigrations("d1", tables, CONFIG, ActivationCache(0), between_steps)
        self.now, self.number, self.rows, self.link_free, self.tokens = 0, 0, 0, 0, 0
        self.refuses = self.silent = False
        self._order = count()
        self._later: list[tuple[int, int, QueuedRow | PageRequest]] = []
        self._queued: deque[QueuedRow] = deque()
        self._ready: MigrationReady | None = None

    def move(self, tokens: int, copy: bool = True) -> MigrationReady:
        """Run a migration to its answer, and commit it."""
        self.number += 1
        self.tokens = tokens
        request = SequenceRequest("s", "s", "m", tuple(range(tokens)), SamplingParams(max_tokens=1))
        order = StartMigration(
            self.number,
            "s",
            self.number,
            Stage("m", 1, 2) if self.fed else Stage("m", 0, 1),
            (0, 1),
            B,
            "d0",
            tokens,
            () if self.fed else tuple(range(tokens)),
            copy,
            request,
            self.fed,
        )
        self._ready = None
        self._carry_out(self.moves.receive(order, SPEC, self.now))
        while self._ready is None:
            self._step()
        self._carry_out(self.moves.settle(FinishMigration(self.number, "s", self.number, True)))
        self.moves.closed("s", self.number)
        return self._ready

    def seconds(self, tokens: int) -> float:
        """Return the time of a migration."""
        began = self.now
        self.move(tokens)
        return (self.now - began) / 1e9

    def lose_source(self) -> None:
        self.silent = True
        self._carry_out(self.moves.unreachable("d0", self.now))

    def _step(self) -> None:
        """Handle what has arrived, then start a row, as the loop of an agent does."""
        if self._queued and not (self._later and self._later[0][0] <= self.now):
            self._start(self._queued.popleft())
        at, _, what = heapq.heappop(self._later)
        self.now = max(self.now, at)
        if isinstance(what, QueuedRow):
            self._carry_out(self.moves.finish_row(what, {}, self.now))
        elif what.before:
            data = PageData(what.move, what.seq, what.epoch, what.lo, what.hi, "", "", what.before, ((0, self.tokens),))
            states = Array("uint8", (what.hi - what.lo, 1), bytes(what.hi - what.lo))
            self._carry_out(self.moves.arrived(data, [states], self.now))
        else:
            data = PageData(what.move, what.seq, what.epoch, what.lo, what.hi, "", "gone" if self.refuses else "")
            arrays = [] if self.refuses else [Array("uint8", (1, 1), b"x")]
            self._carry_out(self.moves.arrived(data, arrays, self.now))

    def _carry_out(self, commands: list[AgentCommand]) -> None:
        todo = deque(commands)
        while todo:
            match todo.popleft():
                case Send(message=PageRequest() as want) if not self.silent:
                    sets = -(-(want.hi - want.lo) // B)
                    self.link_free = max(self.link_free, self.now) + int(self.group * sets)
                    heapq.heappush(
                        self._later, (max(self.link_free, self.now + int(self.turn)), next(self._order), want)
                    )
                case Send(message=MigrationReady() as ready):
                    self._ready = ready
                case VerifyActivations() as states:
                    verified = ActivationsVerified(states.move, states.lo, states.hi)
                    todo.extend(self.moves.checked(verified, self.now))
                case WritePages() as write:
                    written = PagesWritten(write.move, write.lo, write.hi, write.layers)
                    todo.extend(self.moves.written(written, self.now))
        self._queued += self.moves.take_rows()

    def _start(self, row: QueuedRow) -> None:
        self.rows += 1
        end = self.now + int(self.row * -(-row.tokens // B))
        if self.between_steps:  # what arrives meanwhile is handled behind it
            self._later = [(max(at, end), order, what) for at, order, what in self._later]
        self._later.append((end, -1, row))
        heapq.heapify(self._later)


def expected(tokens: int, made: Destination) -> float:
    costs = Costs(
        B,
        CONFIG.recompute_chunk,
        lambda context, chunk: made.row * -(-chunk // B) / 1e9,
        made.group / 1e9,
        copy_turn=made.turn / 1e9,
        fetch_sets=MOST,
        between_steps=True,
    )
    return finish_time(tokens, costs).seconds


@pytest.mark.parametrize("tokens", [20, 120, 480, 1500])
def test_slow_rows_do_not_hold_up_a_fast_link(tokens: int) -> None:
    made = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS)
    assert made.move(1500).recomputed == ((0, B),), "both paces are learned, with one row of a page set"
    took = made.seconds(tokens)
    assert made.rows == 1
    assert took == pytest.approx(expected(tokens, made), rel=0.1)
    assert took <= math.ceil(tokens / B / MOST) * 18.9e-3


@pytest.mark.parametrize("tokens", [20, 120, 480, 1500])
def test_a_front_that_starts_from_hidden_states_rests_too(tokens: int) -> None:
    made = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS, fed=True)
    assert made.move(1500).recomputed == ((0, B),)
    took = made.seconds(tokens)
    assert made.rows == 1
    assert took == pytest.approx(expected(tokens, made), rel=0.1)


def test_a_front_that_starts_from_hidden_states_works_beside_a_slow_link() -> None:
    made = Destination(row=10 * MS, turn=1 * MS, group=20 * MS, fed=True)
    made.move(1500)
    assert sum(hi - lo for lo, hi in made.move(1500).recomputed) > B
    alone = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS, fed=True)
    assert alone.move(480, copy=False).recomputed == ((0, 480),)


@pytest.mark.parametrize("tokens", [480, 1500])
def test_the_front_works_beside_a_slow_link(tokens: int) -> None:
    made = Destination(row=10 * MS, turn=1 * MS, group=20 * MS)
    made.move(1500)
    ready, before = made.move(1500), made.now
    assert sum(hi - lo for lo, hi in ready.recomputed) > 600
    took = made.seconds(tokens)
    alone = -(-tokens // B) * 20e-3
    assert took < 0.75 * alone
    assert before and took == pytest.approx(expected(tokens, made), rel=0.15)


def test_a_single_stall_does_not_wake_the_front() -> None:
    made = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS)
    made.move(1500)
    made.turn = 800 * MS
    made.move(20)
    made.turn, before = 18 * MS, made.rows
    assert made.seconds(1500) < 0.25 and made.rows == before


def test_the_back_alone_is_tried_again() -> None:
    made = Destination(row=40 * MS, turn=400 * MS, group=0.1 * MS)
    for _ in range(3):
        made.move(1500)
    assert made.rows > 20
    made.turn = 18 * MS
    for _ in range(12):
        made.move(1500)
    assert made.seconds(1500) < 0.25


def test_a_front_that_has_rested_is_tried_again() -> None:
    made = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS)
    made.move(1500)
    made.row = 2 * MS
    for _ in range(80):
        made.move(480)
    assert made.rows > 80


def test_without_pages_the_front_brings_all() -> None:
    alone = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS)
    assert alone.move(480, copy=False).recomputed == ((0, 480),)
    refused = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS)
    refused.refuses = True
    assert refused.move(480).recomputed == ((0, 480),)


def test_the_front_goes_on_when_the_source_is_lost_while_it_rests() -> None:
    made = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS)
    made.move(1500)
    request = SequenceRequest("s", "s", "m", tuple(range(480)), SamplingParams(max_tokens=1))
    made.silent = True
    order = StartMigration(9, "s", 9, Stage("m", 0, 1), (0, 1), B, "d0", 480, tuple(range(480)), True, request)
    made._carry_out(made.moves.receive(order, SPEC, made.now))
    assert not made._later
    made._ready = None
    made.lose_source()
    while made._ready is None:
        made._step()
    assert made._ready.recomputed == ((0, 480),)


def test_where_messages_are_handled_during_steps_both_ends_work() -> None:
    made = Destination(row=40 * MS, turn=18 * MS, group=0.1 * MS, between_steps=False)
    made.move(1500)
    assert sum(hi - lo for lo, hi in made.move(1500).recomputed) > B
