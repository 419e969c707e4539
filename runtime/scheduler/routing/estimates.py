"""Estimate the latency of a new sequence's next row on each device that could run a block, from profiles (BL-21).

    queue      rows that wait there, as the agent last reported, as one batch
    compute    the block's own time in a batch with the sequences on the device
    load       of a block that is not loaded there: after the queue, or in parallel to the row's way there where the
               device is idle
    transfer   not per candidate: the same for each change of device, weighed by `policy.routing.paths`

Contract: pure look-ups over `policy.routing.latency`, cached by what they depend on, with batches and contexts rounded
up to powers of two; an admission costs a few dictionary look-ups per block and candidate. Chains with a block that has
no profile are not covered: their paths are chosen by load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from runtime.chains import Chain
from runtime.policy.profiles import BlockProfile, DeviceProfile, LinkProfile, alike, chain_of
from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of
from runtime.scheduler.devices.devices import Device


class LatencyEstimates:
    """Cached latency estimates from block profiles.

    Args:
        profiles: Measured profiles, by block; of whole chains by their version.
        hop: Seconds that a row takes from one device to another.
        way_in: Link over which blocks are loaded; None for loads from disk.
    """

    def __init__(self, profiles: Mapping[str, BlockProfile], hop: float, way_in: LinkProfile | None = None) -> None:
        self._profiles = dict(profiles)
        self._way_in = way_in
        self._known: dict[tuple[str, int, int, int, bool], Latency] = {}
        self._whole: dict[str, BlockProfile] = {}
        self.hop = hop

    def learn(self, profiles: Iterable[BlockProfile]) -> None:
        """Add profiles of further blocks; known profiles stay."""
        for each in profiles:
            self._profiles.setdefault(each.block, each)

    def remove_blocks(self, blocks: Collection[str], version: str) -> None:
        """Forget the profiles of these blocks, and the whole-chain profiles of a version."""
        for measured in (*blocks, version):
            self._profiles.pop(measured, None)
        if blocks:
            self._known = {key: known for key, known in self._known.items() if key[0] not in blocks}
        self._whole.pop(version, None)

    def covers(self, chain: Chain) -> bool:
        """Return whether each block of a chain has a profile."""
        return bool(self._profiles) and all(use.block in self._profiles for use in chain.uses)

    def whole(self, chain: Chain) -> BlockProfile | None:
        """Return the profile of a chain as one block; None for a chain that was not measured.

        The blocks of a low-rank delta are its base's, without its own factors, so only its whole-chain profile counts.
        """
        found = self._profiles.get(chain.version) or self._whole.get(chain.version)
        if found is None and chain.rewriting is None and self.covers(chain):
            blocks = [use.block for use in chain.uses]
            tables = DeviceProfile("", alike([self._profiles[block] for block in dict.fromkeys(blocks)]), ())
            found = self._whole[chain.version] = chain_of(tables, chain.loaded_as, blocks)
        return found

    def estimate_block(self, block: str, device: Device, context: int) -> Latency:
        """Return the latency terms of a block on a device, for a row at a context of `context` tokens."""
        key = block, _up(device.work.queued), _up(device.passing.count), _up(context), block in device.stages.warm
        known = self._known.get(key)
        if known is None:
            queue = (RowWork(key[1], key[3]),) if key[1] else ()
            candidate = Candidate(
                device.name,
                self._profiles[block],
                queue,
                joins=key[2],
                resident=key[4],
                idle=not key[2],
                way_in=self._way_in,
            )
            known = self._known[key] = latency_of(candidate, RowWork(1, key[3]))
        return known

    def table(self, chain: Chain, candidates: Sequence[Sequence[Device]], context: int) -> list[dict[str, Latency]]:
        """Return the latency terms of each candidate, for each block of a chain."""
        return [
            {device.name: self.estimate_block(use.block, device, context) for device in some}
            for use, some in zip(chain.uses, candidates, strict=True)
        ]  # fmt: skip


def _up(number: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
