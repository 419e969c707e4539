"""Rows of which creditors in this process hold some tokens: a debtor's decode steps over the side link."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.config import EngineConfig
from runtime.engine.attention.away import AwayAttention, Creditors
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import LentPages, native_exchange
from runtime.engine.attention.native_away import PacketCreditors
from runtime.engine.kernels.away_calls import native_away
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.models.registry import kernels_for
from runtime.engine.step.context import AwayRow, PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool
from runtime.lending_config import LoanShipping
from runtime.loans import LoanLink, LoanQuery
from runtime.policy.lending.shipping import LoanAsk, ShippingChoice, ShippingCosts
from runtime.transport.channels.seqpacket import PACKET_BYTES
from runtime.transport.messenger import Messenger
from runtime.types import SentAway

HEADS, KV_HEADS, WIDTH, PAGE, LAYERS = 4, 2, 16, 8, 3
#: Tokens of which a creditor holds some: d1, d2; the rest is here.
ENDS, LENGTH = {"d1": 64, "d2": 192}, 333


def kernels() -> Kernels:
    found = kernels_for(EngineConfig())
    assert found is not None
    return found


@dataclass
class Rows:
    """Rows of one context length in pages, one behind the other, with K and V that differ by row and layer.

    `lent`: the creditors of each row, in one word after another; None: all of them have a part of each.
    """

    rows: int = 1
    dtype: str = "float32"
    lent: Sequence[str] | None = None

    def __post_init__(self) -> None:
        made, kind = torch.Generator().manual_seed(4), getattr(torch, self.dtype)
        self.sets = -(-LENGTH // PAGE)
        count, half = self.rows * LAYERS * self.sets, PAGE * KV_HEADS * WIDTH * kind.itemsize
        self.pool, at = PagePool(2 * half * count, half), torch.arange(count * PAGE)
        k, v = (torch.randn(len(at), KV_HEADS, WIDTH, generator=made).to(kind) for _ in range(2))
        self.pool.view(Geometry(KV_HEADS, WIDTH, kind), PAGE).write(at // PAGE, at % PAGE, k, v)
        self.tables = torch.arange(count).view(self.rows, LAYERS, self.sets)
        self.key = torch.empty(self.rows, KV_HEADS, WIDTH, dtype=kind)

    def now(self, seed: int, dtype: str = "float32") -> Tokens:
        query = torch.randn(self.rows, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))
        return Tokens(query.to(getattr(torch, dtype)), self.key, self.key, AttentionSettings())

    def paging(self, away: bool) -> PagedMetadata:
        rows = []
        for row in range(self.rows if away else 0):
            parts, first = [], 0
            for name, last in ENDS.items():
                if self.lent is None or name in self.lent[row].split():
                    parts.append(SentAway("s", name, row, first, last))
                first = last
            rows += [AwayRow(row, 0, tuple(parts))] if parts else []
        last = torch.full((self.rows,), LENGTH - 1)
        spans = tuple(RowSpan(row, row + 1, LENGTH - 1) for row in range(self.rows))
        pages = self.tables[:, :, (LENGTH - 1) // PAGE].t().contiguous()
        return PagedMetadata(
            self.pool, PAGE, None, spans, self.tables, last + 1, pages, last % PAGE, None, tuple(rows)
        )  # fmt: skip

    def whole(self, layer: int, now: Tokens) -> Tensor:
        """Attention on one device."""
        out = torch.zeros(now.query.shape)
        native_attention(kernels())(self.paging(False)).decode(layer, now, out)
        return out


class Held:
    """What one creditor holds of the rows. It waits for `free`; `calls`: how often Python attended."""

    #: The call that is late, and by how many seconds; None: until `free` is set.
    _late: tuple[int, float | None] = (0, None)

    def __init__(self, rows: Rows, name: str, first: int, last: int) -> None:
        self.lent = LentPages(native_attention(kernels()), rows.pool.second_lane(), torch.device("cpu"))
        for row in range(rows.rows):
            groups = rows.tables[row, :, first // PAGE : last // PAGE].t().tolist()
            self.lent.hold_loan(row, groups, last - first, "d0")
        self.calls, self.free = 0, threading.Event()
        self.free.set()

    def answer_late(self, number: int, seconds: float | None) -> None:
        """Have Python's call with this number from now on, the first one is 1, wait so long (`_late`)."""
        self._late = self.calls + number, seconds

    def borrow(self, link: LoanLink, shipping: str = "query") -> None: ...

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None: ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        self.calls += 1
        number, seconds = self._late
        if self.calls == number:
            self.free.clear()
            if seconds is not None:
                threading.Timer(seconds, self.free.set).start()
        assert self.free.wait(30)
        return self.lent.attend(query, arrays, debtor)


