"""Track which paths sequences are on, and how many tokens have passed each.

The traffic between blocks, and the bytes that steps of a device read, follow from these counters.

Contract: one `Passes` for each path of each version of a chain, shared by its sequences, so that a token costs one
addition. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.chains import Chain, Path, devices_of
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.routing.block_usage import BlockUsage
from runtime.scheduler.routing.path_usage import Passes


class UsedPaths:
    """Usage of all paths. `reads`: bytes that steps read, by the paths in use."""

    def __init__(self, blocks: BlockMap) -> None:
        self._path_usage: dict[tuple[str, Path], Passes] = {}
        self.reads = BlockUsage(blocks.block)

    def __len__(self) -> int:
        return len(self._path_usage)

    def __iter__(self) -> Iterator[Passes]:
        return iter(self._path_usage.values())

    def along(self, chain: Chain, path: Path) -> Passes:
        """Return the usage record of a path of a chain; created if needed."""
        key = chain.version, path
        known = self._path_usage.get(key)
        if known is None:
            places = zip(devices_of(chain, path), (use.kv_layers for use in chain.uses), strict=True)
            known = self._path_usage[key] = Passes(chain, path, places=tuple(places))
        return known

    def of_chain(self, chain: Chain) -> list[Passes]:
        """Return the usage of each path of a chain that is in use, or was used and is not forgotten yet."""
        return [path_usage for (version, _), path_usage in self._path_usage.items() if version == chain.version]

    def enter(self, path_usage: Passes) -> None:
        """Count one more sequence on a path."""
        path_usage.users += 1
        if path_usage.users == 1:
            self.reads.begins(path_usage)

    def remove_sequence(self, path_usage: Passes) -> None:
        """Count one sequence less on a path."""
        path_usage.users -= 1
        if not path_usage.users:
            self.reads.ends(path_usage)

    def remove_path(self, path_usage: Passes) -> None:
        """Forget a path that no sequence is on any more."""
        self._path_usage.pop((path_usage.chain.version, path_usage.path), None)

    def remove_version(self, version: str) -> None:
        """Forget all paths of a version of a chain."""
        self._path_usage = {key: path_usage for key, path_usage in self._path_usage.items() if key[0] != version}
