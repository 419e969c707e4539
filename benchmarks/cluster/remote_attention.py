"""Measure attention to a context of which another process holds half, beside one process that has all of it (IL-27).

    python -m benchmarks.cluster.remote_attention [--context 32768] [--kv-heads 8 2] [--layers 32] [--rounds 11]
        [--dtype bfloat16] [--link native python] [--output FILE]

One decoding row of 32 heads of 64 values, native kernels, all layers in one program as served; what else there is in
a layer has almost no width (`thin_layers`). Two processes of one thread each, joined by the agents' side link: the
debtor sends its query, attends to its half meanwhile, and merges. Beside them, in turns, one process of two threads
that has all of the context. `--link python`: packets are read and answered in Python (baseline).

- `layer_ms`: time of a layer, two processes and one; medians of rounds of so many layers. The round trips are in it.
- `ratio`: their quotient in each round; median, least, most.
- `round_trip_ms`: of a query to 16 lent tokens, median and 95 %.
- `error`: largest difference of both results, behind all layers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cluster.thin_layers import HIDDEN, ThinLayers
from benchmarks.reports import deliver
from runtime.chains import Array
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.config import EngineConfig
from runtime.engine.attention.away import AwayLayers, Creditors
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import LentPages, native_exchange
from runtime.engine.attention.native_away import PacketCreditors
from runtime.engine.kernels.away_calls import native_away
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.models.registry import kernels_for
from runtime.engine.step.context import AwayRow, PagedMaker, PagedMetadata, RowSpan
from runtime.engine.tensors.convert import array_of
from runtime.kv.pool import Geometry, PagePool
from runtime.lending_config import LoanShipping
from runtime.loans import LoanExchange, LoanLink, LoanQuery
from runtime.transport.channels.seqpacket import PACKET_BYTES
from runtime.types import SentAway

HEADS, WIDTH, PAGE = 32, 64, 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured. `layers`: in a round; `queries`: tokens that attend; `link`: what exchanges packets."""

    context: int
    kv_heads: int
    dtype: str
    layers: int
    queries: int = 1
    link: str = "native"

    @property
    def groups(self) -> int:
        return self.context // PAGE

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return K and V [context, kv_heads, width] and the query, float32 as in programs, the same in each process."""
        made, dtype = torch.Generator().manual_seed(0), getattr(torch, self.dtype)
        k, v = (torch.randn(self.context, self.kv_heads, WIDTH, generator=made).to(dtype) for _ in range(2))
        return k, v, torch.randn(self.queries, HEADS, WIDTH, generator=made)


class ContextPart:
    """Page sets [first, last) of the context in this process, on pages in a random order."""

    def __init__(self, shape: Shape, first: int, last: int) -> None:
        kernels = kernels_for(EngineConfig())
        if kernels is None:
            raise RuntimeError("there are no native kernels on this machine")
        self.make: PagedMaker = native_attention(kernels)
        self.kernels = kernels
        self.merge = NativeOperations(kernels).merge
        k, v, query = shape.values()
        half = PAGE * shape.kv_heads * WIDTH * k.element_size()
        self.pool, self.pages = PagePool(2 * half * (last - first), half), torch.randperm(last - first)
        at = torch.arange((last - first) * PAGE)
        mine = slice(first * PAGE, last * PAGE)
        geometry = Geometry(shape.kv_heads, WIDTH, k.dtype)
        self.pool.view(geometry, PAGE).write(self.pages[at // PAGE], at % PAGE, k[mine], v[mine])
        none = torch.empty(0, shape.kv_heads, WIDTH, dtype=k.dtype)
        self.now, self._first, self._shape = Tokens(query, none, none, AttentionSettings()), first, shape

    def paging(self, away: Sequence[SentAway]) -> PagedMetadata:
        """Return the paging of the last token of the context. `away`: what is not here."""
        tables = torch.full((1, 1, self._shape.groups), self.pool.padding)
        tables[0, 0, self._first : self._first + len(self.pages)] = self.pages
        return PagedMetadata(
            self.pool, PAGE, None, (RowSpan(0, 1, self._shape.context - 1),), tables,
            torch.tensor([self._shape.context]), self.pages[-1:].view(1, 1), torch.tensor([PAGE - 1]), None,
            (AwayRow(0, 0, tuple(away)),) if away else (),
        )  # fmt: skip

    def layers(self) -> ThinLayers:
        """Return layers that attend to this part."""
        shape = self._shape
        return ThinLayers(self.kernels, [0] * shape.layers, (HEADS, shape.kv_heads, WIDTH), getattr(torch, shape.dtype))


class CreditorEngine:
    """The engine of a creditor, as far as the side link needs it."""

    def __init__(self, held: ContextPart) -> None:
        self._kernels = held.kernels
        self._lent = LentPages(held.make, held.pool.second_lane(), torch.device("cpu"))
        groups = held.pages.view(-1, 1).tolist()
        self._lent.hold_loan(1, groups, len(groups) * PAGE, "d0")
        self._lent.hold_loan(2, groups[:1], PAGE, "d0")

    def exchange_packets(self, room: int) -> LoanExchange | None:
        return native_exchange(self._kernels, self._lent, room)

    def borrow(self, link: LoanLink, shipping: LoanShipping = "query") -> None: ...

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None: ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        return self._lent.attend(query, arrays, debtor)


def lend(post: Connection, folder: str, shape: Shape, groups: int) -> None:
    """Hold the first page sets of the context until anything comes."""
    torch.set_num_threads(1)
    lender = CreditorEngine(ContextPart(shape, 0, groups))
    messenger, client = side_messengers("d1", 1, f"unix://{folder}/d1", None, None)
    peers = SidePeers()
    peers.update({"d0": (1, "")})
    exchange = lender.exchange_packets(PACKET_BYTES) if shape.link == "native" else None
    server = SideServer(lender, messenger, peers, None if exchange is None else exchange.known)
    post.send(server.address)
    post.recv()
    server.close()
    client.close()


def hidden_state() -> Tensor:
    return torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(2))


def attend_alone(post: Connection, shape: Shape) -> None:
    """Attend to all of the context with two threads, a round for each message, until None comes."""
    torch.set_num_threads(2)
    held = ContextPart(shape, 0, shape.groups)
    layers, hidden = held.layers(), hidden_state()
    while post.recv() is not None:
        begin = time.perf_counter()
        out = layers.run(hidden, held.make(held.paging(())), shape.context - 1)
        post.send((time.perf_counter() - begin, out.tolist()))


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    (lender, theirs), (alone, its) = spawn.Pipe(), spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            spawn.Process(target=lend, args=(theirs, folder, shape, shape.groups // 2), daemon=True),
            spawn.Process(target=attend_alone, args=(its, shape), daemon=True),
        ]
        for child in children:
            child.start()
        theirs.close()  # so that a child's end is seen
        its.close()
        peers = SidePeers()
        peers.update({"d1": (1, lender.recv())})
        server, messenger = side_messengers("d0", 1, f"unix://{folder}/d0", None, None)
        held, half = ContextPart(shape, shape.groups // 2, shape.groups), shape.context // 2
        exchange = CreditorEngine(held).exchange_packets(PACKET_BYTES) if shape.link == "native" else None
        link = SideClient(messenger, peers, 30.0, None if exchange is None else exchange.receiver)
        call = native_away(held.kernels, PACKET_BYTES) if shape.link == "native" else None
        reached = Creditors(link, native=None if call is None else PacketCreditors(link, call))
        layers, hidden, away = held.layers(), hidden_state(), [SentAway("s", "d1", 1, 0, half)]
        pairs, error = list[tuple[float, float]](), 0.0
        for turn in range(rounds + 1):
            begin = time.perf_counter()
            backend = AwayLayers(held.make, held.paging(away), reached, held.merge)
            out = layers.run(hidden, backend, shape.context - 1)
            mine = time.perf_counter() - begin
            alone.send(turn)
            other, whole = alone.recv()
            error = max(error, float((out - torch.tensor(whole)).abs().max()))
            pairs += [(mine, other)] if turn else []
        trips = sorted(_round_trip(shape, link, held.now.query) for _ in range(2000))
        for post in (lender, alone):
            post.send(None)
        for child in children:
            child.join()
        link.close()
        server.close()
    ratios = [mine / other for mine, other in pairs]
    layer = [round(1e3 * statistics.median(each) / shape.layers, 4) for each in zip(*pairs, strict=True)]
    return {
        "kv_heads": shape.kv_heads, "dtype": shape.dtype, "link": shape.link, "layer_ms": layer,
        "ratio": [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))],
        "round_trip_ms": [round(1e3 * trips[len(trips) * share // 100], 4) for share in (50, 95)], "error": error,
    }  # fmt: skip


def _round_trip(shape: Shape, link: LoanLink, query: Tensor) -> float:
    asks = LoanQuery(((2,),), ((PAGE,),), (1,), 0, shape.kv_heads, shape.dtype)
    begin = time.perf_counter()
    link.collect(link.send_query("d1", asks, (array_of(query),)))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--link", nargs="+", default=["native"], choices=["native", "python"])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = [
        measure(Shape(given.context, heads, dtype, given.layers, link=link), given.rounds)
        for dtype in given.dtype
        for heads in given.kv_heads
        for link in given.link
    ]
    deliver({"context": given.context, "rows": rows}, given.output)


if __name__ == "__main__":
    main()
