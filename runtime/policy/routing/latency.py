"""Estimate the latency of each candidate for a request's next hop from profiles (BL-21).

    Latency   = T_queue + T_compute + T_transfer + T_load
    T_queue   = the compute times of the queued batches
    T_transfer= the request's bytes over the link to the candidate's device, plus the time to move its K and V there
    T_load    = max(T_swap - T_transfer, 0) on an idle device, T_swap on a busy one, 0 if the block is resident
    T_swap    = bytes of the evicted block over its way out  +  bytes of the new block over its way in

The paper takes device memory bandwidth as the way out and network bandwidth as the way in. Here both are links of the
profile, so off-loading to the host means naming another link. Pure functions; the result contains all terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.policy.profiles import BlockProfile, LinkProfile


@dataclass(frozen=True, slots=True)
class RowWork:
    """Describe a queued batch or a request: `rows` that each attend to `context` tokens."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describe a block on a device that could run the hop.

    Fields:
        queue: Batches queued before it.
        joins: Rows of the batch that the request would join.
        request_bytes: Bytes that travel over `transfer`; None there means that they are on the device.
        resident: The block is loaded. Otherwise it is loaded over `way_in`, after `evicted_bytes` have left over
            `way_out`.
        idle: Loading overlaps the transfer.
        kv_seconds: Time to move the request's K and V to the device (BL-16); 0 if they are there or there are none.
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
    """Hold the four terms, in seconds."""

    queue: float
    compute: float
    transfer: float
    load: float

    @property
    def total(self) -> float:
        return self.queue + self.compute + self.transfer + self.load


def swap_seconds(candidate: Candidate) -> float:
    """Return T_swap. Without a `way_in`, loading takes the profile's `load_seconds`."""
    out = (
        candidate.way_out.seconds(candidate.evicted_bytes)
        if candidate.way_out is not None and candidate.evicted_bytes
        else 0.0
    )
    block = candidate.block
    return out + (block.load_seconds if candidate.way_in is None else candidate.way_in.seconds(block.nbytes))


def latency_of(candidate: Candidate, work: RowWork) -> Latency:
    """Return the four terms for one request on one candidate."""
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
