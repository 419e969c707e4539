"""Estimate the latency of a new sequence's next row on each device that could run a block (BL-13, BL-20, BL-21).

    queue      what waits there, as the agent last reported: rows that decode as one batch, prompts in chunks
    compute    the block's own time: a prompt in chunks, each beside the rows of the sequences on the device
    load       of a block that is not loaded there: loads under way, and the missing bytes, as measured
    transfer   not per candidate: the hidden states' way at each change of device, as measured, weighed by
               `policy.routing.paths`

Contract: look-ups over `policy.routing.latency`. Queue and compute are cached by what they depend on, with batches,
prompts and contexts rounded up to powers of two; an admission costs a few dictionary look-ups per block and candidate.
Chains with a block that has no profile are not covered: their paths are chosen by bytes read, or by load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from runtime.chains import Chain
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, alike, chain_of
from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of
from runtime.policy.routing.paths import PathCosts, by_latency
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.observe.measured_times import MeasuredTimes


class LatencyEstimates:
    """Latency estimates from block profiles and measured times.

    Args:
        profiles: Measured profiles, by block; of whole chains by their version.
        times: What hops and loads take.
        chunk: Tokens of a prompt that run in one step.
    """

    def __init__(self, profiles: Mapping[str, BlockProfile], times: MeasuredTimes, chunk: int) -> None:
        self._profiles = dict(profiles)
        self._times, self._chunk = times, chunk
        self._known: dict[tuple[str, int, int, int, int], Latency] = {}
        self._whole: dict[str, BlockProfile] = {}

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

    def decode_of(self, block: str) -> Grid | None:
        """Return the decode times of a block; None if it has no profile."""
        found = self._profiles.get(block)
        return None if found is None else found.decode

    def prefill_seconds(self, blocks: Sequence[str], tokens: int) -> float | None:
        """Return the time of a chunk of a prompt in these blocks; None if one of them has no profile."""
        found = [self._profiles.get(block) for block in blocks]
        known = [each for each in found if each is not None]
        return sum(each.prefill.at(tokens) for each in known) if len(known) == len(found) else None

    def estimate_block(self, block: str, device: Device, tokens: int) -> Latency:
        """Return queue and compute of a loaded block on a device, for a sequence of `tokens` tokens.

        With one token it is a row that decodes, else a prompt.
        """
        work = device.work
        key = block, _up(work.queued), _up(work.prompt_tokens), _up(device.passing.count), _up(tokens)
        known = self._known.get(key)
        if known is None:
            queue = (RowWork(key[1], key[4], key[2]),) if key[1] else ()
            candidate = Candidate(device.name, self._profiles[block], queue, joins=key[3], chunk=self._chunk)
            known = self._known[key] = latency_of(candidate, work_of(key[4]))
        return known

    def table(self, chain: Chain, candidates: Sequence[Sequence[Device]], tokens: int) -> list[dict[str, Latency]]:
        """Return the latency terms of each candidate, for each block of a chain.

        The fixed part of a load, and loads under way, are divided among the blocks that a device lacks.
        """
        lacking: Counter[str] = Counter()
        sizes: dict[str, dict[str, int]] = {}
        for use, some in zip(chain.uses, candidates, strict=True):
            for device in some:
                if use.block not in device.stages.warm:
                    lacking[device.name] += 1
                    sizes.setdefault(device.name, {})[use.block] = self._profiles[use.block].nbytes
        waits = {name: self._times.loads.delay(name, sizes[name]) / count for name, count in lacking.items()}
        made: list[dict[str, Latency]] = []
        for use, some in zip(chain.uses, candidates, strict=True):
            row = {device.name: self.estimate_block(use.block, device, tokens) for device in some}
            for device in some if lacking else ():
                if use.block not in device.stages.warm:
                    nbytes = self._profiles[use.block].nbytes
                    load = waits[device.name] + self._times.loads.block_seconds(device.name, use.block, nbytes)
                    row[device.name] = replace(row[device.name], load=load)
            made.append(row)
        return made

    def path_costs(
        self, chain: Chain, table: Sequence[Mapping[str, Latency]], servers: Mapping[str, str], tokens: int
    ) -> PathCosts:
        """Return the costs of paths with these latency terms, hops included."""
        nbytes = tokens * max(use.input_bytes for use in chain.uses)
        here, there = (self._times.hop_seconds(same, nbytes, tokens > 1) for same in (True, False))
        several = len(set(servers.values())) > 1
        return by_latency(table, here, max(there - here, 0.0) if several else 0.0, servers if several else {})


def work_of(tokens: int) -> RowWork:
    """Return the work of a sequence's next row: a token that decodes, or a prompt."""
    return RowWork(1, 1) if tokens <= 1 else RowWork(0, tokens, tokens)


def _up(number: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
