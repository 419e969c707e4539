"""Prepare the step that a device will most likely run next, while it waits: the rows of the last step, one token on.

    finish_step -> ran(rows)    prepare() while nothing can run    message -> came(…) -> takes(…) -> goes(…) -> gone(…)

After a step's layers none of this code is in the processor's caches: making a plan of some dozens of rows then takes
half a millisecond, while the next device waits. Prepared in the idle time before the message arrives, it costs nothing.

Contract: nothing is given out ahead: pages are taken when rows run. Rows of migrations, predictions and offers are not
prepared. A prepared step is valid only while sequences, paths, tables and limits stay as they were: `forget` is called
at every change, and rows that arrive otherwise than expected go the usual way, with the same result. It sends nothing
and decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import QueuedRow
from runtime.agent.steps.outbound import next_device, pass_of
from runtime.chains import Array, Slice, Stacked
from runtime.control.agent_io import Send
from runtime.messages import ForwardRows, RunRows
from runtime.policy.batching.step import Blocks, HopLimits, all_fit
from runtime.types import Row

#: Steps that are made ahead: a path that comes back to a device has several, whose turns come one after the other.
_MOST = 8
#: Its rows come together: the sequence and the hop of its first one.
_Key = tuple[str, int]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step. `short`: places of rows that need another page. `brings`: the message that its rows come with, tokens,
    which nobody knows
    ahead, left out. `onward`: another device, and what goes there, if all of them do."""

    rows: list[QueuedRow]
    plan: tuple[Row, ...]
    short: tuple[int, ...]
    names: tuple[str, ...]
    brings: ForwardRows | RunRows
    onward: tuple[str, ForwardRows] | None


