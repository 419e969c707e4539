"""Messages that bring rows, as rows that can wait in a queue. What is of an older epoch, or of a hop that is not here,
is dropped.

Contract: pure but for `early`, which keeps rows whose sequence is not open yet. Nothing is queued here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

from runtime.agent.sequences.sequence import AgentSequence, QueuedRow, credit_of
from runtime.agent.steps.early_rows import EarlyRows
from runtime.chains import Array, Slice, own
from runtime.messages import ForwardRows, RunRows
from runtime.types import ModelSpec


def rows_of_go(
    go: RunRows, sequences: Mapping[str, AgentSequence], specs: Mapping[str, ModelSpec], now: int, strides: bool
) -> list[QueuedRow]:
    """Rows of tokens, at the first hops of their paths. `strides`: one row decodes all the tokens that it may."""
    rows: list[QueuedRow] = []
    at, all_tokens, count = 0, go.tokens, len(go.seqs)
    attempts, ahead = go.attempts or repeat(0, count), go.speculate or repeat(False, count)
    for seq, epoch, start, count, sample, generated, steps, attempt, predicted in zip(
        go.seqs, go.epochs, go.starts, go.counts, go.sample, go.generated, go.steps, attempts, ahead, strict=True
    ):
        tokens = all_tokens[at : at + count]
        at += count
        sequence = sequences.get(seq)
        if sequence is None or sequence.epoch != epoch:
            continue
        lo = sequence.path[0].lo
        credit = None
        if steps > 1 and not strides:
            credit, steps = credit_of(sequence.request, specs[sequence.stages[lo]], generated + steps), 1
        rows.append(
            QueuedRow(
                sequence,
                epoch,
                0,
                sequence.keys[lo],
                sequence.stages[lo],
                start,
                count,
                tokens,
                None,
                sample,
                generated,
                steps,
                now,
                start > 0,
                0,
                attempt,
                predicted,
                credit=credit,
            )
        )
    return rows


def rows_of_pass(
    rows: ForwardRows,
    arrays: Sequence[Array],
    device: str,
    sequences: Mapping[str, AgentSequence],
    early: EarlyRows,
    now: int,
) -> list[QueuedRow]:
    """Rows of hidden states, at later hops. A message whose arrays are not its rows' is dropped: nobody could say whose
    is whose.
    """
    came: list[QueuedRow] = []
    parts, attempts = parts_of(rows.counts, arrays), rows.attempts or repeat(0)
    if parts is None:
        return came
    columns = zip(
        rows.seqs, rows.epochs, rows.hops, rows.starts, rows.counts, rows.sample, rows.generated, parts, strict=True
    )
    for at, ((seq, epoch, index, start, count, sample, generated, part), attempt) in enumerate(
        zip(columns, attempts, strict=False)
    ):
        sequence = sequences.get(seq)
        if sequence is None or sequence.epoch < epoch:
            early.store_row(rows, at, own(part), now)
            continue
        if sequence.epoch != epoch or not 0 < index < len(sequence.path):
            continue
        hop = sequence.path[index]
        if hop.device != device:
            continue
        lo = hop.lo
        row = QueuedRow(
            sequence,
            epoch,
            index,
            sequence.keys[lo],
            sequence.stages[lo],
            start,
            count,
            None,
            part,
            sample,
            generated,
            1,
            now,
            start > 0,
        )
        if attempt:
            row.attempt, row.ahead = attempt, rows.speculate[at]
        came.append(row)
    return came


def parts_of(counts: Sequence[int], arrays: Sequence[Array]) -> Sequence[Array | Slice] | None:
    """Rows' tokens out of arrays that hold those of one row or of several, back to back; None where they do not come
    out even.
    """
    sizes = [array.shape[0] for array in arrays]
    if sizes == list(counts):
        return arrays
    parts: list[Array | Slice] = []
    at = 0  # of the rows
    for array, size in zip(arrays, sizes, strict=True):
        lo = 0
        while lo < size and at < len(counts):
            hi = lo + counts[at]
            parts.append(Slice(array, lo, hi))
            lo, at = hi, at + 1
        if lo != size:
            return None
    return parts if at == len(counts) else None
