"""Paths with what every new sequence asks of them: made once per chain and path, so that admission counts nothing
twice.

Contract: a route is a function of the chain's version and the path alone; what is loaded or free stands elsewhere.
Routes of a version go with it (`forget`). Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.chains import Chain, Path, Stage, path_of

#: Routes that are remembered, of each kind; of very many devices there are more than anybody could keep, and it begins
#: anew.
_MOST = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """`devices`: each once, in the order of the path. `weights`: pages that a group of a sequence takes, by device.
    `stages`: by hop its device, and the stage that runs there."""

    path: Path
    devices: tuple[str, ...]
    weights: tuple[tuple[str, int], ...]
    stages: tuple[tuple[str, Stage], ...]


class RouteCache:
    """Routes by the devices of a chain's blocks, and by path."""

    def __init__(self) -> None:
        self._by_devices: dict[tuple[str, tuple[str, ...]], Route] = {}
        self._by_path: dict[tuple[str, Path], Route] = {}

    def get_route(self, chain: Chain, devices: tuple[str, ...]) -> Route:
        """A device for each block."""
        found = self._by_devices.get((chain.version, devices))
        if found is None:
            _bound(self._by_devices)
            found = self._by_devices[chain.version, devices] = self.along(chain, path_of(chain, devices))
        return found

    def along(self, chain: Chain, path: Path) -> Route:
        """The same, of a path."""
        found = self._by_path.get((chain.version, path))
        if found is None:
            _bound(self._by_path)
            found = self._by_path[chain.version, path] = _route(chain, path)
        return found

    def remove_version(self, version: str) -> None:
        self._by_devices = {key: route for key, route in self._by_devices.items() if key[0] != version}
        self._by_path = {key: route for key, route in self._by_path.items() if key[0] != version}


def _bound(known: dict[Any, Route]) -> None:
    if len(known) >= _MOST:
        known.clear()


def _route(chain: Chain, path: Path) -> Route:
    pages: dict[str, int] = {}
    for hop in path:
        pages[hop.device] = pages.get(hop.device, 0) + hop.layers[1] - hop.layers[0]
    stages = ((hop.device, chain.stage(hop.lo, hop.hi)) for hop in path)
    return Route(
        path, tuple(pages), tuple((device, count) for device, count in pages.items() if count),
        tuple(stages),
    )  # fmt: skip
