"""Drive one migration to this device: rows recompute from the front, page requests copy from the back (BL-16).

`IncomingMigration.advance` returns the requests to send to the source and queues rows that recompute. A row starts from
token ids, or from hidden states that were fetched (`fetch`).

Hidden states are requested ahead of the running row, unless pages from the back would arrive sooner: both share the
link, and pages wait if the front would otherwise have to wait. `policy.migration.two_ended` assigns page sets to the
two sides, `policy.migration.pace` decides how many. Results are handled by `agent.migration.destination`.

An agent that handles messages between its steps only takes no pages while a row of the front runs. There the front
rests while the back alone is faster (`MigrationPace.front_rests`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.agent.migration.activation_fetch import ActivationFetch
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Array
from runtime.config import AgentConfig
from runtime.control.agent_io import Send
from runtime.messages import MigrationReady, PageRequest, StartMigration
from runtime.policy.migration.pace import MigrationPace, SharedPace
from runtime.policy.migration.two_ended import TwoEnded
from runtime.types import ModelSpec

#: Largest number of spans requested ahead of the running row.
_MOST_AHEAD = 32


@dataclass(slots=True)
class IncomingMigration:
    """One migration to this device.

    Fields:
        key: Key of the page table that it fills.
        ends: Which side brings which page set.
        sequence: Stands for the sequence in rows that recompute.
        fetch: Hidden states that the front starts from; None if it starts from token ids.
        nbytes: Bytes of pages that have arrived.
        writing: By token range and first layer: bytes of pages that the engine is writing.
        told: Tokens covered by the latest MigrationReady; -1 before the first.
        pace: Measured speed of both ends.
        shared: The same where hidden states and pages share the link.
        began: Time of the first request in ns; `copying` and `recomputing`: until the latest page was written and the
            latest row recomputed.
        between_steps: Whether pages that arrive wait for the end of a step.
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
    writing: dict[tuple[int, int, int], int] = field(default_factory=dict)
    told: int = -1
    pace: MigrationPace = field(default_factory=MigrationPace)
    shared: SharedPace = field(default_factory=SharedPace)
    began: int = 0
    copying: int = 0
    recomputing: int = 0
    between_steps: bool = False
    _rows: int = 0
    _asked: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _come: dict[tuple[int, int], int] = field(default_factory=dict)  # by token range: layers below this one have come

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more can arrive although pages are missing. While a step still writes pages it is False."""
        return self.ends.stuck and not self.ends.recomputing and not self.ends.copying

    def advance(self, rows: list[QueuedRow], now: int) -> list[Send]:
        """Give both ends the work they can take.

        Returns requests to the source; appends rows that recompute to `rows`.
        """
        ends, resting = self.ends, self._rests()
        out: list[Send] = []
        if not resting:
            out += self._front(rows, now)
        # One request for all pages that are not written yet: they come layer by layer.
        every = self.groups(self.order.upto) if self.order.as_written else 0
        while (free := every or (self._most if resting else self._ahead(now)) - ends.copying) > 0:
            span = ends.next_back(every or min(free, self.config.fetch_window))
            if span is None:
                break
            if not ends.copying - self.groups(len(span)):
                self.pace.back_since = now
            self.shared.asks("pages", span.start, span.stop, now)
            self._asked[span.start, span.stop] = now, self._rows
            out.append(self._want(span.start, span.stop))
        if resting and not ends.copying:  # nothing can be copied (any more)
            out += self._front(rows, now)
        if ends.stuck and self.fetch is not None:
            for span in self.fetch.give_up():
                ends.recompute_failed(span)
        return out

    def ready(self) -> MigrationReady:
        """Return the report that everything is here."""
        fetched, reason = (self.fetch.nbytes, self.fetch.reason) if self.fetch is not None else (0, "")
        return MigrationReady(
            self.device, self.order.move, self.order.seq, self.ends.copied_spans, self.ends.recomputed_spans,
            self.nbytes, fetched, reason, self.copying, self.recomputing,
        )  # fmt: skip

    def groups(self, tokens: int) -> int:
        """Return the number of page sets that hold so many tokens."""
        return -(-tokens // self.spec.page_tokens)

    def takes(self, span: range, layers: tuple[int, int]) -> bool:
        """Return whether pages of these layers come next for a token range, and record that they have come.

        Those of an earlier request, which has failed, do not.
        """
        begin = self._come.get((span.start, span.stop), self.order.layers[0])
        if not begin == layers[0] < layers[1] <= self.order.layers[1]:
            return False
        self._come[span.start, span.stop] = layers[1]
        return True

    def fail_copy(self, span: range) -> None:
        """Record that pages did not arrive, or cannot be used. All of their layers are wanted again."""
        self.ends.copy_failed(span)
        self._come.pop((span.start, span.stop), None)
        self.writing = {key: each for key, each in self.writing.items() if key[:2] != (span.start, span.stop)}

    def end_copy(self, span: range, now: int) -> None:
        """Record that pages of all layers are written, and how long that took, unless they were waited for."""
        self.ends.copied(span)
        self._come.pop((span.start, span.stop), None)
        if self.order.as_written:
            self._asked.pop((span.start, span.stop), None)
            return
        self.copying = now - self.began
        self.end_turn(span, now)
        self.pace.back = (now - self.pace.back_since) / self.groups(len(span))
        self.shared.record_arrival("pages", span.start, span.stop, self.groups(len(span)), now)

    def unfed(self, lo: int, hi: int, reason: str) -> None:
        """Handle hidden states that did not arrive or did not verify."""
        if self.fetch is None:
            return
        span = self.fetch.mark_lost(lo, hi, reason)
        if span is not None:
            self.ends.recompute_failed(span)
        if self.fetch.is_exhausted:
            self.ends.inputs(())

    def cut_off(self) -> None:
        """Handle the loss of the source."""
        self.ends.stop_copy()
        if self.fetch is not None:
            for span in self.fetch.cut(f"{self.order.source} is gone"):
                self.ends.recompute_failed(span)
            self.ends.inputs(())

    def end_turn(self, span: range, now: int) -> None:
        """Record how long pages took from their request on."""
        asked, rows = self._asked.pop((span.start, span.stop), (now, -1))
        if self.between_steps and rows >= 0:
            self.pace.add_turn(now - asked, rows != self._rows or self.ends.recomputing > 0)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _rests(self) -> bool:
        """Return whether the front leaves the rest to the back, as its rows would hold up more than they bring."""
        if not self.between_steps or not self.order.copy:
            return False
        lo, hi = self.ends.gap
        return self.pace.front_rests(self.groups(hi - lo) + self.ends.copying, self._most)

    def _front(self, rows: list[QueuedRow], now: int) -> list[Send]:
        ends = self.ends
        if self.fetch is not None:
            return self._fed_front(self.fetch, rows, now)
        if not ends.recomputing and (span := ends.next_front(self._chunk())) is not None:
            self.pace.front_since = now
            self._rows += 1
            start = self._start(span)
            rows.append(self._row(start, span.stop, self.order.tokens[start : span.stop], None, now))
        return []

    def _fed_front(self, fetch: ActivationFetch, rows: list[QueuedRow], now: int) -> list[Send]:
        ends, shared = self.ends, self.shared
        if (fetched := fetch.next_span(ends.gap[0])) is not None:
            shared.row_since = self.pace.front_since = now
            self._rows += 1
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
        """Return whether to fetch more hidden states: enough that the front does not wait while pages arrive."""
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
        """Return how many tokens the front is assigned next (from hidden states)."""
        if not self.order.copy:
            return self.config.recompute_chunk
        if self.between_steps and self.pace.front is None:
            return self.spec.page_tokens  # as in `_chunk`
        lo, hi = self.ends.gap
        return self.shared.chunk(hi - lo - fetch.behind, fetch.behind, self.config.recompute_chunk)

    def _want(self, lo: int, hi: int, before: int = 0) -> Send:
        order = self.order
        return Send(
            order.source,
            PageRequest(
                order.move,
                order.seq,
                order.epoch,
                order.layers,
                order.first + lo,
                order.first + hi,
                self.device,
                before,
                order.recall,
                order.as_written and not before,
            ),
        )

    @property
    def _most(self) -> int:
        """Largest number of page sets in flight."""
        return self.config.max_inflight_fetches * self.config.fetch_window

    def _ahead(self, now: int) -> int:
        """Return how many page sets the back may have in flight."""
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
        """Return how many tokens the front is assigned next (from token ids)."""
        lo, hi = self.ends.gap
        if self.between_steps and self.order.copy and self.pace.front is None:
            return self.spec.page_tokens  # holds the back up as little as possible
        return self.pace.chunk(hi - lo, self.config.recompute_chunk) if self.order.copy else self.config.recompute_chunk

    def _start(self, span: range) -> int:
        """Return the first token of a row that recomputes a span.

        In a page set that has grown since the front passed it, only the new tokens are recomputed.
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
