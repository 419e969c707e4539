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


@dataclass(slots=True)
class _Known:
    """A numbered batch: what its last message had."""

    number: int
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    starts: tuple[int, ...]
    generated: tuple[int, ...]
    sample: tuple[bool, ...]


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
        generated: tuple[int, ...],
        steps: tuple[int, ...],
    ) -> int:
        """Return the number of these rows (columns as in `RunRows`), 0 where a row is more than one token."""
        if max(counts) > 1 or max(steps) > 1:
            return 0
        key = device, seqs[0]
        known = self._known.get(key)
        if (
            known is not None
            and known.seqs == seqs
            and known.epochs == epochs
            and known.sample == sample
            and _one_on(known.starts, starts)
            and _one_on(known.generated, generated)
        ):
            known.starts, known.generated = starts, generated
            return known.number
        self._count += 1
        self._known[key] = _Known(self._count, seqs, epochs, starts, generated, sample)
        self._known.move_to_end(key)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return self._count


def _one_on(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    return [number + 1 for number in before] == list(now)
