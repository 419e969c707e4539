"""Attend to rows away in one native call a layer: ask creditors, attend to what is here, receive, merge (IL-27, IL-29).

What is the same in all layers of a step is prepared once, and questions are kept from step to step. Native calls stream
K and V through all caches, so that what Python touches between two of them comes from memory: each object counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from runtime.engine.attention.interface import Tokens
from runtime.engine.attention.partial import PartialAttention
from runtime.engine.kernels.exchange import AskedQuestions, AwayCalls, AwayDone, NativeAway
from runtime.engine.kernels.paged_attention import NativeAttention
from runtime.loans import LoanQuery, PacketLoanLink

#: Steps' questions that are kept.
_MOST_STEPS = 16


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


class NativeLayers:
    """Native calls for the rows of a step that are away, all of which decode, with the same away in all layers.

    Args:
        local: Attention to what is here.
        places: The number of the part that is here, and of each creditor's.
        may: Whether rows with such queries are attended to so.
    """

    def __init__(
        self, creditors: PacketCreditors, local: NativeAttention, places: Sequence[int], questions_of: QuestionsOf,
        may: Callable[[Tensor], bool],
    ) -> None:  # fmt: skip
        self._link, self._call, self._creditors = creditors.link, creditors.call, creditors
        self._local, self._places, self._questions_of, self._may = local, places, questions_of, may
        self._like: object = None
        self._calls: AwayCalls | None = None
        self._asked: dict[int, AskedQuestions] = {}

    def attend(
        self, layer: int, now: Tokens, room: PartialAttention, out: Tensor | None
    ) -> tuple[AwayDone, Sequence[int]]:
        """Do what a native call can do of a layer; return it, and the tickets of answers that are still to come.

        `room`: of the parts, the same in all layers with such queries. `out`: gets the merged result. Raises LoanLost,
        LoansMixed.
        """
        query, key = now.query, now.key
        like = query.shape, query.dtype, key.shape[1], key.dtype, now.how
        if like != self._like:
            self._begin(layer, now, room, like)
        if self._calls is None:
            return AwayDone(), ()
        asked = self._asked.get(layer) or self._prepare_questions(layer, now)
        places = None if asked is None or not self._calls.has(layer) else self._link.find_places(asked.questions)
        if asked is None or places is None:
            return AwayDone(), ()
        done = self._call.attend(self._calls, layer, asked, places, query.contiguous(), out)
        return done, self._link.count_packets(asked.questions, done.sent, done.received, done.packet)

    def _begin(self, layer: int, now: Tokens, room: PartialAttention, like: object) -> None:
        self._like, self._calls = like, None
        here = self._local.decoding(layer, now)
        if here is None or not self._may(now.query):
            return
        self._calls = self._call.calls(now.query, here, self._places[0], (room.values, room.sums))
        first = tuple(self._questions_of(0, now))
        self._asked = self._creditors.questions((self._link.turn, tuple(self._places), like, first))

    def _prepare_questions(self, layer: int, now: Tokens) -> AskedQuestions | None:
        dtype, shape = str(now.query.dtype).removeprefix("torch."), tuple(now.query.shape)
        packets = self._link.prepare_packets(self._questions_of(layer, now), dtype, shape)
        if packets is None:
            return None
        made = self._asked[layer] = AskedQuestions(packets, self._places[1:])
        return made
