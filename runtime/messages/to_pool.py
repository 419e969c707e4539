"""Define the messages from agents to the managers of the pool: heartbeats about their pages (IL-10)."""

from __future__ import annotations

from runtime.messages.base import Message


class PoolBeat(Message, frozen=True, tag=True, array_like=True):
    """Report the pages of an agent, as its own book has them, once per period.

    Fields:
        server: Machine it runs on.
        capacity: Pages of the agent.
        free: Pages that hold nothing.
        lent: (debtor, pages that it holds for it, those on their way included), sorted by debtor.
    """

    device: str
    server: str
    capacity: int
    free: int
    lent: tuple[tuple[str, int], ...] = ()
