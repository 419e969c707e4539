"""Define the messages between the drivers of a cluster: peers, heartbeats, shutdown, rejections, direct links."""

from __future__ import annotations

from runtime.messages.base import Message


class PeerList(Message, frozen=True, tag=True, array_like=True):
    """Send an agent the list of all agents (scheduler to agent). An agent missing from the list is gone.

    The first PeerList is the answer to AgentHello.

    Fields:
        agents: (name, incarnation, address) of each agent.
        tensor_transports: `AgentHello.tensor_transport` of each agent, in the same order; empty if no agent has one.
        sides: `AgentHello.side` of each agent, in the same order; empty if no agent has one.
    """

    agents: tuple[tuple[str, int, str], ...]
    tensor_transports: tuple[str, ...] = ()
    sides: tuple[str, ...] = ()


class Shutdown(Message, frozen=True, tag=True, array_like=True):
    """Stop the agent after the step under way (scheduler to agent)."""


class Heartbeat(Message, frozen=True, tag=True, array_like=True):
    """Report that the agent's process is alive (agent to scheduler, sent from a thread of its own).

    Fields:
        stalled_ms: How long the agent's main loop has been busy with one thing.
    """

    stalled_ms: int


class PeerDisconnected(Message, frozen=True, tag=True, array_like=True):
    """Report that the connection to another agent is cut (agent to scheduler). Messages on it may be lost."""

    peer: str
    incarnation: int
    reason: str


class Rejected(Message, frozen=True, tag=True, array_like=True):
    """Refuse a peer after a message that cannot be accepted. All later traffic from and to it is dropped."""

    reason: str


class RendezvousKey(Message, frozen=True, tag=True, array_like=True):
    """Send one key of the rendezvous that sets up a direct link (agent to agent).

    Fields:
        outgoing: True for the link on which the sender of this message sends tensors, false for the opposite direction.
    """

    outgoing: bool
    key: str
    value: bytes


class LinkClosed(Message, frozen=True, tag=True, array_like=True):
    """Report that a direct link is closed (agent to agent). Tensors under way on it are lost.

    Fields:
        outgoing: As in RendezvousKey.
    """

    outgoing: bool
    reason: str
