"""What a new sequence's next row would take on each device that could run a block, from profiles (BL-21): all four
terms, few candidates.

    queue      rows that wait there, as the agent last reported, as one batch
    compute    the block's own time in a batch with whoever is on the device
    load       of a block that is not loaded there: behind what waits, or beside the way of the row where the device is
               idle
    transfer   is the hop's: the same for each change of device, weighed by `policy.routing.paths`

Contract: pure look-ups over `policy.routing.latency`, remembered by what they depend on, with batches and contexts
rounded up to powers of two; so an admission costs a few dictionary look-ups per block and candidate. A block
without a profile costs what loads say (`None` for all).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from runtime.chains import Chain
from runtime.policy.profiles import BlockProfile, DeviceProfile, LinkProfile, alike, chain_of
from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of
from runtime.scheduler.devices.devices import Device


class LatencyEstimates:
    """Args:
    profiles: by block; of whole chains by version. hop: seconds of a row from one device to another. way_in: over which
    blocks are loaded, None for from disk.
    """

    def __init__(self, profiles: Mapping[str, BlockProfile], hop: float, way_in: LinkProfile | None = None) -> None:
        self._profiles = dict(profiles)
        self._way_in = way_in
        self._known: dict[tuple[str, int, int, int, bool], Latency] = {}
        self._whole: dict[str, BlockProfile] = {}
        self.hop = hop

    def learn(self, profiles: Iterable[BlockProfile]) -> None:
        """Of blocks that come later; what is known stays."""
        for each in profiles:
            self._profiles.setdefault(each.block, each)

    def remove_blocks(self, blocks: Collection[str], version: str) -> None:
        """Of blocks, and of a version of a chain, that are gone."""
        for measured in (*blocks, version):
            self._profiles.pop(measured, None)
        if blocks:
            self._known = {key: known for key, known in self._known.items() if key[0] not in blocks}
        self._whole.pop(version, None)

    def covers(self, chain: Chain) -> bool:
        """Whether each block of a chain was measured."""
        return bool(self._profiles) and all(use.block in self._profiles for use in chain.uses)

    def whole(self, chain: Chain) -> BlockProfile | None:
        """A chain as one block; None where it was not measured. The blocks of a low-rank delta are its base's, without
        what it adds: only its own measurement counts.
        """
        found = self._profiles.get(chain.version) or self._whole.get(chain.version)
        if found is None and chain.rewriting is None and self.covers(chain):
            blocks = [use.block for use in chain.uses]
            tables = DeviceProfile("", alike([self._profiles[block] for block in dict.fromkeys(blocks)]), ())
            found = self._whole[chain.version] = chain_of(tables, chain.loaded_as, blocks)
        return found

    def estimate_block(self, block: str, device: Device, context: int) -> Latency:
        """The terms of one candidate for a row at `context` tokens."""
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
        """For each block of a chain the terms of each candidate."""
        return [
            {device.name: self.estimate_block(use.block, device, context) for device in some}
            for use, some in zip(chain.uses, candidates, strict=True)
        ]  # fmt: skip


def _up(number: int) -> int:
    """The next power of two; 0 stays."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
