"""Measure attention to lent K and V with what travels: queries, pages, or what is expected to be faster (IL-28).

    python -m benchmarks.cluster.loan_shipping [--tokens 1 16 128 512] [--lent 64 512 4096] [--here 1024] [--kv-heads 8]
        [--dtype bfloat16] [--layers 8] [--rounds 9] [--output FILE]

One sequence of 32 heads of 64 values, of which another process holds the first `--lent` tokens and this one the
`--here` latest; the last `--tokens` attend. Two processes of one thread each, joined by the agents' side link, as
served: with native exchange where it can be. The three take turns, each first in every third round; the first round, in
which kernels and estimates settle, is left out.

- `ms`: of a layer, for each of the three; medians of the rounds.
- `over_best`: time of `cheapest` over that of the other one whose median is shorter, by round; median, least, most.
- `pages`: share of the layers for which `cheapest` asked for pages.
- `bytes`: of queries with partial attention, and of pages.
- `error`: largest difference between the results with queries and with pages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.cluster.remote_attention import HEADS, PAGE, WIDTH, ContextPart, CreditorEngine, Shape, lend
from benchmarks.reports import deliver
from runtime.chains import Array
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, side_messengers
from runtime.engine.attention.away import AwayAttention, Creditors
from runtime.engine.attention.native_away import PacketCreditors
from runtime.engine.kernels.away_calls import NativeAway, native_away
from runtime.engine.step.context import AwayRow, PagedMetadata, RowSpan
from runtime.lending_config import LoanShipping
from runtime.loans import LoanLink, LoanQuery
from runtime.policy.lending.shipping import page_bytes, query_bytes
from runtime.transport.channels.seqpacket import PACKET_BYTES
from runtime.types import SentAway


class CountedLink:
    """The side link. `pulled`: how many of its queries asked for pages."""

    def __init__(self, link: LoanLink) -> None:
        self._link, self.pulled = link, 0

    def send_query(self, creditor: str, query: LoanQuery, arrays: tuple[Array, ...]) -> int:
        self.pulled += query.pull
        return self._link.send_query(creditor, query, arrays)

    def collect(self, ticket: int) -> tuple[Array, ...]:
        return self._link.collect(ticket)


def paging_of(held: ContextPart, lent: int, here: int, tokens: int) -> PagedMetadata:
    """Return the paging of the last tokens of a sequence of which the first page sets are away."""
    tables = torch.full((1, 1, (lent + here) // PAGE), held.pool.padding)
    tables[0, 0, lent // PAGE :] = held.pages
    empty = torch.empty(0, dtype=torch.int64)
    return PagedMetadata(
        held.pool, PAGE, None, (RowSpan(0, tokens, lent + here - tokens),), tables, torch.tensor([lent + here]),
        empty.view(1, 0), empty, None, (AwayRow(0, 0, (SentAway("s", "d1", 1, 0, lent),)),),
    )  # fmt: skip


def point(
    held: ContextPart, link: SideClient, call: NativeAway | None, given: argparse.Namespace, tokens: int, lent: int
) -> dict[str, Any]:
    """Return the figures of one point of the grid."""
    now = held.now._replace(query=held.now.query[:tokens])
    links: dict[LoanShipping, CountedLink] = {how: CountedLink(link) for how in get_args(LoanShipping)}
    made = {how: torch.zeros(tokens, HEADS, WIDTH, dtype=now.query.dtype) for how in links}
    native = None if call is None else PacketCreditors(link, call)
    reached = {how: Creditors(each, how, native=native) for how, each in links.items()}
    hows = list(reached)
    taken: dict[LoanShipping, list[float]] = {how: [] for how in links}
    before = 0
    for turn in range(given.rounds + 1):
        before = links["cheapest"].pulled if turn < 2 else before
        for at in range(len(reached)):  # each follows each of the others
            how = hows[(turn + at) % len(hows)]
            creditors = reached[how]
            paging = paging_of(held, lent, given.here, tokens)
            begin = time.perf_counter()
            backend = AwayAttention(held.make, paging, creditors, held.merge)
            for _ in range(given.layers):
                backend.decode(0, now, made[how])
            taken[how] += [time.perf_counter() - begin] if turn else []
    best = min(taken["query"], taken["pages"], key=statistics.median)
    ratios = [mine / other for mine, other in zip(taken["cheapest"], best, strict=True)]
    size, width = now.query.element_size(), now.key.element_size()
    return {
        "tokens": tokens, "lent": lent,
        "ms": {how: round(1e3 * statistics.median(each) / given.layers, 3) for how, each in taken.items()},
        "over_best": [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))],
        "pages": round((links["cheapest"].pulled - before) / (given.rounds * given.layers), 2),
        "bytes": [query_bytes(tokens, HEADS, WIDTH, size, 8), page_bytes(lent, given.kv_heads, WIDTH, width)],
        "error": float((made["query"].float() - made["pages"].float()).abs().max()),
    }  # fmt: skip


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    most = max(given.lent)
    shape = Shape(most + given.here, given.kv_heads, given.dtype, given.layers, max(given.tokens))
    spawn = multiprocessing.get_context("spawn")
    lender, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = spawn.Process(target=lend, args=(theirs, folder, shape, most // PAGE), daemon=True)
        child.start()
        theirs.close()  # so that the child's end is seen
        peers = SidePeers()
        peers.update({"d1": (1, lender.recv())})
        server, messenger = side_messengers("d0", 1, f"unix://{folder}/d0", None, None)
        held = ContextPart(shape, most // PAGE, shape.groups)
        exchange = CreditorEngine(held).exchange_packets(PACKET_BYTES)
        link = SideClient(messenger, peers, 30.0, None if exchange is None else exchange.receiver)
        call = None if exchange is None else native_away(held.kernels, PACKET_BYTES)
        rows = [point(held, link, call, given, tokens, lent) for tokens in given.tokens for lent in given.lent]
        lender.send(None)
        child.join()
        link.close()
        server.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--lent", type=int, nargs="+", default=[64, 512, 4096], help="multiples of 16")
    parser.add_argument("--here", type=int, default=1024, help="a multiple of 16")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    deliver(
        {"dtype": given.dtype, "kv_heads": given.kv_heads, "here": given.here, "rows": measure(given)}, given.output
    )


if __name__ == "__main__":
    main()
