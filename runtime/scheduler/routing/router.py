"""Find paths for sequences over the devices that have their chain's blocks, and report what a path needs and holds.

    route      the cheapest path, with what it requires
    roomier    a route that holds a longer sequence
    lacking    stages of a route that are not loaded
    spoils     whether removing an instance limits the length of sequences

Contract: a path passes living devices of the block map only. Stages are loaded on the devices of a path when they are
first needed. The router reports what is to be loaded; it sends nothing, and counts no sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from runtime.chains import Chain, Path, Stage, devices_of
from runtime.config import ClusterConfig
from runtime.kv.pages import groups_for
from runtime.policy.profiles import BlockProfile
from runtime.policy.roles.role import PathPhase, devices_of_phase
from runtime.policy.routing.bytes_read import added
from runtime.policy.routing.latency import Latency
from runtime.policy.routing.paths import by_bytes, by_load, cheapest, choose_roomy
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.routing.block_usage import BlockUsage
from runtime.scheduler.routing.estimates import LatencyEstimates
from runtime.scheduler.routing.route_cache import Route, RouteCache

#: Limit of candidates per block; more cost time and gain little (power of a few choices).
_MOST = 8

#: Receives a choice by profiles: the chain, for each block the terms of each candidate, and the chosen devices.
OnTable = Callable[[Chain, Sequence[Mapping[str, Latency]], tuple[str, ...] | None], None]


class Router:
    """Choose paths.

    Args:
        config: Settings of the scheduler.
        devices: The devices.
        blocks: Where blocks are.
        reads: Bytes that steps read, by device.
        estimates: Latencies of rows where profiles exist; None for none.
    """

    def __init__(
        self,
        config: ClusterConfig,
        devices: Devices,
        blocks: BlockMap,
        reads: BlockUsage,
        estimates: LatencyEstimates | None = None,
    ) -> None:
        self._config = config
        self._devices = devices
        self._blocks = blocks
        self._reads = reads
        self._routes = RouteCache()
        self._turn = 0
        self.estimates = estimates

    def learn(self, profiles: Iterable[BlockProfile]) -> None:
        """Add profiles of the blocks of another chain."""
        if self.estimates is not None:
            self.estimates.learn(profiles)

    def remove_blocks(self, blocks: Collection[str], version: str) -> None:
        """Forget what is cached of removed blocks, and of a removed version of a chain; an empty version for none."""
        if self.estimates is not None:
            self.estimates.remove_blocks(blocks, version)
        if version:
            self._routes.remove_version(version)

    def measured(self, chain: Chain) -> bool:
        """Return whether paths of a chain are chosen by profiles."""
        return self.estimates is not None and self.estimates.covers(chain)

    def within(self, chain: Chain, phase: PathPhase) -> frozenset[str] | None:
        """Return the devices that a chain's new paths may pass in a phase; None for all of them (TI-04).

        All of them too where those with the role lack a block of the chain, now that some do not come back. Those that
        leave their role are among them only if the rest lacks a block.
        """
        leaving = self._devices.roles.leaving
        return (self._able(chain, phase, leaving) if leaving else None) or self._able(chain, phase)

    def _able(self, chain: Chain, phase: PathPhase, without: Collection[str] = ()) -> frozenset[str] | None:
        roles = self._devices.roles
        if not roles.apart:
            return None
        blocks = [self._blocks.instances.get(use.block, ()) for use in chain.uses]
        there = roles.among(each.name for each in self._devices if not each.final and each.name not in without)
        return devices_of_phase(blocks, there, phase)

    def admits(self, chain: Chain, path: Path, phase: PathPhase) -> bool:
        """Return whether a path may be used in a phase."""
        within = self._able(chain, phase)
        return within is None or within.issuperset(hop.device for hop in path)

    def first_paths(self, chain: Chain, loads: Mapping[str, float]) -> list[Path | None]:
        """Return the paths with the stages that a chain needs first: one, or one per phase where roles are apart."""
        if not self._devices.roles.apart:
            return [self.path(chain, loads)]
        phases: tuple[PathPhase, ...] = ("prompts", "decodes")
        routes = [self.route(chain, loads, within=self.within(chain, phase)) for phase in phases]
        return [None if route is None else route.path for route in routes]

    def least_loaded(
        self, chain: Chain, loads: Mapping[str, float], groups: int, within: Collection[str] | None
    ) -> Route | None:
        """Return the route over the least loaded devices, or a roomier one if it does not hold `groups` page sets."""
        candidates = [self._candidates(use.block, within) for use in chain.uses]
        chosen = cheapest(by_load(candidates, loads, self._config.hop_cost))
        if chosen is None:
            return None
        route = self._routes.get_route(chain, chosen)
        return self._roomier(chain, candidates, route, groups) if self.holds(route) < groups else route

    def path(self, chain: Chain, loads: Mapping[str, float], warm: bool = False, context: int = 0) -> Path | None:
        """Return the path of `route`."""
        found = self.route(chain, loads, warm, context)
        return None if found is None else found.path

    def route(
        self, chain: Chain, loads: Mapping[str, float], warm: bool = False, context: int = 0, groups: int = 0,
        on_table: OnTable | None = None, within: Collection[str] | None = None,
    ) -> Route | None:  # fmt: skip
        """Return the cheapest route now, or None while a block has no candidate.

        Cheapest by profiles, for a prompt of `context` tokens, where all of the chain has been measured; else by load
        or by bytes read (`config.routing`).

        Args:
            chain: The chain.
            loads: Sequences by device.
            warm: Use only devices that have loaded the blocks.
            context: Tokens of the sequence's context.
            groups: Most page sets that the sequence may need. If the cheapest route cannot hold them, a roomier
                one is returned where there is one.
            on_table: Receives all latency terms of a choice by profiles.
            within: Devices that the path may pass; None: all of them.
        """
        self.turn()
        candidates = [self._candidates(use.block, within) for use in chain.uses]
        if warm:
            candidates = [
                [name for name in some if use.block in self._devices[name].stages.warm]
                for use, some in zip(chain.uses, candidates, strict=True)
            ]
        if self.estimates is not None and self.measured(chain):
            table = self.estimates.table(
                chain, [[self._devices[name] for name in some] for some in candidates], context
            )
            servers = {name: self._devices[name].facts.server for row in table for name in row}
            chosen = cheapest(self.estimates.path_costs(chain, table, servers, context))
            if on_table is not None:
                on_table(chain, table, chosen)
        elif self._config.routing == "least-bytes":
            chosen = self._by_reading(chain, candidates, context)
        else:
            chosen = cheapest(by_load(candidates, loads, self._config.hop_cost))
        if chosen is None:
            return None
        route = self._routes.get_route(chain, chosen)
        return self._roomier(chain, candidates, route, groups) if self.holds(route) < groups else route

    def only(self, chain: Chain) -> Route | None:
        """Return the route over the only instances of a chain's blocks; None if one has several, or none alive."""
        instances, living = self._blocks.instances, self._devices.living
        devices: list[str] = []
        for use in chain.uses:
            where = instances.get(use.block, ())
            if len(where) != 1 or where[0] not in living:
                return None
            devices.append(where[0])
        return self._routes.get_route(chain, tuple(devices))

    def holds(self, route: Route) -> float:
        """Return the page sets that one sequence alone can have along a route."""
        return min((self._devices[name].pages.assured // pages for name, pages in route.weights), default=math.inf)

    def roomier(self, chain: Chain, route: Route, groups: int, within: Collection[str] | None = None) -> Route:
        """Return a roomier route for a sequence of `groups` page sets, or the given route if there is none.

        Considers all devices that are alive or will be replaced; of those `within`, if given.
        """
        soon = [
            [
                name
                for name in self._blocks.instances.get(use.block, ())
                if not self._devices[name].final and (within is None or name in within)
            ]
            for use in chain.uses
        ]
        return self._roomier(chain, soon, route, groups)

    def spoils(self, chains: Iterable[Chain], block: str, source: str, target: str | None = None) -> bool:
        """Return whether a change of a block's instances would limit the length of sequences of these chains.

        The change: no instance on `source` any more, but one on `target` if that is given. Without it, the limit is the
        model's context, or what fits now if that is less.
        """
        where = [name for name in self._blocks.instances.get(block, ()) if name != source]
        after = {block: where if target is None or target in where else [*where, target]}
        for chain in chains:
            if any(use.block == block for use in chain.uses):
                groups = groups_for(chain.spec, chain.spec.virtual_tokens + chain.spec.max_model_len)
                if self._most(chain, after, groups) < min(groups, self._most(chain, {}, groups)):
                    return True
        return False

    def _by_reading(self, chain: Chain, candidates: Sequence[Sequence[str]], context: int) -> tuple[str, ...] | None:
        """Choose the path on which all steps read the fewest bytes with the new sequence.

        A change of device costs `hop_cost` hundredths of the bytes that the chain reads.
        """
        enters, adds = self._read(chain, candidates, context)
        own = sum(self._blocks.block(use.block).nbytes for use in chain.uses)
        return cheapest(by_bytes(adds, enters, self._config.hop_cost / 100 * own))

    def _read(
        self, chain: Chain, candidates: Sequence[Sequence[str]], context: int
    ) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Return the bytes that steps read now by device, and what each block adds there over all its sequences."""
        devices = {name: self._devices[name] for name in dict.fromkeys(name for some in candidates for name in some)}
        enters = {name: float(self._reads.step_bytes(device)) for name, device in devices.items()}
        groups = groups_for(chain.spec, context)
        adds: list[dict[str, float]] = []
        for use, some in zip(chain.uses, candidates, strict=True):
            nbytes = self._blocks.block(use.block).nbytes
            row = {}
            for name in some:
                device = devices[name]
                own = groups * use.kv_layers * device.pages.page_bytes
                row[name] = added(device.passing.count, own, nbytes, self._reads.uses(name, use.block))
            adds.append(row)
        return enters, adds

    def reading(self, chain: Chain, path: Path, context: int) -> float:
        """Return the bytes that a new sequence on this path adds to all steps, plus those of the steps it waits for.

        See `policy.routing.bytes_read`.
        """
        enters, adds = self._read(chain, [(name,) for name in devices_of(chain, path)], context)
        return sum(enters[hop.device] for hop in path) + sum(added for row in adds for added in row.values())

    def turn(self) -> int:
        """Advance and return the start of the rotation over very many devices."""
        self._turn += 7919
        return self._turn

    def hops(self, chain: Chain, devices: tuple[str, ...]) -> Path:
        """Return the path over these devices, one for each block of a chain; cached."""
        return self._routes.get_route(chain, devices).path

    def along(self, chain: Chain, path: Path) -> Route:
        """Return the route of a path; cached."""
        return self._routes.along(chain, path)

    def allows(self, chain: Chain, path: Path) -> bool:
        """Return whether a path could be chosen now, and its stages are loaded."""
        devices = devices_of(chain, path)
        held = ((use.block, name) for use, name in zip(chain.uses, devices, strict=True))
        there = all(
            name in self._blocks.instances.get(block, ())
            and self._devices.alive(name)
            and (block, name) not in self._blocks.leaving
            for block, name in held
        )
        return there and not self.missing(chain, path)

    def missing(self, chain: Chain, path: Path) -> list[tuple[str, Stage]]:
        """Return the stages of a path that are not loaded, whether or not they are being loaded."""
        return self.lacking(self._routes.along(chain, path))

    def lacking(self, route: Route) -> list[tuple[str, Stage]]:
        """Return the stages of a route that are not loaded, whether or not they are being loaded."""
        devices = self._devices
        return [(device, stage) for device, stage in route.stages if stage not in devices[device].stages.loaded]

    # -- internals -----------------------------------------------------------------------------------------------------

    def _candidates(self, block: str, within: Collection[str] | None = None) -> Sequence[str]:
        """Return living devices with a block; of very many a few, different ones each time.

        Instances that are about to be removed count only where there is no other.
        """
        where = self._blocks.instances.get(block, [])
        if within is not None:
            where = [name for name in where if name in within]
        if self._blocks.leaving:
            stay = [name for name in where if (block, name) not in self._blocks.leaving]
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
        """Return the page sets, up to about `groups`, that one sequence alone can have over a chain's instances.

        `instead`: devices of blocks with a changed plan.
        """
        where = self._blocks.instances
        soon = [
            [name for name in instead.get(use.block, where.get(use.block, ())) if not self._devices[name].final]
            for use in chain.uses
        ]  # fmt: skip
        capacity = {name: self._devices[name].pages.assured for some in soon for name in some}
        layers = [use.kv_layers for use in chain.uses]
        found = (choose_roomy(soon, layers, capacity, most) for most in (groups, max(groups // 2, 1), 1))
        return max(
            (self.holds(self._routes.get_route(chain, chosen)) for chosen in found if chosen is not None), default=0
        )

    def _roomier(self, chain: Chain, candidates: Sequence[Sequence[str]], route: Route, groups: int) -> Route:
        """Return a route that holds longer sequences than this one, or this one if none is found."""
        capacity = {name: self._devices[name].pages.assured for some in candidates for name in some}
        chosen = choose_roomy(candidates, [use.kv_layers for use in chain.uses], capacity, groups)
        other = route if chosen is None else self._routes.get_route(chain, chosen)
        return other if self.holds(other) > self.holds(route) else route
