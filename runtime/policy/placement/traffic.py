"""Keep the state of a placement: where instances are, what memory is free, and how many rows cross devices (BL-26).

An instance of a sends to a b on its own device if there is one, else to one on its server, else elsewhere. The
instances of a block are assumed to be used equally. Changes are made in place and undone by their opposites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Default cost of a row between two devices of a server, relative to one between servers: enough to prefer no hop at
#: all.
NEAR = 1 / 16


#: (sender, receiver) -> rows.
Pairs = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Hold the rows per period that change servers, and that change devices within a server.

    Fields:
        near: Cost of a row between devices, relative to one between servers.
    """

    between_servers: float
    between_devices: float
    near: float = NEAR

    @property
    def weight(self) -> float:
        return self.between_servers + self.near * self.between_devices


@dataclass(frozen=True, slots=True)
class TrafficStep:
    """Move an instance of a block from one device to another."""

    block: str
    source: str
    target: str


class TrafficLedger:
    """Track instances, free memory and traffic.

    Args:
        servers: device -> server.
        free: device -> free bytes.
        nbytes: block -> bytes.
        pairs: (sender, receiver) -> rows.
        near: As in `Traffic`.
    """

    def __init__(
        self,
        servers: Mapping[str, str],
        free: Mapping[str, int],
        nbytes: Mapping[str, int],
        pairs: Pairs,
        near: float = NEAR,
    ) -> None:
        self._weight = near
        self.servers = servers
        self.free = dict(free)
        self.nbytes = nbytes
        self._pairs: dict[str, dict[tuple[str, str], float]] = {}
        for pair, rows in pairs.items():
            for block in pair if pair[0] != pair[1] else ():
                self._pairs.setdefault(block, {})[pair] = rows
        self._on: dict[str, dict[str, None]] = {}  # block -> its devices, in order of addition
        self._near: dict[str, Counter[str]] = {}  # block -> server -> instances there
        self._devices: dict[str, list[str]] = {}  # server -> devices
        for device, server in servers.items():
            self._devices.setdefault(server, []).append(device)

    def add(self, block: str, device: str) -> None:
        """Add an instance and subtract its bytes from the device's free memory."""
        self._on.setdefault(block, {})[device] = None
        self._near.setdefault(block, Counter())[self.servers[device]] += 1
        self.free[device] -= self.nbytes[block]

    def remove(self, block: str, device: str) -> None:
        """Remove an instance."""
        del self._on[block][device]
        near, server = self._near[block], self.servers[device]
        near[server] -= 1
        if not near[server]:
            del near[server]
        self.free[device] += self.nbytes[block]

    def move(self, step: TrafficStep) -> None:
        """Move an instance from one device to another."""
        self.remove(step.block, step.source)
        self.add(step.block, step.target)

    # -- memory --------------------------------------------------------------------------------------------------------

    def fits(self, block: str, device: str) -> bool:
        """Return whether a device has room for an instance and none of the block yet."""
        return self.nbytes[block] <= self.free[device] and not self.has(block, device)

    def has(self, block: str, device: str) -> bool:
        return device in self._on.get(block, ())

    def best_fit(self, block: str, beside: str | None = None) -> str | None:
        """Return the device where the least is left over, with `beside` placed there too; None if there is no room."""
        needed = self.nbytes[block] + (self.nbytes[beside] if beside is not None else 0)
        free = self.free
        taken = self._on.get(block, {})
        fitting = (each for each in free if free[each] >= needed and each not in taken)
        return min(fitting, key=free.__getitem__, default=None)

    def allows(self, steps: Sequence[TrafficStep], transient: bool) -> bool:
        """Return whether memory suffices for the steps.

        `transient`: at each moment, loading before dropping; otherwise only after all steps.
        """
        change: Counter[str] = Counter()
        for step in steps:
            if self.has(step.block, step.target):
                return False
            change[step.target] -= self.nbytes[step.block]
            if transient and self.free[step.target] + change[step.target] < 0:
                return False
            change[step.source] += self.nbytes[step.block]
        return all(self.free[device] + bytes_ >= 0 for device, bytes_ in change.items())

    # -- traffic -------------------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """Return the traffic of all pairs."""
        return self._sum({pair: rows for pairs in self._pairs.values() for pair, rows in pairs.items()})

    def weight_of(self, blocks: Iterable[str]) -> float:
        """Return the weighted traffic of the pairs that contain any of these blocks."""
        return self._sum({pair: rows for block in blocks for pair, rows in self._pairs.get(block, {}).items()}).weight

    def saved_by(self, steps: Sequence[TrafficStep]) -> float:
        """Return the weight that these steps save; negative if they add some."""
        blocks = [step.block for step in steps]
        before = self.weight_of(blocks)
        for step in steps:
            self.move(step)
        after = self.weight_of(blocks)
        for step in reversed(steps):
            self.move(TrafficStep(step.block, step.target, step.source))
        return before - after

    def weight_with(self, block: str, device: str) -> float:
        """Return `weight_of` a block if it had one more instance, on this device."""
        self.add(block, device)
        weight = self.weight_of([block])
        self.remove(block, device)
        return weight

    def partners(self, block: str) -> list[tuple[str, str]]:
        """Return the instances, (block, device), of the blocks that exchange rows with this one."""
        blocks = sorted({each for pair in self._pairs.get(block, ()) for each in pair if each != block})
        return [(each, device) for each in blocks for device in self._on.get(each, ())]

    def near_to(self, block: str) -> list[str]:
        """Return the devices of the servers that have partners of this block."""
        servers = dict.fromkeys(self.servers[device] for _, device in self.partners(block))
        return [device for server in servers for device in self._devices[server]]

    def _sum(self, pairs: Pairs) -> Traffic:
        far = near = 0.0
        for (sender, receiver), rows in pairs.items():
            senders, receivers = self._on.get(sender), self._on.get(receiver)
            if not senders or not receivers:
                continue
            servers = self._near[receiver]
            share = rows / len(senders)
            for device in senders:
                if self.servers[device] not in servers:
                    far += share
                elif device not in receivers:
                    near += share
        return Traffic(far, near, self._weight)
