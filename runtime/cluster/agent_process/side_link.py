"""Carry attention between agents beside their main links: queries to lent pages, and the answers (IL-27).

    debtor's step --AttendLoans--> creditor's thread: engine.attend_loans --LoansAttended--> debtor's step

The creditor answers on a thread of its own, so that an agent answers while it steps, and two agents may hold pages for
each other. Each end has a messenger for this alone. A creditor answers only agents that the scheduler has introduced,
in their present incarnation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import zmq

from runtime.chains import Array
from runtime.cluster.errors import public
from runtime.loans import LoanEngine, LoanQuery
from runtime.messages import AttendLoans, LoansAttended
from runtime.transport.keys import Keys
from runtime.transport.messenger import Messenger, PeerCut
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

    def update(self, known: Mapping[str, tuple[int, str]]) -> None:
        self._known = dict(known)

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
    """

    def __init__(self, engine: LoanEngine, messenger: Messenger, peers: SidePeers) -> None:
        self._engine, self._messenger = engine, messenger
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
                for item in self._messenger.receive(_WAIT):
                    if isinstance(item, PeerCut):
                        continue
                    if isinstance(item.message, AttendLoans):
                        self._answer(item.sender, item.message, item.arrays)
                    else:
                        self._messenger.deny(item.sender, "only attention to loans is asked for here")
        except Exception:  # debtors get no answers any more, and give up after their time
            _log.critical("attention for other devices has ended", exc_info=True)
        finally:
            self._messenger.close()

    def _answer(self, to: str, asked: AttendLoans, arrays: Sequence[Array]) -> None:
        try:
            made, error = self._engine.attend_loans(asked.query, arrays), ""
        except Exception as failed:  # whatever it is, the agent that asked must not wait for it
            if not isinstance(failed, LoanLost):
                _log.warning("a query to loans failed", exc_info=True)
            made, error = (), public(failed) or type(failed).__name__
        self._messenger.send(to, LoansAttended(asked.turn, error), made)


class SideClient:
    """`runtime.chains.LoanLink` over messages. Used by the thread of the engine's steps alone.

    Args:
        seconds: Longest wait for an answer.
    """

    def __init__(self, messenger: Messenger, peers: SidePeers, seconds: float) -> None:
        self._messenger, self._peers, self._seconds = messenger, peers, seconds
        #: Tickets so far, and how often all that was under way has been given up.
        self._number = self._turn = 0
        #: Called while an answer is awaited; may update the peers.
        self.look: Callable[[], None] = lambda: None
        #: By ticket: the creditor, and until when (s) it may answer. A creditor answers in this order.
        self._open: dict[int, tuple[str, float]] = {}
        self._answers: dict[int, tuple[Array, ...]] = {}
        self._known: dict[str, tuple[int, str]] = {}

    def send_query(self, creditor: str, query: LoanQuery, arrays: tuple[Array, ...]) -> int:
        peer = self._peers.get(creditor)
        if peer is None or not peer[1]:
            raise self._give_all_up(f"{creditor}, which holds K and V, is gone")
        if self._known.get(creditor) != peer:
            self._messenger.learn(creditor, *peer, calls=False)
            self._known[creditor] = peer
        self._number += 1
        if not self._messenger.send(creditor, AttendLoans(self._turn, query), arrays):
            raise self._give_all_up(f"{creditor}, which holds K and V, cannot be reached")
        self._open[self._number] = creditor, time.monotonic() + self._seconds
        return self._number

    def collect(self, ticket: int) -> tuple[Array, ...]:
        while ticket not in self._answers:
            creditor, until = self._open[ticket]
            left = until - time.monotonic()
            peer = self._peers.get(creditor)
            if left <= 0 or peer != self._known.get(creditor):
                raise self._give_all_up(f"{creditor} did not answer for the K and V that it holds")
            items = self._messenger.receive(min(left, _LOOK))
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
        ticket = next((ticket for ticket, (creditor, _) in self._open.items() if creditor == sender), None)
        if ticket is None:
            return  # nothing was asked
        if message.error:
            raise self._give_all_up(f"{sender}: {message.error}")
        del self._open[ticket]
        self._answers[ticket] = arrays

    def _cut(self, cut: PeerCut) -> None:
        self._known.pop(cut.peer, None)
        if any(creditor == cut.peer for creditor, _ in self._open.values()):
            raise self._give_all_up(f"{cut.peer}, which holds K and V: {cut.reason}")

    def _give_all_up(self, why: str) -> LoanLost:
        """Give up all that is under way: the step fails."""
        self._turn += 1
        self._open.clear()
        self._answers.clear()
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
