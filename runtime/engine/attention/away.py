"""Attend to sequences of which other devices hold page sets: ask them, attend to what is here, merge (IL-01, IL-27).

    rows with all pages here    the device's attention, as ever
    rows with page sets away    --queries--> creditors     meanwhile: attention to the pages here (IL-29)
                                <--values, sums--          merged in the order of the tokens, whatever came first
                                or <--pages--, where these are cheaper (IL-28): attention to them here

All rows that one creditor has a part of go to it in one message for each layer. Tables have only the page sets that are
here, one behind the other: no page id of another device is in them.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from runtime.engine.attention.away_paging import causal_pairs, paging_here, paging_of, tokens_of
from runtime.engine.attention.interface import Tokens
from runtime.engine.attention.native_away import NOTHING, AwayStep, NativeLayers, PacketCreditors, StepLayer
from runtime.engine.attention.partial import PartialAttention, PartPlace, attend_partly, values_dtype
from runtime.engine.attention.pulled import PulledPages
from runtime.engine.kernels.away_calls import AwayDone, RowParts
from runtime.engine.kernels.paged_attention import NativeAttention
from runtime.engine.step.context import AttentionBackend, PagedMaker, PagedMetadata, RowSpan
from runtime.engine.tensors.convert import array_of
from runtime.kv.transfers import put
from runtime.lending_config import LoanShipping
from runtime.loans import LoanLink, LoanQuery
from runtime.policy.lending.shipping import LoanAsk, ShippingCosts, query_bytes
from runtime.types import LoanLost, LoansMixed

#: Merges values [parts, tokens, heads, head_dim] and sums [parts, tokens, heads, 2], in the order of the tokens, into
#: two tensors (`Operations.merge`).
Merge = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]

#: Seconds from which on an answer was awaited, and had not come before.
_WAITED = 5e-5


@dataclass(frozen=True, slots=True)
class Creditors:
    """How an engine reaches the devices that hold page sets for it.

    Fields:
        shipping: What travels.
        native: The same link, for native code.
    """

    link: LoanLink
    shipping: LoanShipping = "query"
    costs: ShippingCosts = field(default_factory=ShippingCosts)
    pulled: PulledPages = field(default_factory=PulledPages)
    native: PacketCreditors | None = None


@dataclass(frozen=True)
class _CreditorShare:
    """What one creditor has of the rows away.

    Fields:
        loans, tokens: As in `LoanQuery`.
        parts: For each of its rows the first lent token and the span among the rows away.
    """

    creditor: str
    loans: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, RowSpan], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Query tokens of each row."""
        return tuple(span.hi - span.lo for _, span in self.parts)

    @cached_property
    def lent(self) -> tuple[int, ...]:
        """Lent tokens of each row."""
        return tuple(map(sum, self.tokens))


@dataclass(frozen=True, slots=True)
class _OpenQuery:
    """A query that is under way.

    Fields:
        query: The queries of its rows.
        ask: What its time is learned for; None: it does not count for the choice of what travels.
        pulled: Whether the pages come, and not attention to them.
        begin: When it was sent, perf_counter seconds.
    """

    ticket: int
    share: _CreditorShare
    query: Tensor
    ask: LoanAsk | None
    pulled: bool
    begin: float


