"""Which models cannot run any more, because devices will not come back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from runtime.stages import Chain


def stranded(chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str]) -> dict[str, str]:
    """Model -> a device with the last instance of one of its blocks. `instances`: devices by block; `failed`: those without a future."""
    out: dict[str, str] = {}
    for chain in chains:
        last = [where[0] for use in chain.uses if (where := instances.get(use.block, ())) and set(where) <= set(failed)]
        if last:
            out[chain.model] = last[0]
    return out
