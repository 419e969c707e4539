"""Attend for other devices to the page sets that are held for them (IL-01, IL-27).

Queries of any number of rows of one layer come together; each row attends to all tokens of its loans, which come before
all of its queries. It runs on a thread of its own while steps run: with scratch of its own, over pages that nothing
writes while a loan stands, and it asks no other device, so that two devices may hold pages for each other (IL-07).
A device may also ask for the pages themselves, and attend to them (`engine.attention.pulled`). Each asks about its own
loans only.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.partial import attend_partly, values_dtype
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.exchange import Decoding, NativeQuestions, NativeReceiver, exchange_of
from runtime.engine.kernels.paged_attention import NativeAttention
from runtime.engine.step.context import AttentionBackend, PagedMaker, PagedMetadata, RowSpan
from runtime.engine.tensors.convert import array_of, joined
from runtime.kv.pool import Geometry, PagePool
from runtime.kv.transfers import put
from runtime.loans import LoanExchange, LoanQuery
from runtime.policy.lending.shipping import MOST_PULLED
from runtime.types import LoanLost

#: Steps of debtors for which the attention is kept.
_MOST_BACKENDS = 8


class _HeldLoan(NamedTuple):
    """A loan: page ids [layers, page sets], the tokens in them, who may ask, its first layer in the debtor's hop."""

    pages: Tensor
    tokens: int
    debtor: str
    first_layer: int

    @property
    def width(self) -> int:
        """Tokens in a page."""
        return self.tokens // self.pages.shape[1]


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LentPages:
    """The page sets that one device holds for other devices. `pool`: its pages, with scratch of their own."""

    def __init__(self, made: PagedMaker, pool: PagePool, device: torch.device) -> None:
        self._made, self._pool, self._device = made, pool, device
        self._answers = values_dtype(device)
        self._held: dict[int, _HeldLoan] = {}
        #: Called when another loan is held, or one is not any more.
        self.changed: Callable[[], None] = lambda: None
        #: By rows and geometry: what was made for the latest steps of debtors, the same for all layers of a step.
        self._backends: OrderedDict[object, tuple[list[_HeldLoan], AttentionBackend, int]] = OrderedDict()

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None:
        """Attend for a loan from now on.

        Args:
            groups: Page ids [page sets, layers]; they hold so many tokens.
            debtor: The device that may ask.
            first_layer: The loan's first layer, counted from the first one of the debtor's hop.
        """
        pages = torch.tensor([list(group) for group in groups], dtype=torch.int64).t().contiguous()
        self._held[loan] = _HeldLoan(pages, tokens, debtor, first_layer)
        self.changed()

    def drop_loan(self, loan: int) -> None:
        self._held.pop(loan, None)
        self.changed()

    @torch.inference_mode()
    def attend(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        """Return values [tokens, heads, head_dim] and sums [tokens, heads, 2] of `PartialAttention`, or the pages.

        `debtor`: the device that asks.

        Raises:
            LoanLost: A loan is not held here for that device.
            ValueError: The query does not fit its loans, or its array.
        """
        held = map(self._held.get, itertools.chain.from_iterable(query.loans))
        if any(each is None or each.debtor != debtor for each in held):
            raise LoanLost("a loan is not held here any more")
        if query.pull:
            return (self._pages(query),)
        now = self._tokens(query, arrays)
        backend, first = self._backend(query, Geometry(query.kv_heads, now.key.shape[2], now.key.dtype))
        part = attend_partly(backend, query.layer - first, now)
        values = part.values.to(self._answers)
        return array_of(values.cpu().contiguous()), array_of(part.sums.cpu().contiguous())

    def decoding(self, query: LoanQuery, array: Array) -> Decoding | None:
        """Return what answers a query that has been answered, for native code; None if that cannot.

        `array`: its queries, of which only the shape and the dtype count.
        """
        now = self._tokens(query, (array,))
        try:
            backend, first = self._backend(query, Geometry(query.kv_heads, now.key.shape[2], now.key.dtype))
        except LoanLost:
            return None
        if not isinstance(backend, NativeAttention) or self._answers != torch.float64:
            return None
        return backend.decoding(query.layer - first, now)

    def _tokens(self, query: LoanQuery, arrays: Sequence[Array]) -> Tokens:
        """Return the queries as attention takes them. Raises ValueError."""
        count = sum(query.counts)
        if len(arrays) != 1 or len(arrays[0].shape) != 3 or arrays[0].shape[0] != count or query.dtype not in _DTYPES:
            raise ValueError("queries of another shape")
        _, heads, width = arrays[0].shape
        dtype = _DTYPES.get(arrays[0].dtype)
        if dtype is None or min(heads, width, query.kv_heads) < 1 or heads % query.kv_heads:
            raise ValueError("queries of another type or number of heads")
        asked = joined([Array(arrays[0].dtype, (count, heads * width), arrays[0].data)], (count, heads * width), dtype,
                       self._device).view(count, heads, width)  # fmt: skip
        kept = torch.empty((0, query.kv_heads, width), dtype=_DTYPES[query.dtype], device=self._device)
        return Tokens(asked, kept, kept, AttentionSettings(query.scaling or None, None, query.softcap or None))

    def _loans_of(self, query: LoanQuery) -> list[_HeldLoan]:
        """Return what is held for each loan of a query. Raises LoanLost, ValueError for what these do not have."""
        found, widths = [], set()
        for loans, counts in zip(query.loans, query.tokens, strict=True):
            if not loans:
                raise ValueError("a row asks for no loan")
            for loan, tokens in zip(loans, counts, strict=True):
                held = self._held.get(loan)
                if held is None or not 0 < tokens <= held.tokens:
                    raise LoanLost("a loan is not held here any more")
                if not 0 <= query.layer - held.first_layer < held.pages.shape[0] or tokens % held.width:
                    raise ValueError(f"there is no layer {query.layer} in a loan, or its pages have another geometry")
                widths.add(held.width)
                found.append(held)
        if len(widths) > 1:
            raise ValueError("loans with pages of several geometries")
        return found

    def _pages(self, query: LoanQuery) -> Array:
        """Return the pages of a query's rows. Raises LoanLost; ValueError, also for too many bytes."""
        tables, first = _tables(query, self._loans_of(query))
        pages = [page for table in tables for page in table[query.layer - first].tolist()]
        if len(pages) * 2 * self._pool.half_bytes > MOST_PULLED:
            raise ValueError("more pages than may be asked for at once")
        return array_of(self._pool.read(pages))

    def _backend(self, query: LoanQuery, geometry: Geometry) -> tuple[AttentionBackend, int]:
        """Return the attention over the rows of a query, for all layers that its loans share, and the first of these.

        Raises LoanLost, ValueError.
        """
        loans = self._loans_of(query)
        key = query.loans, query.tokens, query.counts, geometry
        known = self._backends.get(key)
        if known is not None and all(map(operator.is_, known[0], loans)):
            self._backends.move_to_end(key)
            return known[1:]
        (tables, first), width = _tables(query, loans), loans[0].width
        if self._pool.page_tokens(geometry) < width:
            raise ValueError("pages of another geometry")
        paging = lent_paging(self._pool, tables, query.counts, [*map(sum, query.tokens)], width, self._device)
        backend = self._made(paging)
        self._backends[key] = loans, backend, first
        while len(self._backends) > _MOST_BACKENDS:
            self._backends.popitem(last=False)
        return backend, first


def native_exchange(kernels: Kernels, lent: LentPages, room: int) -> LoanExchange | None:
    """Return native code for packets of up to `room` bytes, which answers for what is lent; None if there is none."""
    found = exchange_of(kernels)
    if found is None:
        return None
    known = NativeQuestions(found, room, lent.decoding)
    lent.changed = known.invalidate
    return LoanExchange(NativeReceiver(found, room), known)


def _tables(query: LoanQuery, held: Sequence[_HeldLoan]) -> tuple[list[Tensor], int]:
    """Return the page ids of each row [layers, pages] in the layers that all loans have, and the first of these.

    `held`: the loans of all rows.
    """
    rest, tables = iter(held), []
    first = max(each.first_layer for each in held)
    last = min(each.first_layer + each.pages.shape[0] for each in held)
    for counts in query.tokens:
        some = [(next(rest), tokens) for tokens in counts]
        row = [
            each.pages[first - each.first_layer : last - each.first_layer, : tokens // each.width]
            for each, tokens in some
        ]
        tables.append(row[0] if len(row) == 1 else torch.cat(row, 1))
    return tables, first


def lent_paging(
    pool: PagePool,
    tables: Sequence[Tensor],
    counts: Sequence[int],
    held: Sequence[int],
    width: int,
    device: torch.device,
) -> PagedMetadata:
    """Return a paging of rows, back to back, that attend to tokens which all come before them.

    Args:
        tables: Page ids of each row [layers, pages].
        counts: Query tokens of each row.
        held: Tokens in its pages.
        width: Tokens in a page.
    """
    layers, pages = (max(each.shape[axis] for each in tables) for axis in (0, 1))
    table = torch.full((len(tables), layers, pages), pool.padding)
    for at, each in enumerate(tables):
        table[at, : each.shape[0], : each.shape[1]] = each
    spans, first = [], 0
    for count, length in zip(counts, held, strict=True):
        spans.append(RowSpan(first, first + count, length))
        first += count
    nowhere = torch.zeros((layers, 0), dtype=torch.int64, device=device)
    return PagedMetadata(
        pool, width, None, tuple(spans), table.to(device), put(held, device), nowhere, nowhere[0], tuple(held)
    )
