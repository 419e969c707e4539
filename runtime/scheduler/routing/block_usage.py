"""Which blocks of each device are in use, and so what a step there reads: by the paths that sequences are on.

Contract: told of the first sequence on a path and of the last one (`begins`, `ends`); so it costs nothing per sequence.
Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from runtime.chains import Block
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.routing.path_usage import Passes


class BlockUsage:
    """`block`: a block by its name."""

    def __init__(self, block: Callable[[str], Block]) -> None:
        self._block = block
        self._paths: dict[str, Counter[str]] = {}
        self._nbytes: dict[str, int] = {}

    def begins(self, path_usage: Passes) -> None:
        for use, (device, _) in zip(path_usage.chain.uses, path_usage.places, strict=True):
            paths = self._paths.setdefault(device, Counter())
            paths[use.block] += 1
            if paths[use.block] == 1:
                self._nbytes[device] = self._nbytes.get(device, 0) + self._block(use.block).nbytes

    def ends(self, path_usage: Passes) -> None:
        for use, (device, _) in zip(path_usage.chain.uses, path_usage.places, strict=True):
            paths = self._paths[device]
            paths[use.block] -= 1
            if not paths[use.block]:
                del paths[use.block]
                self._nbytes[device] -= self._block(use.block).nbytes

    def uses(self, device: str, block: str) -> bool:
        return block in self._paths.get(device, ())

    def weights(self, device: str) -> int:
        """Bytes of the blocks that are in use there."""
        return self._nbytes.get(device, 0)

    def step_bytes(self, device: Device) -> int:
        """Bytes that a step there reads, K and V of all sequences included."""
        return self.weights(device.name) + device.pages.used_pages * device.pages.page_bytes
