"""The reason of a request that is refused because it would be late, and what a server tells its client (QL-19)."""

from __future__ import annotations

import re

_REASON = re.compile(r"this request would end about \d+ s after its deadline; try again in (\d+) s")


def late_reason(late_ns: int) -> str:
    """Return the reason of a refusal; in as many seconds as it would be late, the queue is that much shorter."""
    seconds = max(-(-late_ns // 10**9), 1)
    return f"this request would end about {seconds} s after its deadline; try again in {seconds} s"


def retry_after(reason: str) -> int | None:
    """Return the seconds after which to try again, None if this is another reason."""
    found = _REASON.fullmatch(reason)
    return None if found is None else int(found.group(1))
