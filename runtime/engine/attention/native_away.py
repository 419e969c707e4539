"""Attend to rows away natively: ask creditors, attend to what is here, receive, merge (IL-27, IL-29).

    a layer by itself          NativeLayers.attend    one native call
    the layers of a step       AwayStep               one native call, which also runs all between them (`Program`)

What is the same in all layers of a step is prepared once, and questions are kept from step to step. Native calls stream
K and V through all caches, so that what Python touches between two of them comes from memory: each object counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from runtime.engine.attention.interface import Tokens
from runtime.engine.attention.partial import PartialAttention
from runtime.engine.kernels.away_calls import AskedQuestions, AwayCall, AwayCalls, AwayDone, NativeAway, RowParts
from runtime.engine.kernels.paged_attention import NativeAttention
from runtime.engine.step.context import AttentionBackend
from runtime.loans import LoanQuery, PacketLoanLink

#: Steps' questions that are kept.
_MOST_STEPS = 16

#: What native code has done of a layer without it, and the tickets of its questions.
NOTHING: tuple[AwayDone, Sequence[int]] = AwayDone(), ()


@dataclass(frozen=True, slots=True)
class PacketCreditors:
    """How native code reaches creditors.

    Fields:
        kept: Questions by layer, of rows of which the same is asked.
    """

    link: PacketLoanLink
    call: NativeAway
    kept: dict[object, dict[int, AskedQuestions]] = field(default_factory=dict)

    def questions(self, asked: object) -> dict[int, AskedQuestions]:
        """Return the questions of some rows by layer, to which new ones are added.

        `asked`: what tells these rows apart.
        """
        if (found := self.kept.get(asked)) is None:
            if len(self.kept) >= _MOST_STEPS:
                self.kept.clear()
            found = self.kept[asked] = {}
        return found


#: Returns what each creditor is asked in a layer for these rows.
QuestionsOf = Callable[[int, Tokens], Sequence[tuple[str, LoanQuery]]]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The calls of rows with such queries, and their questions by layer."""

    calls: AwayCalls
    asked: dict[int, AskedQuestions]


