"""Which blocks are on which devices, and which instances are about to be removed.

    place(chains) once the devices are there     add, remove: one instance     remove_chain: a chain served no more

Contract: an instance (a block on a device) is a plan; stages are loaded when a path first needs them
(`routing.router`). A chain that no placement holds has a reason (`why_not`), and its sequences are refused with it. It
sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from runtime.chains import Block, Chain, Stage
from runtime.config import ClusterConfig
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.placement.by_role import laid_out_by_role

#: Up to this many devices each hold all blocks, where they fit (`auto`); more devices divide them. With all blocks on
#: each of 12 simulated A100s every step read a whole family's weights for a twelfth of its rows, and p95 was 1.7 times
#: that of one model per device.
_FEW = 4


class BlockMap:
    """The planned instances of all blocks.

    `instances`: block -> the devices that are to hold it; callers only read it. `leaving`: (block, device) of instances
    that take no new sequences, because they are about to be removed.
    """

    def __init__(self, blocks: Iterable[Block], config: ClusterConfig, devices: Devices) -> None:
        self._config = config
        self._devices = devices
        self._blocks = {block.id: block for block in blocks}
        self._why: dict[str, str] = {}
        self.instances: dict[str, list[str]] = {}
        self.leaving: set[tuple[str, str]] = set()

    @property
    def by_demand(self) -> bool:
        """Whether placement starts with one copy of each chain and adds copies by demand."""
        return self._config.placement in ("on-demand", "eager", "frag-min") or (
            self._config.placement == "auto" and self._config.devices > _FEW
        )

    def block(self, name: str) -> Block:
        return self._blocks[name]

    def knows(self, block: str) -> bool:
        return block in self._blocks

    def learn(self, blocks: Iterable[Block]) -> None:
        """Add the blocks of another chain."""
        self._blocks.update((block.id, block) for block in blocks)

    def why_not(self, chain: Chain) -> str | None:
        """Return why this cluster cannot run a chain; None if it can, or if blocks are not placed yet."""
        return self._why.get(chain.version)

    def up(self, chain: Chain) -> bool:
        """Return whether each block of a chain has a living device."""
        return all(any(self._devices.alive(name) for name in self.instances.get(use.block, ())) for use in chain.uses)

    # -- changes -------------------------------------------------------------------------------------------------------

    def place(self, chains: Sequence[Chain]) -> None:
        """Place the blocks of these chains on devices, in order; existing instances stay.

        A chain that does not fit beside those before it is left out, with a reason.
        """
        how = "eager" if self._config.placement == "auto" and self.by_demand else self._config.placement
        devices, swap = list(self._devices), self._config.residency == "swap"
        found = laid_out_by_role(chains, self._blocks, devices, self._devices.roles, how, swap)
        for chain in chains:
            self._why.pop(chain.version, None)
        self._why.update(found.lacking)
        for block, device in found.instances:
            self.add(block, device)

    def add(self, block: str, device: str) -> None:
        """Plan one more instance."""
        where = self.instances.setdefault(block, [])
        if device not in where:
            where.append(device)
            self._devices[device].plan.add(block, self._blocks[block].nbytes)

    def remove(self, block: str, device: str) -> None:
        """Plan one instance less. Raises ValueError for the last one of a block."""
        if self.instances.get(block) == [device]:
            raise ValueError(f"{device} has the only instance of block {block[:12]}")
        self.instances[block].remove(device)
        self._remove_instance(block, device)

    def shun(self, device: str, blocks: Iterable[str]) -> bool:
        """Remove the instances of these blocks on a device that cannot load them; the last one of a block stays.

        Returns whether any was removed.
        """
        gone = [
            block for block in blocks if block in self._devices[device].plan.blocks and len(self.instances[block]) > 1
        ]
        for block in gone:
            self.remove(block, device)
        return bool(gone)

    def remove_chain(self, chain: Chain, kept: Collection[Chain]) -> tuple[str, ...]:
        """Remove the blocks of a chain that none of the `kept` chains has, from all devices; return these blocks."""
        still = {use.block for other in kept for use in other.uses}
        gone = tuple(dict.fromkeys(use.block for use in chain.uses if use.block not in still))
        for block in gone:
            for device in self.instances.pop(block, ()):
                self._remove_instance(block, device)
            self._blocks.pop(block, None)
        if all(other.version != chain.version for other in kept):
            self._why.pop(chain.version, None)
        return gone

    # -- queries -------------------------------------------------------------------------------------------------------

    def spare(self, block: str, device: str) -> bool:
        """Return whether a block has another living instance that is not about to be removed.

        Where roles are apart: for each phase that the device runs.
        """
        staying = [
            name
            for name in self.instances.get(block, ())
            if name != device and (block, name) not in self.leaving and self._devices.alive(name)
        ]
        roles = self._devices.roles
        if not roles.apart:
            return bool(staying)
        there, own = [roles[name] for name in staying], roles[device]
        return (not own.prompts or any(role.prompts for role in there)) and (
            not own.decodes or any(role.decodes for role in there)
        )

    def within(self, chain: Chain, names: Collection[str]) -> bool:
        """Return whether every path of a chain passes one of these devices.

        That is so where one of its blocks has all of its instances on them.
        """
        return any(all(name in names for name in self.instances.get(use.block, ())) for use in chain.uses)

    def devices_of(self, chain: Chain) -> set[str]:
        """Return the devices that have instances of a chain's blocks."""
        return {name for use in chain.uses for name in self.instances.get(use.block, ())}

    # -- internals -----------------------------------------------------------------------------------------------------

    def _remove_instance(self, block: str, device: str) -> None:
        self._devices[device].plan.remove(block, self._blocks[block].nbytes)
        self.leaving.discard((block, device))


def blocks_of(chain: Chain, stage: Stage) -> tuple[str, ...]:
    """Return the blocks of a chain in one of its stages."""
    return tuple(use.block for use in chain.uses if stage.lo <= use.lo and use.hi <= stage.hi)
