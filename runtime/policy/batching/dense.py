"""Decide a dense batch's next step: which rows run in its slots, enter, leave, or run their prompts apart (Baton).

`decide_lane` is a pure function of one model's rows, its slots, and memory counted in pages. In rank order (priority,
then the plan's order) it

  1. keeps rows in their slots and fills free ones: at once in `baton` and `baton-pd`, only an empty batch in the other
     two modes. A row of a better priority takes the slot of the worst one, which returns when a slot is free; its K
     and V are saved (BA-14);
  2. moves rows out, the last first, while the pages in use would exceed `high`; admits rows only up to `low` (BA-15).
     One row always runs: alone and aligned it needs no more pages than the plan has allocated;
  3. in the modes with prompts apart, groups prompts by similar length (BA-13) into batches that memory allows.

A row that finds no slot or memory blocks the rows behind it, so that small sequences do not starve a large one. A row
that is in neither the window nor a batch waits, with its K and V kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.config import DenseConfig

#: Modes that run prompts apart, and modes that fill a slot as soon as it is free.
_APART = frozenset({"pd", "baton-pd"})
_AT_ONCE = frozenset({"baton", "baton-pd"})


@dataclass(frozen=True, slots=True)
class RowView:
    """Describe one sequence of the lane's model.

    Fields:
        kept: Tokens with K and V.
        tokens: Tokens to run now; 0 if it has no turn.
        span: Columns that it takes in the lane; 0 if it is kept apart.
        prompt: It runs a chunk of its prompt instead of its next token.
    """

    seq: str
    kept: int
    tokens: int
    span: int = 0
    priority: int = 0
    prompt: bool = False

    @property
    def reach(self) -> int:
        """Return the columns it takes in the lane, or would take there."""
        return self.span or self.kept


@dataclass(frozen=True, slots=True)
class LaneView:
    """Describe one model's batch between two steps.

    Fields:
        finished: Spans of slots with sequences that have ended but are still computed.
        others: Pages in use outside the lane.
        capacity: Pages of the device.
        must: No other lane runs in this step, so a row of this one has to.
    """

    rows: tuple[RowView, ...]
    finished: tuple[int, ...]
    kv_layers: int
    page_tokens: int
    others: int
    capacity: int
    must: bool = True

    def pages(self, rows: int, columns: int) -> int:
        """Return the pages that a batch of this shape takes."""
        return rows * -(-columns // self.page_tokens) * self.kv_layers


@dataclass(frozen=True, slots=True)
class LaneDecision:
    """Describe one step of a lane, in this order.

    Fields:
        leaving: Rows that are saved and moved out first. A row in both `leaving` and `window` returns without holes.
        clear: Drop the finished slots.
        apart: Batches of prompts, run one after another.
        window: Rows that run together in the lane; those kept apart enter before.
        pages: Most pages in use at any time, `others` included.
    """

    window: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    clear: bool = False
    pages: int = 0

    @property
    def runs(self) -> frozenset[str]:
        return frozenset((*self.window, *(seq for batch in self.apart for seq in batch)))


def decide_lane(view: LaneView, config: DenseConfig) -> LaneDecision:
    """Decide the next step of one model's batch. At least one row runs if any has a turn and `must` is set."""
    return _Lane(view, config).decision()


