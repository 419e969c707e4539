"""Keep the rows, plan and messages of batches that decode on, from one step to the next (persistent batches).

The scheduler numbers a batch when it forms one: the rows of one message, one token each. A later message with the same
number has the same rows in the same order, each one token on. For such a message nothing has to be looked up or built
row by row: the rows of the last step are advanced by one token, with the plan for the engine and the message for the
next device. `StepPlan.batch` and the messages that a step sends carry the number on, so the links and the engine keep
their state under it, too.

    message -> rows_of(message) -> queue -> begin(waiting) -> engine -> first(rows, outputs), results(rows, sampled)
                     ^ prepare() does the work beforehand, while the device waits for the message

A batch is kept here after a step of exactly its rows has ended well. Rows of migrations, speculated rows and rows that
are only part of a step are never kept. `clear` is called when stages are loaded or unloaded and when a step
fails. Pages are taken when a step begins, not before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import QueuedRow
from runtime.agent.steps.outbound import next_device, pass_of
from runtime.chains import Array, Slice, Stacked
from runtime.control.agent_io import Send
from runtime.messages import SCHEDULER, ForwardRows, RowsDone, RunRows
from runtime.policy.batching.step import Blocks, HopLimits, all_fit
from runtime.types import Row, Sampled

#: Batches that are kept. A path that returns to a device has one for each of its hops there; they run in turn.
_MOST = 8
#: One in so many steps of a batch is timed on its way to the next device (`agent.steps.hop_times`). All other
#: messages are alike, so that both ends of a link look them up instead of encoding and decoding each.
_TIMED = 8
#: A batch on a device: its number, the sequence of its first row, and that row's hop.
_Key = tuple[int, str, int]


@dataclass(slots=True)
class _Batch:
    """A batch between two steps.

    Fields:
        rows: Its rows; those of the last step until `_advance`, then those of the next one.
        device: The device that all its rows go on to; None if they end here, stay here, or go to several devices.
        ends: Whether all its rows are at the end of their paths.
        ready: Whether `rows`, `plan`, `short` and `onward` are those of the next step.
        plan: The engine's rows; for first hops, token ids are filled in later.
        short: Indexes of rows that need another page.
        names: Tables of the rows.
        onward: The message to `device`.
    """

    number: int
    rows: list[QueuedRow]
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    names: tuple[str, ...]
    device: str | None = None
    ends: bool = False
    ready: bool = False
    plan: tuple[Row, ...] = ()
    short: tuple[int, ...] = ()
    onward: ForwardRows | None = None


class DecodeBatches:
    """The persistent batches of one device.

    Args:
        device: Its name in paths.
        tables: Its page tables.
        limits: Limits of a step.
    """

    def __init__(self, device: str, tables: SequencePageTables, limits: HopLimits) -> None:
        self._device, self._tables, self._limits = device, tables, limits
        self._batches: OrderedDict[_Key, _Batch] = OrderedDict()
        #: Rows of the latest message that has a number, until they run: they may become a batch.
        self._arrived: tuple[int, tuple[QueuedRow, ...]] | None = None
        self._waiting: _Batch | None = None
        self._running: _Batch | None = None
        self._sent: Sequence[QueuedRow] | None = None
        self._untimed = 0
        #: Number of steps that took rows and plan from a batch, advanced by one token.
        self.reused = 0

    def clear(self) -> None:
        """Drop all batches, because what they were built from has changed."""
        self._batches.clear()
        self._arrived = self._waiting = self._running = self._sent = None

    def prepare(self) -> None:
        """Advance all batches by one token, while the device waits for messages."""
        for key, batch in list(self._batches.items()):
            if not batch.ready and not self._advance(batch):
                del self._batches[key]

    # -- a message, and the step of its rows ---------------------------------------------------------------------------

    def rows_of(self, message: ForwardRows | RunRows, arrays: Sequence[Array], now: int) -> list[QueuedRow] | None:
        """Return the rows of a message if its batch is known, else None.

        The caller owns the list and its rows until their step has ended.
        """
        self._arrived = self._waiting = None
        if not message.batch:
            return None
        batch = self._batches.pop(_key(message), None)
        if batch is None or not (batch.ready or self._advance(batch)):
            return None
        rows = batch.rows
        if (
            batch.seqs != message.seqs
            or batch.epochs != message.epochs
            or rows[0].start != message.starts[0]
            or not _are_here(rows)
        ):
            return None
        if isinstance(message, RunRows):
            for row, token in zip(rows, message.tokens, strict=True):
                row.since, row.ids = now, (token,)
        elif len(arrays) == 1 and arrays[0].shape[0] == len(rows):
            for at, row in enumerate(rows):
                row.since, row.array = now, Slice(arrays[0], at, at + 1)
        else:
            return None
        self._waiting, self._arrived = batch, (batch.number, tuple(rows))
        return rows

    def arrived(self, message: ForwardRows | RunRows, rows: list[QueuedRow]) -> None:
        """Record the rows of a message with an unknown batch. Ignored unless every row of the message is there."""
        if message.batch and len(rows) == len(message.seqs):
            self._arrived = message.batch, tuple(rows)

    def begin(self, waiting: Sequence[QueuedRow]) -> tuple[int, tuple[Row, ...], Mapping[str, Array]] | None:
        """Return number, plan and inputs of the next step, if just a known batch waits and enough pages are free."""
        batch, self._waiting = self._waiting, None
        if batch is None or waiting is not batch.rows or len(waiting) != len(batch.plan) or not _are_here(waiting):
            return None
        if not all([self._tables.grow(batch.names[at], 1) for at in batch.short]):  # noqa: C419
            return None
        self._running, self._arrived = batch, None
        self.reused += 1
        first = batch.rows[0].array
        return batch.number, self._filled(batch), Stacked(batch.names, first.whole) if isinstance(first, Slice) else {}

    def number_of(self, chosen: list[QueuedRow]) -> int:
        """Return the number of the batch if a step's rows are exactly those of the last numbered message, else 0."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or arrived[1] != tuple(chosen) or not _decodes(chosen):
            return 0
        self._running = _Batch(
            arrived[0],
            chosen,
            tuple([row.sequence.seq for row in chosen]),
            tuple([row.epoch for row in chosen]),
            tuple([row.name for row in chosen]),
        )
        return arrived[0]

    # -- its results ---------------------------------------------------------------------------------------------------

    def first(self, rows: Sequence[QueuedRow], outputs: Mapping[str, Array], now: int) -> Send | None:
        """Return the message that carries a step's rows to the next device, if it was built beforehand.

        Returns it once per step. One in `_TIMED` carries the time at which it left.
        """
        batch = self._running
        if batch is None or batch.rows is not rows or self._sent is rows or not _whole(rows):
            return None
        if batch.onward is None or batch.device is None:
            return None
        if not isinstance(outputs, Stacked) or not outputs.matches_rows(batch.names):
            return None
        self._sent, message = rows, batch.onward
        self._untimed = (self._untimed + 1) % _TIMED
        if not self._untimed:
            message = replace(message, sent=now)
        return Send(batch.device, message, (outputs.whole,))

    def already_sent(self, rows: Sequence[QueuedRow]) -> bool:
        """Return whether `first` has returned the message for these rows, and reset that."""
        sent, self._sent = self._sent, None
        return sent is rows

    def results(self, rows: Sequence[QueuedRow], sampled: Mapping[str, Sampled]) -> Send | None:
        """Return the message with the tokens of a batch if all its rows end here; None for any other step."""
        batch = self._running
        if batch is None or batch.rows is not rows or not batch.ends or len(sampled) != len(rows) or not _whole(rows):
            return None
        seqs = tuple([row.sequence.seq for row in rows])
        epochs, ones = tuple([row.epoch for row in rows]), (1,) * len(rows)
        tokens = tuple(  # under the sequences' names: the engine returns them under those of tables
            [
                Sampled(seq, (one := sampled[row.name]).token, one.logprob, one.top)
                for row, seq in zip(rows, seqs, strict=True)
            ]
        )
        return Send(SCHEDULER, RowsDone(self._device, seqs, epochs, ones, tokens, batch=batch.number))

    def number_of_running(self, rows: Sequence[QueuedRow]) -> int:
        """Return the batch number for the messages of a step; 0 if its rows are not a whole batch."""
        batch = self._running
        return 0 if batch is None or batch.rows is not rows or not _whole(rows) else batch.number

    def end_step(self, rows: Sequence[QueuedRow], blocks: Blocks) -> None:
        """Keep the batch of a step that has ended well, for its next step."""
        batch, self._running = self._running, None
        if batch is None or batch.rows is not rows:
            return
        if not batch.plan:  # its first step here
            if not self._can_keep(rows, blocks):
                return
            batch.device = None if (device := next_device(rows)) == self._device else device
            batch.ends = all([row.hop + 1 == len(row.sequence.path) for row in rows])  # noqa: C419
        batch.ready = False
        first = rows[0]
        self._batches[batch.number, first.sequence.seq, first.hop] = batch
        if len(self._batches) > _MOST:
            self._batches.popitem(last=False)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _can_keep(self, rows: Sequence[QueuedRow], blocks: Blocks) -> bool:
        told, tokens = self._tables.told, rows[0].ids is not None
        return (
            all([row.name in told and (row.ids is not None) == tokens for row in rows])  # noqa: C419
            and all([row.stage in blocks.passes and row.sequence.ahead is None for row in rows])  # noqa: C419
            and len({row.name for row in rows}) == len(rows)
            and all_fit(rows, blocks, self._limits)
        )

    def _advance(self, batch: _Batch) -> bool:
        """Build rows, plan and message of the next step from the last one; return False if a sequence is closed."""
        if not _are_here(batch.rows):
            return False
        told, rows, plan = self._tables.told, [], []
        for row in batch.rows:
            start, generated, last = row.start + 1, row.generated + 1, row.hop + 1 == len(row.sequence.path)
            rows.append(
                QueuedRow(
                    row.sequence, row.epoch, row.hop, row.name, row.stage, start, 1, None, None, row.sample, generated,
                    1, 0, True,
                )
            )  # fmt: skip
            plan.append(Row(row.name, row.stage, (0,), start, (), row.sample and last, generated))
        batch.rows, batch.plan = rows, tuple(plan)
        batch.short = tuple([at for at, row in enumerate(rows) if told[row.name] <= row.start])
        batch.onward = None if batch.device is None else pass_of(rows, batch.number)
        batch.ready = True
        return True

    def _filled(self, batch: _Batch) -> tuple[Row, ...]:
        """Return the plan with what was not known beforehand: tokens, and pages taken now."""
        if batch.rows[0].ids is None and not batch.short:
            return batch.plan
        plan = list(batch.plan)
        if batch.rows[0].ids is not None:
            for at, (row, each) in enumerate(zip(plan, batch.rows, strict=True)):
                plan[at] = Row(row.seq, row.model, each.ids or (), row.start, (), row.sample, row.generated)
        for at in batch.short:
            row = plan[at]
            pages = self._tables.announce_pages(row.seq, row.start + 1)
            plan[at] = Row(row.seq, row.model, row.tokens, row.start, pages, row.sample, row.generated)
        return tuple(plan)


def _are_here(rows: Sequence[QueuedRow]) -> bool:
    """Whether no row's sequence was closed or opened anew since the row was made."""
    return all([row.sequence.here for row in rows])  # noqa: C419


def _whole(rows: Sequence[QueuedRow]) -> bool:
    """Return whether all rows still go on together: none is closed, and no next hop is on offer (BL-23)."""
    return all([row.sequence.here and not row.sequence.offers for row in rows])  # noqa: C419


def _key(message: ForwardRows | RunRows) -> _Key:
    return message.batch, message.seqs[0], message.hops[0] if isinstance(message, ForwardRows) else 0


def _decodes(rows: Sequence[QueuedRow]) -> bool:
    """Return whether every row decodes one token, without migration, speculation, division or credit.

    The last rows of a prompt with hidden states to be saved do not count as such.
    """
    return all(
        [  # noqa: C419
            row.tokens == row.steps == 1
            and not (row.move or row.attempt or row.shadow or row.part or row.before or row.credit is not None)
            and (row.sequence.saving is None or row.start >= row.sequence.saving.end)
            and (row.sequence.entry is None or row.start >= row.sequence.entry.tokens)
            for row in rows
        ]
    )
