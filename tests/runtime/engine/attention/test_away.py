"""Attention of a chunk of which another device holds the first page sets, with queries or pages under way (IL-28)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.attention.away import AwayAttention, Creditors
from runtime.engine.attention.away_paging import causal_pairs
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import LentPages
from runtime.engine.attention.partial import PartialAttention, attend_partly
from runtime.engine.layers.operations import StockOperations
from runtime.engine.step.context import AwayRow, PagedMaker, PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool
from runtime.lending_config import LoanShipping
from runtime.loans import LoanQuery
from runtime.policy.lending.shipping import ShippingCosts
from runtime.types import LoanLost, SentAway
from tests.runtime.engine.attention.test_partial import maker

HEADS, KV_HEADS, WIDTH, PAGE = 8, 2, 16, 4
LENT, HERE, CHUNK = 16, 64, 48


class Clock:
    """The time that attention is measured by: it goes on where something is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class SlowLink:
    """Creditors in this process, whose answers come after a fixed time for queries, and for pages, in seconds."""

    def __init__(self, lent: LentPages, queries: float = 0.0, pages: float = 0.0, clock: Clock | None = None) -> None:
        self._lent, self._seconds, self._clock = lent, (queries, pages), clock or Clock()
        self._sent = 0.0
        self.asked: list[bool] = []
        self.answer: tuple[Array, ...] | None = None

    def send_query(self, creditor: str, query: LoanQuery, arrays: Sequence[Array]) -> int:
        self.asked.append(query.pull)
        self._sent = self._clock.now
        self._answer = self._lent.attend(query, arrays, "d0")
        return len(self.asked)

    def collect(self, ticket: int) -> tuple[Array, ...]:
        self._clock.now = max(self._clock.now, self._sent + self._seconds[self.asked[-1]])
        return self._answer if self.answer is None else self.answer


