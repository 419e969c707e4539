"""What drivers of engines have in common when steps fail."""

from __future__ import annotations

from runtime.types import EngineLost
from zoo.errors import ZooError

#: Failed steps in a row that make a device count as dead: one may be a request's fault, three in a row hardly are.
MAX_FAILURES = 3


def public(error: BaseException) -> str:
    """What a client may read of an error: our own messages; of others only the kind, for they may hold addresses and
    paths.
    """
    return str(error) if isinstance(error, ZooError | EngineLost) else type(error).__name__
