"""Attention of a chunk of which another device holds K and V of some layers, or of some tokens of all (IL-01)."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from runtime.engine.attention.away import AwayLayers, Creditors
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import LentPages
from runtime.engine.layers.operations import StockOperations
from runtime.engine.step.context import AwayRow, PagedMaker, PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool
from runtime.lending_config import LoanShipping
from runtime.loans import LoanQuery
from runtime.types import LoanLost, SentAway
from tests.runtime.engine.attention.test_away import HEADS, KV_HEADS, PAGE, WIDTH, SlowLink
from tests.runtime.engine.attention.test_partial import maker

LAYERS, GROUPS, CHUNK = 4, 20, 8
TOKENS = GROUPS * PAGE
#: Loans by number: layers and page sets. Layer 1 has three of them, which begin at different layers; layer 3 has none.
LOANS = {5: ((0, 2), (0, 4)), 6: ((0, 3), (4, 6)), 8: ((1, 2), (6, 8)), 7: ((2, 3), (0, 3))}


class Layers:
    """A sequence with several layers, of which another pool has some pages: its last tokens attend."""

    def __init__(self, made: PagedMaker) -> None:
        self._made, random = made, torch.Generator().manual_seed(3)
        self.kv = [[torch.randn(TOKENS, KV_HEADS, WIDTH, generator=random) for _ in range(2)] for _ in range(LAYERS)]
        self.query = torch.randn(CHUNK, HEADS, WIDTH, generator=random)
        whole = self._pool(set())
        self.want = [self._run(made(self._paging(whole, self._table(set()))), layer) for layer in range(LAYERS)]
        # What is lent is nowhere on the device.
        gone = {at for layers, groups in LOANS.values() for at in product(range(*layers), range(*groups))}
        self.here, self._lent = self._paging(self._pool(gone), self._table(gone)), self._pool(set())
        self.held = LentPages(made, self._lent, torch.device("cpu"))
        for loan, (layers, groups) in LOANS.items():
            pages = [[layer * GROUPS + group for layer in range(*layers)] for group in range(*groups)]
            self.held.hold_loan(loan, pages, len(pages) * PAGE, "d0", layers[0])

    def attend(self, link: SlowLink, how: LoanShipping = "query", shift: int = 0) -> list[Tensor]:
        loans = tuple(
            SentAway("s", "d1", loan, groups[0] * PAGE, groups[1] * PAGE, layers)
            for loan, (layers, groups) in LOANS.items()
        )
        row = AwayRow(0, shift, tuple(sorted(loans, key=lambda each: each.first)))
        paging = PagedMetadata(**{**_fields(self.here), "away": (row,), "tables": self.here.tables[:, shift:]})
        backend = AwayLayers(self._made, paging, Creditors(link, how), StockOperations().merge)
        return [self._run(backend, layer, shift) for layer in range(LAYERS - shift)]

    def _run(self, backend: object, layer: int, shift: int = 0) -> Tensor:
        k, v = (each[-CHUNK:] for each in self.kv[layer + shift])
        out = torch.zeros_like(self.query)
        now = Tokens(self.query, k, v, AttentionSettings())
        backend.decode(layer, now, out)  # type: ignore[attr-defined]
        backend.chunks(layer, now, out)  # type: ignore[attr-defined]
        return out

    def _pool(self, without: set[tuple[int, int]]) -> PagePool:
        half, at = PAGE * KV_HEADS * WIDTH * 4, torch.arange(TOKENS)
        pool = PagePool(2 * half * LAYERS * GROUPS, half)
        view = pool.view(Geometry(KV_HEADS, WIDTH, torch.float32), PAGE)
        for layer, (k, v) in enumerate(self.kv):
            kept = torch.tensor([(layer, token // PAGE) not in without for token in range(TOKENS)])
            view.write((layer * GROUPS + at // PAGE)[kept], (at % PAGE)[kept], k[kept], v[kept])
        return pool

    @staticmethod
    def _table(without: set[tuple[int, int]]) -> Tensor:
        table = torch.arange(LAYERS * GROUPS).view(LAYERS, GROUPS)
        for layer, group in without:
            table[layer, group] = LAYERS * GROUPS  # padding
        return table[None]

    @staticmethod
    def _paging(pool: PagePool, table: Tensor) -> PagedMetadata:
        none = torch.empty(0, dtype=torch.int64)
        assert pool.padding == LAYERS * GROUPS
        return PagedMetadata(
            pool, PAGE, None, (RowSpan(0, CHUNK, TOKENS - CHUNK),), table, torch.tensor([TOKENS]),
            none.view(1, 0), none,
        )  # fmt: skip


def _fields(paging: PagedMetadata) -> dict[str, object]:
    return {name: getattr(paging, name) for name in paging.__dataclass_fields__}


@pytest.fixture(params=["gathered", "native"])
def layered(request: pytest.FixtureRequest) -> Layers:
    return Layers(maker(request.param))


@pytest.mark.parametrize("how", ["query", "pages"])
@pytest.mark.parametrize("shift", [0, 1])
def test_each_layer_asks_for_what_is_lent_of_it(layered: Layers, how: LoanShipping, shift: int) -> None:
    link = SlowLink(layered.held)
    made = layered.attend(link, how, shift)
    for layer, (out, want) in enumerate(zip(made, layered.want[shift:], strict=True), shift):
        assert (out - want).abs().max() < 1e-5, f"layer {layer}"
    assert torch.equal(made[-1], layered.want[-1]), "all of the last layer is here"
    assert len(link.asked) == 3 - shift, "one question for each layer with something lent"


def test_a_layer_that_a_loan_does_not_have_is_refused(layered: Layers) -> None:
    for layer in (0, 2):
        with pytest.raises(ValueError, match=f"no layer {layer}"):
            layered.held.attend(LoanQuery(((8,),), ((PAGE,),), (1,), layer, KV_HEADS, "float32", pull=True), (), "d0")
    with pytest.raises(LoanLost):
        layered.held.attend(LoanQuery(((9,),), ((PAGE,),), (1,), 0, KV_HEADS, "float32", pull=True), (), "d0")
