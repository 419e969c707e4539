"""One model's dense batch: the sequence in each slot, and the saved K and V of sequences without a slot.

`DenseBatch` carries out the decisions of `policy.batching.dense`. It works on rows of plans and on the KV store of one
model; it does not deal with layers, other models or memory limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from runtime.config import DenseConfig
from runtime.engine.dense.context import PaddedBatch
from runtime.engine.dense.kv_store import DenseKV, SavedKV
from runtime.engine.dense.padding_stats import IdleCounts, RanRow, counted
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.context import RowSpan
from runtime.policy.batching.dense import LaneView, RowView
from runtime.types import Row

#: A store that is too small grows by an extra 1/_GROWTH of its columns if memory allows: growing copies all of it.
_GROWTH = 4
#: A store is made smaller once it is more than this many times as large as needed.
_WASTE = 4


class DenseBatch:
    """The dense batch of one model: a KV store with one row per slot, and the saved K and V of sequences beside it.

    `seats[row]` is the sequence in a row of the store, or None where it has ended and is still computed.
    """

    def __init__(self, model: LoadedModel, device: torch.device, config: DenseConfig) -> None:
        self.model = model
        # Layers that attend by themselves need all places of the window, padding included.
        self._skips = config.padding == "skipped" and not any(unit.masked for unit in model.units)
        self.kv_store = DenseKV(model.spec.kv_layers, device)
        self.seats: list[str | None] = []
        self._kept: dict[str, SavedKV] = {}
        self._prompts: DenseKV | None = None
        self._device = device
        self._slots = config.slots

    @property
    def pages(self) -> int:
        """Pages that the KV store, a batch of prompts and the saved sequences take."""
        window = self._pages(self.kv_store.stored_rows, self.kv_store.columns.capacity)
        return window + self._prompt_pages + self._kept_pages(self._kept)

    def view(self, rows: Sequence[Row], others: int, capacity: int, must: bool) -> LaneView:
        """Return what the policy decides from, with the sequences in rank order.

        `rows` are the plan's; `others` counts the pages in use outside of this batch (see `LaneView`).
        """
        named = {row.seq: row for row in self._ranked(rows)}
        seqs = [*named, *(seq for seq in self.seats if seq is not None and seq not in named)]
        finished = tuple(self.kv_store.columns.span(at) for at, seq in enumerate(self.seats) if seq is None)
        spec = self.model.spec
        unplanned = self._kept_pages(seq for seq in self._kept if seq not in named) + self._prompt_pages
        views = tuple(self._row(seq, named.get(seq)) for seq in seqs)
        return LaneView(views, finished, spec.kv_layers, spec.page_tokens, others + unplanned, capacity, must)

    # -- sequences and slots -------------------------------------------------------------------------------------------

    def release(self, seq: str, *, stays: bool) -> None:
        """Drop a sequence that has ended. `stays`: its row is still computed until the whole batch has ended."""
        self._kept.pop(seq, None)
        if seq in self.seats:
            at = self.seats.index(seq)
            if stays:
                self.seats[at] = None
            else:
                self._free_seat(at)
        if not any(self.seats):
            self.clear()

    def save(self, seq: str) -> None:
        """Take a sequence out of its slot and save its K and V (BA-14)."""
        at = self.seats.index(seq)
        self._kept[seq] = self.kv_store.copy_row(at)
        self._free_seat(at)

    def read(self, seq: str, tokens: int) -> SavedKV:
        """Return the K and V of a sequence's first `tokens` tokens. Raises ValueError if it has fewer."""
        held = self.kv_store.copy_row(self.seats.index(seq)) if seq in self.seats else self._kept.get(seq)
        if held is None or held.tokens < tokens:
            raise ValueError(f"{seq} has no {tokens} tokens")
        return (
            held
            if held.tokens == tokens
            else SavedKV(tokens, [k[:tokens] for k in held.k], [v[:tokens] for v in held.v])
        )

    def write(self, seq: str, saved: SavedKV) -> None:
        """Save K and V of a sequence until it gets a slot."""
        self._kept[seq] = saved

    def cost(self, tokens: int) -> int:
        """Return the pages that `tokens` saved tokens of one sequence take."""
        return self._pages(1, tokens)

    def copy(self, seq: str, source: str, tokens: int, *, moves: bool) -> None:
        """Save the K and V of another sequence's first tokens for one that begins with them.

        `moves`: the source, if it is saved beside the batch, loses its K and V. Raises ValueError if the source has
        fewer tokens.
        """
        held = self._kept.get(source)
        if held is None and source in self.seats:
            held, moves = self.kv_store.copy_row(self.seats.index(source)), True
        if held is None or held.tokens < tokens:
            raise ValueError(f"{source} has no {tokens} tokens to begin with")
        made = SavedKV(tokens, [], [])
        for layer in range(len(held.k)):
            for kept, given in ((made.k, held.k), (made.v, held.v)):
                kept.append(given[layer][:tokens].clone())
                if moves:
                    given[layer] = given[layer][:0]
        if moves:
            self._kept.pop(source, None)
        self._kept[seq] = made

    def clear(self) -> None:
        """Drop the rows of sequences that have ended."""
        while None in self.seats:
            self._free_seat(self.seats.index(None))

    def park(self) -> None:
        """Save all sequences and empty the KV store, because its memory is needed elsewhere."""
        self.clear()
        for seq in [seq for seq in self.seats if seq is not None]:
            self.save(seq)
        self.fit(0, 0, 0)

    def fit(self, rows: int, columns: int, spare: int) -> None:
        """Cut columns that are padding in all rows, then resize the KV store for `rows` rows and `columns` columns.

        The store gets exactly this size, or a larger one that costs at most `spare` pages more, so that it need not
        grow in every step.
        """
        self.kv_store.columns.release()
        held = self.kv_store.columns
        width = self.model.spec.page_tokens
        exact = -(-columns // width) * width
        least = self._pages(rows, exact)
        fits = self.kv_store.stored_rows >= rows and held.capacity >= columns
        now = self._pages(self.kv_store.stored_rows, held.capacity)
        if fits and now <= least + spare and now <= _WASTE * max(least, 1):
            return
        wide_rows, wide = (
            min(self._slots, 1 << (rows - 1).bit_length()) if rows else 0,
            exact + -(-exact // (_GROWTH * width)) * width,
        )
        if self._pages(wide_rows, wide) <= least + spare:
            rows, exact = max(rows, wide_rows), wide
        self.kv_store.shape(rows, exact)

    # -- running -------------------------------------------------------------------------------------------------------

    def window(self, rows: Iterable[Row], pages: int) -> PaddedBatch:
        """Open a window for these rows of the plan; sequences without a slot get one first (BA-09, BA-10).

        `pages`: pages that the device has to spare beyond what this needs.
        """
        named = {row.seq: row for row in rows}
        coming = [seq for seq in named if seq not in self.seats]
        width = max(len(row.tokens) for row in named.values())
        reach = max((self.kv_store.columns.needed, *(self._kept[seq].tokens for seq in coming if seq in self._kept)))
        self.fit(len(self.seats) + len(coming), reach + width, pages)
        for seq in coming:
            self.kv_store.enter(self._kept.pop(seq, None))
            self.seats.append(seq)
        ordered = [None if seq is None else named.get(seq) for seq in self.seats]
        return self._opened(self.kv_store, ordered)

    def apart(self, rows: Sequence[Row]) -> PaddedBatch:
        """Open a window for prompts, or chunks of them, in a KV store of their own (BA-08)."""
        self._prompts = kv_store = DenseKV(self.model.spec.kv_layers, self._device)
        kept = [self._kept.pop(row.seq, None) for row in rows]
        width = self.model.spec.page_tokens
        columns = max(0 if one is None else one.tokens for one in kept) + max(len(row.tokens) for row in rows)
        kv_store.shape(len(rows), -(-columns // width) * width)
        for one in kept:
            kv_store.enter(one)
        return self._opened(kv_store, rows)

    def prompt_cost(self, rows: Sequence[Row]) -> int:
        """Return the pages that a batch of prompts takes beyond those that its sequences hold already."""
        columns = max(row.start for row in rows) + max(len(row.tokens) for row in rows)
        return self._pages(len(rows), columns) - self._kept_pages(row.seq for row in rows if row.seq in self._kept)

    def truncate(self, seq: str, tokens: int) -> None:
        """Drop the saved K and V of a sequence behind its first `tokens` tokens."""
        held = self._kept.pop(seq)
        if tokens:
            self._kept[seq] = SavedKV(
                tokens, [k[:tokens].clone() for k in held.k], [v[:tokens].clone() for v in held.v]
            )

    def save_kv(self, batch: PaddedBatch) -> None:
        """Save the K and V of a batch of prompts that has run, until its sequences get slots."""
        for row, kept in zip(batch.rows.rows, batch.kv_store.drain(), strict=True):
            self._kept[row.seq] = kept

    def close_prompts(self) -> None:
        """Drop the prompts' KV store, whether their batch ran or failed."""
        self._prompts = None

    def counts(self, batch: PaddedBatch) -> IdleCounts:
        """Count the useful and idle places that a batch computed."""
        window = batch.kv_store.window
        alive = (
            [True] * len(window.counts)
            if batch.kv_store is not self.kv_store
            else [seq is not None for seq in self.seats]
        )
        rows = [RanRow(count, at in window.fresh, alive[at]) for at, count in enumerate(window.counts)]
        made = counted(rows, window.width)
        return replace(made, skipped=made.shaped - batch.rows.tokens)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _row(self, seq: str, row: Row | None) -> RowView:
        at = self.seats.index(seq) if seq in self.seats else None
        span = 0 if at is None else self.kv_store.columns.span(at)
        priority = self.model.sequences[seq].request.priority
        if row is None:  # it does not run in this step: its kept tokens are counted by its span
            return RowView(seq, span, 0, span, priority)
        return RowView(seq, row.start, len(row.tokens), span, priority, _is_prompt(row))

    def _ranked(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows that decode, then prompts, each by arrival.

        A plan's own order is another one: it begins with rows that were deferred, whatever their rank.
        """
        order = {seq: (held.request.arrival, at) for at, (seq, held) in enumerate(self.model.sequences.items())}
        return sorted(rows, key=lambda row: (_is_prompt(row), *order[row.seq]))

    def _opened(self, kv_store: DenseKV, rows: Sequence[Row | None]) -> PaddedBatch:
        """Open a window for the rows of a KV store, in its order; None stands for a row with nothing to run.

        Rows of this batch with an ended sequence are computed too: the modes that keep them in their slots require it.
        """
        counts = [0 if row is None else len(row.tokens) for row in rows]
        ended = [at for at, seq in enumerate(self.seats) if seq is None] if kv_store is self.kv_store else []
        window = kv_store.begin(
            counts, [0 if row is None else row.start for row in rows], ended if self._skips else None
        )
        ids: list[int] = []
        spans = []
        for place, row in zip(window.places, rows, strict=True):
            if row is not None:
                spans.append(RowSpan(place.at, place.at + place.count, row.start))
            own = () if row is None else row.tokens
            ids.extend([*own, *[0] * place.empty] if place.at <= place.empty_at else [*[0] * place.empty, *own])
        return PaddedBatch(
            ModelBatch(self.model, tuple(row for row in rows if row is not None), tuple(spans), tuple(ids)), kv_store
        )

    def _free_seat(self, at: int) -> None:
        last = self.kv_store.remove_row(at)
        self.seats[at] = self.seats[last]
        del self.seats[last]

    @property
    def _prompt_pages(self) -> int:
        prompts = self._prompts
        return 0 if prompts is None else self._pages(prompts.stored_rows, prompts.columns.capacity)

    def _kept_pages(self, seqs: Iterable[str]) -> int:
        return sum(self._pages(1, self._kept[seq].tokens) for seq in seqs)

    def _pages(self, rows: int, columns: int) -> int:
        return rows * -(-columns // self.model.spec.page_tokens) * self.model.spec.kv_layers


def _is_prompt(row: Row) -> bool:
    """Whether a row runs (a part of) its prompt rather than its next token."""
    return len(row.tokens) > 1 or row.start == 0 or not row.sample


def rows_by_model(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    """Group a plan's rows by model, models in the order of their first row."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.model, []).append(row)
    return found
