"""Cut the paging of a step in which other devices hold page sets: rows with all pages here, and what rows have here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.engine.step.context import PagedMetadata, RowSpan
from runtime.kv.transfers import put


def tokens_of(span: RowSpan) -> range:
    return range(span.lo, span.hi)


def causal_pairs(spans: Sequence[RowSpan]) -> int:
    """Return how many pairs there are of a query of these rows and a token at or before it."""
    counts = ((span.hi - span.lo, span.start) for span in spans)
    return sum(count * start + count * (count + 1) // 2 for count, start in counts)


def paging_of(paging: PagedMetadata, rows: Sequence[int]) -> PagedMetadata:
    """Return the paging of these rows alone, at their places in the context. It is not for writing."""
    index = put(rows, paging.tables.device)
    spans = tuple(paging.spans[row] for row in rows)
    tokens = put([t for span in spans for t in tokens_of(span)], paging.tables.device)
    return replace(
        paging, tokens=tokens, spans=spans, tables=paging.tables[index], lengths=paging.lengths[index], away=()
    )


def paging_here(paging: PagedMetadata, spans: Sequence[RowSpan], here: Sequence[Sequence[int]]) -> PagedMetadata:
    """Return the paging of the rows away over the pages that are here, as rows that have no more.

    `spans`: the rows, back to back, at positions counted over the tokens here; `here`: page sets of each row. It is not
    for writing.
    """
    layers = paging.tables.shape[1]
    tables = paging.tables.new_full((len(spans), layers, max(map(len, here))), paging.pool.padding)
    for at, (one, groups) in enumerate(zip(paging.away, here, strict=True)):
        tables[at, :, : len(groups)] = paging.tables[one.row].index_select(1, put(groups, tables.device))
    lengths = put([span.length for span in spans], paging.tables.device)
    return replace(paging, tokens=None, spans=tuple(spans), tables=tables, lengths=lengths, away=())
