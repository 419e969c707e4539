"""Attend here to pages that another device holds for this one, which it sent instead of attending to them (IL-28).

They are put into a pool of their own, and the device's attention runs over them as it would at the creditor: on like
devices the result has the same bits, whatever travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import lent_paging
from runtime.engine.attention.partial import PartialAttention, attend_partly
from runtime.engine.step.context import PagedMaker
from runtime.engine.tensors.convert import joined
from runtime.kv.pool import PagePool
from runtime.types import LoanLost


class PulledPages:
    """Pages of other devices, kept from their arrival until a layer has attended to them."""

    def __init__(self) -> None:
        self._pool: PagePool | None = None

    def attend_to_pages(
        self,
        made: PagedMaker,
        data: Array,
        rows: Sequence[int],
        counts: Sequence[int],
        now: Tokens,
        like: PagePool,
        width: int,
    ) -> PartialAttention:
        """Attend to the pages of some rows, back to back in `data`.

        Args:
            made: The device's attention.
            data: uint8 [pages, bytes of a page].
            rows: Lent tokens of each row, all before its queries; whole pages.
            counts: Query tokens of each row, back to back in `now.query`.
            like: The device's own pool.
            width: Tokens in a page.

        Raises:
            LoanLost: It is something else.
        """
        pages, nbytes, device = sum(rows) // width, 2 * like.half_bytes, now.query.device
        try:
            given = joined([data], (pages, nbytes), torch.uint8, device)
        except ValueError as error:
            raise LoanLost(f"the pages of a creditor cannot be used: {error}") from None
        pool = self._room(pages, like, device)
        pool.write(range(pages), given)
        tables, at = list[Tensor](), 0
        for tokens in rows:
            tables.append(torch.arange(at, at + tokens // width)[None])
            at += tokens // width
        paging = lent_paging(pool, tables, counts, rows, width, device)
        how = AttentionSettings(now.how.scaling, None, now.how.softcap)
        return attend_partly(made(paging), 0, now._replace(how=how))

    def _room(self, pages: int, like: PagePool, device: torch.device) -> PagePool:
        held = self._pool
        if held is None or held.pages < pages or held.half_bytes != like.half_bytes:
            count = 1 << (pages - 1).bit_length()
            held = self._pool = PagePool(2 * like.half_bytes * count, like.half_bytes, str(device))
        return held
