"""Estimate the latency of each candidate for a request's next hop from the profile tables (BL-21); `routing.variants`
and `routing.paths` take the least.

    Latency   = T_queue + T_compute + T_transfer + T_load
    T_queue   = the queued batches' own compute times
    T_transfer= the request's bytes over the link to the candidate's device, and what moving its K and V there takes
    T_load    = max(T_swap - T_transfer, 0) on an idle device, T_swap on a busy one, 0 where the block is resident
    T_swap    = bytes of the block that must go, over its way out  +  bytes of the new one, over its way in

The paper writes the way out as device memory bandwidth and the way in as the network's; both are links of the profile
here, so that off-loading to the host is a matter of which link is named. Pure: profiles and numbers in, the terms out.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.policy.profiles import BlockProfile, LinkProfile


@dataclass(frozen=True, slots=True)
class RowWork:
    """A batch in a queue or a request in hand: `rows` that attend to `context` tokens."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block on a device that could take the hop.

    `queue`: batches before it. `joins`: rows of the batch that it becomes part of. `request_bytes` travel over
    `transfer` (None: it is here already), and `kv_seconds` is what its K and V take to get there (BL-16; 0 where they
    are, or are none). `resident`: the block is loaded; else it comes over `way_in`, after `evicted_bytes` have gone
    over `way_out`. `idle`: loading overlaps the transfer.
    """

    name: str
    block: BlockProfile
    queue: tuple[RowWork, ...] = ()
    joins: int = 0
    request_bytes: int = 0
    transfer: LinkProfile | None = None
    resident: bool = True
    idle: bool = True
    way_in: LinkProfile | None = None
    evicted_bytes: int = 0
    way_out: LinkProfile | None = None
    kv_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Latency:
    """The four terms, in seconds."""

    queue: float
    compute: float
    transfer: float
    load: float

    @property
    def total(self) -> float:
        return self.queue + self.compute + self.transfer + self.load


def swap_seconds(candidate: Candidate) -> float:
    """T_swap. Without a way in, what loading from disk was measured to take."""
    out = (
        candidate.way_out.seconds(candidate.evicted_bytes)
        if candidate.way_out is not None and candidate.evicted_bytes
        else 0.0
    )
    block = candidate.block
    return out + (block.load_seconds if candidate.way_in is None else candidate.way_in.seconds(block.nbytes))


def latency_of(candidate: Candidate, work: RowWork) -> Latency:
    """The four terms for one request on one candidate."""
    compute = candidate.block.decode
    transfer = candidate.transfer.seconds(candidate.request_bytes) if candidate.transfer is not None else 0.0
    transfer += candidate.kv_seconds
    swap = 0.0 if candidate.resident else swap_seconds(candidate)
    return Latency(
        queue=sum(compute.at(each.rows, each.context) for each in candidate.queue),
        compute=compute.at(candidate.joins + work.rows, work.context),
        transfer=transfer,
        load=max(swap - transfer, 0.0) if candidate.idle else swap,
    )
