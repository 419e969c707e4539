"""Answer questions to lent pages natively that have been answered: a step's questions are those of the step before.

    SideServer: messenger.receive --> engine.attend_loans --> messenger.send, and `learn_answer`
                `answer_known`: native code reads, attends and answers until something else comes or a loan changes

Numbers of messages go on in the messenger, which gets what native code does not know, as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.chains import Array
from runtime.loans import KnownQuestions
from runtime.messages import AttendLoans, LoansAttended
from runtime.transport.messenger import Envelope, Messenger
from runtime.transport.packets import PacketLink, head_of


class KnownAnswers:
    """The questions that native code answers for a messenger. For its thread."""

    def __init__(self, known: KnownQuestions, messenger: Messenger, admits: Callable[[str, int], bool]) -> None:
        self._known, self._messenger, self._admits = known, messenger, admits
        #: The debtors' names, incarnations and packets; ends are numbers in it.
        self._links: list[tuple[str, int, PacketLink]] = []

    @property
    def stamp(self) -> int:
        return self._known.stamp

    def learn_answer(self, asked: Envelope, question: AttendLoans, made: Sequence[Array], stamp: int) -> None:
        """Answer a question natively from now on, if that can be.

        Args:
            made: What it was answered with.
            stamp: The stamp before that.
        """
        link = self._messenger.packets(asked.sender)
        head = None if link is None or len(asked.arrays) != 1 else head_of(question, asked.arrays)
        answer = None if head is None else head_of(LoansAttended(question.turn), made)
        if link is None or head is None or answer is None or link.find_place() is None:
            return
        known = [(name, incarnation) for name, incarnation, _ in self._links]
        if (asked.sender, asked.incarnation) not in known:
            known.append((asked.sender, asked.incarnation))
            self._links.append((asked.sender, asked.incarnation, link))
        end = known.index((asked.sender, asked.incarnation))
        self._known.learn(end, head, answer, question.query, asked.arrays[0], stamp)

    def answer_known(self, seconds: float) -> bool:
        """Answer natively for up to `seconds` without a question; return False, at once, if it cannot.

        The messenger may have messages afterwards.
        """
        if not len(self._known):
            return False
        places = [link.find_place() for name, incarnation, link in self._links if self._admits(name, incarnation)]
        ends = [place for place in places if place is not None]
        if len(ends) < len(self._links):  # one is gone, or its messages come another way
            self._known.clear()
            self._links.clear()
            return False
        files = self._messenger.quiet_files({link.to for _, _, link in self._links})
        if files is None:
            return True
        if (done := self._known.answer(ends, files, seconds)) is None:
            return False
        for (_, _, link), count in zip(self._links, done.counts, strict=False):
            link.count(count, count)
        if done.source >= 0:
            self._links[done.source][2].put_back(done.packet)
        return True
