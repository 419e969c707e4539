"""Estimate the latency of each candidate for a request's next hop (BL-21).

    Latency   = T_queue + T_compute + T_transfer + T_load
    T_queue   = the compute time of the work queued before the request
    T_compute = rows that decode, from the profile's table; prompts in chunks, from its line of prompts
    T_transfer= the request's hidden states on their way to the device, and its K and V if they are elsewhere (BL-16)
    T_load    = max(T_swap - T_transfer, 0) on an idle device, T_swap on a busy one, 0 if the block is resident
    T_swap    = loads under way there, which come first, and the bytes that are missing

In the paper, T_swap has the way out of what leaves, too. Weights that leave a device are dropped, which takes no time.
Pure functions; the result contains all terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.policy.profiles import BlockProfile


@dataclass(frozen=True, slots=True)
class RowWork:
    """Describe queued work, or a request's.

    Fields:
        rows: Rows that decode a token each, and attend to `context` tokens.
        prompt: Tokens of prompts.
    """

    rows: int
    context: int
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describe a block on a device that could run the hop.

    Fields:
        queue: Work queued before the request.
        joins: Rows of the batch that the request would join.
        transfer: Seconds until the request's hidden states, K and V are there; 0 if they are.
        swap: T_swap in seconds, 0 if the block is resident.
        idle: Loading overlaps the transfer.
        chunk: Tokens of a prompt that run in one step.
    """

    name: str
    block: BlockProfile
    queue: tuple[RowWork, ...] = ()
    joins: int = 0
    transfer: float = 0.0
    swap: float = 0.0
    idle: bool = True
    chunk: int = 512


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


def compute_seconds(block: BlockProfile, work: RowWork, chunk: int) -> float:
    """Return the time of work in a block: its prompt in chunks of `chunk` tokens, each beside all of its rows."""
    rows = block.decode.at(work.rows, work.context) if work.rows else 0.0
    whole, rest = divmod(work.prompt, chunk)
    prompt = whole * block.prefill.at(chunk) + (block.prefill.at(rest) if rest else 0.0)
    return rows * max(whole + (rest > 0), 1) + prompt


def latency_of(candidate: Candidate, work: RowWork) -> Latency:
    """Return the four terms for one request on one candidate."""
    block, chunk = candidate.block, candidate.chunk
    joined = RowWork(work.rows + candidate.joins, work.context, work.prompt)
    return Latency(
        queue=sum(compute_seconds(block, each, chunk) for each in candidate.queue),
        compute=compute_seconds(block, joined, chunk),
        transfer=candidate.transfer,
        load=max(candidate.swap - candidate.transfer, 0.0) if candidate.idle else candidate.swap,
    )
