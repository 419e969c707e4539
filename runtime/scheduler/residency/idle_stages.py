"""Since when the stages of devices with a shared budget are idle, as seen on ticks."""

from __future__ import annotations

from collections.abc import Collection

from runtime.chains import Stage
from runtime.scheduler.devices.devices import Device


class IdleStages:
    """The idle stages of one cluster. Times in ns."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, Stage], int] = {}

    def since(self, device: str, stage: Stage) -> int | None:
        """Return since when a stage is idle, None if it was not seen idle."""
        return self._since.get((device, stage))

    def note(self, device: Device, busy: Collection[Stage], now: int) -> None:
        """Note which loaded stages of a device are idle: all but the busy ones."""
        for stage in device.stages.loaded:
            if stage in busy:
                self.end(device.name, stage)
            else:
                self._since.setdefault((device.name, stage), now)

    def end(self, device: str, stage: Stage) -> None:
        """Note that a stage is idle no more: it is used, or has left."""
        self._since.pop((device, stage), None)

    def remove_device(self, device: str) -> None:
        """Forget a device that has died."""
        self._since = {key: each for key, each in self._since.items() if key[0] != device}
