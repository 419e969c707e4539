"""Carry attention between agents beside their main links: queries to lent pages, and the answers (IL-27).

    debtor's step --AttendLoans--> creditor's thread: engine.attend_loans --LoansAttended--> debtor's step

The creditor answers on a thread of its own, so that an agent answers while it steps, and two agents may hold pages for
each other. Each end has a messenger for this alone. A creditor answers only agents that the scheduler has introduced,
in their present incarnation, and each of them about its own loans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import zmq

from runtime.chains import Array
from runtime.cluster.agent_process.known_answers import KnownAnswers
from runtime.cluster.agent_process.packet_questions import PacketQuestions
from runtime.cluster.errors import public
from runtime.loans import KnownQuestions, LoanEngine, LoanQuery, PacketPlace, PacketQuestion, PacketReceiver
from runtime.messages import AttendLoans, LoansAttended
from runtime.transport.keys import Keys
from runtime.transport.messenger import Envelope, Messenger, PeerCut
from runtime.types import LoanLost

_log = logging.getLogger(__name__)

#: Longest wait for queries, in seconds, after which the thread looks whether it is to end.
_WAIT = 0.2
#: Time in seconds after which an agent that waits for an answer looks whether its creditor is still there.
_LOOK = 0.02


class SidePeers:
    """Incarnation and side address of each agent, as the scheduler told last. For any thread."""

    def __init__(self) -> None:
        self._known: Mapping[str, tuple[int, str]] = {}
        #: Called when these have changed.
        self.changed: Callable[[], None] = lambda: None

    def update(self, known: Mapping[str, tuple[int, str]]) -> None:
        if known != self._known:
            self._known = dict(known)
            self.changed()

    def get(self, name: str) -> tuple[int, str] | None:
        return self._known.get(name)

    def admits(self, name: str, incarnation: int) -> bool:
        """Return whether an agent is known in this incarnation."""
        known = self._known.get(name)
        return known is not None and known[0] == incarnation


class SideServer:
    """Answers queries to the pages that this agent holds for other agents, on a thread of its own.

    Args:
        messenger: Bound, and used by this thread alone.
        known: Answers questions that have come before natively; None: all are answered in Python.
    """

    def __init__(
        self, engine: LoanEngine, messenger: Messenger, peers: SidePeers, known: KnownQuestions | None = None
    ) -> None:
        self._engine, self._messenger = engine, messenger
        self._known = None if known is None else KnownAnswers(known, messenger, peers.admits)
        if known is not None:
            peers.changed = known.invalidate
        self.address = messenger.address
        messenger.admit(peers.admits)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zoo-loans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._messenger.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                waited = self._known is not None and self._known.answer_known(_WAIT)
                for item in self._messenger.receive(0.0 if waited else _WAIT):
                    if isinstance(item, PeerCut):
                        continue
                    if isinstance(item.message, AttendLoans):
                        self._answer(item, item.message)
                    else:
                        self._messenger.deny(item.sender, "only attention to loans is asked for here")
        except Exception:  # debtors get no answers any more, and give up after their time
            _log.critical("attention for other devices has ended", exc_info=True)
        finally:
            self._messenger.close()

    def _answer(self, came: Envelope, asked: AttendLoans) -> None:
        stamp = 0 if self._known is None else self._known.stamp
        try:
            made, error = self._engine.attend_loans(asked.query, came.arrays, came.sender), ""
        except Exception as failed:  # whatever it is, the agent that asked must not wait for it
            if not isinstance(failed, LoanLost):
                _log.warning("a query to loans failed", exc_info=True)
            made, error = (), public(failed) or type(failed).__name__
        sent = self._messenger.send(came.sender, LoansAttended(asked.turn, error), made)
        if self._known is not None and sent and not error:
            self._known.learn_answer(came, asked, made, stamp)


class SideClient:
    """`runtime.loans.PacketLoanLink` over messages. Used by the thread of the engine's steps alone.

    Args:
        seconds: Longest wait for an answer.
        receiver: Waits for answers natively; None: the messenger does.
    """

    def __init__(
        self, messenger: Messenger, peers: SidePeers, seconds: float, receiver: PacketReceiver | None = None
    ) -> None:
        self._messenger, self._peers, self._seconds = messenger, peers, seconds
        self._packets = None if receiver is None else PacketQuestions(messenger, receiver)
        #: Tickets so far, and how often all that was under way has been given up.
        self._number = self._turn = 0
        #: Called while an answer is awaited; may update the peers.
        self.look: Callable[[], None] = lambda: None
        #: By ticket: the creditor, and until when (s) it may answer. A creditor answers in this order.
        self._open: dict[int, tuple[str, float]] = {}
        self._answers: dict[int, tuple[Array, ...]] = {}
        self._known: dict[str, tuple[int, str]] = {}

    @property
    def turn(self) -> int:
        return self._turn

    def prepare_packets(
        self, asks: Sequence[tuple[str, LoanQuery]], dtype: str, head: tuple[int, int]
    ) -> Sequence[PacketQuestion] | None:
        if self._packets is None:
            return None
        return self._packets.prepare(
            [(creditor, AttendLoans(self._turn, asked)) for creditor, asked in asks], dtype, head
        )

    def find_places(self, creditors: Sequence[str]) -> Mapping[str, PacketPlace] | None:
        if self._packets is None or self._open:
            return None
        for each in creditors:
            self._reach(each)
        return self._packets.find_places(creditors)

    def count_packets(
        self, questions: Sequence[PacketQuestion], sent: int, received: int, packet: bytes | None,
        before: Mapping[str, int],
    ) -> Sequence[int]:  # fmt: skip
        if self._packets is None:
            return ()
        self._packets.count_answered(before)
        first = self._number + 1
        self._number += sent
        creditors = self._packets.count(questions, first, sent, received, packet)
        if not creditors:
            return ()
        until, tickets = time.monotonic() + self._seconds, range(first + received, first + sent)
        self._open.update({ticket: (creditor, until) for ticket, creditor in zip(tickets, creditors, strict=True)})
        return tickets

    def send_query(self, creditor: str, query: LoanQuery, arrays: tuple[Array, ...]) -> int:
        self._reach(creditor)
        self._number += 1
        asked = AttendLoans(self._turn, query)
        passed = self._packets is not None and self._packets.send(self._number, creditor, asked, arrays)
        if not passed and not self._messenger.send(creditor, asked, arrays):
            raise self._give_all_up(f"{creditor}, which holds K and V, cannot be reached")
        self._open[self._number] = creditor, time.monotonic() + self._seconds
        return self._number

    def _reach(self, creditor: str) -> None:
        """Make a creditor known to the messenger. Raises LoanLost."""
        peer = self._peers.get(creditor)
        if peer is None or not peer[1]:
            raise self._give_all_up(f"{creditor}, which holds K and V, is gone")
        if self._known.get(creditor) != peer:
            self._messenger.learn(creditor, *peer, calls=False)
            self._known[creditor] = peer

    def collect(self, ticket: int) -> tuple[Array, ...]:
        while ticket not in self._answers:
            creditor, until = self._open[ticket]
            left = until - time.monotonic()
            peer = self._peers.get(creditor)
            if left <= 0 or peer != self._known.get(creditor):
                raise self._give_all_up(f"{creditor} did not answer for the K and V that it holds")
            wait = min(left, _LOOK)
            place = None if self._packets is None else self._packets.find_place(ticket)
            if self._packets is not None and place is not None and self._next_of(creditor) == ticket:
                arrays = self._packets.receive(ticket, place, wait)
                if arrays is not None:
                    del self._open[ticket]
                    return arrays
                wait = 0.0
            items = self._messenger.receive(wait)
            if not items:
                self.look()
            for item in items:
                if isinstance(item, PeerCut):
                    self._cut(item)
                else:
                    self._handle(item.sender, item.message, item.arrays)
        return self._answers.pop(ticket)

    def close(self) -> None:
        self._messenger.close()

    def _handle(self, sender: str, message: object, arrays: tuple[Array, ...]) -> None:
        if not isinstance(message, LoansAttended) or message.turn != self._turn:
            return  # of a step that was given up
        ticket = self._next_of(sender)
        if ticket is None:
            return  # nothing was asked
        if message.error:
            raise self._give_all_up(f"{sender}: {message.error}")
        del self._open[ticket]
        if self._packets is not None:
            self._packets.close_question(ticket)
        self._answers[ticket] = arrays

    def _next_of(self, creditor: str) -> int | None:
        """Return the ticket that a creditor answers next."""
        return next((ticket for ticket, (each, _) in self._open.items() if each == creditor), None)

    def _cut(self, cut: PeerCut) -> None:
        self._known.pop(cut.peer, None)
        if any(creditor == cut.peer for creditor, _ in self._open.values()):
            raise self._give_all_up(f"{cut.peer}, which holds K and V: {cut.reason}")

    def _give_all_up(self, why: str) -> LoanLost:
        """Give up all that is under way: the step fails."""
        self._turn += 1
        self._open.clear()
        self._answers.clear()
        if self._packets is not None:
            self._packets.clear()
        return LoanLost(why)


def side_messengers(
    name: str, incarnation: int, bind: str, keys: Keys | None, context: zmq.Context[zmq.Socket[bytes]] | None
) -> tuple[Messenger, Messenger]:
    """Return the messengers of an agent's server and client. Raises as `Messenger`."""
    own = bind if bind.startswith("tcp:") else f"{bind}.side"
    server = Messenger(name, incarnation, own, keys, context=context, purpose="side")
    try:
        return server, Messenger(name, incarnation, keys=keys, context=context)
    except Exception:
        server.close()
        raise
