"""Track which blocks of each device are in use, and so how many bytes a step there reads.

Contract: `begins` is called for the first sequence on a path, `ends` after the last one, so it costs nothing per
sequence. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from runtime.chains import Block
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.routing.path_usage import Passes


class BlockUsage:
    """Blocks in use by device. `block`: returns a block by its ID."""

    def __init__(self, block: Callable[[str], Block]) -> None:
        self._block = block
        self._paths: dict[str, Counter[str]] = {}
        self._nbytes: dict[str, int] = {}

    def begins(self, path_usage: Passes) -> None:
        """Count a path that has got its first sequence."""
        for use, (device, _) in zip(path_usage.chain.uses, path_usage.places, strict=True):
            paths = self._paths.setdefault(device, Counter())
            paths[use.block] += 1
            if paths[use.block] == 1:
                self._nbytes[device] = self._nbytes.get(device, 0) + self._block(use.block).nbytes

    def ends(self, path_usage: Passes) -> None:
        """Remove a path that has lost its last sequence."""
        for use, (device, _) in zip(path_usage.chain.uses, path_usage.places, strict=True):
            paths = self._paths[device]
            paths[use.block] -= 1
            if not paths[use.block]:
                del paths[use.block]
                self._nbytes[device] -= self._block(use.block).nbytes

    def uses(self, device: str, block: str) -> bool:
        return block in self._paths.get(device, ())

    def weights(self, device: str) -> int:
        """Return the bytes of the blocks in use on a device."""
        return self._nbytes.get(device, 0)

    def step_bytes(self, device: Device) -> int:
        """Return the bytes that a step on a device reads: weights in use, and K and V of all its sequences."""
        return self.weights(device.name) + device.pages.used_pages * device.pages.page_bytes
