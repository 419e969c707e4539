"""Decode steps said in short on a link: a message whose rows are those of the last one of its kind, one token on, says no more than that.

    Pass  ->  PassAgain          Go  ->  GoAgain(tokens)          Done  ->  DoneAgain(tokens)

Names, epochs and numbers of some dozens of rows cost a message more than its 64 KB of hidden states do. Whoever gets it has the last one,
because a link's messages come in order and are numbered (`register`): one that is missing ends the link.

Contract: `Said` is the sender's end of a link, `Heard` the receiver's; state machines never see these messages. Pure bookkeeping.
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
    """What went out on a link: the last message of each kind."""

    def __init__(self) -> None:
        self._pass: Pass | None = None
        self._go: Go | None = None
        self._done: Done | None = None

    def short(self, message: Message) -> Message:
        """The same in fewer words, if the last one of its kind allows that."""
        match message:
            case Pass():
                return PassAgain() if self._pass is not None and _pass_again(self._pass, message) else message
            case Go():
                return GoAgain(message.tokens) if self._go is not None and _go_again(self._go, message) else message
            case Done():
                return DoneAgain(_tokens(message.sampled)) if self._done is not None and _done_again(self._done, message) else message
        return message

    def went(self, message: Message) -> None:
        """It is on its way, in whatever words."""
        match message:
            case Pass():
                self._pass = message
            case Go():
                self._go = message
            case Done():
                self._done = message


class Heard:
    """What came on a link."""

    def __init__(self) -> None:
        self._said = Said()

    def full(self, message: Message) -> Message | None:
        """A message in full; None for one that goes on from what never came, or not from that."""
        said = self._said
        match message:
            case PassAgain():
                whole: Message | None = None if said._pass is None else _next_pass(said._pass)
            case GoAgain():
                whole = None if said._go is None else _next_go(said._go, message.tokens)
            case DoneAgain():
                whole = None if said._done is None else _next_done(said._done, message.tokens)
            case _:
                whole = message
        if whole is not None:
            said.went(whole)
        return whole


def _more(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple([number + 1 for number in numbers])


def _tokens(sampled: Sequence[Sampled | None]) -> tuple[int, ...]:
    return tuple([one.token for one in sampled if one is not None])


def _pass_again(last: Pass, now: Pass) -> bool:
    return (
        now.seqs == last.seqs
        and now.epochs == last.epochs
        and now.hops == last.hops
        and now.counts == last.counts
        and now.sample == last.sample
        and not now.turns
        and not last.turns
        and now.starts == _more(last.starts)
        and now.generated == _more(last.generated)
    )


def _next_pass(last: Pass) -> Pass | None:
    if last.turns:
        return None
    return Pass(last.seqs, last.epochs, last.hops, _more(last.starts), last.counts, last.sample, _more(last.generated))


def _go_again(last: Go, now: Go) -> bool:
    return (
        now.seqs == last.seqs
        and now.epochs == last.epochs
        and now.counts == last.counts
        and now.sample == last.sample
        and now.steps == last.steps
        and not now.turns
        and not last.turns
        and now.starts == _more(last.starts)
        and now.generated == _more(last.generated)
    )


def _next_go(last: Go, tokens: tuple[int, ...]) -> Go | None:
    if last.turns or len(tokens) != len(last.tokens):
        return None
    return Go(last.seqs, last.epochs, _more(last.starts), last.counts, tokens, last.sample, _more(last.generated), last.steps)


def _done_again(last: Done, now: Done) -> bool:
    return (
        now.seqs == last.seqs
        and now.epochs == last.epochs
        and now.counts == last.counts
        and now.device == last.device
        and not now.turns
        and not now.prompts
        and len(now.sampled) == len(now.seqs)
        and all(map(_plain, now.sampled, now.seqs))
    )


def _plain(sampled: Sampled | None, seq: str) -> bool:
    return sampled is not None and sampled.logprob is None and not sampled.top and sampled.seq == seq


def _next_done(last: Done, tokens: tuple[int, ...]) -> Done | None:
    if len(tokens) != len(last.seqs):
        return None
    return Done(
        last.device, last.seqs, last.epochs, last.counts, tuple([Sampled(seq, token) for seq, token in zip(last.seqs, tokens, strict=True)])
    )
