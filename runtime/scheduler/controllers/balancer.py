"""Move sequences to less busy devices with the same blocks (BL-19), or in one of the paper's two baseline ways.

    strict       never: a sequence's next tokens run where its K and V are
    owner        the device with its K and V, unless it is busier by more than `margin` sequences; then K and V move
                 from both ends (BL-16)
    least-busy   always the least busy device; K and V are copied while the sequence waits
    recompute    always the least busy device; K and V are computed there again while the sequence waits

Contract: `look` is called once per interval and examines the busiest devices only. A sequence moves with all blocks
that it has on one device, so that its path gets no more hops.
"""

from __future__ import annotations

import heapq

from runtime.scheduler.controllers.actions import Actions, MoveRequest, holders
from runtime.scheduler.controllers.hotspots import ChainPart, Hotspots, stages_of
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.state import ClusterState

_MS = 1_000_000
#: Limits: devices that are examined at once, and chain parts on each.
_HOT, _PARTS = 16, 8
_NOBODY = Hotspots({}, {}, {})


class Balancer:
    """Balance sequences over devices with the same blocks."""

    def __init__(self, state: ClusterState, actions: Actions) -> None:
        config = state.config.control
        self._state = state
        self._actions = actions
        self._how = config.rebalance
        self._margin = config.rebalance_margin if self._how == "owner" else 1
        self._patience = config.migration_timeout_ms * _MS

    def look(self, now: int) -> None:
        """Request migrations off the busiest devices. `now`: ns."""
        if self._how == "strict":
            return
        busy = (device for device in self._state.devices if device.alive and device.passing.count > self._margin)
        for device in heapq.nlargest(_HOT, busy, key=lambda each: each.passing.count):
            for part in stages_of(device, _NOBODY)[:_PARTS]:
                self._lighten(device, part, now)

    def _lighten(self, device: Device, part: ChainPart, now: int) -> None:
        """Move sequences to the least busy device, half the difference of the two."""
        others = [each for each in holders(self._state, part.blocks, device.name) if each is not device]
        target = min(others, key=lambda each: (each.passing.count, each.pages.used), default=None)
        if target is None or device.passing.count - target.passing.count <= self._margin:
            return
        ordered = self._actions.order_moves(part.sequences, device.name)
        movers = [seq for seq in ordered if not self._actions.wished(seq)]
        waiting = len(part.sequences) - len(movers)  # their migrations are pending
        count = (device.passing.count - target.passing.count) // 2 - waiting
        for seq in movers[: max(count, 0)]:
            self._state.tell.control(
                now, "dispatch.choose", "BL-19", target.name, part.blocks[0], seq=seq, rule=self._how, owner=device.name
            )
            self._actions.move_request(self._move_request(seq, part, device.name, target.name, now))

    def _move_request(self, seq: str, part: ChainPart, source: str, target: str, now: int) -> MoveRequest:
        blocks, until = frozenset(part.blocks), now + self._patience
        baseline = self._how != "owner"
        return MoveRequest(
            seq, blocks, source, target, until, "BL-19", self._how != "recompute", self._how != "least-busy", baseline
        )
