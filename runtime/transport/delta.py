"""Send the messages of a persistent batch in short: each one after the first carries only what is new.

    ForwardRows -> ForwardRowsDelta(slot)
    RunRows     -> RunRowsDelta(slot, tokens)
    RowsDone    -> RowsDoneDelta(slot, tokens)

Names, epochs and positions of some dozens of rows cost a message more than its 64 KB of hidden states do. A message
with a batch number that is sent in full takes a slot on its link: the next of eight, in turn, for each kind of message.
Both ends count alike, because the messages of a link arrive in order and complete (a missing one ends the link). A
later message with the same number has the same rows one token on, and names the slot instead.

`DeltaEncoder` is the sender's end of a link, `DeltaDecoder` the receiver's. State machines see full messages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from runtime.messages import ForwardRows, Message, RowsDone, RunRows
from runtime.types import Sampled

#: Batches of a link and kind that may be sent in short at a time.
_SLOTS = 8


class ForwardRowsDelta(Message, frozen=True, tag=True, array_like=True):
    """The last ForwardRows of a slot, every start and every `generated` one more. `sent`: as there."""

    slot: int
    sent: int = 0


class RunRowsDelta(Message, frozen=True, tag=True, array_like=True):
    """The last RunRows of a slot, one token on, with these tokens: one for each row."""

    slot: int
    tokens: tuple[int, ...]


class RowsDoneDelta(Message, frozen=True, tag=True, array_like=True):
    """The last RowsDone of a slot, with these tokens sampled, without log-probabilities."""

    slot: int
    tokens: tuple[int, ...]


Batched = ForwardRows | RunRows | RowsDone
Delta = ForwardRowsDelta | RunRowsDelta | RowsDoneDelta


@dataclass(slots=True)
class _Slot:
    """The last message of a batch, and the one that follows it where that is made already."""

    last: Batched
    following: Batched | None = None


class _Slots:
    """The slots of one kind of message on one link."""

    def __init__(self) -> None:
        self.slots: list[_Slot] = []
        self._next = 0

    def find(self, message: Batched) -> int | None:
        """Return the slot of the batch that a message continues, None if there is none."""
        for at, slot in enumerate(self.slots):
            if slot.last.batch == message.batch and _continues(message, slot.last):
                return at
        return None

    def add(self, message: Batched) -> None:
        """Give a slot to a message that is sent in full."""
        if len(self.slots) < _SLOTS:
            self.slots.append(_Slot(message))
        else:
            self.slots[self._next] = _Slot(message)
        self._next = (self._next + 1) % _SLOTS


class DeltaEncoder:
    """Shorten the messages that are sent on a link."""

    def __init__(self) -> None:
        self._kinds: dict[type[Message], _Slots] = {kind: _Slots() for kind in (ForwardRows, RunRows, RowsDone)}

    def short(self, message: Message) -> Message:
        """Return the message in short if it continues a batch of its link, else the message itself."""
        if not isinstance(message, Batched) or not message.batch:
            return message
        slot = self._kinds[type(message)].find(message)
        if slot is None:
            return message
        match message:
            case ForwardRows():
                return ForwardRowsDelta(slot, message.sent)
            case RunRows():
                return RunRowsDelta(slot, message.tokens)
        tokens = _plain_tokens(message)
        return message if tokens is None else RowsDoneDelta(slot, tokens)

    def mark_sent(self, message: Message, short: Message) -> None:
        """Record that a message goes out, as `short`."""
        if isinstance(message, Batched) and message.batch:
            slots = self._kinds[type(message)]
            if isinstance(short, Delta):
                slots.slots[short.slot].last = message
            else:
                slots.add(message)


class DeltaDecoder:
    """Complete the messages that arrive on a link."""

    def __init__(self) -> None:
        self._kinds: dict[type[Message], _Slots] = {
            ForwardRowsDelta: _Slots(), RunRowsDelta: _Slots(), RowsDoneDelta: _Slots()
        }  # fmt: skip

    def prepare(self) -> None:
        """Make the next ForwardRows of each slot, while the device waits for them."""
        for slot in self._kinds[ForwardRowsDelta].slots:
            if slot.following is None:
                slot.following = _following(slot.last, ())

    def full(self, message: Message) -> Message | None:
        """Return a message in full; None for a delta with an unknown slot or a wrong number of tokens."""
        if isinstance(message, Batched):
            if message.batch:
                self._kinds[_SHORT[type(message)]].add(message)
            return message
        if not isinstance(message, Delta):
            return message
        slots = self._kinds[type(message)].slots
        if not 0 <= message.slot < len(slots):
            return None
        slot = slots[message.slot]
        tokens = () if isinstance(message, ForwardRowsDelta) else message.tokens
        if not isinstance(message, ForwardRowsDelta) and len(tokens) != len(slot.last.seqs):
            return None
        slot.last, slot.following = slot.following or _following(slot.last, tokens), None
        if isinstance(message, ForwardRowsDelta) and message.sent:
            return replace(slot.last, sent=message.sent)  # the slot's own has no time, which is not the next one's
        return slot.last


_SHORT: dict[type[Message], type[Message]] = {
    ForwardRows: ForwardRowsDelta, RunRows: RunRowsDelta, RowsDone: RowsDoneDelta
}  # fmt: skip


def _continues(message: Batched, last: Batched) -> bool:
    """Whether a message of the same batch has the same rows, one token on. (A batch may travel in parts.)"""
    if message.seqs != last.seqs or message.epochs != last.epochs:
        return False
    if isinstance(message, RowsDone) or isinstance(last, RowsDone):
        return True
    if isinstance(message, ForwardRows) and isinstance(last, ForwardRows) and message.hops != last.hops:
        return False
    return message.starts[0] == last.starts[0] + 1


def _plain_tokens(message: RowsDone) -> tuple[int, ...] | None:
    """Return the tokens of a message that has nothing else to report, None for one that has."""
    if message.prompts or message.earlier:
        return None
    tokens = [one.token for one in message.sampled if one is not None and one.logprob is None and not one.top]
    return tuple(tokens) if len(tokens) == len(message.seqs) else None


def _following(last: Batched, tokens: tuple[int, ...]) -> Batched:
    """Return the message that follows in a batch."""
    match last:
        case ForwardRows():
            return ForwardRows(
                last.seqs, last.epochs, last.hops, _more(last.starts), last.counts, last.sample, _more(last.generated),
                batch=last.batch,
            )  # fmt: skip
        case RunRows():
            return RunRows(
                last.seqs, last.epochs, _more(last.starts), last.counts, tokens, last.sample, _more(last.generated),
                last.steps, batch=last.batch,
            )  # fmt: skip
        case RowsDone():
            sampled = tuple([Sampled(seq, token) for seq, token in zip(last.seqs, tokens, strict=True)])
            return RowsDone(last.device, last.seqs, last.epochs, last.counts, sampled, batch=last.batch)


def _more(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple([number + 1 for number in numbers])
