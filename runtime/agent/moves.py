"""K and V of sequences on their way between devices, as one device's relay sees it (BL-16): what it receives, and what it gives.

    scheduler --Receive--> destination --Want--> source --Pages--> destination (WritePages, PagesWritten) … --Moved--> scheduler
                                       rows that recompute from the front run in its own steps meanwhile
    scheduler --Receive (longer)--> … --Moved-->     what has grown since, with the sequence at rest for the last one
    scheduler --Settle--> destination                committed: the table is the sequence's; else its pages are free

Contract: the destination is the one authority (`policy.twoended`): each page group has one winner. All pages are taken before the first one
comes; without room for all of them nothing begins. The source only reads, and serves the sequence on. Nothing here knows how
pages travel, or when a move is worth while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.agent.commands import SCHEDULER, PagesWritten, ReadPages, RelayCommand, Send, WritePages
from runtime.agent.guests import Guest, Waiting
from runtime.agent.tables import Tables
from runtime.config import RelayConfig
from runtime.messages import Moved, Pages, Receive, Settle, Stuck, Want
from runtime.policy.twoended import TwoEnded
from runtime.stages import Array
from runtime.types import ModelSpec


@dataclass(slots=True)
class Pace:
    """How fast both ends of a move are: nanoseconds for a page group, the latest; None before the first. `front`, `back`: when each began
    what it is at (the back: the oldest that has not come)."""

    front: float | None = None
    back: float | None = None
    front_since: int = 0
    back_since: int = 0

    def ahead(self, groups: int, most: int) -> int:
        """Groups that the back may have under way while so many are left for both: never more than the front would leave to it.

        Until both are known one at a time: asked for too much, a slow link would hold up what the front could have done (BL-16).
        """
        if self.front is None or self.back is None:
            return 1
        share = self.front / max(self.front + self.back, 1.0)
        return max(1, min(most, int(groups * share / 2)))

    def chunk(self, tokens: int, most: int) -> int:
        """Tokens that the front may take at once of so many that are left: no more than it would do before the back comes."""
        if self.front is None or self.back is None:
            return most
        return min(most, int(tokens * self.back / max(self.front + self.back, 1.0)))


@dataclass(slots=True)
class _Incoming:
    """A move to this device. `nbytes`: that came; `writing`: pages that the engine is putting down."""

    order: Receive
    key: str
    spec: ModelSpec
    ends: TwoEnded
    guest: Guest
    nbytes: int = 0
    writing: dict[tuple[int, int], int] = field(default_factory=dict)
    told: int = -1
    pace: Pace = field(default_factory=Pace)


class Moves:
    def __init__(self, device: str, tables: Tables, config: RelayConfig) -> None:
        self._device = device
        self._tables = tables
        self._config = config
        self._incoming: dict[int, _Incoming] = {}
        self._adopted: dict[tuple[str, int], list[tuple[tuple[int, int], str]]] = {}
        self._rows: list[Waiting] = []

    def keys(self) -> set[str]:
        """Tables that are no sequence's yet."""
        return {each.key for each in self._incoming.values()} | {key for some in self._adopted.values() for _, key in some}

    def take_rows(self) -> list[Waiting]:
        """Rows that recompute, for the queue."""
        rows, self._rows = self._rows, []
        return rows

    def adopted(self, seq: str, epoch: int) -> list[tuple[tuple[int, int], str]]:
        """Tables that were settled for a sequence, each with its layers; handed over."""
        return self._adopted.pop((seq, epoch), [])

    # -- the destination -----------------------------------------------------------------------------------------------

    def receive(self, order: Receive, spec: ModelSpec | None, now: int) -> list[RelayCommand]:
        """Begin a move, or bring what has grown since."""
        known = self._incoming.get(order.move)
        if known is not None:
            return self._grow(known, order, now)
        if spec is None and order.tokens:
            return self._stuck(order.move, order.seq, f"{order.stage.id} is not loaded here")
        first, last = order.layers
        if spec is None or spec.kv_layers != last - first:
            spec = ModelSpec(order.stage.id, last - first, order.page_tokens, order.upto + 1, 1)
        key = self._tables.open(f"{order.seq}!{order.move}", order.stage.lo, spec)
        if not self._tables.grow(key, order.upto):
            self._tables.release(key)
            return self._stuck(order.move, order.seq, "no room for its pages")
        request = order.request
        guest = Guest(request, order.epoch, (), ())
        # Where nothing attends there are no pages, and nothing to bring.
        tokens = order.upto if spec.kv_layers else 0
        ends = TwoEnded(tokens, spec.page_tokens, recompute=bool(order.tokens), copy=order.copy)
        self._incoming[order.move] = _Incoming(order, key, spec, ends, guest)
        return self._go_on(self._incoming[order.move], now)

    def arrived(self, pages: Pages, arrays: Sequence[Array], now: int) -> list[RelayCommand]:
        """Pages from the source. Those that nobody awaits any more are dropped."""
        move, span = self._incoming.get(pages.move), range(pages.lo, pages.hi)
        if move is None or not move.ends.awaits(span):
            return []
        if pages.error or len(arrays) != 1:
            move.ends.copy_failed(span)
            return self._go_on(move, now)
        places = self._tables.pages(move.key, pages.lo, pages.hi)
        move.writing[pages.lo, pages.hi] = len(arrays[0].data) if hasattr(arrays[0].data, "__len__") else 0
        return [WritePages(places, arrays[0], pages.digest, pages.move, pages.lo, pages.hi)]

    def written(self, event: PagesWritten, now: int) -> list[RelayCommand]:
        """Pages are down, or did not verify."""
        move, span = self._incoming.get(event.move), range(event.lo, event.hi)
        if move is None:
            return []
        move.nbytes += move.writing.pop((event.lo, event.hi), 0)
        if event.error:
            move.ends.copy_failed(span)
        else:
            move.ends.copied(span)
            move.pace.back = (now - move.pace.back_since) / -(-len(span) // move.spec.page_tokens)
        move.pace.back_since = now
        return self._go_on(move, now)

    def ran(self, row: Waiting, now: int) -> list[RelayCommand]:
        """A row that recomputes is through."""
        move = self._incoming.get(row.move)
        if move is None or move.key != row.name:
            return []
        stop, width = row.start + row.tokens, move.spec.page_tokens
        # What lies between was copied, and is here: nothing is recomputed before what it attends to.
        self._tables.fill(move.key, stop - self._tables.book.tokens_of(move.key))
        move.ends.recomputed(range(row.start // width * width, stop))
        move.pace.front = (now - move.pace.front_since) / -(-row.tokens // width)
        return self._go_on(move, now)

    def failed(self, row: Waiting, reason: str, now: int) -> list[RelayCommand]:
        """The step of a row that recomputes failed: what the front had is fetched, if there is a source."""
        move = self._incoming.get(row.move)
        if move is None or move.key != row.name:
            return []
        move.ends.stop_recompute()
        if not move.ends.stuck:
            return self._go_on(move, now)
        self._drop(move)
        return self._stuck(row.move, row.guest.seq, reason)

    def settle(self, order: Settle) -> list[RelayCommand]:
        """The end of a move, whatever its phase. Committed, the table waits for the Open that comes next."""
        move = self._incoming.get(order.move)
        if move is None:
            return []
        if not order.commit or not move.ends.done:
            self._drop(move)
            return []
        del self._incoming[order.move]
        self._tables.fill(move.key, move.order.upto - self._tables.book.tokens_of(move.key))
        self._adopted.setdefault((order.seq, order.epoch), []).append((move.order.layers, move.key))
        return []

    def unreachable(self, device: str, now: int) -> list[RelayCommand]:
        """A device is gone: recomputing takes over to the end what it was to give, where it can."""
        out: list[RelayCommand] = []
        for move in tuple(self._incoming.values()):
            if move.order.source == device:
                move.ends.stop_copy()
                out += self._go_on(move, now)
        return out

    def closed(self, seq: str, epoch: int) -> None:
        """A sequence has ended: so have its moves, up to this epoch."""
        if not self._incoming and not self._adopted:
            return
        for move in [each for each in self._incoming.values() if each.order.seq == seq and each.order.epoch <= epoch]:
            self._drop(move)
        for name in [name for name in self._adopted if name[0] == seq and name[1] <= epoch]:
            for _, key in self._adopted.pop(name):
                self._tables.release(key)

    # -- the source ----------------------------------------------------------------------------------------------------

    def give(self, want: Want, guest: Guest | None) -> RelayCommand:
        """Pages of a sequence that runs here; or why there are none."""
        answer = Pages(want.move, want.seq, want.epoch, want.lo, want.hi, "")
        hops = (
            ()
            if guest is None or guest.epoch != want.epoch
            else (hop for hop in guest.path if hop.device == self._device and hop.covers(want.layers))
        )
        hop = next(iter(hops), None)
        key = None if guest is None or hop is None else guest.keys.get(hop.lo)
        if key is None or hop is None:
            return Send(want.by, _refusal(answer, f"these layers of {want.seq} are not here"))
        if not 0 <= want.lo < want.hi <= self._tables.book.tokens_of(key) or want.lo % self._tables.spec(key).page_tokens:
            return Send(want.by, _refusal(answer, f"tokens {want.lo} to {want.hi} of {want.seq} are not written here"))
        first = hop.layers[0]
        layers = slice(want.layers[0] - first, want.layers[1] - first)
        return ReadPages(self._tables.pages(key, want.lo, want.hi, layers), want.by, answer)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _grow(self, move: _Incoming, order: Receive, now: int) -> list[RelayCommand]:
        more = order.upto - move.order.upto
        if more < 0 or not move.ends.done or not self._room(move, order.upto):
            self._drop(move)
            return self._stuck(order.move, order.seq, "no room for what has grown")
        move.order = order
        if move.spec.kv_layers:
            move.ends.extend(order.upto)
        return self._go_on(move, now)

    def _room(self, move: _Incoming, upto: int) -> bool:
        return self._tables.grow(move.key, upto - self._tables.book.tokens_of(move.key))

    def _go_on(self, move: _Incoming, now: int) -> list[RelayCommand]:
        """Give both ends what they can take; tell the scheduler when all is here, or when nothing more can come."""
        ends, order = move.ends, move.order
        if ends.done:
            return self._tell(move)
        out: list[RelayCommand] = []
        if not ends.recomputing and (span := ends.next_front(self._chunk(move))) is not None:
            move.pace.front_since = now
            self._rows.append(self._front(move, span, now))
        most = self._config.fetches * self._config.window
        while (free := self._ahead(move, most) - ends.copying) > 0:
            span = ends.next_back(min(free, self._config.window))
            if span is None:
                break
            if not ends.copying - -(-len(span) // move.spec.page_tokens):
                move.pace.back_since = now
            out.append(Send(order.source, Want(order.move, order.seq, order.epoch, order.layers, span.start, span.stop, self._device)))
        if ends.stuck and not ends.recomputing and not ends.copying:
            self._drop(move)
            return [*out, *self._stuck(order.move, order.seq, "its pages cannot be had any more")]
        return out

    def _ahead(self, move: _Incoming, most: int) -> int:
        if not move.ends.recomputes:
            return most
        lo, hi = move.ends.gap
        return move.pace.ahead(-(-(hi - lo) // move.spec.page_tokens), most)

    def _chunk(self, move: _Incoming) -> int:
        lo, hi = move.ends.gap
        return move.pace.chunk(hi - lo, self._config.chunk) if move.order.copy else self._config.chunk

    def _front(self, move: _Incoming, span: range, now: int) -> Waiting:
        """The row that recomputes a span; of a group that has grown only what is new, if the front has been there before."""
        start = max(span.start, min(self._tables.book.tokens_of(move.key), span.stop - 1))
        ids = move.order.tokens[start : span.stop]
        return Waiting(
            move.guest, move.order.epoch, 0, move.key, move.order.stage.id, start, len(ids), ids, None, False, 0, 1, now, True,
            move.order.move,
        )  # fmt: skip

    def _tell(self, move: _Incoming) -> list[RelayCommand]:
        order, ends = move.order, move.ends
        if move.told == order.upto:
            return []
        move.told = order.upto
        return [Send(SCHEDULER, Moved(self._device, order.move, order.seq, ends.copied_spans, ends.recomputed_spans, move.nbytes))]

    def _drop(self, move: _Incoming) -> None:
        del self._incoming[move.order.move]
        self._tables.release(move.key)

    def _stuck(self, move: int, seq: str, reason: str) -> list[RelayCommand]:
        return [Send(SCHEDULER, Stuck(self._device, move, seq, reason))]


def _refusal(pages: Pages, why: str) -> Pages:
    return Pages(pages.move, pages.seq, pages.epoch, pages.lo, pages.hi, "", why)
