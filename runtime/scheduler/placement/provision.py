"""Which blocks are on which devices, which stages that makes, and the paths that they allow.

    place(chains) once the devices are there     paths: per block the living devices that hold it     ensure(path): loads what is missing

Contract: a block's devices are a plan; stages of models are loaded on the devices that their paths need, when they
are first needed. A chain that no placement holds has a reason (`why_not`), and its sequences are refused with it.
Says what is to be loaded; sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from runtime.chains import Block, Chain, Path, Stage, devices_of
from runtime.config import ClusterConfig
from runtime.kv.pages import groups_for
from runtime.policy.profiles import BlockProfile
from runtime.policy.routing.bytes_read import choose
from runtime.policy.routing.latency import Latency
from runtime.policy.routing.paths import choose_by_cost, choose_devices, choose_roomy
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.placement.initial import laid_out
from runtime.scheduler.routing.block_usage import BlockUsage
from runtime.scheduler.routing.estimates import LatencyEstimates
from runtime.scheduler.routing.route_cache import Route, RouteCache
from runtime.scheduler.sequences.sequence import PathUsage

#: Devices that are weighed for a block: more of them cost time and gain little (power of a few choices).
_MOST = 8

#: So many devices hold everything each, where it fits (`auto`); more of them share it out. With everything on each of
#: 12 simulated A100s every step read a whole family's weights for a twelfth of its rows, and p95 was 1.7 times that of
#: one model per device.
_FEW = 4


class Provision:
    """`estimates`: what rows take, where profiles are there. `on_table`: called with all terms of a choice that was
    made by them.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        config: ClusterConfig,
        devices: Devices,
        estimates: LatencyEstimates | None = None,
    ) -> None:
        self._config = config
        self._devices = devices
        self._blocks = {block.id: block for block in blocks}
        self._where: dict[str, list[str]] = {}
        self._why: dict[str, str] = {}
        self._turn = 0
        self.estimates = estimates
        self.on_table: Callable[[Chain, Sequence[Mapping[str, Latency]], tuple[str, ...] | None], None] = (
            lambda chain, table, chosen: None
        )
        #: (block, device) of instances that take no newcomers, for they are about to go.
        self.leaving: set[tuple[str, str]] = set()
        self._routes = RouteCache()
        self._passes: dict[tuple[str, Path], PathUsage] = {}
        #: What steps read of weights, by who is where.
        self.reads = BlockUsage(self._blocks)

    @property
    def instances(self) -> Mapping[str, Sequence[str]]:
        """Block -> the devices that are to hold it."""
        return self._where

    @property
    def by_demand(self) -> bool:
        """Whether there is one copy of each chain at first, and more of what is asked for."""
        return self._config.placement in ("on-demand", "eager", "frag-min") or (
            self._config.placement == "auto" and self._config.devices > _FEW
        )

    def block(self, name: str) -> Block:
        return self._blocks[name]

    def learn(self, blocks: Iterable[Block], profiles: Iterable[BlockProfile] = ()) -> None:
        """Blocks of another chain, and what was measured of them."""
        self._blocks.update((block.id, block) for block in blocks)
        if self.estimates is not None:
            self.estimates.learn(profiles)

    def why_not(self, chain: Chain) -> str | None:
        """Why a chain cannot be run by this cluster; None if it can, or if that is not known yet."""
        return self._why.get(chain.version)

    def up(self, chain: Chain) -> bool:
        """Whether each of its blocks has a living device."""
        return all(any(self._devices.alive(name) for name in self._where.get(use.block, ())) for use in chain.uses)

    def passes(self, chain: Chain, path: Path) -> PathUsage:
        """Where the tokens of a chain's sequences along a path are counted."""
        key = chain.version, path
        known = self._passes.get(key)
        if known is None:
            places = zip(devices_of(chain, path), (use.kv_layers for use in chain.uses), strict=True)
            known = self._passes[key] = PathUsage(chain, path, places=tuple(places))
        return known

    def passed(self, chain: Chain) -> list[PathUsage]:
        """The paths that a chain's tokens have gone so far."""
        return [passes for (version, _), passes in self._passes.items() if version == chain.version]

    def all_passed(self) -> Collection[PathUsage]:
        """All that is counted along paths."""
        return self._passes.values()

    def joins(self, passes: PathUsage) -> None:
        """One more sequence is on a path."""
        passes.users += 1
        if passes.users == 1:
            self.reads.begins(passes)

    def leaves(self, passes: PathUsage) -> None:
        passes.users -= 1
        if not passes.users:
            self.reads.ends(passes)

    def unused(self, passes: PathUsage) -> None:
        """A path that nobody is on any more is forgotten."""
        self._passes.pop((passes.chain.version, passes.path), None)

    def place(self, chains: Sequence[Chain]) -> None:
        """Put the blocks of these chains on devices; what is there already stays.

        A chain that does not fit beside the others is left out, with a reason. Chains are taken in order.
        """
        how = "on-demand" if self._config.placement == "auto" and self.by_demand else self._config.placement
        found = laid_out(chains, self._blocks, list(self._devices), how)
        for chain in chains:
            self._why.pop(chain.version, None)
        self._why.update(found.lacking)
        for block, device in found.instances:
            self.add(block, device)

    def add(self, block: str, device: str) -> None:
        """Another instance."""
        where = self._where.setdefault(block, [])
        if device not in where:
            where.append(device)
            known = self._devices[device]
            known.blocks.add(block)
            known.planned += self._blocks[block].nbytes

    def remove(self, block: str, device: str) -> None:
        """One instance less. Raises ValueError for the last one."""
        if self._where.get(block) == [device]:
            raise ValueError(f"{device} has the only instance of block {block[:12]}")
        self._where[block].remove(device)
        known = self._devices[device]
        known.blocks.discard(block)
        known.planned -= self._blocks[block].nbytes
        self.leaving.discard((block, device))

    def forget(self, chain: Chain, kept: Collection[Chain]) -> tuple[str, ...]:
        """Let go what a chain had that none of those kept have: its blocks, wherever they are, and what was noted of
        it. Those blocks.
        """
        still = {use.block for other in kept for use in other.uses}
        gone = tuple(dict.fromkeys(use.block for use in chain.uses if use.block not in still))
        for block in gone:
            for device in self._where.pop(block, ()):
                self._devices[device].blocks.discard(block)
                self._devices[device].planned -= self._blocks[block].nbytes
                self.leaving.discard((block, device))
            self._blocks.pop(block, None)
        served = any(other.version == chain.version for other in kept)
        if self.estimates is not None:
            self.estimates.forget(gone, "" if served else chain.version)
        if not served:
            self._why.pop(chain.version, None)
            self._routes.forget(chain.version)
            self._passes = {key: passes for key, passes in self._passes.items() if key[0] != chain.version}
        return gone

    def knows(self, block: str) -> bool:
        return block in self._blocks

    def spare(self, block: str, device: str) -> bool:
        """Whether a block has another living instance, one that stays."""
        staying = (name for name in self._where.get(block, ()) if name != device and (block, name) not in self.leaving)
        return any(self._devices.alive(name) for name in staying)

    def measured(self, chain: Chain) -> bool:
        """Whether paths of a chain are chosen by profiles."""
        return self.estimates is not None and self.estimates.covers(chain)

    def within(self, chain: Chain, names: Collection[str]) -> bool:
        """Whether every path of a chain passes one of these devices, for one of its blocks is nowhere else."""
        return any(all(name in names for name in self._where.get(use.block, ())) for use in chain.uses)

    def path(self, chain: Chain, loads: Mapping[str, float], warm: bool = False, context: int = 0) -> Path | None:
        """As `route`."""
        found = self.route(chain, loads, warm, context)
        return None if found is None else found.path

    def route(
        self, chain: Chain, loads: Mapping[str, float], warm: bool = False, context: int = 0, groups: int = 0
    ) -> Route | None:
        """The cheapest path now, or None while a block has no living device. `warm`: only over devices that have loaded
        the blocks.
        `groups`: that a sequence comes to at most; where the cheapest one never holds them, one that does if there is
        one.

        Cheapest by profiles, for a row at `context` tokens (0: nobody's, which is not told), where all of the chain has
        been measured; else by loads.
        """
        self.turn()
        candidates = [self._candidates(use.block) for use in chain.uses]
        if warm:
            candidates = [
                [name for name in some if use.block in self._devices[name].warm]
                for use, some in zip(chain.uses, candidates, strict=True)
            ]
        if self.estimates is not None and self.measured(chain):
            table = self.estimates.table(
                chain, [[self._devices[name] for name in some] for some in candidates], context
            )
            chosen = choose_by_cost(
                [{name: each.total for name, each in row.items()} for row in table], self.estimates.hop
            )
            if context:
                self.on_table(chain, table, chosen)
        elif self._config.routing == "least-bytes":
            chosen = self._by_reading(chain, candidates, context)
        else:
            chosen = choose_devices(candidates, loads, self._config.hop_cost)
        if chosen is None:
            return None
        route = self._routes.over(chain, chosen)
        return self._roomier(chain, candidates, route, groups) if self.holds(route) < groups else route

    def holds(self, route: Route) -> float:
        """Page groups that one sequence alone can have along a route."""
        return min((self._devices[name].capacity // pages for name, pages in route.weights), default=math.inf)

    def roomier(self, chain: Chain, route: Route, groups: int) -> Route:
        """For a sequence of so many page groups that a route does not hold: one that holds more, over whatever devices
        there are or will be again; the same one if there is none."""
        soon = [
            [name for name in self._where.get(use.block, ()) if not self._devices[name].final] for use in chain.uses
        ]
        return self._roomier(chain, soon, route, groups)

    def spoils(self, chains: Iterable[Chain], block: str, source: str, target: str | None = None) -> bool:
        """Whether sequences of one of these chains could not become as long as their model lets them, or as they now
        can, if a block were not on `source` any more, but on `target` if that is given."""
        where = [name for name in self._where.get(block, ()) if name != source]
        after = {block: where if target is None or target in where else [*where, target]}
        for chain in chains:
            if any(use.block == block for use in chain.uses):
                groups = groups_for(chain.spec, chain.spec.virtual_tokens + chain.spec.max_model_len)
                if self._most(chain, after, groups) < min(groups, self._most(chain, {}, groups)):
                    return True
        return False

    def shun(self, device: str, blocks: Iterable[str]) -> bool:
        """A device cannot load a stage with these blocks: they run where else they are to be. Whether any does."""
        gone = [block for block in blocks if block in self._devices[device].blocks and len(self._where[block]) > 1]
        for block in gone:
            self.remove(block, device)
        return bool(gone)

    def _by_reading(self, chain: Chain, candidates: Sequence[Sequence[str]], context: int) -> tuple[str, ...] | None:
        """Where everybody's steps read least with a newcomer on them; a hop is a few hundredths of what it reads
        itself.
        """
        enters, adds = self._read(chain, candidates, context)
        return choose(
            adds, enters, self._config.hop_cost / 100 * sum(self._blocks[use.block].nbytes for use in chain.uses)
        )

    def _read(
        self, chain: Chain, candidates: Sequence[Sequence[str]], context: int
    ) -> tuple[dict[str, float], list[dict[str, float]]]:
        """What steps read on each device now, and what each block there adds, everybody counted."""
        devices = {name: self._devices[name] for name in dict.fromkeys(name for some in candidates for name in some)}
        enters = {name: float(self.reads.of(device)) for name, device in devices.items()}
        groups = groups_for(chain.spec, context)
        adds: list[dict[str, float]] = []
        for use, some in zip(chain.uses, candidates, strict=True):
            nbytes = self._blocks[use.block].nbytes
            row = {}
            for name in some:
                device = devices[name]
                own = groups * use.kv_layers * device.page_bytes
                row[name] = float((device.members + 1) * (own if self.reads.uses(name, use.block) else own + nbytes))
            adds.append(row)
        return enters, adds

    def reading(self, chain: Chain, path: Path, context: int) -> float:
        """Bytes that everybody's steps read more with a newcomer on this path, and those that it waits for
        (`policy.routing.bytes_read`).
        """
        enters, adds = self._read(chain, [(name,) for name in devices_of(chain, path)], context)
        return sum(enters[hop.device] for hop in path) + sum(added for row in adds for added in row.values())

    def turn(self) -> int:
        """Another number each time: where to begin to look among very many."""
        self._turn += 7919
        return self._turn

    def hops(self, chain: Chain, devices: tuple[str, ...]) -> Path:
        """Devices of a chain's blocks as a path, mostly made once."""
        return self._routes.over(chain, devices).path

    def along(self, chain: Chain, path: Path) -> Route:
        """What is asked of a path, mostly made once."""
        return self._routes.along(chain, path)

    def allows(self, chain: Chain, path: Path) -> bool:
        """Whether a path could be chosen now, and its stages are loaded."""
        devices = devices_of(chain, path)
        held = ((use.block, name) for use, name in zip(chain.uses, devices, strict=True))
        there = all(
            name in self._where.get(block, ()) and self._devices.alive(name) and (block, name) not in self.leaving
            for block, name in held
        )
        return there and not self.missing(chain, path)

    def missing(self, chain: Chain, path: Path) -> list[tuple[str, Stage]]:
        """Stages of a path that are not loaded, whether or not they are on their way."""
        return self.lacking(self._routes.along(chain, path))

    def lacking(self, route: Route) -> list[tuple[str, Stage]]:
        """The same of a route."""
        devices = self._devices
        return [(device, stage) for device, stage, name in route.stages if name not in devices[device].loaded]

    def blocks_of(self, chain: Chain, stage: Stage) -> tuple[str, ...]:
        return tuple(use.block for use in chain.uses if stage.lo <= use.lo and use.hi <= stage.hi)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _candidates(self, block: str) -> Sequence[str]:
        """Living devices with a block; of very many a few, others each time. One that it is about to leave only where
        there is no other.
        """
        where = self._where.get(block, [])
        if self.leaving:
            stay = [name for name in where if (block, name) not in self.leaving]
            where = stay if any(self._devices.alive(name) for name in stay) else where
        living = self._devices.living
        if len(where) <= _MOST:
            return [name for name in where if name in living]
        first = self._turn % len(where)
        at = min(first + _MOST, len(where))
        some = [name for name in where[first:at] if name in living]
        while len(some) < _MOST and at < first + len(where):
            name = where[at % len(where)]
            at += 1
            if name in living:
                some.append(name)
        return some

    def _most(self, chain: Chain, instead: Mapping[str, Sequence[str]], groups: int) -> float:
        """Page groups, up to about so many, that one sequence alone can have where a chain's blocks are, or are to
        be.
        """
        soon = [
            [name for name in instead.get(use.block, self._where.get(use.block, ())) if not self._devices[name].final]
            for use in chain.uses
        ]  # fmt: skip
        capacity = {name: self._devices[name].capacity for some in soon for name in some}
        layers = [use.kv_layers for use in chain.uses]
        found = (choose_roomy(soon, layers, capacity, most) for most in (groups, max(groups // 2, 1), 1))
        return max((self.holds(self._routes.over(chain, chosen)) for chosen in found if chosen is not None), default=0)

    def _roomier(self, chain: Chain, candidates: Sequence[Sequence[str]], route: Route, groups: int) -> Route:
        """A route that holds longer sequences than this one, if one is found."""
        capacity = {name: self._devices[name].capacity for some in candidates for name in some}
        chosen = choose_roomy(candidates, [use.kv_layers for use in chain.uses], capacity, groups)
        other = route if chosen is None else self._routes.over(chain, chosen)
        return other if self.holds(other) > self.holds(route) else route
