"""Keep what loads cost on each device, by the tier that their bytes come from, learned while it serves (BL-21, UN-04).

    seconds = fixed + first * bytes read from disk for the first time + again * bytes read again        if any
            + fixed' + host * bytes that host memory keeps                                              if any

Each tier has a fixed part of its own: that of host memory is a hundredth of that of reading, and with one for both, the
first loads from host memory would be expected to take as long as reading does.
Agents report what their host memory keeps (`HostWeights`), and what each load brought from where (`StageReady`). An
estimate is made of what is expected to come, a rate is learned from what came. A device's rates begin as those of all
devices together, and these as the profile's loading times, or else `ControlConfig.bandwidth`.

Contract: it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from runtime.chains import Stage
from runtime.policy.measured_cost import MeasuredCost
from runtime.policy.profiles import BlockProfile
from runtime.policy.residency.swap import SwapBytes, swap_bytes

#: Most profiles that the first rate is fitted to.
_MOST = 512
#: Assumed rate of what host memory keeps, as a multiple of that of a disk.
_HOST = 20.0


@dataclass(slots=True)
class _Load:
    """A load under way. `own`: bytes beside its blocks."""

    estimate: float
    expected: SwapBytes
    own: int
    blocks: tuple[str, ...]


@dataclass(slots=True)
class _DeviceLoads:
    """Loads of one device.

    Fields:
        had: Blocks that it has had.
        host: Bytes of blocks that its host memory keeps.
        coming: Blocks on their way, by number of loads.
    """

    had: set[str] = field(default_factory=set)
    host: dict[str, int] = field(default_factory=dict)
    coming: Counter[str] = field(default_factory=Counter)
    under_way: dict[Stage, _Load] = field(default_factory=dict)


class LoadTimes:
    """Learned costs of loads.

    Args:
        blocks: Profiles with loading times.
        rate: Bytes per second that are assumed without any.
    """

    def __init__(self, blocks: Iterable[BlockProfile], rate: float) -> None:
        known = [(_reading(each.nbytes), each.load_seconds) for each in blocks if each.load_seconds > 0]
        points = known[:_MOST] or [(_reading(size), size / rate) for size in (1e6, 1e8)]
        host = [((0.0, 0.0, 0.0, 1.0, size), size / rate / _HOST) for size in (1e6, 1e8)]
        self._all = MeasuredCost([*points, ((1.0, 0.0, 1e8, 0.0, 0.0), 1e8 / rate), *host])
        self._costs: dict[str, MeasuredCost] = {}
        self._loads: dict[str, _DeviceLoads] = {}

    def seconds(self, device: str, sizes: Mapping[str, int], own: int = 0) -> float:
        """Return the time to load blocks that a device lacks, by their bytes, and `own` bytes of adapters.

        Loads under way come first; what they bring is not counted again.
        """
        loads = self._loads.get(device)
        missing = {block: size for block, size in sizes.items() if loads is None or not loads.coming[block]}
        return self.pending(device) + self._cost(device).at(self._bytes_of(device, missing, own).terms)

    def delay(self, device: str, sizes: Mapping[str, int] | None = None) -> float:
        """Return the time until a load's first byte comes: loads under way, and the fixed part of a load.

        `sizes`: blocks that are to be loaded, by their bytes; None: any, from the slowest tier.
        """
        if sizes is None:
            return self.pending(device) + self.fixed(device)
        read, _, _, kept, _ = self._cost(device).coefficients
        reads, _, _, keeps, _ = self._bytes_of(device, sizes, 0).terms
        return self.pending(device) + reads * read + keeps * kept

    def fixed(self, device: str) -> float:
        """Return the fixed part of a load from the slowest tier."""
        read, _, _, kept, _ = self._cost(device).coefficients
        return max(read, kept)

    def pending(self, device: str) -> float:
        """Return the time that the loads under way take on a device, by what is known of loads now."""
        loads, cost = self._loads.get(device), self._cost(device)
        return 0.0 if loads is None else sum(cost.at(each.expected.terms) for each in loads.under_way.values())

    def block_seconds(self, device: str, block: str, nbytes: int) -> float:
        """Return the time that the bytes of one block take to a device, 0 if they are on their way."""
        loads = self._loads.get(device)
        if loads is not None and loads.coming[block]:
            return 0.0
        _, first, again, _, host = self._bytes_of(device, {block: nbytes}, 0).terms
        _, by_first, by_again, _, by_host = self._cost(device).coefficients
        return by_first * first + by_again * again + by_host * host

    @property
    def seconds_per_byte(self) -> float:
        """Time to load one byte that a device has not had."""
        return self._all.coefficients[1]

    def begin(self, device: str, stage: Stage, sizes: Mapping[str, int], own: int, there: Collection[str]) -> None:
        """Record that a stage is requested. `there`: blocks that are loaded already."""
        loads = self._loads.setdefault(device, _DeviceLoads())
        missing = {block: size for block, size in sizes.items() if block not in there and not loads.coming[block]}
        expected = self._bytes_of(device, missing, own)
        loads.under_way[stage] = _Load(self._cost(device).at(expected.terms), expected, own, tuple(sizes))
        loads.coming.update(sizes.keys())

    def end(self, device: str, stage: Stage, seconds: float | None, disk: int = -1, host: int = 0) -> float | None:
        """Record that a stage is loaded, after `seconds` of work for it alone; None: it could not be loaded.

        Returns the estimate that was made of it, None without one.

        Args:
            disk, host: Bytes of its blocks that came from disk and from host memory; -1: as expected.
        """
        loads = self._loads.get(device)
        load = None if loads is None else loads.under_way.pop(stage, None)
        if loads is None or load is None:
            return None
        loads.coming.subtract(load.blocks)
        loads.coming = +loads.coming
        if seconds is None:
            return None
        loads.had.update(load.blocks)
        came = load.expected if disk < 0 else load.expected.as_brought(disk, host, load.own)
        if device not in self._costs:
            self._costs[device] = MeasuredCost.assuming(self._all.coefficients)
        for cost in (self._all, self._costs[device]):
            cost.add(came.terms, seconds)
        return load.estimate

    def keep_blocks(self, device: str, blocks: Iterable[tuple[str, int]]) -> None:
        """Record the bytes of blocks that a device's host memory keeps now; 0: none of one."""
        kept = self._loads.setdefault(device, _DeviceLoads()).host
        for block, nbytes in blocks:
            if nbytes:
                kept[block] = nbytes
            else:
                kept.pop(block, None)

    def host_bytes(self, device: str) -> int:
        """Return the bytes of blocks that a device's host memory keeps."""
        loads = self._loads.get(device)
        return 0 if loads is None else sum(loads.host.values())

    def remove_device(self, device: str) -> None:
        """Forget the loads of a device that has died; its rates stay."""
        self._loads.pop(device, None)

    def remove_blocks(self, blocks: Collection[str]) -> None:
        """Forget blocks that no chain has any more."""
        for loads in self._loads.values():
            loads.had.difference_update(blocks)
            for block in blocks:
                loads.host.pop(block, None)

    def _cost(self, device: str) -> MeasuredCost:
        return self._costs.get(device, self._all)

    def _bytes_of(self, device: str, missing: Mapping[str, int], own: int) -> SwapBytes:
        loads = self._loads.get(device)
        return swap_bytes(missing, own, (), {}) if loads is None else swap_bytes(missing, own, loads.had, loads.host)


def _reading(nbytes: float) -> tuple[float, float, float, float, float]:
    """Return the terms of bytes that are read for the first time."""
    return 1.0, float(nbytes), 0.0, 0.0, 0.0
