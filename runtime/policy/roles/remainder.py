"""Say whether a prompt runs where it will decode, since its cached prefix there leaves little (Dynamo: local prefill).

A hand-off of it would bring back pages that are there. The remainder runs in steps beside decodes, so that its length
is limited. Pure.
"""

from __future__ import annotations


def runs_locally(tokens: int, cached: int, limit: int) -> bool:
    """Return whether so many tokens, of which the first `cached` have K and V, leave at most `limit`, but some."""
    return cached > 0 and 0 < tokens - cached <= limit
