"""What a dense batch does in one step: who runs in its slots, who comes in, who goes out, whose prompts run apart, who
waits (Baton).

Contract: `decide_lane` is a pure function of one model's rows, of how its slots are taken and of memory counted in
pages. In rank order (priority, then the plan's order) it

  1. keeps rows in their slots, and fills free ones: at once in `baton` and `baton-pd`, only an empty batch in the other
    two modes;
     a row of a better priority takes the slot of the worst, whose K and V are saved (BA-14) and who comes back when a
     slot is free;
  2. moves rows out, the last first, while the pages in use would exceed `high`; takes rows in only up to `low` (BA-15).
    One row always
     runs: alone and aligned it needs no more pages than whoever planned the step has given it;
  3. in the modes with prompts apart, groups prompts by similar length (BA-13) into batches that memory allows.

Whoever memory or slots turn away holds back those behind: a large sequence is not starved by small ones. Who is in
neither the window nor a batch waits with what is kept of it. It does not know tensors, columns' places, clocks or which
tokens.
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
    """One sequence of the lane's model. `kept`: tokens whose K and V it has; `tokens`: how many it is to run now, 0 if
    it has no turn;
    `span`: columns it takes in the lane, 0 if it is kept apart. `prompt`: it runs (a chunk of) its prompt rather than
    its next token.
    """

    seq: str
    kept: int
    tokens: int
    span: int = 0
    priority: int = 0
    prompt: bool = False

    @property
    def reach(self) -> int:
        """Columns it takes in the lane, or would take once it is there."""
        return self.span or self.kept


@dataclass(frozen=True, slots=True)
class LaneView:
    """One model's batch between two steps. `finished`: spans of slots whose sequences have ended but are computed on,
    with the others.
    `others`: pages in use elsewhere; `capacity`: pages of the device. `must`: nobody else runs in this step, so
    somebody here has to.
    """

    rows: tuple[RowView, ...]
    finished: tuple[int, ...]
    kv_layers: int
    page_tokens: int
    others: int
    capacity: int
    must: bool = True

    def pages(self, rows: int, columns: int) -> int:
        """Pages that a batch of this shape takes."""
        return rows * -(-columns // self.page_tokens) * self.kv_layers


@dataclass(frozen=True, slots=True)
class LaneDecision:
    """One step of a lane. `leaving` are saved and go out first, `clear` drops the finished slots; then `apart` run,
    batch by batch; then
    `window`, all together: those of them that are apart come in before. Who is in `leaving` and `window` comes back
    without holes.
    `pages`: the most in use at any time, `others` included.
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
    """The next step of one model's batch. Somebody runs if anybody has a turn."""
    return _Lane(view, config).decision()


class _Lane:
    """The ledger of one decision. `_inside`: who will be in the lane, in rank order."""

    def __init__(self, view: LaneView, config: DenseConfig) -> None:
        self._view = view
        self._config = config
        self._apart_mode = config.mode in _APART
        self._at_once = config.mode in _AT_ONCE
        self._ranked = sorted(view.rows, key=lambda row: (row.tokens == 0, row.priority))
        self._inside = [row for row in self._ranked if row.span]
        self._finished = list(view.finished)
        self._peak = self._grown = (
            0  # pages: the most while prompts run, and what those that have run hold more than before
        )
        self._high = min(
            int(config.high * view.capacity), view.capacity - view.kv_layers
        )  # what others may grow by before they shrink
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
            leaving.append(only.seq)  # without its holes it is as short as can be
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
                return  # nobody overtakes

    def _enter(self, row: RowView, instead_of: RowView | None) -> bool:
        """Take a row in, if memory allows, or if nobody else is there to run."""
        inside = sorted((*(one for one in self._inside if one is not instead_of), row), key=self._ranked.index)
        if self._total(inside) > self._low and not (self._view.must and len(inside) == 1):
            return False
        self._inside = inside
        return True

    def _shrink(self) -> None:
        """Give memory back until it suffices: finished slots first, then the last rows; the first only if others
        run.
        """
        if self._total(self._inside) > self._high:
            self._finished = []
        least = 1 if self._view.must else 0
        while len(self._inside) > least and self._total(self._inside) > self._high:
            self._inside.pop()

    # -- prompts apart -------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[str, ...]]:
        """Batches of prompts whose lengths round up to one power of two (BA-13), as large as memory allows: they need
        no slots.
        """
        prompts = [row for row in self._ranked if row.prompt and not row.span]
        alone = self._view.must and not any(row.tokens for row in self._inside)
        if alone and prompts and self._cost(prompts[:1]) > self._free():
            self._inside, self._finished = [], []  # they have no turn, and nobody else can run
        for group in _similar(prompts):
            while group:
                batch = self._fitting(group, alone)
                if not batch:
                    return  # nobody overtakes
                self._peak = max(self._peak, self._low - self._free() + self._cost(batch))
                self._grown += self._kept_more(batch)
                group, alone = group[len(batch) :], False
                yield tuple(row.seq for row in batch)

    def _fitting(self, group: Sequence[RowView], alone: bool) -> Sequence[RowView]:
        """As many of the group as fit from its first on; that one in any case if nobody runs else."""
        most = len(group)
        while most > int(alone) and self._cost(group[:most]) > self._free():
            most -= 1
        return group[:most]

    def _free(self) -> int:
        """Pages that prompts may take, after those that have run: up to `low`, lest those who wait for a slot keep each
        other out of it.
        """
        return self._low - self._total(self._inside) - self._grown

    def _cost(self, batch: Sequence[RowView]) -> int:
        """Pages that a batch of prompts takes while it runs, beyond what its rows hold already."""
        columns = max(row.kept for row in batch) + max(row.tokens for row in batch)
        return self._view.pages(len(batch), columns) - self._apart(batch)

    def _kept_more(self, batch: Iterable[RowView]) -> int:
        """Pages that the rows will hold beyond those they hold now."""
        pages = self._view.pages
        return sum(pages(1, row.kept + row.tokens) - pages(1, row.kept) for row in batch)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _total(self, inside: Sequence[RowView]) -> int:
        """Pages in use while these are in the lane and run, and everybody else is kept apart."""
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
    """Rows by the power of two that their tokens round up to; groups in the order of their first rows."""
    groups: dict[int, list[RowView]] = {}
    for row in rows:
        groups.setdefault((row.tokens - 1).bit_length(), []).append(row)
    yield from groups.values()