class Halves:
    """A sequence of which the first tokens are in another pool: its last `CHUNK` tokens attend."""

    def __init__(self, made: PagedMaker) -> None:
        self._made, random = made, torch.Generator().manual_seed(3)
        k, v = (torch.randn(LENT + HERE, KV_HEADS, WIDTH, generator=random) for _ in range(2))
        query = torch.randn(CHUNK, HEADS, WIDTH, generator=random)
        self.now = Tokens(query, k[-CHUNK:], v[-CHUNK:], AttentionSettings())
        self.pool, self.lent = (self._filled(k[part], v[part]) for part in (slice(LENT, None), slice(LENT)))
        self.held = LentPages(made, self.lent, torch.device("cpu"))
        self.held.hold_loan(5, [[page] for page in range(LENT // PAGE)], LENT, "d0")
        whole = self._filled(k, v)
        self.want = torch.zeros_like(query)
        backend = made(self._paging(whole, torch.arange((LENT + HERE) // PAGE)))
        backend.chunks(0, self.now, self.want)

    def attend(self, link: SlowLink, how: LoanShipping, costs: ShippingCosts | None = None) -> Tensor:
        table = torch.full(((LENT + HERE) // PAGE,), self.pool.padding)
        table[LENT // PAGE :] = torch.arange(HERE // PAGE)
        paging = self._paging(self.pool, table, (AwayRow(0, 0, (SentAway("s", "d1", 5, 0, LENT),)),))
        out = torch.zeros_like(self.now.query)
        AwayAttention(
            self._made, paging, Creditors(link, how, costs or ShippingCosts()), StockOperations().merge
        ).decode(0, self.now, out)
        return out

    @staticmethod
    def _filled(k: Tensor, v: Tensor) -> PagePool:
        half, at = PAGE * KV_HEADS * WIDTH * 4, torch.arange(len(k))
        pool = PagePool(2 * half * (len(k) // PAGE), half)
        pool.view(Geometry(KV_HEADS, WIDTH, k.dtype), PAGE).write(at // PAGE, at % PAGE, k, v)
        return pool

    @staticmethod
    def _paging(pool: PagePool, table: Tensor, away: tuple[AwayRow, ...] = ()) -> PagedMetadata:
        tokens, none = LENT + HERE, torch.empty(0, dtype=torch.int64)
        return PagedMetadata(
            pool, PAGE, None, (RowSpan(0, CHUNK, tokens - CHUNK),), table[None, None], torch.tensor([tokens]),
            none.view(1, 0), none, None, away,
        )  # fmt: skip


@pytest.fixture(params=["gathered", "native"])
def halves(request: pytest.FixtureRequest) -> Halves:
    return Halves(maker(request.param))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("runtime.engine.attention.away.time", made)
    return made


def test_queries_and_pages_give_the_same_bits(halves: Halves) -> None:
    made = [halves.attend(SlowLink(halves.held), how) for how in ("query", "pages")]
    assert torch.equal(*made) and (made[0] - halves.want).abs().max() < 1e-5


def test_a_chunk_beside_attends_to_its_own_pages(halves: Halves) -> None:
    """Where no step's call has attended to it."""
    away = torch.full(((LENT + HERE) // PAGE,), halves.pool.padding)
    beside, own = away.clone(), torch.arange(HERE // PAGE)
    away[LENT // PAGE :], beside[: HERE // PAGE] = own, own
    alone = replace(
        halves._paging(halves.pool, own), spans=(RowSpan(0, CHUNK, HERE - CHUNK),), lengths=torch.tensor([HERE])
    )
    want, query = torch.zeros_like(halves.now.query), halves.now.query
    halves._made(alone).chunks(0, halves.now, want)
    paging = replace(
        alone,
        spans=(RowSpan(0, CHUNK, LENT + HERE - CHUNK), RowSpan(CHUNK, 2 * CHUNK, HERE - CHUNK)),
        tables=torch.stack((away, beside))[:, None],
        lengths=torch.tensor([LENT + HERE, HERE]),
        away=(AwayRow(0, 0, (SentAway("s", "d1", 5, 0, LENT),)),),
    )
    link, out = SlowLink(halves.held), torch.zeros(2 * CHUNK, HEADS, WIDTH)
    backend = AwayAttention(halves._made, paging, Creditors(link, "query"), StockOperations().merge)
    now = halves.now._replace(query=torch.cat((query, query)))
    backend.decode(0, now, out)
    backend.chunks(0, now, out)
    assert (out[:CHUNK] - halves.want).abs().max() < 1e-5
    assert torch.allclose(out[CHUNK:], want, atol=1e-6)


@pytest.mark.parametrize(("queries", "pages", "pulled"), [(0.02, 0.0, True), (0.0, 0.02, False)])
def test_the_cheapest_follows_what_answers_took(
    halves: Halves, clock: Clock, queries: float, pages: float, pulled: bool
) -> None:
    costs, link = ShippingCosts(), SlowLink(halves.held, queries, pages, clock)
    for _ in range(16):
        assert (halves.attend(link, "cheapest", costs) - halves.want).abs().max() < 1e-5
    assert link.asked[-4:] == [pulled] * 4, link.asked


def test_where_attention_here_is_slow_queries_travel(
    halves: Halves, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages come sooner than attention to them would, but would be attended to here, after what is here."""

    def slow(*given: Any) -> PartialAttention:
        clock.now += 0.02
        return attend_partly(*given)

    monkeypatch.setattr("runtime.engine.attention.away.attend_partly", slow)
    costs, link = ShippingCosts(), SlowLink(halves.held, queries=0.005, clock=clock)
    for _ in range(16):
        halves.attend(link, "cheapest", costs)
    assert link.asked[-4:] == [False] * 4, link.asked


def test_pages_of_another_size_are_a_lost_loan(halves: Halves) -> None:
    link = SlowLink(halves.held)
    for answer in ((), (Array("uint8", (1, 8), bytes(8)),), (Array("uint8", (4, 512), bytes(8)),)):
        link.answer = answer
        with pytest.raises(LoanLost):
            halves.attend(link, "pages")


def test_what_a_creditor_keeps_for_a_step_ends_with_its_loans(halves: Halves) -> None:
    """One that is dropped is lost at once; one that is held anew counts with the pages that it has then."""
    link = SlowLink(halves.held)
    first = halves.attend(link, "query")
    assert torch.equal(first, halves.attend(link, "query"))
    halves.held.drop_loan(5)
    with pytest.raises(LoanLost):
        halves.attend(link, "query")
    halves.held.hold_loan(5, [[page] for page in (2, 0, 3, 1)], LENT, "d0")  # attention does not depend on their order
    assert (halves.attend(link, "query") - halves.want).abs().max() < 1e-5
    halves.held.hold_loan(5, [[page] for page in (0, 0, 1, 1)], LENT, "d0")
    assert (halves.attend(link, "query") - halves.want).abs().max() > 1e-3


def test_a_creditor_sends_only_so_many_pages_at_once(halves: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.attention.lent.MOST_PULLED", 2 * 512)
    with pytest.raises(ValueError, match="more pages"):
        halves.attend(SlowLink(halves.held), "pages")


def test_pairs_of_queries_and_tokens_are_counted_as_they_attend() -> None:
    spans = [RowSpan(0, 1, 0), RowSpan(1, 2, 9), RowSpan(2, 6, 0), RowSpan(6, 13, 20)]
    brute = sum(1 for span in spans for at in range(span.hi - span.lo) for key in range(99) if key <= span.start + at)
    assert causal_pairs(spans) == brute
    assert causal_pairs([]) == 0
