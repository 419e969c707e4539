"""Rules for failed steps that all drivers of engines share."""

from __future__ import annotations

from runtime.types import EngineLost
from zoo.errors import ZooError

#: Failed steps in a row after which a device counts as dead: one may be caused by a request, three hardly are.
MAX_FAILURES = 3


def public(error: BaseException) -> str:
    """Return what clients may read of an error.

    That is the message of our own errors; of any other error only its type, because its message may contain addresses
    and paths.
    """
    return str(error) if isinstance(error, ZooError | EngineLost) else type(error).__name__