class _Lane:
    """Hold the state of one decision. `_inside`: rows that will be in the lane, in rank order."""

    def __init__(self, view: LaneView, config: DenseConfig) -> None:
        self._view = view
        self._config = config
        self._apart_mode = config.mode in _APART
        self._at_once = config.mode in _AT_ONCE
        self._ranked = sorted(view.rows, key=lambda row: (row.tokens == 0, row.priority))
        self._inside = [row for row in self._ranked if row.span]
        self._finished = list(view.finished)
        self._peak = self._grown = (
            0  # pages: the peak while prompts run, and what finished prompts hold more than before
        )
        self._high = min(
            int(config.high * view.capacity), view.capacity - view.kv_layers
        )  # leave one page set for the other lanes to grow
        self._low = int(config.low * view.capacity)

    def decision(self) -> LaneDecision:
        self._fill()
        self._shrink()
        apart = tuple(self._batches()) if self._apart_mode else ()
        peak = max(self._peak, self._total(self._inside) + self._grown)
        kept = {row.seq for row in self._inside}
        window = tuple(row.seq for row in self._inside if row.tokens)
        leaving = [row.seq for row in self._ranked if row.span and row.seq not in kept]
        only = self._inside[0] if len(self._inside) == 1 and not self._finished else None
        if only is not None and only.span > only.kept and self._total(self._inside) > self._high:
            leaving.append(only.seq)  # it returns without holes, as short as possible
            peak = self._total([replace(only, span=only.kept)])
        return LaneDecision(window, tuple(leaving), apart, bool(self._view.finished) and not self._finished, peak)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        coming = [row for row in self._ranked if row.tokens and not row.span and not (self._apart_mode and row.prompt)]
        if not any(row.tokens for row in self._inside):
            self._finished = []
            self._inside = [] if coming else self._inside
        elif not self._at_once:
            return
        for row in coming:
            worst = self._inside[-1] if self._inside else None
            full = len(self._inside) + len(self._finished) >= self._config.slots
            gives_way = worst is not None and (not worst.tokens or (self._at_once and worst.priority > row.priority))
            if (full and not gives_way) or not self._enter(row, worst if full else None):
                return  # no later row overtakes it

    def _enter(self, row: RowView, instead_of: RowView | None) -> bool:
        """Admit a row if memory allows, or if no other row could run."""
        inside = sorted((*(one for one in self._inside if one is not instead_of), row), key=self._ranked.index)
        if self._total(inside) > self._low and not (self._view.must and len(inside) == 1):
            return False
        self._inside = inside
        return True

    def _shrink(self) -> None:
        """Free memory until it suffices: first finished slots, then the last rows.

        The first row is moved out only if other lanes run.
        """
        if self._total(self._inside) > self._high:
            self._finished = []
        least = 1 if self._view.must else 0
        while len(self._inside) > least and self._total(self._inside) > self._high:
            self._inside.pop()

    # -- prompts apart -------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[str, ...]]:
        """Yield batches of prompts of similar length, as large as memory allows; they need no slots.

        The lengths in a batch round up to the same power of two (BA-13).
        """
        prompts = [row for row in self._ranked if row.prompt and not row.span]
        alone = self._view.must and not any(row.tokens for row in self._inside)
        if alone and prompts and self._cost(prompts[:1]) > self._free():
            self._inside, self._finished = [], []  # they have no turn, and the prompt is the only row that can run
        for group in _similar(prompts):
            while group:
                batch = self._fitting(group, alone)
                if not batch:
                    return  # no later row overtakes it
                self._peak = max(self._peak, self._low - self._free() + self._cost(batch))
                self._grown += self._kept_more(batch)
                group, alone = group[len(batch) :], False
                yield tuple(row.seq for row in batch)

    def _fitting(self, group: Sequence[RowView], alone: bool) -> Sequence[RowView]:
        """Return the longest prefix of the group that fits; with `alone` at least its first row."""
        most = len(group)
        while most > int(alone) and self._cost(group[:most]) > self._free():
            most -= 1
        return group[:most]

    def _free(self) -> int:
        """Return the pages that prompts may take beyond those already run.

        The limit is `low`, so that rows that wait for a slot do not keep each other out of it.
        """
        return self._low - self._total(self._inside) - self._grown

    def _cost(self, batch: Sequence[RowView]) -> int:
        """Return the pages that a batch of prompts takes while it runs, beyond what its rows hold already."""
        columns = max(row.kept for row in batch) + max(row.tokens for row in batch)
        return self._view.pages(len(batch), columns) - self._apart(batch)

    def _kept_more(self, batch: Iterable[RowView]) -> int:
        """Return the pages that the rows will hold beyond those they hold now."""
        pages = self._view.pages
        return sum(pages(1, row.kept + row.tokens) - pages(1, row.kept) for row in batch)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _total(self, inside: Sequence[RowView]) -> int:
        """Return the pages in use while these rows are in the lane and run, and all the rest are kept apart."""
        names = {row.seq for row in inside}
        outside = self._apart(row for row in self._ranked if row.seq not in names)
        return self._view.others + outside + self._lane(inside)

    def _lane(self, inside: Sequence[RowView]) -> int:
        rows = len(inside) + len(self._finished)
        width = max((row.tokens for row in inside), default=0)
        reach = max((*(row.reach for row in inside), *self._finished), default=0)
        return self._view.pages(rows, reach + width)

    def _apart(self, rows: Iterable[RowView]) -> int:
        return sum(self._view.pages(1, row.kept) for row in rows)


def _similar(rows: Sequence[RowView]) -> Iterator[list[RowView]]:
    """Group rows by the power of two that their tokens round up to, in the order of the groups' first rows."""
    groups: dict[int, list[RowView]] = {}
    for row in rows:
        groups.setdefault((row.tokens - 1).bit_length(), []).append(row)
    yield from groups.values()
