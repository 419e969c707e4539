"""What every message between a scheduler and agents has in common: a typed struct with a tag, of one protocol."""

from __future__ import annotations

import msgspec

#: Of these messages; agents and schedulers of different ones refuse each other.
PROTOCOL = 6
#: The scheduler's name where a device's could stand.
SCHEDULER = "scheduler"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all."""
