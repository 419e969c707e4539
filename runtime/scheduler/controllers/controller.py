"""Run the periodic actions of the scheduler: scale and move blocks, balance sequences, move paused ones ahead.

    pauses      K and V of paused sequences                            BL-17
    scaler      add instances where memory is full, remove idle ones   BL-24
    rearranger  move instances next to those they exchange rows with   BL-26
    balancer    move sequences off devices that are busier             BL-19, Figure 24
    watcher      change roles of devices as their use changes          TI-24

Contract: `tick` is called once per period of the driver. Each mechanism is a switch in `ControlConfig`; with all off
nothing happens here. While devices have roles, instances stay where they are. Nothing costs anything per token, and a
tick's cost grows with devices, not with sequences.
`migration` carries out migrations, `controllers.actions` orders them.
"""

from __future__ import annotations

from runtime.scheduler.controllers.actions import ActionCounts, Actions
from runtime.scheduler.controllers.autoscaler import Autoscaler
from runtime.scheduler.controllers.balancer import Balancer
from runtime.scheduler.controllers.locality import LocalityController
from runtime.scheduler.controllers.pauses import Pauses
from runtime.scheduler.controllers.role_watcher import RoleWatcher
from runtime.scheduler.handoff.role_changes import RoleChanges
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.migration.migrations import Migrations
from runtime.scheduler.placement.traffic import Crossings, TrafficCounter
from runtime.scheduler.state import ClusterState

_MS = 1_000_000
#: Limit of paths from which token counts are gathered per interval.
_PATHS = 2048


class Controller:
    """All periodic mechanisms, and the traffic counts that they use."""

    def __init__(
        self, state: ClusterState, migrations: Migrations, prefix_cache: PrefixCache, roles: RoleChanges
    ) -> None:
        self._state = state
        self._config = state.config.control
        self.actions = Actions(state, migrations, prefix_cache)
        self.traffic = TrafficCounter(state.devices, state.used_paths)
        self.pauses = Pauses(state, self.actions)
        self._scaler = Autoscaler(state, self.actions, self.traffic, state.block_map.by_demand)
        self._rearranger = LocalityController(state, self.actions, self.traffic)
        self._balancer = Balancer(state, self.actions)
        self._watcher = RoleWatcher(state, roles, self.actions, migrations.moves)
        self._next = 0
        self._begun: int | None = None

    def tick(self, now: int) -> None:
        """Continue what is under way; look at loads where their interval is over. `now`: ns."""
        if not self._state.placed:
            return
        self.pauses.look(now)
        self._watcher.look(now)
        apart = self._state.devices.roles.apart
        if now >= self._next:
            self._next = now + self._config.interval_ms * _MS
            self.traffic.gather(_PATHS)
            if self._config.scaling and not apart:
                self._scaler.look(now)
            self._balancer.look(now)
        rearranging = self._config.rearranging and self._config.locality and not apart
        if self._is_over(now):
            self.traffic.turn()
            if rearranging:
                self._rearranger.decide(now)
        if rearranging:
            self._rearranger.look(now)
        self.actions.advance(now)

    def _is_over(self, now: int) -> bool:
        """Return whether a traffic period is over; if so, begin the next. Autoscaling uses these periods too."""
        if self._begun is None:
            self._begun = now
        if now - self._begun < self._config.rearrange_interval_ms * _MS:
            return False
        self._begun = now
        return True

    @property
    def counts(self) -> ActionCounts:
        return self.actions.counts

    def crossings(self) -> Crossings:
        """Return the totals of rows that changed device and server."""
        self.traffic.gather()
        return self.traffic.totals
