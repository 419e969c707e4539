"""Decode steps said in short on a link: a message whose rows are those of the last one of its kind, one token on, says
no more than that.

    Pass  ->  ForwardRowsDelta          RunRows  ->  RunRowsDelta(tokens)          RowsDone  ->  RowsDoneDelta(tokens)

Names, epochs and numbers of some dozens of rows cost a message more than its 64 KB of hidden states do. Whoever gets it
has the last one, because a link's messages come in order and are numbered (`register`): one that is missing ends the
link.

Contract: `DeltaEncoder` is the sender's end of a link, `DeltaDecoder` the receiver's; state machines never see these
messages. `prepare` may be called at any time, and only makes what follows sooner. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.messages import ForwardRows, Message, RowsDone, RunRows
from runtime.types import Sampled


class ForwardRowsDelta(Message, frozen=True, tag=True, array_like=True):
    """The last ForwardRows of this link, every start and every `generated` one more."""


class RunRowsDelta(Message, frozen=True, tag=True, array_like=True):
    """The last RunRows of this link, likewise, with these tokens, one for each row."""

    tokens: tuple[int, ...]


class RowsDoneDelta(Message, frozen=True, tag=True, array_like=True):
    """The last RowsDone of this link, with these tokens sampled, and nothing else of them to tell."""

    tokens: tuple[int, ...]


Short = ForwardRowsDelta | RunRowsDelta | RowsDoneDelta


class DeltaEncoder:
    """What went out on a link, or came: the last message of each kind."""

    def __init__(self) -> None:
        self._go: RunRows | None = None
        self._done: RowsDone | None = None
        self._pass: ForwardRows | None = None
        self._due: ForwardRows | None = None

    def prepare(self) -> None:
        """Make the ForwardRows that follows now, where time costs nothing."""
        if self._due is None and self._pass is not None:
            self._due = _next_pass(self._pass)

    def short(self, message: Message) -> Message:
        """The same in fewer words, if the last one of its kind allows that."""
        match message:
            case ForwardRows():
                return ForwardRowsDelta() if self.next_pass() == message else message
            case RunRows():
                return RunRowsDelta(message.tokens) if self.next_go(message.tokens) == message else message
            case RowsDone():
                tokens = tuple([one.token for one in message.sampled if one is not None])
                return RowsDoneDelta(tokens) if self.next_done(tokens) == message else message
        return message

    def mark_sent(self, message: Message) -> None:
        """It is on its way, in whatever words."""
        match message:
            case ForwardRows():
                self._pass, self._due = message, None
            case RunRows():
                self._go = message
            case RowsDone():
                self._done = message

    def next_pass(self) -> ForwardRows | None:
        """What follows the last one of its kind; None if there was none, or it had turns."""
        self.prepare()
        return self._due

    def next_go(self, tokens: tuple[int, ...]) -> RunRows | None:
        last = self._go
        if last is None or last.attempts or len(tokens) != len(last.tokens):
            return None
        return RunRows(
            last.seqs,
            last.epochs,
            _more(last.starts),
            last.counts,
            tokens,
            last.sample,
            _more(last.generated),
            last.steps,
        )

    def next_done(self, tokens: tuple[int, ...]) -> RowsDone | None:
        last = self._done
        if last is None or len(tokens) != len(last.seqs):
            return None
        sampled = tuple([Sampled(seq, token) for seq, token in zip(last.seqs, tokens, strict=True)])
        return RowsDone(last.device, last.seqs, last.epochs, last.counts, sampled)


class DeltaDecoder:
    """What came on a link."""

    def __init__(self) -> None:
        self._said = DeltaEncoder()

    def prepare(self) -> None:
        self._said.prepare()

    def full(self, message: Message) -> Message | None:
        """A message in full; None for one that goes on from what never came, or not from that."""
        said = self._said
        match message:
            case ForwardRowsDelta():
                whole: Message | None = said.next_pass()
            case RunRowsDelta():
                whole = said.next_go(message.tokens)
            case RowsDoneDelta():
                whole = said.next_done(message.tokens)
            case _:
                whole = message
        if whole is not None:
            said.mark_sent(whole)
        return whole


def _more(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple([number + 1 for number in numbers])


def _next_pass(last: ForwardRows) -> ForwardRows | None:
    if last.attempts:
        return None
    return ForwardRows(
        last.seqs, last.epochs, last.hops, _more(last.starts), last.counts, last.sample, _more(last.generated)
    )
