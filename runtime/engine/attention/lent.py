"""Attend for other devices to the page sets that are held for them (IL-01, IL-27).

Queries of any number of rows of one layer come together; each row attends to all tokens of its loans, which come before
all of its queries. It runs on a thread of its own while steps run: with scratch of its own, over pages that nothing
writes while a loan stands, and it asks no other device, so that two devices may hold pages for each other (IL-07).
A device may also ask for the pages themselves, and attend to them (`engine.attention.pulled`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.partial import attend_partly
from runtime.engine.step.context import PagedMaker, PagedMetadata, RowSpan
from runtime.engine.tensors.convert import array_of, joined
from runtime.kv.pool import Geometry, PagePool
from runtime.kv.transfers import put
from runtime.loans import LoanQuery
from runtime.policy.lending.shipping import MOST_PULLED
from runtime.types import LoanLost

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LentPages:
    """The page sets that one device holds for other devices. `pool`: its pages, with scratch of their own."""

    def __init__(self, made: PagedMaker, pool: PagePool, device: torch.device) -> None:
        self._made, self._pool, self._device = made, pool, device
        self._held: dict[int, tuple[Tensor, int]] = {}

    def hold_loan(self, loan: int, groups: Sequence[Sequence[int]], tokens: int) -> None:
        """Attend for a loan from now on. `groups`: page ids [page sets, layers]; they hold so many tokens."""
        self._held[loan] = torch.tensor([list(group) for group in groups], dtype=torch.int64).t().contiguous(), tokens

    def drop_loan(self, loan: int) -> None:
        self._held.pop(loan, None)

    @torch.inference_mode()
    def attend(self, query: LoanQuery, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return attention float32 [tokens, heads, head_dim] and its log-sum-exp [tokens, heads], or the pages.

        Raises:
            LoanLost: A loan is not held here.
            ValueError: The query does not fit its loans, or its array.
        """
        if query.pull:
            return (self._pages(query),)
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
        how = AttentionSettings(query.scaling or None, None, query.softcap or None)
        paging = self._paging(query, Geometry(query.kv_heads, width, kept.dtype))
        part = attend_partly(self._made(paging), 0, Tokens(asked, kept, kept, how))
        return array_of(part.out.cpu().contiguous()), array_of(part.lse.cpu().contiguous())

    def _part(self, loan: int, tokens: int, layer: int) -> Tensor:
        """Return the pages of a loan's first tokens in a layer. Raises LoanLost, ValueError without that layer."""
        pages, held = self._held.get(loan, (None, 0))
        if pages is None or not 0 < tokens <= held:
            raise LoanLost("a loan is not held here any more")
        width = held // pages.shape[1]
        if layer >= pages.shape[0] or tokens % width:
            raise ValueError(f"there is no layer {layer} in a loan, or its pages have another geometry")
        return pages[layer, : tokens // width]

    def _pages(self, query: LoanQuery) -> Array:
        """Return the pages of a query's rows. Raises LoanLost; ValueError, also for too many bytes."""
        tables, _ = self._tables(query)
        pages = [page for table in tables for page in table.tolist()]
        if len(pages) * 2 * self._pool.half_bytes > MOST_PULLED:
            raise ValueError("more pages than may be asked for at once")
        return array_of(self._pool.read(pages))

    def _tables(self, query: LoanQuery) -> tuple[list[Tensor], list[int]]:
        """Return the page ids and the tokens of a query's rows. Raises LoanLost, ValueError."""
        tables, held = [], []
        for loans, counts in zip(query.loans, query.tokens, strict=True):
            if not loans:
                raise ValueError("a row asks for no loan")
            known = [self._part(loan, tokens, query.layer) for loan, tokens in zip(loans, counts, strict=True)]
            tables.append(torch.cat(known))
            held.append(sum(counts))
        return tables, held

    def _paging(self, query: LoanQuery, geometry: Geometry) -> PagedMetadata:
        tables, held = self._tables(query)
        pages, tokens = tables[0].numel(), held[0]
        if tokens % pages or self._pool.page_tokens(geometry) < tokens // pages:
            raise ValueError("pages of another geometry")
        return lent_paging(self._pool, tables, query.counts, held, tokens // pages, self._device)


def lent_paging(
    pool: PagePool,
    tables: Sequence[Tensor],
    counts: Sequence[int],
    held: Sequence[int],
    width: int,
    device: torch.device,
) -> PagedMetadata:
    """Return a paging of rows, back to back, of one layer, that attend to tokens which all come before them.

    Args:
        tables: Page ids of each row.
        counts: Query tokens of each row.
        held: Tokens in its pages.
        width: Tokens in a page.
    """
    table = torch.full((len(tables), 1, max(each.numel() for each in tables)), pool.padding)
    for at, each in enumerate(tables):
        table[at, 0, : each.numel()] = each
    spans, first = [], 0
    for count, length in zip(counts, held, strict=True):
        spans.append(RowSpan(first, first + count, length))
        first += count
    nowhere = torch.zeros((1, 0), dtype=torch.int64, device=device)
    return PagedMetadata(
        pool, width, None, tuple(spans), table.to(device), put(held, device), nowhere, nowhere[0], tuple(held)
    )
