"""Number the batches that decode on (persistent batches).

Rows of one message that are one token each make up a batch. Where the next message to the device has the same rows in
the same order, each one token on, it carries the same number; any other membership gets a new one. Links, agents and
engines keep what they have prepared for a batch under its number.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

#: Batches that are remembered: several may be under way on a device in turn.
_MOST = 256
#: n -> n + 1. Applied to some hundred rows at every step.
_NEXT = (1).__add__


@dataclass(slots=True)
class _Known:
    """A numbered batch: what its last message had."""

    number: int
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    starts: tuple[int, ...]


class BatchNumbers:
    """Give each batch of each device its number: from 1 on, never used twice."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._count = 0

    def number(
        self,
        device: str,
        seqs: tuple[str, ...],
        epochs: tuple[int, ...],
        starts: tuple[int, ...],
        counts: tuple[int, ...],
        sample: tuple[bool, ...],
        steps: tuple[int, ...],
    ) -> int:
        """Return the number of these rows (columns as in `RunRows`).

        0 unless each row is one token and samples one: then `generated` grows with `starts` from step to step.
        """
        rows = len(seqs)
        if counts.count(1) < rows or steps.count(1) < rows or False in sample:
            return 0
        key = device, seqs[0]
        known = self._known.get(key)
        if (
            known is not None
            and known.seqs == seqs
            and known.epochs == epochs
            and tuple(map(_NEXT, known.starts)) == starts
        ):
            known.starts = starts
            return known.number
        self._count += 1
        self._known[key] = _Known(self._count, seqs, epochs, starts)
        self._known.move_to_end(key)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return self._count
