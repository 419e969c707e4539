"""Load idle instances of a chain on further devices while several of its sequences wait for the first load.

Contract: it only requests stages of instances that are placed already, at most once per `_LOOKED` for each chain.
"""

from __future__ import annotations

from runtime.chains import Chain
from runtime.scheduler.controllers.actions import holders
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.state import ClusterState

#: Least time in ns between two searches for idle instances of one chain; loading one takes far longer.
_LOOKED = 50_000_000


class IdleInstances:
    """Instances without sequences that could be loaded."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        #: By version of a chain: time in ns of the latest search for idle instances of it.
        self._looked: dict[str, int] = {}

    def load(self, chain: Chain, route: Route, now: int) -> None:
        """Load idle instances on devices that are not on a route, if more than one sequence waits."""
        state = self._state
        if state.waiting.count(chain.version) < 2 or now - self._looked.get(chain.version, -_LOOKED) < _LOOKED:
            return
        self._looked = {version: at for version, at in self._looked.items() if now - at < _LOOKED} | {
            chain.version: now
        }
        for device in holders(state, [use.block for use in chain.uses]):
            if not device.passing.count and not device.stages.loading and device.name not in route.devices:
                path = state.router.hops(chain, (device.name,) * len(chain.uses))
                for name, stage in state.router.missing(chain, path):
                    state.ask_for(chain, name, stage)
