"""Estimate how long K and V of a sequence take to another device, and learn from how long they took (BL-16).

The back of the context is copied at the measured rate of earlier moves; the front is recomputed as fast as the profile
of the blocks says, or else as earlier moves did. Before either is known nothing is expected of recomputing. Order and
answer take as long as those of earlier moves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from runtime.chains import BlockUse
from runtime.messages import MigrationReady
from runtime.policy.migration.cost import ChunkSeconds
from runtime.policy.migration.pace import copy_turns
from runtime.scheduler.migration.migration import Migration, MovePart
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


def move_seconds(
    state: ClusterState,
    sequence: ScheduledSequence,
    uses: Sequence[BlockUse],
    source: str,
    target: str,
    copy: bool,
    recompute: bool,
    present: int = 0,
) -> float:
    """Return the time until K and V of a sequence's blocks on `source` are on `target`.

    Args:
        copy: Whether pages are copied.
        recompute: Whether pages are recomputed at the destination.
        present: Tokens that the destination has already.
    """
    blocks = tuple(use.block for use in uses)
    width = sequence.chain.spec.page_tokens
    nbytes = sum(use.kv_layers for use in uses) * state.devices[source].pages.page_bytes
    again = _recompute_seconds(state, blocks, assume=not copy) if recompute else None
    there = state.devices[target].facts
    return state.times.move_seconds(
        max(sequence.computed - present, 0),
        width,
        there.recompute_chunk,
        nbytes if copy else None,
        again,
        there.fetch_sets,
        there.between_steps,
    )


def record_move(state: ClusterState, move: Migration, part: MovePart, event: MigrationReady, now: int) -> None:
    """Learn from the first answer of a destination."""
    if move.stages != 1 or move.as_written or move.orphan or not (event.copied or event.recomputed):
        return
    times, there = state.times, state.devices[part.target].facts
    chunk = there.recompute_chunk
    if event.nbytes and event.copying:
        width = move.sequence.spec.page_tokens
        copied = sum(-(-hi // width) - lo // width for lo, hi in event.copied)
        times.add_copy(copy_turns(copied, there.fetch_sets, there.between_steps), event.nbytes, event.copying / 1e9)
    if event.recomputed and event.recomputing and not event.activation_bytes:
        chunks = [min(chunk, hi - at) for lo, hi in event.recomputed for at in range(lo, hi, chunk)]
        weights = _weights(state, move.chain.blocks(part.hop.lo, part.hop.hi))
        times.add_recompute(chunks, weights, event.recomputing / 1e9)
    if len(move.parts) == 1:
        times.add_move(now, move.estimate, (now - move.began) / 1e9, max(event.copying, event.recomputing) / 1e9)


def _recompute_seconds(state: ClusterState, blocks: Sequence[str], assume: bool) -> ChunkSeconds | None:
    """Return the time of recomputing a chunk; None if it is unknown. `assume`: an assumed time is better than none."""
    estimates, times = state.router.estimates, state.times
    if estimates is None or estimates.prefill_seconds(blocks, 1) is None:
        return times.recompute_seconds(_weights(state, set(blocks))) if assume or times.knows_recompute else None

    def seconds(context: int, tokens: int) -> float:
        return estimates.prefill_seconds(blocks, tokens) or 0.0

    return seconds


def _weights(state: ClusterState, blocks: Collection[str]) -> int:
    return sum(state.sizes_of(blocks).values())