class NativeLayers:
    """Native calls for the rows of a step that are away, all of which decode, with the same away in all layers.

    Args:
        local: Attention to what is here.
        rows: Numbers of these rows in the step.
        parts: The rows' parts that are here, then those of each creditor.
        may: Whether rows with such queries are attended to so.
    """

    def __init__(
        self, creditors: PacketCreditors, local: NativeAttention, rows: Tensor, parts: Sequence[RowParts],
        questions_of: QuestionsOf, may: Callable[[Tensor], bool],
    ) -> None:  # fmt: skip
        self._creditors, self._local, self._rows, self._parts = creditors, local, rows, tuple(parts)
        self._questions_of, self._may = questions_of, may
        self._prepared: dict[object, _Prepared | None] = {}
        self._calls: dict[tuple[int, object], AwayCall | None] = {}
        #: What a step's call has done of a layer, where the rest is left.
        self._begun: dict[int, tuple[AwayDone, Sequence[int]]] = {}

    def call_of(self, layer: int, now: Tokens, room: PartialAttention) -> AwayCall | None:
        """Return the native call of a layer; None if there is none.

        `room`: of the parts, the same in all layers with such queries.
        """
        query, key = now.query, now.key
        like = query.shape, query.dtype, key.shape[1], key.dtype, now.how
        if (layer, like) in self._calls:
            return self._calls[layer, like]
        if like not in self._prepared:
            self._prepared[like] = self._prepare(layer, now, room, like)
        made, prepared = None, self._prepared[like]
        if prepared is not None and prepared.calls.has(layer):
            asked = prepared.asked.get(layer) or self._asked_in(layer, now, prepared.asked)
            made = None if asked is None else prepared.calls.at_layer(layer, asked)
        self._calls[layer, like] = made
        return made

    def attend(
        self, layer: int, now: Tokens, room: PartialAttention, out: Tensor | None
    ) -> tuple[AwayDone, Sequence[int]]:
        """Do what a native call can do of a layer; return it, and the tickets of answers that are still to come.

        `out`: gets the merged result. Raises LoanLost, LoansMixed.
        """
        call = self.call_of(layer, now, room)
        if call is None:
            return NOTHING
        link, native = self._creditors.link, self._creditors.call
        places = link.find_places([each.creditor for each in call.asked.questions])
        if places is None:
            return NOTHING
        native.point_to(places)
        done = native.attend(call, now.query.contiguous(), out)
        return done, link.count_packets(call.asked.questions, done.sent, done.received, done.packet, {})

    def keep_begun(self, layer: int, done: AwayDone, tickets: Sequence[int]) -> None:
        """Keep what a step's call has done of a layer (`take_begun`)."""
        self._begun[layer] = done, tickets

    def take_begun(self, layer: int) -> tuple[AwayDone, Sequence[int]] | None:
        """Return what a step's call has done of a layer, once."""
        return self._begun.pop(layer, None)

    def _prepare(self, layer: int, now: Tokens, room: PartialAttention, like: object) -> _Prepared | None:
        here = self._local.decoding(layer, now)
        if here is None or not self._may(now.query):
            return None
        calls = self._creditors.call.calls(
            now.query, here, self._parts[0].numbers, (room.values, room.sums), self._rows
        )
        first = tuple(self._questions_of(0, now))  # for those of all layers, which differ in the layer alone
        return _Prepared(calls, self._creditors.questions((self._creditors.link.turn, self._parts, like, first)))

    def _asked_in(self, layer: int, now: Tokens, asked: dict[int, AskedQuestions]) -> AskedQuestions | None:
        dtype, (_, heads, width) = str(now.query.dtype).removeprefix("torch."), now.query.shape
        packets = self._creditors.link.prepare_packets(self._questions_of(layer, now), dtype, (heads, width))
        if packets is None:
            return None
        ends = {each.creditor: self._creditors.call.end_of(each.creditor) for each in packets}
        made = asked[layer] = AskedQuestions(packets, self._parts[1:], ends)
        return made


@dataclass(frozen=True, slots=True)
class StepLayer:
    """A layer of a step of which other devices hold pages.

    Fields:
        owner: What takes over where the call leaves the rest.
        beside: Attention to the step's other rows, which the call attends to as well; None if there are none.
    """

    call: AwayCall
    owner: NativeLayers
    beside: AttentionBackend | None


class AwayStep:
    """The native calls in the layers of a step: `open`, run some of them in their order, `close`.

    Args:
        layers: Those that have one, by number.
    """

    def __init__(self, creditors: PacketCreditors, layers: Mapping[int, StepLayer]) -> None:
        self._link, self._native, self._layers = creditors.link, creditors.call, layers
        self._creditors = sorted({each.creditor for one in layers.values() for each in one.call.asked.questions})
        self._due: dict[str, int] | None = None

    def open(self) -> Mapping[int, StepLayer]:
        """Return the layers with native calls, none if they cannot be made now. Raises LoanLost."""
        places = self._link.find_places(self._creditors)
        if places is None:
            return {}
        self._native.point_to(places)
        self._due = {creditor: place.due for creditor, place in places.items()}
        return self._layers

    def close(self, left: int | None) -> None:
        """Take it that the calls have run up to layer `left`, with the rest left to its owner; None: all of them."""
        if self._due is None:
            return
        answered = {each: self._native.end_of(each).due - due for each, due in self._due.items()}
        self._due = None
        one = None if left is None else self._layers.get(left)
        if one is None or left is None:
            self._link.count_packets((), 0, 0, None, answered)
            return
        questions, done = one.call.asked.questions, one.call.read_done()
        for each in questions[: done.received]:
            answered[each.creditor] -= 1
        tickets = self._link.count_packets(questions, done.sent, done.received, done.packet, answered)
        one.owner.keep_begun(left, done, tickets)