class CountedCosts(ShippingCosts):
    """Counts choices of which answers are to be recorded, and records of answers and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def choose(self, how: LoanShipping, ask: LoanAsk) -> ShippingChoice:
        made = super().choose(how, ask)
        self.counts.update({"choices": 1, "learns": made.learns, "pulled": made.learns and made.pages})
        return made

    def add_answer(self, ask: LoanAsk, pulled: bool, seconds: float, waited: bool) -> None:
        self.counts["answers"] += 1
        super().add_answer(ask, pulled, seconds, waited)

    def add_attention(self, products: int, seconds: float) -> None:
        self.counts["attended"] += 1
        super().add_attention(products, seconds)

    def add_pulled_attention(self, products: int, seconds: float) -> None:
        self.counts["pages"] += 1
        super().add_pulled_attention(products, seconds)


class Debtor:
    """A debtor's steps. `done`: what native calls have done."""

    costs: CountedCosts

    def __init__(self, rows: Rows, peers: SidePeers, native: bool, seconds: float = 2.0) -> None:
        self.rows, self.done = rows, list[Any]()
        exchange = native_exchange(
            kernels(), LentPages(native_attention(kernels()), rows.pool, torch.device("cpu")), 1 << 20
        )
        call = native_away(kernels(), PACKET_BYTES)
        assert exchange is not None and call is not None
        self.link = SideClient(Messenger("d0", 1), peers, seconds, exchange.receiver if native else None)
        attend = call.attend

        def seen(*given: Any) -> Any:
            self.done.append(attend(*given))
            return self.done[-1]

        call.attend = seen  # type: ignore[method-assign]
        self._native = PacketCreditors(self.link, call) if native else None
        self.ship("query")

    def ship(self, how: LoanShipping) -> None:
        """Have queries or pages travel from now on."""
        self.costs = CountedCosts()
        self.reached = Creditors(self.link, how, self.costs, native=self._native)

    def step(self, seed: int, query: str = "float32", out: str = "float32", creditors: int = 2) -> list[Tensor]:
        """Attend in all layers. `query`: types of the queries, of one layer after another."""
        paging = self.rows.paging(True)
        backend = AwayAttention(native_attention(kernels()), paging, self.reached, NativeOperations(kernels()).merge)
        results = []
        for layer in range(LAYERS):
            now = self.rows.now(seed + layer, query.split()[layer % len(query.split())])
            wide = torch.cat([now.query.flatten(1), torch.ones(self.rows.rows, 5, dtype=now.query.dtype)], 1)
            now = now._replace(query=wide[:, : HEADS * WIDTH].view(-1, HEADS, WIDTH))  # as in a layer's product
            results.append(torch.zeros(now.query.shape, dtype=getattr(torch, out)))
            backend.decode(layer, now, results[-1])
        return results


class Cluster:
    def __init__(self, folder: Path, rows: Rows, native: str = "client server") -> None:
        self.held, self._closing, first = dict[str, Held](), list[SideServer | SideClient](), 0
        peers, debtors, known = SidePeers(), SidePeers(), {}
        debtors.update({"d0": (1, "")})
        for name, last in ENDS.items():
            self.held[name] = Held(rows, name, first, last)
            exchange = native_exchange(kernels(), self.held[name].lent, PACKET_BYTES)
            server, client = side_messengers(name, 1, f"unix://{folder}/{name}", None, None)
            client.close()
            known_here = exchange.known if exchange is not None and "server" in native else None
            self._closing.append(SideServer(self.held[name], server, debtors, known_here))
            known[name] = 1, server.address
            first = last
        peers.update(known)
        self.peers, self.debtor = peers, Debtor(rows, peers, "client" in native)
        self._closing.append(self.debtor.link)

    def close(self) -> None:
        for each in reversed(self._closing):
            each.close()
