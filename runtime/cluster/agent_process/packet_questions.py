"""Send questions to lent pages, and receive their answers, past the messenger.

Both are known but for their numbers and arrays: a question's message is that of the step before, and an answer's is
LoansAttended with attention of its shape. Any other packet goes to the messenger as it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

from runtime.chains import Array
from runtime.loans import MOST_HEAD_BYTES, PacketPlace, PacketQuestion, PacketReceiver
from runtime.messages import AttendLoans, LoansAttended
from runtime.transport.messenger import Messenger
from runtime.transport.packets import PacketLink, head_of, numbered
from runtime.transport.wire import ITEM_BYTES

#: Questions kept with their messages.
_MOST_HEADS = 1024


class PacketQuestions:
    """Questions of one debtor. For its messenger's thread."""

    def __init__(self, messenger: Messenger, receiver: PacketReceiver) -> None:
        self._messenger, self._receiver = messenger, receiver
        #: Questions under way that were sent here, by ticket.
        self._open: dict[int, tuple[PacketLink, PacketQuestion]] = {}

    def send(self, ticket: int, creditor: str, asked: AttendLoans, arrays: tuple[Array, ...]) -> bool:
        """Send a question; False, with nothing sent, if it does not go this way."""
        link = self._messenger.packets(creditor)
        if link is None or len(arrays) != 1:
            return False
        known = _question_of(creditor, asked, arrays[0].dtype, arrays[0].shape)
        if known is None or memoryview(arrays[0].data).nbytes != known.nbytes:
            return False
        if not link.send(known.question, arrays[0].data):
            return False
        self._open[ticket] = link, known
        return True

    def prepare(
        self, asks: Sequence[tuple[str, AttendLoans]], dtype: str, head: tuple[int, int]
    ) -> list[PacketQuestion] | None:
        """Return the packets of these questions, with queries [tokens, *head]; None if one is too long."""
        made = [_question_of(creditor, asked, dtype, (sum(asked.query.counts), *head)) for creditor, asked in asks]
        known = [each for each in made if each is not None]
        return known if len(known) == len(made) else None

    def find_places(self, creditors: Sequence[str]) -> dict[str, PacketPlace] | None:
        """Return where the next questions to these creditors may go now; None if one may not."""
        places = {}
        for each in creditors:
            link = self._messenger.packets(each)
            place = None if link is None else link.find_place()
            if place is None:
                return None
            places[each] = place
        return places

    def count_answered(self, counts: Mapping[str, int]) -> None:
        """Take it that so many questions were sent past this object, and all of them answered, by creditor."""
        for creditor, count in counts.items():
            link = self._messenger.packets(creditor)
            if link is not None:  # as it had a place
                link.count(count, count)

    def count(
        self, questions: Sequence[PacketQuestion], ticket: int, sent: int, received: int, packet: bytes | None
    ) -> list[str]:
        """Take it that the first questions were sent past this object, and the first of their answers received.

        `ticket`: of the first one. `packet`: what came instead of the next answer. Returns the creditors of the rest.
        """
        rest = []
        for at, each in enumerate(questions[:sent]):
            link = self._messenger.packets(each.creditor)
            if link is None:
                continue  # its creditor is known, for it had a place
            link.count(int(at < received), 1)
            if at == received and packet is not None:
                link.put_back(packet)
            if at >= received:
                self._open[ticket + at] = link, each
                rest.append(each.creditor)
        return rest

    def find_place(self, ticket: int) -> PacketPlace | None:
        """Return where the answer to a question comes; None if the messenger has to receive it."""
        found = self._open.get(ticket)
        return None if found is None else found[0].find_place()

    def receive(self, ticket: int, place: PacketPlace, seconds: float) -> tuple[Array, ...] | None:
        """Return the answer to the question that is due there, valid until the next call.

        None if it has not come in time, or something else has, which the messenger may receive.
        """
        packet = self._receiver.receive(place.file, seconds)
        if packet is None:
            return None
        link, known = self._open[ticket]
        head, (tokens, heads, _) = numbered(known.answer, place.due), known.shape
        first, last = len(head), len(head) + prod(known.shape) * 8
        if len(packet) != last + tokens * heads * 16 or packet[:first] != head:
            link.put_back(bytes(packet))
            return None
        link.count(1, 0)
        del self._open[ticket]
        sums = Array("float64", (tokens, heads, 2), packet[last:])
        return Array("float64", known.shape, packet[first:last]), sums

    def close_question(self, ticket: int) -> None:
        """Take it that the messenger has received the answer."""
        self._open.pop(ticket, None)

    def clear(self) -> None:
        """Give up all questions under way."""
        self._open.clear()


@lru_cache(_MOST_HEADS)
def _question_of(creditor: str, asked: AttendLoans, dtype: str, shape: tuple[int, ...]) -> PacketQuestion | None:
    """Return the messages of a question with such queries; None if one is too long for a packet, or for native code.

    Raises WireError for a question that the creditor would refuse.
    """
    if len(shape) != 3:
        return None
    tokens, heads, width = shape
    queries = Array(dtype, shape, bytes(prod(shape) * ITEM_BYTES.get(dtype, 0)))
    made = [Array("float64", (tokens, heads, wide), bytes(tokens * heads * wide * 8)) for wide in (width, 2)]
    question, answer = head_of(asked, (queries,)), head_of(LoansAttended(asked.turn), made)
    if question is None or answer is None or len(question.data) > MOST_HEAD_BYTES:
        return None
    return PacketQuestion(creditor, question, answer, shape, len(queries.data))
