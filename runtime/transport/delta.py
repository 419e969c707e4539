"""Decode steps said in short on a link: a message whose rows are those of the last one of its kind, one token on, says no more than that.

    Pass  ->  PassAgain          Go  ->  GoAgain(tokens)          Done  ->  DoneAgain(tokens)

Names, epochs and numbers of some dozens of rows cost a message more than its 64 KB of hidden states do. Whoever gets it has the last one,
because a link's messages come in order and are numbered (`register`): one that is missing ends the link.

Contract: `Said` is the sender's end of a link, `Heard` the receiver's; state machines never see these messages. `prepare` may be called
at any time, and only makes what follows sooner. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.messages import Done, Go, Message, Pass
from runtime.types import Sampled


class PassAgain(Message, frozen=True, tag=True, array_like=True):
    """The last Pass of this link, every start and every `generated` one more."""


class GoAgain(Message, frozen=True, tag=True, array_like=True):
    """The last Go of this link, likewise, with these tokens, one for each row."""

    tokens: tuple[int, ...]


class DoneAgain(Message, frozen=True, tag=True, array_like=True):
    """The last Done of this link, with these tokens sampled, and nothing else of them to tell."""

    tokens: tuple[int, ...]


Short = PassAgain | GoAgain | DoneAgain


class Said:
    """What went out on a link, or came: the last message of each kind."""

    def __init__(self) -> None:
        self._go: Go | None = None
        self._done: Done | None = None
        self._pass: Pass | None = None
        self._due: Pass | None = None

    def prepare(self) -> None:
        """Make the Pass that follows now, where time costs nothing."""
        if self._due is None and self._pass is not None:
            self._due = _next_pass(self._pass)

    def short(self, message: Message) -> Message:
        """The same in fewer words, if the last one of its kind allows that."""
        match message:
            case Pass():
                return PassAgain() if self.next_pass() == message else message
            case Go():
                return GoAgain(message.tokens) if self.next_go(message.tokens) == message else message
            case Done():
                tokens = tuple([one.token for one in message.sampled if one is not None])
                return DoneAgain(tokens) if self.next_done(tokens) == message else message
        return message

    def went(self, message: Message) -> None:
        """It is on its way, in whatever words."""
        match message:
            case Pass():
                self._pass, self._due = message, None
            case Go():
                self._go = message
            case Done():
                self._done = message

    def next_pass(self) -> Pass | None:
        """What follows the last one of its kind; None if there was none, or it had turns."""
        self.prepare()
        return self._due

    def next_go(self, tokens: tuple[int, ...]) -> Go | None:
        last = self._go
        if last is None or last.turns or len(tokens) != len(last.tokens):
            return None
        return Go(last.seqs, last.epochs, _more(last.starts), last.counts, tokens, last.sample, _more(last.generated), last.steps)

    def next_done(self, tokens: tuple[int, ...]) -> Done | None:
        last = self._done
        if last is None or len(tokens) != len(last.seqs):
            return None
        sampled = tuple([Sampled(seq, token) for seq, token in zip(last.seqs, tokens, strict=True)])
        return Done(last.device, last.seqs, last.epochs, last.counts, sampled)


class Heard:
    """What came on a link."""

    def __init__(self) -> None:
        self._said = Said()

    def prepare(self) -> None:
        self._said.prepare()

    def full(self, message: Message) -> Message | None:
        """A message in full; None for one that goes on from what never came, or not from that."""
        said = self._said
        match message:
            case PassAgain():
                whole: Message | None = said.next_pass()
            case GoAgain():
                whole = said.next_go(message.tokens)
            case DoneAgain():
                whole = said.next_done(message.tokens)
            case _:
                whole = message
        if whole is not None:
            said.went(whole)
        return whole


def _more(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple([number + 1 for number in numbers])


def _next_pass(last: Pass) -> Pass | None:
    if last.turns:
        return None
    return Pass(last.seqs, last.epochs, last.hops, _more(last.starts), last.counts, last.sample, _more(last.generated))
