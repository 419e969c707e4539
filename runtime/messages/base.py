"""Define what all messages between a scheduler and agents share: the base struct and the protocol version."""

from __future__ import annotations

import msgspec

#: Version of the message format. An agent and a scheduler with different versions refuse each other.
PROTOCOL = 26
#: Name of the scheduler, used wherever a device's name can stand.
SCHEDULER = "scheduler"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base class of all messages: a frozen struct, tagged with its type and encoded as an array."""
