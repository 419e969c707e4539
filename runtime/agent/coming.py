"""Messages that bring rows, as rows that can wait in a queue. What is of an older epoch, or of a hop that is not here, is dropped.

Contract: pure but for `early`, which keeps rows whose sequence is not open yet. Nothing is queued here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

from runtime.agent.early import Early
from runtime.agent.guests import Guest, Waiting
from runtime.messages import Go, Pass
from runtime.stages import Array


def rows_of_go(go: Go, guests: Mapping[str, Guest], now: int) -> list[Waiting]:
    """Rows of tokens, at the first hops of their paths."""
    rows: list[Waiting] = []
    at, all_tokens, count = 0, go.tokens, len(go.seqs)
    turns, ahead = go.turns or repeat(0, count), go.ahead or repeat(False, count)
    for seq, epoch, start, count, sample, generated, steps, turn, predicted in zip(
        go.seqs, go.epochs, go.starts, go.counts, go.sample, go.generated, go.steps, turns, ahead, strict=True
    ):
        tokens = all_tokens[at : at + count]
        at += count
        guest = guests.get(seq)
        if guest is None or guest.epoch != epoch:
            continue
        lo = guest.path[0].lo
        rows.append(
            Waiting(
                guest, epoch, 0, guest.keys[lo], guest.stages[lo], start, count, tokens, None, sample, generated, steps, now, start > 0,
                0, turn, predicted,
            )
        )  # fmt: skip
    return rows


def rows_of_pass(
    rows: Pass, arrays: Sequence[Array], device: str, guests: Mapping[str, Guest], early: Early, now: int
) -> Iterator[Waiting]:
    """Rows of hidden states, at later hops. A message without one array for each row is dropped: nobody could say whose is whose."""
    if len(arrays) != len(rows.seqs):
        return
    for at, seq in enumerate(rows.seqs):
        guest, index, count, array = guests.get(seq), rows.hops[at], rows.counts[at], arrays[at]
        if guest is None or guest.epoch < rows.epochs[at]:
            early.keep(rows, at, array, now)
            continue
        if guest.epoch != rows.epochs[at] or not 0 < index < len(guest.path):
            continue
        hop, start = guest.path[index], rows.starts[at]
        if hop.device != device or array.shape[:1] != (count,):
            continue
        stage, name = guest.stages[hop.lo], guest.keys[hop.lo]
        row = Waiting(
            guest, guest.epoch, index, name, stage, start, count, None, array, rows.sample[at], rows.generated[at], 1, now, start > 0
        )  # fmt: skip
        if rows.turns and rows.turns[at]:
            row.turn, row.ahead = rows.turns[at], rows.ahead[at]
        yield row
