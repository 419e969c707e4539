"""Messages between the drivers of a cluster: peers, heartbeats, shutdown, rejections, rendezvous of direct links."""

from __future__ import annotations

from runtime.messages.base import Message


class PeerList(Message, frozen=True, tag=True, array_like=True):
    """Scheduler to agent: every agent there is, as (name, incarnation, address). Whoever is not in it any more is gone.

    The first one is the answer to Ready. `rails`: of each of them (`Ready.rail`); empty where none has one.
    """

    agents: tuple[tuple[str, int, str], ...]
    tensor_transports: tuple[str, ...] = ()


class Shutdown(Message, frozen=True, tag=True, array_like=True):
    """Scheduler to agent: end after the step under way."""


class Heartbeat(Message, frozen=True, tag=True, array_like=True):
    """Agent to scheduler, from a thread of its own: its process lives, and its loop has been at one thing for
    `stalled_ms`.
    """

    stalled_ms: int


class PeerDisconnected(Message, frozen=True, tag=True, array_like=True):
    """Agent to scheduler: its link with another agent is cut; what was on it may be lost."""

    peer: str
    incarnation: int
    reason: str


class Rejected(Message, frozen=True, tag=True, array_like=True):
    """To whoever sent what cannot be taken: why. Nothing more will be taken of it, nor sent to it."""

    reason: str


class RendezvousKey(Message, frozen=True, tag=True, array_like=True):
    """Agent to agent, while a direct link is made: a key of its rendezvous. `outgoing`: of the link on which whoever
    says this sends.
    """

    outgoing: bool
    key: str
    value: bytes


class LinkClosed(Message, frozen=True, tag=True, array_like=True):
    """Agent to agent: a direct link is over, and what was under way on it is lost. `outgoing`: as in RendezvousKey."""

    outgoing: bool
    reason: str
