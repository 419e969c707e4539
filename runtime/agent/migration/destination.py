"""Receive migrations of sequences' K and V on the destination device (BL-16).

    scheduler --StartMigration--> destination --PageRequest--> source (`agent.migration.source`)
    source --PageData--> destination (WritePages, PagesWritten) … --MigrationReady--> scheduler
        meanwhile rows that recompute from the front run in the destination's own steps, from token ids or from
        --PageRequest (before)--> source --PageData (hidden states)--> `fetch` (VerifyActivations, ActivationsVerified)
    scheduler --StartMigration (longer)--> … --MigrationReady-->   what has grown; for the last one the sequence rests
    scheduler --FinishMigration--> destination       commit: the table becomes the sequence's; else its pages are freed

- The destination is the only authority (`policy.migration.two_ended`): each page set is brought by one side.
- All pages are taken before the first one arrives; a migration does not start without room for all of them.
- The first page sets may be those of a sequence that is open here (`agent.migration.opening`).
- The source only reads, and keeps serving the sequence.
- Hidden states from which rows were recomputed stay in the activation cache here, as if hops had brought them.

A loan (IL-04) is a migration of a part of a sequence that is never committed: its pages stay, held for the source,
until the sequence is closed here, or until they are at the source again: that is a migration, too, which is committed
into the sequence's table there.

How pages travel, and when a migration pays off, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.migration.activation_fetch import ActivationFetch
from runtime.agent.migration.incoming import IncomingMigration
from runtime.agent.migration.mending import PageMending
from runtime.agent.migration.opening import open_table
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Array, own
from runtime.config import AgentConfig
from runtime.control.agent_io import (
    ActivationsVerified,
    AgentCommand,
    DropLoan,
    HoldLoan,
    PagesWritten,
    Send,
    VerifyActivations,
    WritePages,
)
from runtime.messages import (
    SCHEDULER,
    EndLoan,
    FinishMigration,
    MendPages,
    MigrationFailed,
    PageData,
    PageRequest,
    RowsLost,
    StartMigration,
)
from runtime.policy.migration.pace import PaceMemory
from runtime.types import ModelSpec


class IncomingMigrations:
    """The migrations to one device: those under way, and committed ones until their sequence is opened."""

    def __init__(
        self,
        device: str,
        tables: SequencePageTables,
        config: AgentConfig,
        kept: ActivationCache,
        between_steps: bool = False,
    ) -> None:
        self._device = device
        self._between_steps = between_steps
        self._tables = tables
        self._kept = kept
        self._config = config
        self._incoming: dict[int, IncomingMigration] = {}
        self._adopted: dict[tuple[str, int], list[tuple[tuple[int, int], str]]] = {}
        self._rows: list[QueuedRow] = []
        self._dropped: list[int] = []
        self._paces = PaceMemory()
        self._mending = PageMending(device, tables)

    def keys(self) -> set[str]:
        """Return the page tables of migrations, which belong to no open sequence yet."""
        return (
            {each.key for each in self._incoming.values()}
            | {key for some in self._adopted.values() for _, key in some}
            | self._mending.keys()
        )

    def seqs(self) -> set[str]:
        """Return the sequences that migrate to this device."""
        return {each.order.seq for each in self._incoming.values()} | {seq for seq, _ in self._adopted}

    def lent(self) -> Iterator[tuple[str, int]]:
        """Yield the pages that are held for other devices, those on their way included, with the debtor (IL-11)."""
        loans = (each for each in self._incoming.values() if each.order.loan)
        return ((each.order.source, self._tables.book.pages_of(each.key)) for each in loans)

    def take_rows(self) -> list[QueuedRow]:
        """Return the rows that recompute, for the queue; each is returned once."""
        rows, self._rows = self._rows, []
        return rows

    def drop_loans(self) -> list[AgentCommand]:
        """Return commands that end the loans that are over; each is returned once."""
        over, self._dropped = self._dropped, []
        return [DropLoan(loan) for loan in over]

    def adopted(self, seq: str, epoch: int) -> list[tuple[tuple[int, int], str]]:
        """Hand over the tables that were committed for a sequence, each with its attention layers."""
        return self._adopted.pop((seq, epoch), [])

    # -- the destination -----------------------------------------------------------------------------------------------

    def receive(
        self, order: StartMigration, spec: ModelSpec | None, now: int, donor: AgentSequence | None = None
    ) -> list[AgentCommand]:
        """Start a migration, or extend one by what the sequence has grown.

        `donor`: the sequence of which it shares pages, as `order.shared` says; None if it is not here.
        """
        known = self._incoming.get(order.move)
        if known is not None:
            return self._grow(known, order, now)
        if spec is None and (order.tokens or order.from_activations):
            return self._stuck(order.move, order.seq, f"{order.stage.id} is not loaded here")
        opened = open_table(order, spec, self._tables, self._device, donor)
        if isinstance(opened, str):
            return self._stuck(order.move, order.seq, opened)
        sequence = AgentSequence(order.request, order.epoch, (), ())
        fetch = ActivationFetch(order.stage.lo) if order.from_activations else None
        self._incoming[order.move] = IncomingMigration(
            self._device,
            self._tables,
            self._config,
            order,
            opened.key,
            opened.spec,
            opened.ends,
            sequence,
            fetch,
            pace=self._paces.begin(order.stage.id, order.source),
            began=now,
            between_steps=self._between_steps,
        )
        return self._go_on(self._incoming[order.move], now)

    def arrived(self, pages: PageData, arrays: Sequence[Array], now: int) -> list[AgentCommand]:
        """Handle pages or hidden states from the source; those that are not awaited any more are dropped."""
        move = self._incoming.get(pages.move)
        first = 0 if move is None else move.order.first
        span = range(pages.lo - first, pages.hi - first)
        if pages.before:
            return [] if move is None else self._fetched(move, pages, arrays, now)
        if move is None or not move.ends.awaits(span):
            return []
        if pages.error or len(arrays) != 1:
            move.fail_copy(span)
            return self._go_on(move, now)
        lo, hi, every = span.start, span.stop, move.order.layers
        layers = pages.layers if pages.layers[1] else every
        if not move.takes(span, layers):
            return []
        places = self._tables.pages(move.key, lo, hi, slice(layers[0] - every[0], layers[1] - every[0]))
        move.writing[lo, hi, layers[0]] = len(arrays[0].data) if hasattr(arrays[0].data, "__len__") else 0
        return [WritePages(places, arrays[0], pages.digest, pages.move, lo, hi, layers)]

    def written(self, event: PagesWritten, now: int) -> list[AgentCommand]:
        """Handle the engine's answer for written pages."""
        move, span = self._incoming.get(event.move), range(event.lo, event.hi)
        nbytes = None if move is None else move.writing.pop((event.lo, event.hi, event.layers[0]), None)
        if move is None or nbytes is None:
            return []
        move.nbytes += nbytes
        if event.error:
            move.fail_copy(span)
        elif event.layers[1] == move.order.layers[1]:
            move.end_copy(span, now)
        move.pace.back_since = now
        return self._go_on(move, now)

    def checked(self, event: ActivationsVerified, now: int) -> list[AgentCommand]:
        """Handle the result of verifying hidden states."""
        move = self._incoming.get(event.move)
        if move is None or move.fetch is None:
            return []
        if event.error:
            move.unfed(event.lo, event.hi, event.error)
        else:
            move.fetch.checked(event.lo, event.hi)
            move.shared.record_arrival("inputs", event.lo, event.hi, move.groups(event.hi - event.lo), now)
        return self._go_on(move, now)

    def finish_row(self, row: QueuedRow, outputs: Mapping[str, Array], now: int) -> list[AgentCommand]:
        """Handle a row that has recomputed its tokens. `outputs`: of its step, by table."""
        if (mended := self._mending.finish_row(row, outputs)) is not None:
            return mended
        move = self._incoming.get(row.move)
        if move is None or move.key != row.name:
            return []
        stop, width = row.start + row.tokens, move.spec.page_tokens
        move.recomputing = now - move.began
        # Tokens before the row were copied and are here: a row runs only after everything it attends to.
        self._tables.fill(move.key, stop - self._tables.book.tokens_of(move.key))
        move.ends.recomputed(range(row.start // width * width, stop))
        move.pace.front = (now - move.pace.front_since) / -(-row.tokens // width)
        if move.fetch is not None:
            move.fetch.finish_span()
            move.shared.record_row(move.groups(row.tokens), now)
            if row.array is not None and self._kept:
                self._kept.store_span(row.sequence.seq, move.fetch.before, row.start, own(row.array))
        return self._go_on(move, now)

    def failed(self, row: QueuedRow, reason: str, now: int) -> list[AgentCommand]:
        """Handle a failed step of a row that recomputes: its pages are copied instead, if there is a source."""
        if (lost := self._mending.failed(row, reason)) is not None:
            return lost
        move = self._incoming.get(row.move)
        if move is None or move.key != row.name:
            return []
        move.ends.stop_recompute()
        if move.fetch is not None:
            move.fetch.finish_span()
            move.fetch.cut(reason)
            move.fetch.give_up()
        if not move.ends.stuck:
            return self._go_on(move, now)
        self._discard_move(move)
        return self._stuck(row.move, row.sequence.seq, reason)

    def recalls(self, seq: str, epoch: int) -> bool:
        """Return whether pages of a sequence come back, and are not the sequence's yet."""
        orders = (each.order for each in self._incoming.values())
        return any(order.recall and (order.seq, order.epoch) == (seq, epoch) for order in orders)

    def recalled_into(self, order: FinishMigration, keys: Mapping[int, str]) -> str:
        """Return the table, of `keys` by first component, that gets the pages back; "" if none does."""
        move = self._incoming.get(order.move)
        return keys.get(move.order.stage.lo, "") if move is not None and move.order.recall and order.commit else ""

    def settle(self, order: FinishMigration, keys: Mapping[int, str] | None = None) -> list[AgentCommand]:
        """End a migration in any phase. A committed table waits for the OpenSequences that comes next.

        Pages of a loan that come back become a part of one of the sequence's tables, `keys` by first component; if they
        cannot, it runs again.
        """
        move = self._incoming.get(order.move)
        if move is None:
            return []
        if not order.commit or not move.ends.is_complete:
            self._discard_move(move)
            return []
        first, recall = move.order.first, move.order.recall
        del self._incoming[order.move]
        self._tables.fill(move.key, move.order.upto - first - self._tables.book.tokens_of(move.key))
        if recall:
            key = (keys or {}).get(move.order.stage.lo, "")
            if self._tables.bring_back(key, move.key, recall, first, layers=move.order.hop_layers):
                return []
            self._tables.release(move.key)
            why = "its pages cannot come back"
            return [Send(SCHEDULER, RowsLost(self._device, (order.seq,), (order.epoch,), why, True))]
        self._adopted.setdefault((order.seq, order.epoch), []).append((move.order.layers, move.key))
        return []

    def unreachable(self, device: str, now: int) -> list[AgentCommand]:
        """Handle the loss of a device: what it was the source of is recomputed to the end, where possible."""
        out: list[AgentCommand] = []
        for move in tuple(self._incoming.values()):
            if move.order.source == device:
                move.cut_off()
                out += self._go_on(move, now)
        return out

    def closed(self, seq: str, epoch: int) -> None:
        """Discard the migrations of a sequence up to this epoch."""
        self._mending.closed(seq, epoch)
        if not self._incoming and not self._adopted:
            return
        for move in [each for each in self._incoming.values() if each.order.seq == seq and each.order.epoch <= epoch]:
            self._discard_move(move)
        for name in [name for name in self._adopted if name[0] == seq and name[1] <= epoch]:
            for _, key in self._adopted.pop(name):
                self._tables.release(key)
            self._kept.close(seq)

    # -- loans ---------------------------------------------------------------------------------------------------------

    def mend(
        self, order: MendPages, arrays: Sequence[Array], sequence: AgentSequence | None, now: int
    ) -> list[AgentCommand]:
        """Compute tokens of a sequence again that a dead device held."""
        return self._mending.begin(order, arrays, sequence, self._rows, now)

    @property
    def mending(self) -> PageMending:
        """What is computed again here."""
        return self._mending

    def lent_pages(self, want: PageRequest) -> tuple[int, ...] | None:
        """Return the pages of a loan that a request asks for; None if they are not held here."""
        move = self._incoming.get(want.loan)
        if move is None or not move.order.loan or (move.order.seq, move.order.epoch) != (want.seq, want.epoch):
            return None
        first, width = move.order.first, move.spec.page_tokens
        lo, hi = want.lo - first, want.hi - first
        held = move.told >= 0 and want.layers == move.order.layers
        if not held or not 0 <= lo < hi <= self._tables.book.tokens_of(move.key) or lo % width:
            return None
        return self._tables.pages(move.key, lo, hi)

    def end_loan(self, order: EndLoan) -> list[AgentCommand]:
        """Free the pages of a loan from token `upto` of its sequence on."""
        move = self._incoming.get(order.loan)
        if move is None or move.told < 0 or (move.order.seq, move.order.epoch) != (order.seq, order.epoch):
            return []
        kept = order.upto - move.order.first
        if kept <= 0:
            self._discard_move(move)
            return self.drop_loans()
        self._tables.book.cut_lent(move.key, kept)
        return [self._hold(move, kept)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _hold(self, move: IncomingMigration, tokens: int) -> HoldLoan:
        """Return the command that holds these first tokens of a loan."""
        order = move.order
        return HoldLoan(order.move, self._tables.book.groups_of(move.key), tokens, order.source, order.skipped)

    def _grow(self, move: IncomingMigration, order: StartMigration, now: int) -> list[AgentCommand]:
        more = order.upto - move.order.upto
        if more < 0 or not move.ends.is_complete or not self._room(move, order.upto):
            self._discard_move(move)
            return self._stuck(order.move, order.seq, "no room for what has grown")
        move.order = order
        if move.spec.kv_layers:
            move.ends.extend(order.upto)
        if move.fetch is not None and move.fetch.is_exhausted:
            move.ends.inputs(())
        return self._go_on(move, now)

    def _room(self, move: IncomingMigration, upto: int) -> bool:
        return self._tables.grow(move.key, upto - self._tables.book.tokens_of(move.key))

    def _go_on(self, move: IncomingMigration, now: int) -> list[AgentCommand]:
        """Give both ends work; report to the scheduler when everything is here, or when nothing more can arrive."""
        if move.ends.is_complete:
            return self._report_progress(move)
        out: list[AgentCommand] = [*move.advance(self._rows, now)]
        if move.is_exhausted:
            self._discard_move(move)
            out += self._stuck(move.order.move, move.order.seq, "its pages cannot be had any more")
        return out

    def _fetched(
        self, move: IncomingMigration, pages: PageData, arrays: Sequence[Array], now: int
    ) -> list[AgentCommand]:
        """Handle the source's answer to a request for hidden states."""
        fetch = move.fetch
        if fetch is None or not fetch.awaits(pages.lo, pages.hi):
            return []
        move.ends.inputs(pages.kept)
        if pages.error or len(arrays) != 1 or not fetch.arrived(pages.lo, pages.hi, arrays[0]):
            move.unfed(pages.lo, pages.hi, pages.error or "hidden states of another shape")
            return self._go_on(move, now)
        return [VerifyActivations(arrays[0], pages.digest, pages.move, pages.lo, pages.hi)]

    def _report_progress(self, move: IncomingMigration) -> list[AgentCommand]:
        order = move.order
        if move.told == order.upto:
            return []
        move.told = order.upto
        out: list[AgentCommand] = []
        if order.loan:
            self._tables.book.lend(move.key)
            out.append(self._hold(move, order.upto - order.first))
        self._paces.end(order.stage.id, order.source, move.pace)
        return [*out, Send(SCHEDULER, move.ready())]

    def _discard_move(self, move: IncomingMigration) -> None:
        del self._incoming[move.order.move]
        if move.order.loan and move.told >= 0:
            self._dropped.append(move.order.move)
        self._tables.release(move.key)
        if move.fetch is not None:
            self._kept.discard_spans(move.order.seq, move.fetch.before)

    def _stuck(self, move: int, seq: str, reason: str) -> list[AgentCommand]:
        return [Send(SCHEDULER, MigrationFailed(self._device, move, seq, reason))]