class AwayLayers:
    """`engine.step.context.AttentionBackend` for a paging with rows of which other devices hold K and V.

    A loan may be of some layers only: layers of which the same is away share one backend; those with all of their pages
    here have the device's own.
    """

    def __init__(self, made: PagedMaker, paging: PagedMetadata, creditors: Creditors | None, merge: Merge) -> None:
        self.paging = paging
        self._made, self._creditors, self._merge = made, creditors, merge
        #: Layers at which the loans of a row begin or end: between two of them the same is away in all layers.
        self._edges = sorted({edge - row.shift for row in paging.away for loan in row.loans for edge in loan.layers})
        self._between: dict[int, AttentionBackend] = {}

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._at(layer).write_kv(layer, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        self._at(layer).decode(layer, now, out, sums)

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        self._at(layer).chunks(layer, now, out, sums)

    def prepare_calls(self, layers: Mapping[int, Tokens]) -> AwayStep | None:
        """Return the native calls of layers with such queries; None if there are none. Raises LoanLost, LoansMixed."""
        reached, found = self._creditors, dict[int, StepLayer]()
        for layer, now in layers.items():
            backend = self._at(layer)
            one = backend.step_layer(layer, now) if isinstance(backend, AwayAttention) else None
            if one is not None:
                found[layer] = one
        if not found or reached is None or reached.native is None:
            return None
        return AwayStep(reached.native, found)

    def _at(self, layer: int) -> AttentionBackend:
        part = bisect_right(self._edges, layer)
        if (found := self._between.get(part)) is None:
            away = tuple(row for each in self.paging.away if (row := each.at_layer(layer)).loans)
            paging = replace(self.paging, away=away)
            made, creditors, merge = self._made, self._creditors, self._merge
            found = AwayAttention(made, paging, creditors, merge) if away else made(paging)
            self._between[part] = found
        return found


class AwayAttention:
    """The same where other devices hold the same in all layers."""

    def __init__(self, made: PagedMaker, paging: PagedMetadata, creditors: Creditors | None, merge: Merge) -> None:
        self.paging = paging
        self._creditors, self._made, self._merge = creditors, made, merge
        self._whole = made(replace(paging, away=()))
        gone = {one.row for one in paging.away}
        here = [row for row in range(len(paging.spans)) if row not in gone]
        self._here = made(paging_of(paging, here)) if here else None
        # The rows away, back to back, with the pages that are here.
        device = paging.tables.device
        tokens = [t for one in paging.away for t in tokens_of(paging.spans[one.row])]
        self._tokens = put(tokens, device)
        #: Whether the rows away are all rows, in their order.
        self._everything = self._here is None and paging.tokens is None and tokens == [*range(len(tokens))]
        self._spans: list[RowSpan] = []
        at = 0
        for one in paging.away:
            span = paging.spans[one.row]
            self._spans.append(RowSpan(at, at + span.hi - span.lo, span.start - one.tokens))
            at += span.hi - span.lo
        width = paging.page_tokens
        groups = [
            one.groups_here(-(-(span.length + one.tokens) // width), width)
            for one, span in zip(paging.away, self._spans, strict=True)
        ]
        self._first = [each[0] * width for each in groups]
        #: Parts of all rows by the shape of their queries: native calls keep pointers to them.
        self._rooms: dict[torch.Size, PartialAttention] = {}
        #: Whether a step's call has attended to the chunks beside, in the layer of the last `decode`.
        self._chunks_done = False
        self._local = made(paging_here(paging, self._spans, groups))

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._whole.write_kv(layer, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        """As the interface; computes chunks of rows away, too, for which creditors are asked once."""
        query = now.query if self._everything else now.query[self._tokens]
        room, places = self._room(query)
        dtype = torch.float32 if sums is None else torch.float64
        direct = self._everything and out.dtype == dtype and out.is_contiguous()
        whole = out if direct else torch.empty(query.shape, dtype=dtype, device=query.device)
        done, tickets = self._attend_natively(layer, now, room, whole if sums is None else None)
        self._chunks_done = done.beside
        total = None if sums is None else sums if direct else torch.empty_like(room.sums[0])
        if not done.merged:
            self._do_rest(layer, now, query, (room, places), done, tickets, (out, sums))
            self._merge(room.values, room.sums, whole, total)
        if direct:
            return
        if sums is not None and total is not None:
            sums[self._tokens] = total
        if self._everything:
            out.copy_(whole)
        else:
            out[self._tokens] = whole.to(out.dtype)

    def step_layer(self, layer: int, now: Tokens) -> StepLayer | None:
        """Return the native call of a layer within a step. `now`: of all rows of the step."""
        native, here = self._native, self._here
        if native is None or not (here is None or isinstance(here, NativeAttention)):
            return None
        away = now if self._everything else now._replace(query=now.query[self._tokens])
        call = native.call_of(layer, away, self._room(away.query)[0])
        return None if call is None else StepLayer(call, native, here)

    def _attend_natively(
        self, layer: int, now: Tokens, room: PartialAttention, out: Tensor | None
    ) -> tuple[AwayDone, Sequence[int]]:
        """Do what native code can do, or return what a step's call has done of this layer already."""
        native = self._native
        if native is None:
            return NOTHING
        begun = native.take_begun(layer)
        if begun is not None:
            return begun
        # rows with all pages here attend while the creditors do, which a call for itself does not wait for
        return native.attend(layer, now, room, out) if self._everything else NOTHING

    def _do_rest(
        self, layer: int, now: Tokens, query: Tensor, into: tuple[PartialAttention, list[PartPlace]], done: AwayDone,
        tickets: Sequence[int], out: tuple[Tensor, Tensor | None],
    ) -> None:  # fmt: skip
        """Do what native code has not done of a layer, up to the merge.

        Args:
            query: Of the rows away.
            tickets: Of the questions that it has sent, and has no answers to.
            out: Where rows go of which all is here.
        """
        (room, places), shares, away = into, self._shares, now._replace(query=query)
        late = zip(tickets, shares[done.received : done.sent], strict=True)
        asked = [_OpenQuery(ticket, share, self._queries_of(share, query), None, False, 0.0) for ticket, share in late]
        asked += self._send_queries(layer, away, shares[done.sent :])
        if self._here is not None and not done.beside:
            self._here.decode(layer, now, *out)
        learns = any(each.ask is not None for each in asked)
        where = places[0]
        if not done.attended and isinstance(where, int):
            self._attend_here(layer, away, learns, room.part(where))
        elif not done.attended:
            room.put_parts(where, self._attend_here(layer, away, learns))
        for each, where in zip(asked, places[1 + done.received :], strict=True):
            self._take_answer(each, now, room, where)

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        if self._here is not None and not self._chunks_done:
            self._here.chunks(layer, now, out, sums)

    def _attend_here(
        self, layer: int, now: Tokens, learns: bool, into: PartialAttention | None = None
    ) -> PartialAttention:
        """Attend to what is here. `learns`: its time counts for the choice of what travels."""
        begin = time.perf_counter()
        local = attend_partly(self._local, layer, now, into)
        if learns:
            products = causal_pairs(self._spans) * now.query[0].numel()
            self._reached().costs.add_attention(products, time.perf_counter() - begin)
        return local

    @cached_property
    def _shares(self) -> tuple[_CreditorShare, ...]:
        """What each creditor has of the rows, the same for all layers of a step. Raises LoansMixed."""
        if len({one.shift for one in self.paging.away}) > 1:
            raise LoansMixed("rows of models that share a layer at different depths are not asked for together")
        shares = []
        for creditor in sorted({loan.creditor for one in self.paging.away for loan in one.loans}):
            rows = [
                (span, mine)
                for one, span in zip(self.paging.away, self._spans, strict=True)
                if (mine := [loan for loan in one.loans if loan.creditor == creditor])
            ]
            shares.append(
                _CreditorShare(
                    creditor,
                    tuple(tuple(loan.loan for loan in mine) for _, mine in rows),
                    tuple(tuple(loan.last - loan.first for loan in mine) for _, mine in rows),
                    tuple((mine[0].first, span) for span, mine in rows),
                )
            )
        return tuple(shares)

    def _room(self, query: Tensor) -> tuple[PartialAttention, list[PartPlace]]:
        """Return the parts of all rows, the same tensors for all layers, and where each holder's go.

        A row with fewer parts than another one has parts without tokens, which are never written.
        """
        if (room := self._rooms.get(query.shape)) is None:
            room = self._rooms[query.shape] = PartialAttention.empty(query, self._parts[0])
        return room, self._places

    @cached_property
    def _parts(self) -> tuple[int, list[RowParts]]:
        """Return the most parts of a row, and the parts by token, numbered in the order of the row's tokens.

        Parts are given for what is here, then for each creditor; for all tokens of the rows that it has a part of.
        """
        holders = [list(zip(self._first, self._spans, strict=True)), *(share.parts for share in self._shares)]
        firsts: dict[RowSpan, list[int]] = {span: [] for span in self._spans}
        for parts in holders:
            for first, span in parts:
                insort(firsts[span], first)
        found = [
            RowParts(
                tuple(token for _, span in parts for token in tokens_of(span)),
                tuple(firsts[span].index(first) for first, span in parts for _ in tokens_of(span)),
            )
            for parts in holders
        ]
        return max(map(len, firsts.values())), found

    @cached_property
    def _places(self) -> list[PartPlace]:
        """Where the parts go."""
        places: list[PartPlace] = []
        for tokens, numbers in self._parts[1]:
            if len(set(numbers)) == 1 and len(tokens) == len(self._tokens):
                places.append(numbers[0])
            else:
                places.append((put(numbers, self._tokens.device), put(tokens, self._tokens.device)))
        return places

    @cached_property
    def _native(self) -> NativeLayers | None:
        """Native calls, where queries may travel."""
        reached, local = self._reached(), self._local
        if reached.native is None or reached.shipping == "pages" or not isinstance(local, NativeAttention):
            return None
        parts = self._parts[1]
        return NativeLayers(reached.native, local, self._tokens, parts, self._questions, self._is_asked_natively)

    def _questions(self, layer: int, now: Tokens) -> list[tuple[str, LoanQuery]]:
        return [(share.creditor, self._question(share, layer, now)) for share in self._shares]

    def _is_asked_natively(self, query: Tensor) -> bool:
        """Return whether pages would not travel, whatever they take."""
        return self._reached().shipping == "query" or not any(self._ask_of(one, query).is_open for one in self._shares)

    def _question(self, share: _CreditorShare, layer: int, now: Tokens, pulled: bool = False) -> LoanQuery:
        return LoanQuery(
            share.loans,
            share.tokens,
            share.counts,
            layer + self.paging.away[0].shift,
            now.key.shape[1],
            str(now.key.dtype).removeprefix("torch."),
            now.how.scaling or 0.0,
            now.how.softcap or 0.0,
            pulled,
        )

    def _send_queries(self, layer: int, now: Tokens, shares: Sequence[_CreditorShare]) -> Iterator[_OpenQuery]:
        """Ask each creditor for its part of the rows: send it their queries, or ask for its pages.

        Raises:
            LoanLost: There is no link, or a creditor cannot be reached; LoansMixed.
        """
        reached = self._reached()
        for share in shares:
            some = self._queries_of(share, now.query)
            ask = None if reached.shipping == "query" else self._ask_of(share, some)
            pulled, learns = (False, False) if ask is None else reached.costs.choose(reached.shipping, ask)
            asks = self._question(share, layer, now, pulled)
            begin = time.perf_counter()
            arrays = () if pulled else (array_of(some.cpu().contiguous()),)
            ticket = reached.link.send_query(share.creditor, asks, arrays)
            yield _OpenQuery(ticket, share, some, ask if learns else None, pulled, begin)

    def _queries_of(self, share: _CreditorShare, query: Tensor) -> Tensor:
        whole = len(share.parts) == len(self._spans)
        return query if whole else torch.cat([query[span.lo : span.hi] for _, span in share.parts])

    def _ask_of(self, share: _CreditorShare, query: Tensor) -> LoanAsk:
        tokens, (_, heads, width) = sum(share.counts), query.shape
        products = sum(count * held for count, held in zip(share.counts, share.lent, strict=True)) * heads * width
        pages = sum(share.lent) // self.paging.page_tokens * 2 * self.paging.pool.half_bytes
        queries = query_bytes(tokens, heads, width, query.element_size(), values_dtype(query.device).itemsize)
        return LoanAsk(share.creditor, queries, pages, products, causal_pairs(self._spans) * heads * width)

    def _take_answer(self, asked: _OpenQuery, now: Tokens, room: PartialAttention, where: PartPlace) -> None:
        """Put attention of the rows of a query to what was asked for in its place. Raises LoanLost."""
        reached, late = self._reached(), time.perf_counter()
        arrays = reached.link.collect(asked.ticket)
        if asked.ask is not None:
            over = time.perf_counter()
            reached.costs.add_answer(asked.ask, asked.pulled, over - asked.begin, over - late > _WAITED)
        if not asked.pulled:
            if not isinstance(where, int) or not room.part(where).take_bytes(arrays):
                room.put_parts(where, PartialAttention.of_arrays(arrays, asked.query))
            return
        if len(arrays) != 1:
            raise LoanLost("the answer of a creditor is not its pages")
        share, own, begin = asked.share, now._replace(query=asked.query), time.perf_counter()
        made = reached.pulled.attend_to_pages(
            self._made, arrays[0], share.lent, share.counts, own, self.paging.pool, self.paging.page_tokens
        )
        if asked.ask is not None:
            reached.costs.add_pulled_attention(asked.ask.products, time.perf_counter() - begin)
        room.put_parts(where, made)

    def _reached(self) -> Creditors:
        if self._creditors is None:
            raise LoanLost("there is no link to the creditors")
        return self._creditors
