"""Turn incoming messages into rows for the queue.

Rows of older epochs, and of hops that are not on this device, are dropped. Rows of a sequence that is not open yet go
to `EarlyRows`; apart from that the functions are pure.
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
    """Return the rows of a RunRows message, at the first hops of their paths.

    Args:
        strides: Whether one row decodes all its `steps` tokens in one step; otherwise it gets a credit for them.
    """
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
    """Return the rows of a ForwardRows message, at later hops.

    A message with arrays that do not match its rows is dropped.
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
    """Split arrays into the hidden states of each row; return None if the arrays do not end where rows end.

    Args:
        counts: Tokens of each row.
        arrays: Hidden states of one or several rows each, back to back.
    """
    sizes = [array.shape[0] for array in arrays]
    if sizes == list(counts):
        return arrays
    parts: list[Array | Slice] = []
    at = 0  # index of the row
    for array, size in zip(arrays, sizes, strict=True):
        lo = 0
        while lo < size and at < len(counts):
            hi = lo + counts[at]
            parts.append(Slice(array, lo, hi))
            lo, at = hi, at + 1
        if lo != size:
            return None
    return parts if at == len(counts) else None
