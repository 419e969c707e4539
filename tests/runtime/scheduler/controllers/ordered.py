"""Random schedules of placement orders from outside, beside all that the controllers decide by themselves.

Loads are slow, messages late, devices die. One seed gives one schedule.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product

from runtime.chains import Chain, Surrogate, devices_of
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, SpeculationConfig
from runtime.engine.fakes.integer_model import counting_model, surrogate_of
from runtime.kv.pages import groups_for
from runtime.scheduler.controllers.actions import Drain, MoveRequest
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

A = counting_model("a", "1 2* 3* 4* 5* 6", max_model_len=64)
B = counting_model("b", "11 2* 3* 14* 15* 16", max_model_len=64)
CUT = (2, 3, 4)
#: `LAST`: requests and orders come until then. `END`: clock ticks come until then.
LAST, END = 400 * MS, 2500 * MS
PATIENCE = 100 * MS


@dataclass
class Insisted:
    """An instance that is ordered to leave again and again until it has left.

    Fields:
        since: When the first order came, in ns.
        left: When it had left, in ns.
        refused: Reason of the latest refusal.
        rightly: Whether removing it would really shorten the longest possible sequence.
    """

    block: str
    source: str
    since: int
    left: int | None = None
    refused: str | None = None
    rightly: bool = False


@dataclass
class Ordered(VirtualCluster):
    """A virtual cluster with random placement orders.

    Fields:
        marked: Since when (ns) each instance has been about to leave, by (block, device).
        slowest: The longest time (ns) that an instance was about to leave.
    """

    seed: int = 0
    insisted: list[Insisted] = field(default_factory=list)
    marked: dict[tuple[str, str], int] = field(default_factory=dict)
    slowest: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.models, self.cuts = [A, B], [CUT, CUT]
        self.devices, self.pages = rng.choice((3, 3, 4)), rng.choice((40, 60, 90, 160))
        jitter, slow = rng.choice((0, 1, 4)) * MS, rng.choice((2, 20, 50)) * MS
        self.latency, self.delay = MS // 10, lambda: rng.randrange(jitter + 1)
        self.loading = lambda: rng.randrange(MS, slow + 1)
        self.page_bytes_per_ms = rng.choice((1e9, 1000.0))
        self.agent_config = AgentConfig(recompute_chunk=8, fetch_window=1)
        self.config = _config(rng, self.devices)
        if self.config.speculation.mode != "off":
            self.stand_ins, self.surrogates = [surrogate_of(A, "a~", 2, 3)], {"a": [Surrogate("a~", 2, 3, 1)]}
        super().__post_init__()
        self._plan(rng)

    def _plan(self, rng: random.Random) -> None:
        for number in range(rng.choice((15, 30))):
            one = request(f"s{number}", range(1 + rng.randrange(12)), rng.choice("ab"), max_tokens=rng.randrange(2, 40))
            self.ask(one, at=rng.randrange(LAST))
        blocks = list(dict.fromkeys(use.block for chain in self.scheduler.chains() for use in chain.uses))
        for block in rng.sample(blocks, rng.choice((2, 4))):
            self.at(rng.randrange(20 * MS, LAST // 2), lambda block=block: self._replace(block))
        for block in rng.choices(blocks, k=rng.choice((0, 8))):
            self.at(rng.randrange(20 * MS, LAST), lambda block=block: self._order(block))
        for _ in range(rng.choice((0, 0, 2))):
            self.at(rng.randrange(20 * MS, LAST // 2), lambda: self.kill(f"d{rng.randrange(self.devices)}"))
        self.ticks(5 * MS, END)
        for when in range(0, END, 5 * MS):
            self.at(when, self._watch)

    def check(self) -> None:
        """Check after every twentieth event only: the check takes most of the time."""
        if self._count % 20 == 0:
            super().check()

    # -- orders from outside -------------------------------------------------------------------------------------------

    def where(self, block: str) -> list[str]:
        return list(self.scheduler.block_map.instances.get(block, ()))

    def longest(self, chain: Chain, where: dict[str, list[str]]) -> int:
        """Return the most page groups that a sequence of a chain can have over all paths through these instances."""
        best = 0
        for path in product(*(where[use.block] for use in chain.uses)):
            taken: Counter[str] = Counter()
            for device, use in zip(path, chain.uses, strict=True):
                taken[device] += use.kv_layers
            capacity = {device: self.scheduler.devices[device].pages.capacity for device in taken}
            best = max(best, min(capacity[device] // pages for device, pages in taken.items() if pages))
        return min(best, groups_for(chain.spec, chain.spec.max_model_len))

    def _shortens(self, block: str, source: str) -> bool:
        """Return whether removing the instance would shorten the longest possible sequence of a model."""
        now = {name: list(where) for name, where in self.scheduler.block_map.instances.items()}
        after = now | {block: [name for name in now[block] if name != source]}
        users = [chain for chain in self.scheduler.chains() if any(use.block == block for use in chain.uses)]
        return any(self.longest(chain, after) < self.longest(chain, now) for chain in users)

    def _order(self, block: str) -> None:
        """Give a random order, without regard to other orders."""
        rng, actions, somewhere = self.rng, self.scheduler.control.actions, f"d{self.rng.randrange(self.devices)}"
        if rng.random() < 0.5:
            actions.grow([block], somewhere, "a test's", self.now)
        else:
            source, target = rng.choice(self.where(block)), rng.choice((None, somewhere))
            actions.drain(Drain(frozenset([block]), source, target, self.now + PATIENCE, "a test's"))

    def _replace(self, block: str) -> None:
        source = self.rng.choice(self.where(block))
        target = self.rng.choice([f"d{at}" for at in range(self.devices) if f"d{at}" != source])
        self.insisted.append(Insisted(block, source, self.now))
        self._insist(self.insisted[-1], target)

    def _insist(self, one: Insisted, target: str) -> None:
        """Order a new instance, the moves of sequences to it, and the old one's removal, until the old one has left."""
        scheduler, actions, blocks = self.scheduler, self.scheduler.control.actions, frozenset([one.block])
        if one.source not in self.where(one.block):
            one.left = self.now
            return
        if scheduler.devices.alive(target):
            actions.grow(blocks, target, "a test's", self.now)
            for sequence in scheduler.sequences.values():
                path = devices_of(sequence.chain, sequence.path) if sequence.path else ()
                for use, at in zip(sequence.chain.uses, path, strict=False):
                    if use.block == one.block and at != target:
                        actions.move_request(
                            MoveRequest(sequence.seq, blocks, at, target, self.now + 50 * MS, "a test's")
                        )
            one.refused = actions.drain(Drain(blocks, one.source, target, self.now + PATIENCE, "a test's"))
            one.rightly = self._shortens(one.block, one.source)
        if self.now < END - 500 * MS:
            self.at(self.now + 7 * MS, lambda: self._insist(one, target))

    def _watch(self) -> None:
        """Record how long instances have been about to leave."""
        leaving = self.scheduler.block_map.leaving
        self.marked = {each: self.marked.get(each, self.now) for each in leaving}
        self.slowest = max([self.slowest, *(self.now - since for since in self.marked.values())])


def _config(rng: random.Random, devices: int) -> ClusterConfig:
    control = ControlConfig(
        scaling=rng.random() < 0.7,
        rearranging=rng.random() < 0.7,
        rebalance=rng.choice(("strict", "owner", "least-busy", "recompute")),
        rebalance_margin=1,
        interval_ms=5,
        rearrange_interval_ms=40,
        idle_ms=rng.choice((20, 100)),
        cooldown_ms=20,
        migration_timeout_ms=rng.choice((50, 100)),
        max_migrations=rng.choice((1, 4, 16)),
        bandwidth=1e6,
        crossing_us=1e5,
        low=0.3,
        high=rng.choice((0.5, 0.8)),
    )
    config = ClusterConfig(
        devices=devices,
        placement=rng.choice(("partition", "partition", "replicate", "on-demand")),
        prefill_chunk=8,
        control=control,
        migration_final_sets=1,
        prefix_caching=rng.choice(("off", "active", "cached")),
        dispatch=rng.choice(("placed", "broadcast")),
    )
    predicted = config.prefix_caching == "off" and rng.random() < 0.5
    return replace(config, speculation=SpeculationConfig("exact" if predicted else "off", top=0.5))