class StepPrefetcher:
    """See the top of the file. `device`: its name in paths; `limits`: of a step."""

    def __init__(self, device: str, tables: SequencePageTables, limits: HopLimits) -> None:
        self._device, self._tables, self._limits = device, tables, limits
        self._ran: OrderedDict[_Key, Sequence[QueuedRow]] = OrderedDict()
        self._made: OrderedDict[_Key, PreparedStep] = OrderedDict()
        self._came: PreparedStep | None = None
        self._runs: PreparedStep | None = None
        self._gone: Sequence[QueuedRow] | None = None
        #: Steps that were made ahead and run.
        self.taken = 0

    def discard_prepared(self) -> None:
        """Something is not as it was."""
        self._ran.clear()
        self._made.clear()
        self._came = self._runs = self._gone = None

    def step_done(self, rows: Sequence[QueuedRow]) -> None:
        """These rows, all that a step had, are through."""
        first = rows[0]
        if first.tokens == 1:
            _latest(self._ran, (first.sequence.seq, first.hop), rows)

    def prepare(self, blocks: Blocks) -> None:
        """Make what follows from steps that were."""
        while self._ran:
            key, rows = self._ran.popitem()
            if (made := self._next(rows, blocks)) is not None:
                _latest(self._made, key, made)

    def match_message(
        self, message: ForwardRows | RunRows, arrays: Sequence[Array], now: int
    ) -> list[QueuedRow] | None:
        """The rows of a message, if they are those that were expected; they are the caller's from now on."""
        key = (
            None if not message.seqs else (message.seqs[0], message.hops[0] if isinstance(message, ForwardRows) else 0)
        )
        made = self._made.get(key) if key is not None else None
        if made is None or key is None or not _as_expected(message, arrays, made.brings):
            return None
        del self._made[key]
        if isinstance(message, RunRows):
            for row, token in zip(made.rows, message.tokens, strict=True):
                row.since, row.ids = now, (token,)
        else:
            for at, row in enumerate(made.rows):
                row.since, row.array = now, Slice(arrays[0], at, at + 1)
        self._came = made
        return made.rows

    def takes(self, waiting: Sequence[QueuedRow]) -> tuple[tuple[Row, ...], Mapping[str, Array]] | None:
        """The next step's rows and what they start from, if just those wait that have come as expected, and there are
        pages for them.
        """
        made, self._came = self._came, None
        if made is None or waiting is not made.rows or len(waiting) != len(made.plan):  # others may have joined them
            return None
        first = made.rows[0].array
        begins = isinstance(made.brings, RunRows)
        if not (begins or isinstance(first, Slice)) or not all(
            [self._tables.grow(made.names[at], 1) for at in made.short]  # noqa: C419
        ):
            return None
        self._runs = made
        self.taken += 1
        return self._full(made), Stacked(made.names, first.whole) if isinstance(first, Slice) else {}

    def goes(self, rows: Sequence[QueuedRow], outputs: Mapping[str, Array]) -> Send | None:
        """What tells of rows that are through, if their step was made ahead and all of them go on to one other device.
        Once.
        """
        made, self._runs = self._runs, None
        if made is None or made.rows is not rows or made.onward is None:
            return None
        if not isinstance(outputs, Stacked) or not outputs.matches_rows(made.names):
            return None
        device, message = made.onward
        self._gone = rows
        return Send(device, message, (outputs.whole,))

    def already_sent(self, rows: Sequence[QueuedRow]) -> bool:
        """Whether `goes` has told of these."""
        gone, self._gone = self._gone, None
        return gone is rows

    # -- inside --------------------------------------------------------------------------------------------------------

    def _full(self, made: PreparedStep) -> tuple[Row, ...]:
        """Its rows with what could not be known before: tokens, and pages that they need now."""
        plan = list(made.plan)
        if isinstance(made.brings, RunRows):
            for at, (row, each) in enumerate(zip(plan, made.rows, strict=True)):
                plan[at] = Row(row.seq, row.model, each.ids or (), row.start, (), row.sample, row.generated)
        for at in made.short:
            row = plan[at]
            plan[at] = Row(
                row.seq,
                row.model,
                row.tokens,
                row.start,
                self._tables.announce_pages(row.seq, row.start + 1),
                row.sample,
                row.generated,
            )
        return tuple(plan)

    def _next(self, rows: Sequence[QueuedRow], blocks: Blocks) -> PreparedStep | None:
        """The step behind one; None where it is not sure what that will be."""
        told = self._tables.told
        following: list[QueuedRow] = []
        plan: list[Row] = []
        for row in rows:
            sequence, start = row.sequence, row.start + 1
            plain = row.tokens == row.steps == 1 and not (
                row.move or row.attempt or row.shadow or row.part or row.before
            )
            if not plain or not sequence.here or sequence.ahead is not None or row.stage not in blocks.passes:
                return None
            if row.name not in told:
                return None
            generated, last = row.generated + 1, row.hop + 1 == len(sequence.path)
            following.append(
                QueuedRow(
                    sequence,
                    row.epoch,
                    row.hop,
                    row.name,
                    row.stage,
                    start,
                    1,
                    None,
                    None,
                    row.sample,
                    generated,
                    1,
                    0,
                    True,
                )
            )
            plan.append(Row(row.name, row.stage, (0,), start, (), row.sample and last, generated))
        if len({row.ids is None for row in rows}) > 1:
            return None
        if len({row.name for row in rows}) < len(rows) or not all_fit(following, blocks, self._limits):
            return None
        device = next_device(following)
        onward = None if device in (None, self._device) else (device, pass_of(following))
        short = tuple([at for at, row in enumerate(following) if told[row.name] <= row.start])
        return PreparedStep(
            following,
            tuple(plan),
            short,
            tuple([row.name for row in rows]),
            _brings(following, tokens=rows[0].ids is not None),
            onward,
        )


def _latest(kept: OrderedDict[_Key, _T], key: _Key, one: _T) -> None:
    """Of what is kept the latest ones."""
    kept[key] = one
    kept.move_to_end(key)
    if len(kept) > _MOST:
        kept.popitem(last=False)


def _brings(rows: Sequence[QueuedRow], *, tokens: bool) -> ForwardRows | RunRows:
    columns = [(row.sequence.seq, row.epoch, row.hop, row.start, row.tokens, row.sample, row.generated) for row in rows]
    seqs, epochs, hops, starts, counts, sample, generated = zip(*columns, strict=True)
    if tokens:
        return RunRows(seqs, epochs, starts, counts, (), sample, generated, (1,) * len(rows))
    return ForwardRows(seqs, epochs, hops, starts, counts, sample, generated)


def _as_expected(message: ForwardRows | RunRows, arrays: Sequence[Array], expected: ForwardRows | RunRows) -> bool:
    if isinstance(message, ForwardRows):
        return message == expected and [array.shape[0] for array in arrays] == [len(message.seqs)]
    return (
        isinstance(expected, RunRows)
        and not (message.attempts or message.speculate)
        and _but_tokens(message) == _but_tokens(expected)
    )


def _but_tokens(go: RunRows) -> tuple[tuple[object, ...], ...]:
    return go.seqs, go.epochs, go.starts, go.counts, go.sample, go.generated, go.steps
