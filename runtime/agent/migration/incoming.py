"""One move to this device: both its ends given what they can take, front by rows and back by Wants (BL-16).

Contract: `advance` says what is to be asked of the source now, and puts rows that recompute into the queue. A row
starts from token ids, or from hidden states that have come (`fetch`), which are asked for ahead of the row that runs,
where the back would not be there sooner: they share the link with pages, and pages wait where the front would wait for
them. Who has what is `policy.migration.two_ended`'s, how much `pace`'s. What comes back is told by `moves`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.agent.migration.activation_fetch import ActivationFetch
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Array
from runtime.config import AgentConfig
from runtime.control.agent_io import Send
from runtime.messages import PageRequest, StartMigration
from runtime.policy.migration.pace import MigrationPace, SharedPace
from runtime.policy.migration.two_ended import TwoEnded
from runtime.types import ModelSpec

#: Spans that are asked for ahead of the row that runs, at most.
_MOST_AHEAD = 32


@dataclass(slots=True)
class IncomingMigration:
    """`fetch`: what the front starts from, where that is not tokens. `nbytes`: that came; `writing`: pages that the
    engine is putting down.
    `told`: up to where the scheduler knows that all is here.
    """

    device: str
    tables: SequencePageTables
    config: AgentConfig
    order: StartMigration
    key: str
    spec: ModelSpec
    ends: TwoEnded
    sequence: AgentSequence
    fetch: ActivationFetch | None = None
    nbytes: int = 0
    writing: dict[tuple[int, int], int] = field(default_factory=dict)
    told: int = -1
    pace: MigrationPace = field(default_factory=MigrationPace)
    shared: SharedPace = field(default_factory=SharedPace)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more can come, though not all is here. (A step that writes its pages comes back first.)"""
        return self.ends.stuck and not self.ends.recomputing and not self.ends.copying

    def advance(self, rows: list[QueuedRow], now: int) -> list[Send]:
        """Give both ends what they can take. `rows`: takes what is to run."""
        out = self._front(rows, now) if self.fetch is None else self._fed_front(self.fetch, rows, now)
        ends = self.ends
        while (free := self._ahead(now) - ends.copying) > 0:
            span = ends.next_back(min(free, self.config.fetch_window))
            if span is None:
                break
            if not ends.copying - self.groups(len(span)):
                self.pace.back_since = now
            self.shared.asks("pages", span.start, span.stop, now)
            out.append(self._want(span.start, span.stop))
        if ends.stuck and self.fetch is not None:
            for span in self.fetch.give_up():
                ends.recompute_failed(span)
        return out

    def groups(self, tokens: int) -> int:
        return -(-tokens // self.spec.page_tokens)

    def unfed(self, lo: int, hi: int, reason: str) -> None:
        """Inputs have not come, or are not what was sent."""
        if self.fetch is None:
            return
        span = self.fetch.mark_lost(lo, hi, reason)
        if span is not None:
            self.ends.recompute_failed(span)
        if self.fetch.is_exhausted:
            self.ends.inputs(())

    def cut_off(self) -> None:
        """The source is gone."""
        self.ends.stop_copy()
        if self.fetch is not None:
            for span in self.fetch.cut(f"{self.order.source} is gone"):
                self.ends.recompute_failed(span)
            self.ends.inputs(())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _front(self, rows: list[QueuedRow], now: int) -> list[Send]:
        ends = self.ends
        if not ends.recomputing and (span := ends.next_front(self._chunk())) is not None:
            self.pace.front_since = now
            start = self._start(span)
            rows.append(self._row(start, span.stop, self.order.tokens[start : span.stop], None, now))
        return []

    def _fed_front(self, fetch: ActivationFetch, rows: list[QueuedRow], now: int) -> list[Send]:
        ends, shared = self.ends, self.shared
        if (fetched := fetch.next_span(ends.gap[0])) is not None:
            shared.row_since = now
            rows.append(self._row(fetched.start, fetched.span.stop, None, fetched.array, now))
        out: list[Send] = []
        while not fetch.is_exhausted and self._looks_ahead(fetch, now):
            span = ends.next_front(self._portion(fetch), ahead=True)
            if span is None:
                break
            start = self._start(span)
            fetch.request_span(span, start)
            shared.asks("inputs", start, span.stop, now)
            out.append(self._want(start, span.stop, fetch.before))
        return out

    def _looks_ahead(self, fetch: ActivationFetch, now: int) -> bool:
        """Whether the front is to be given more than it has: so much that it need not wait while pages come."""
        if self.ends.front_lacks:
            return True
        if (
            self.shared.row is None
            or fetch.claimed_count > _MOST_AHEAD
            or (self.order.copy and self._portion(fetch) < self.spec.page_tokens)
        ):
            return False
        return fetch.claimed_count < 2 or not self.shared.supplied(
            self.groups(fetch.behind) - self.groups(fetch.running), self._most, now
        )

    def _portion(self, fetch: ActivationFetch) -> int:
        """Tokens that the front is given next."""
        if not self.order.copy:
            return self.config.recompute_chunk
        lo, hi = self.ends.gap
        return self.shared.chunk(hi - lo - fetch.behind, fetch.behind, self.config.recompute_chunk)

    def _want(self, lo: int, hi: int, before: int = 0) -> Send:
        order = self.order
        return Send(
            order.source, PageRequest(order.move, order.seq, order.epoch, order.layers, lo, hi, self.device, before)
        )

    @property
    def _most(self) -> int:
        """Page groups that are under way at once."""
        return self.config.max_inflight_fetches * self.config.fetch_window

    def _ahead(self, now: int) -> int:
        """Page groups that the back may have under way."""
        most = self._most
        if self.ends.front_rests or (self.fetch is not None and self.fetch.is_exhausted):
            return most
        lo, hi = self.ends.gap
        if self.fetch is None:
            return self.pace.ahead(self.groups(hi - lo), most)
        fetch, groups = self.fetch, self.groups
        here = groups(fetch.here) - groups(fetch.running)
        return self.shared.fetch(groups(hi - lo - fetch.behind), groups(fetch.behind), here, fetch.waiting, most)

    def _chunk(self) -> int:
        """Tokens that the front is given next."""
        lo, hi = self.ends.gap
        return self.pace.chunk(hi - lo, self.config.recompute_chunk) if self.order.copy else self.config.recompute_chunk

    def _start(self, span: range) -> int:
        """Where a row that recomputes a span begins: of a group that has grown with what is new, if the front has been
        there before.
        """
        return max(span.start, min(self.tables.book.tokens_of(self.key), span.stop - 1))

    def _row(self, start: int, stop: int, ids: tuple[int, ...] | None, array: Array | None, now: int) -> QueuedRow:
        order = self.order
        return QueuedRow(
            self.sequence,
            order.epoch,
            0,
            self.key,
            order.stage.id,
            start,
            stop - start,
            ids,
            array,
            False,
            0,
            1,
            now,
            True,
            order.move,
        )
