"""Cache what every new sequence needs of a path: its devices, its pages per page set, its stages.

Contract: a route is a function of the chain's version and the path alone; what is loaded or free is not part of it.
Routes of a version are removed with it (`remove_version`). It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.chains import Chain, Path, Stage, path_of

#: Limit of cached routes of each kind; the cache is cleared when it is reached.
_MOST = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A path and what it requires.

    Fields:
        devices: Each device once, in the order of the path.
        weights: Pages per page set of a sequence, by device; devices without attention layers are left out.
        stages: For each hop, its device and stage.
    """

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
        """Return the route over these devices, one for each block of the chain."""
        found = self._by_devices.get((chain.version, devices))
        if found is None:
            _bound(self._by_devices)
            found = self._by_devices[chain.version, devices] = self.along(chain, path_of(chain, devices))
        return found

    def along(self, chain: Chain, path: Path) -> Route:
        """Return the route of a path."""
        found = self._by_path.get((chain.version, path))
        if found is None:
            _bound(self._by_path)
            found = self._by_path[chain.version, path] = _route(chain, path)
        return found

    def remove_version(self, version: str) -> None:
        """Forget all routes of a version of a chain."""
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
