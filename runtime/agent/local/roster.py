"""Who is on a device: sequences that wait, that run, and that have ended while a step is still writing their pages.

Contract: a living sequence is in exactly one queue. `leaving` ones are alive to nobody but the page book. Pages are not
this file's affair, except in `check`.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.agent.local.planned import PlannedSequence
from runtime.control.sequence import RankedQueue
from runtime.kv.pages import PageBook


class Roster:
    def __init__(self) -> None:
        self.running: RankedQueue[PlannedSequence] = RankedQueue()
        self.waiting: RankedQueue[PlannedSequence] = RankedQueue()
        self._live: dict[str, PlannedSequence] = {}
        self._leaving: dict[str, PlannedSequence] = {}

    def __len__(self) -> int:
        """Living sequences."""
        return len(self._live)

    def __iter__(self) -> Iterator[PlannedSequence]:
        """Living sequences, in the order in which they came."""
        return iter(tuple(self._live.values()))

    def __getitem__(self, seq: str) -> PlannedSequence:
        return self._live[seq]

    def get(self, seq: str) -> PlannedSequence | None:
        return self._live.get(seq)

    def holds(self, seq: str) -> bool:
        """Whether the name is taken, by a living or a leaving sequence."""
        return seq in self._live or seq in self._leaving

    def uses(self, model: str) -> bool:
        return any(live.spec.name == model for live in (*self._live.values(), *self._leaving.values()))

    def enter(self, live: PlannedSequence) -> None:
        self._live[live.seq] = live
        self.waiting.add(live)

    def admit(self, live: PlannedSequence) -> None:
        self.waiting.remove(live)
        self.running.add(live)

    def send_back(self, live: PlannedSequence) -> None:
        """From running to waiting. Its rank puts it before all that came later."""
        self.running.remove(live)
        self.waiting.add(live)

    def end(self, live: PlannedSequence, *, mid_step: bool) -> None:
        """`mid_step`: a step that is under way runs it, so it is to be settled when that is over."""
        del self._live[live.seq]
        if live in self.waiting:
            self.waiting.remove(live)
            return
        self.running.remove(live)
        if mid_step:
            self._leaving[live.seq] = live

    def leaving(self, seq: str) -> PlannedSequence:
        """A sequence that has ended while a step was running it. Raises KeyError."""
        return self._leaving[seq]

    def settle(self, seq: str) -> PlannedSequence:
        """The last step of a leaving sequence is over."""
        return self._leaving.pop(seq)

    def settle_all(self) -> list[PlannedSequence]:
        return [self.settle(seq) for seq in tuple(self._leaving)]

    def check(self, book: PageBook) -> None:
        """Verify that queues and pages agree. Raises RuntimeError."""
        queued = {live.seq for live in self.running} | {live.seq for live in self.waiting}
        if queued != set(self._live) or len(self.running) + len(self.waiting) != len(self._live):
            raise RuntimeError("the queues and the living sequences differ")
        if any(book.pages_of(live.seq) for live in self.waiting):
            raise RuntimeError("a waiting sequence holds pages")
        held = sum(book.pages_of(live.seq) for live in (*self.running, *self._leaving.values()))
        if held != book.capacity - book.free:
            raise RuntimeError("pages are held by nobody")
