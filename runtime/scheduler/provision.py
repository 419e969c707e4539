"""Which blocks are on which devices, which stages that makes, and the paths that they allow.

    place(chains) once the devices are there     paths: per block the living devices that hold it     ensure(path): loads what is missing

Contract: a block's devices are a plan; stages of models are loaded on the devices that their paths need, when they are first needed.
A chain that no placement holds has a reason (`why_not`), and its sequences are refused with it. Says what is to be loaded; sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from runtime.config import ClusterConfig
from runtime.policy.packing import pack
from runtime.policy.paths import choose_devices
from runtime.policy.spread import cells, spread
from runtime.scheduler.devices import Devices
from runtime.scheduler.members import Passes
from runtime.stages import Block, Chain, Path, Stage, devices_of, path_of

#: Devices that are weighed for a block: more of them cost time and gain little (power of a few choices).
_MOST = 8

#: So many devices hold everything each, where it fits (`auto`); more of them share it out. With everything on each of 12 simulated A100s
#: every step read a whole family's weights for a twelfth of its rows, and p95 was 1.7 times that of one model per device.
_FEW = 4


class Provision:
    def __init__(self, blocks: Iterable[Block], config: ClusterConfig, devices: Devices) -> None:
        self._config = config
        self._devices = devices
        self._blocks = {block.id: block for block in blocks}
        self._where: dict[str, list[str]] = {}
        self._why: dict[str, str] = {}
        self._turn = 0
        self._paths: dict[tuple[str, tuple[str, ...]], Path] = {}
        self._passes: dict[tuple[str, Path], Passes] = {}

    @property
    def instances(self) -> Mapping[str, Sequence[str]]:
        """Block -> the devices that are to hold it."""
        return self._where

    def block(self, name: str) -> Block:
        return self._blocks[name]

    def learn(self, blocks: Iterable[Block]) -> None:
        """Blocks of another chain."""
        self._blocks.update((block.id, block) for block in blocks)

    def why_not(self, chain: Chain) -> str | None:
        """Why a chain cannot be run by this cluster; None if it can, or if that is not known yet."""
        return self._why.get(chain.version)

    def up(self, chain: Chain) -> bool:
        """Whether each of its blocks has a living device."""
        return all(any(self._devices.alive(name) for name in self._where.get(use.block, ())) for use in chain.uses)

    def passes(self, chain: Chain, path: Path) -> Passes:
        """Where the tokens of a chain's sequences along a path are counted."""
        key = chain.version, path
        known = self._passes.get(key)
        if known is None:
            places = zip(devices_of(chain, path), (use.kv_layers for use in chain.uses), strict=True)
            known = self._passes[key] = Passes(chain, path, places=tuple(places))
        return known

    def passed(self, chain: Chain) -> list[Passes]:
        """The paths that a chain's tokens have gone so far."""
        return [passes for (version, _), passes in self._passes.items() if version == chain.version]

    def place(self, chains: Sequence[Chain]) -> None:
        """Put the blocks of these chains on devices, as often as there is room; what is there already stays.

        A chain that does not fit beside the others is left out, with a reason. Chains are taken in order.
        """
        names = [device.name for device in self._devices]
        limits = [device.limit for device in self._devices]
        placing = self._config.placing
        if placing == "demand" or (placing == "auto" and len(names) > _FEW):
            self._pack(chains, names, limits)
        else:
            self._copy(chains, names, limits)

    def _pack(self, chains: Sequence[Chain], names: Sequence[str], limits: Sequence[int]) -> None:
        """One copy of each chain; whoever asks for more gets it later (`control`)."""
        sizes = {use.block: self._blocks[use.block].nbytes for chain in chains for use in chain.uses}
        for chain, plan in zip(chains, pack([[use.block for use in chain.uses] for chain in chains], sizes, limits), strict=True):
            self._why.pop(chain.version, None)
            if plan is None:
                self._why[chain.version] = self._lacks(chain, limits)
            for use, at in zip(chain.uses, plan or (), strict=False):
                self.add(use.block, names[at])

    def _copy(self, chains: Sequence[Chain], names: Sequence[str], limits: Sequence[int]) -> None:
        """As many copies of everything as there is room for."""
        taken: list[Chain] = []
        groups: tuple[tuple[int, ...], ...] = ()
        for chain in chains:
            found = cells(self._sizes([*taken, chain]), limits, self._config.placing == "split")
            if not found:
                self._why[chain.version] = self._lacks(chain, limits)
                continue
            self._why.pop(chain.version, None)
            taken, groups = [*taken, chain], found
        order = self._order(taken)
        for group in groups:
            plan = spread([self._blocks[name].nbytes for name in order], [limits[at] for at in group]) or ()
            for block, at in zip(order, plan, strict=True):
                self.add(block, names[group[at]])

    def add(self, block: str, device: str) -> None:
        """Another instance."""
        where = self._where.setdefault(block, [])
        if device not in where:
            where.append(device)
            self._devices[device].blocks.add(block)

    def remove(self, block: str, device: str) -> None:
        """One instance less. Raises ValueError for the last one."""
        if self._where.get(block) == [device]:
            raise ValueError(f"{device} has the only instance of block {block[:12]}")
        self._where[block].remove(device)
        self._devices[device].blocks.discard(block)

    def forget(self, chain: Chain, kept: Collection[Chain]) -> tuple[str, ...]:
        """Let go what a chain had that none of those kept have: its blocks, wherever they are, and what was noted of it. Those blocks."""
        still = {use.block for other in kept for use in other.uses}
        gone = tuple(dict.fromkeys(use.block for use in chain.uses if use.block not in still))
        for block in gone:
            for device in self._where.pop(block, ()):
                self._devices[device].blocks.discard(block)
            self._blocks.pop(block, None)
        if all(other.version != chain.version for other in kept):
            self._why.pop(chain.version, None)
            self._paths = {key: path for key, path in self._paths.items() if key[0] != chain.version}
            self._passes = {key: passes for key, passes in self._passes.items() if key[0] != chain.version}
        return gone

    def knows(self, block: str) -> bool:
        return block in self._blocks

    def path(self, chain: Chain, loads: Mapping[str, float]) -> Path | None:
        """The cheapest path now, or None while a block has no living device."""
        self._turn += 1
        candidates = [self._candidates(use.block) for use in chain.uses]
        chosen = choose_devices(candidates, loads, self._config.hop_cost)
        return None if chosen is None else self.hops(chain, chosen)

    def hops(self, chain: Chain, devices: tuple[str, ...]) -> Path:
        """Devices of a chain's blocks as a path, made once."""
        path = self._paths.get((chain.version, devices))
        if path is None:
            path = self._paths[chain.version, devices] = path_of(chain, devices)
        return path

    def allows(self, chain: Chain, path: Path) -> bool:
        """Whether a path could be chosen now, and its stages are loaded."""
        devices = devices_of(chain, path)
        there = all(
            name in self._where.get(use.block, ()) and self._devices.alive(name) for use, name in zip(chain.uses, devices, strict=True)
        )
        return there and not self.missing(chain, path)

    def weights(self, path: Path) -> tuple[tuple[str, int], ...]:
        """Pages that a group of a sequence takes, by device, along a path."""
        pages: dict[str, int] = {}
        for hop in path:
            pages[hop.device] = pages.get(hop.device, 0) + hop.layers[1] - hop.layers[0]
        return tuple((device, count) for device, count in pages.items() if count)

    def missing(self, chain: Chain, path: Path) -> list[tuple[str, Stage]]:
        """Stages of a path that are not loaded, whether or not they are on their way."""
        stages = ((hop.device, chain.stage(hop.lo, hop.hi)) for hop in path)
        return [(device, stage) for device, stage in stages if not self._devices[device].has(stage)]

    def blocks_of(self, chain: Chain, stage: Stage) -> tuple[str, ...]:
        return tuple(use.block for use in chain.uses if stage.lo <= use.lo and use.hi <= stage.hi)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _candidates(self, block: str) -> Sequence[str]:
        """Living devices with a block; of very many a few, others each time."""
        where = self._where.get(block, [])
        if len(where) <= _MOST:
            return [name for name in where if self._devices.alive(name)]
        first = self._turn * 7919 % len(where)
        some: list[str] = []
        for at in range(len(where)):
            name = where[(first + at) % len(where)]
            if self._devices.alive(name):
                some.append(name)
                if len(some) == _MOST:
                    break
        return some

    def _order(self, chains: Sequence[Chain]) -> list[str]:
        """Blocks so that each chain's own lie together, behind those that it shares with chains before; where all chains are to be cut
        over all devices, by where they stand in them instead."""
        if self._config.placing != "split":
            return list(dict.fromkeys(use.block for chain in chains for use in chain.uses))
        depth: dict[str, tuple[int, int]] = {}
        for chain in chains:
            for use in chain.uses:
                depth.setdefault(use.block, (use.lo, len(depth)))
        return sorted(depth, key=depth.__getitem__)

    def _sizes(self, chains: Sequence[Chain]) -> list[int]:
        return [self._blocks[name].nbytes for name in self._order(chains)]

    def _lacks(self, chain: Chain, limits: Sequence[int]) -> str:
        need = sum(self._blocks[name].nbytes for name in {use.block for use in chain.uses})
        have = ", ".join(str(limit) if limit else "any" for limit in limits)
        return f"the cluster cannot hold {chain.model} beside what it holds: {need} bytes of weights, devices take {have}"
