"""Which paths sequences are on, and how many tokens have gone along each: the counters behind the traffic between
blocks, and behind what a device's steps read.

Contract: one `Passes` for each path of each version of a chain, which its sequences share, so that a token costs one
addition. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.chains import Chain, Path, devices_of
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.routing.block_usage import BlockUsage
from runtime.scheduler.routing.path_usage import Passes


class UsedPaths:
    """`reads`: what steps read of weights, by the paths that are in use."""

    def __init__(self, blocks: BlockMap) -> None:
        self._path_usage: dict[tuple[str, Path], Passes] = {}
        self.reads = BlockUsage(blocks.block)

    def __len__(self) -> int:
        return len(self._path_usage)

    def __iter__(self) -> Iterator[Passes]:
        return iter(self._path_usage.values())

    def along(self, chain: Chain, path: Path) -> Passes:
        """Where the tokens of a chain's sequences along a path are counted."""
        key = chain.version, path
        known = self._path_usage.get(key)
        if known is None:
            places = zip(devices_of(chain, path), (use.kv_layers for use in chain.uses), strict=True)
            known = self._path_usage[key] = Passes(chain, path, places=tuple(places))
        return known

    def of_chain(self, chain: Chain) -> list[Passes]:
        """The paths that a chain's tokens have gone so far."""
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
