"""Take a snapshot of a cluster for users: devices, block instances, chains, migrations. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from runtime.chains import devices_of
from runtime.policy.slo.objectives import TimeObjective
from runtime.scheduler.observe.measured_times import KINDS, Kind

if TYPE_CHECKING:
    from runtime.scheduler.devices.devices import Device
    from runtime.scheduler.devices.roles import DeviceRoles
    from runtime.scheduler.order.planning import PlanState
from runtime.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class DevicePicture:
    """One device.

    Fields:
        role: What it runs (`policy.roles.role`).
        next_role: What it runs once what is there has ended, while its role changes; empty otherwise.
        pid: Process of its agent, 0 if it has none.
        pages_used: Pages taken, of `pages`.
        weights: Bytes of loaded weights.
        weights_limit: Bytes of weights that it may hold, 0 for no limit.
        host_weights: Bytes of unloaded weights that its agent keeps in host memory.
        sequences: Sequences with a path over it.
        queued: Rows that wait there.
        steps, busy_ns, tokens: Totals since its agent started.
        links: Other devices with a direct tensor link, and the state of the link.
        host_memory: Bytes of host memory for K and V of sequences that gave way, and for weights that wait.
        host_kv: Bytes of K and V there, as last reported.
        lent: Pages that it holds for other devices, by debtor (IL-11).
        borrowed: Pages that other devices hold for it, by creditor.
    """

    device: str
    role: str
    alive: bool
    pid: int
    pages: int
    pages_used: int
    weights: int
    weights_limit: int
    host_weights: int
    sequences: int
    queued: int
    stages: tuple[str, ...]
    loading: tuple[str, ...]
    steps: int
    busy_ns: int
    tokens: int
    links: Mapping[str, str]
    host_memory: int = 0
    host_kv: int = 0
    next_role: str = ""
    lent: Mapping[str, int] = field(default_factory=dict)
    borrowed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstancePicture:
    """A block on a device.

    Fields:
        nbytes: Bytes of its weights.
        sequences: Sequences that run through it now.
        queue: Rows that wait for it there.
        batch_limit: Limit of sequences on the device.
    """

    block: str
    device: str
    nbytes: int
    sequences: int
    queue: int
    batch_limit: int


@dataclass(frozen=True, slots=True)
class ChainPicture:
    """The version of a model that new sequences get.

    Fields:
        up: Whether each of its blocks has a living device.
        paths: Devices of its blocks, and the tokens that have passed that path.
    """

    model: str
    version: str
    blocks: tuple[str, ...]
    up: bool
    running: int
    waiting: int
    paths: tuple[tuple[tuple[str, ...], int], ...]


@dataclass(frozen=True, slots=True)
class MovePicture:
    """A migration under way, from one device to one other.

    Fields:
        tokens: Tokens requested so far.
        stage: Requests to the destination so far.
        held: Whether the sequence gets no rows, for the last stage.
    """

    seq: str
    source: str
    target: str
    tokens: int
    stage: int
    held: bool


@dataclass(frozen=True, slots=True)
class EstimatePicture:
    """How far the latest estimates of a kind were from what was measured (BL-21).

    Fields:
        count: Estimates that are compared.
        seconds: Median of what was measured.
        error: Median of the estimate's distance, as a share of what was measured.
        bias: Median of the same with its sign; above 0: estimated too long.
    """

    kind: str
    count: int
    seconds: float
    error: float
    bias: float


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """A group of waiting requests (QL-03). Times in seconds from now.

    Fields:
        slo_ms, ttft_slo_ms: The shortest of the group's class; None for requests without such a deadline.
        waiting: Number of its members.
        due: Deadline of the first of them.
        first_end, last_end: Forecasts of the ends of the first and the last of them; of their first tokens, with
            `ttft_slo_ms`.
    """

    id: str
    model: str
    priority: int
    slo_ms: int | None
    ttft_slo_ms: int | None
    waiting: int
    due: float
    first_end: float
    last_end: float


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """What waits, where the order is by deadline.

    Fields:
        groups: In their order.
        virtual: The virtual queue of each cell: the ids of its groups. One named `all` where sequences run
            on any devices.
        planned: The planned order; None where no order is planned.
    """

    plan: str
    waiting: int
    groups: tuple[GroupPicture, ...]
    virtual: tuple[Mapping[str, Any], ...]
    planned: PlanState | None = None


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """The whole cluster.

    Fields:
        estimates: Of hops, loads, moves, requests, copies to host memory and back, and prompts, where there are any.
        queue: None where the order is by arrival.
        migration_totals: Fields of `scheduler.migration.migration.MigrationCounts`.
        starved: Running sequences that wait for pages.
    """

    devices: tuple[DevicePicture, ...]
    instances: tuple[InstancePicture, ...]
    chains: tuple[ChainPicture, ...]
    migrations: tuple[MovePicture, ...]
    migration_totals: Mapping[str, int]
    starved: int
    estimates: tuple[EstimatePicture, ...] = ()
    queue: QueuePicture | None = None

    def document(self) -> dict[str, Any]:
        """Return the snapshot as a JSON-compatible dictionary."""
        return asdict(self)


def picture_of(scheduler: Scheduler) -> ClusterPicture:
    """Take a snapshot now. O(sequences + instances)."""
    through: Counter[tuple[str, str]] = Counter()
    for sequence in scheduler.sequences.values():
        if sequence.path:
            through.update(
                zip((use.block for use in sequence.chain.uses), devices_of(sequence.chain, sequence.path), strict=True)
            )
    debts = scheduler.lending.loans.debts()
    placed = [(block, device) for block, devices in scheduler.block_map.instances.items() for device in devices]
    return ClusterPicture(
        devices=tuple(
            _device(each, scheduler.devices.roles, scheduler.times.loads.host_bytes(each.name), debts)
            for each in sorted(scheduler.devices, key=lambda each: (len(each.name), each.name))
        ),
        instances=tuple(_instance(scheduler, block, device, through) for block, device in placed),
        chains=_chains(scheduler),
        migrations=tuple(
            MovePicture(move.sequence.seq, part.source, part.target, move.upto, move.stages, move.sequence.waits.held)
            for move in scheduler.migrations
            for part in move.parts
        ),
        migration_totals=asdict(scheduler.migrations.counts()),
        starved=scheduler.starved,
        estimates=tuple(made for kind in KINDS if (made := _estimates(scheduler, kind)) is not None),
        queue=_queue(scheduler),
    )


def _ms(objective: TimeObjective | None, first_token: bool) -> int | None:
    return objective.ms if objective is not None and objective.first_token == first_token else None


def _queue(scheduler: Scheduler) -> QueuePicture | None:
    order = scheduler.order
    if order is None:
        return None
    forecasts = order.forecasts.by_group(order.now)
    groups = tuple(
        GroupPicture(
            id=str(each.id),
            model=each.key.answers.model,
            priority=each.key.priority,
            slo_ms=_ms(each.key.objective, first_token=False),
            ttft_slo_ms=_ms(each.key.objective, first_token=True),
            waiting=each.waiting,
            due=(each.due - order.now) / 1e9,
            first_end=(each.first - order.now) / 1e9,
            last_end=(each.last - order.now) / 1e9,
        )
        for each in forecasts
    )
    by_cell: dict[str, list[str]] = {name: [] for name in order.forecasts.queues.cells}
    for told in forecasts:
        by_cell.setdefault(told.cell, []).append(str(told.id))
    cells = tuple({"cell": name or "all", "groups": tuple(ids)} for name, ids in by_cell.items())
    planned = None if scheduler.plans is None else scheduler.plans.picture()
    return QueuePicture(order.plan, sum(each.waiting for each in groups), groups, cells, planned)


def _estimates(scheduler: Scheduler, kind: Kind) -> EstimatePicture | None:
    outcomes = scheduler.times.outcomes(kind)
    if not outcomes:
        return None
    off = [(each.estimate - each.measured) / max(each.measured, 1e-9) for each in outcomes]
    seconds = median(each.measured for each in outcomes)
    return EstimatePicture(kind, len(outcomes), seconds, median(map(abs, off)), median(off))


def _device(each: Device, roles: DeviceRoles, host_weights: int, debts: Mapping[tuple[str, str], int]) -> DevicePicture:
    stages, work = each.stages, each.work
    return DevicePicture(
        device=each.name,
        role=roles[each.name].name,
        alive=each.alive,
        pid=each.facts.pid if each.alive else 0,
        pages=each.pages.capacity,
        pages_used=each.pages.used,
        weights=stages.nbytes,
        weights_limit=each.plan.limit,
        host_weights=host_weights,
        sequences=each.passing.count,
        queued=work.queued,
        stages=tuple(stage.id for stage in stages.loaded),
        loading=tuple(sorted(stage.id for stage in stages.loading)),
        steps=work.steps,
        busy_ns=work.busy,
        tokens=work.tokens,
        links=dict(work.links) if each.alive else {},
        host_memory=each.facts.host_memory,
        host_kv=each.host[0] if each.alive else 0,
        next_role=roles.leaving.get(each.name, ""),
        lent={debtor: pages for (debtor, creditor), pages in debts.items() if creditor == each.name},
        borrowed={creditor: pages for (debtor, creditor), pages in debts.items() if debtor == each.name},
    )


def _instance(scheduler: Scheduler, block: str, device: str, through: Mapping[tuple[str, str], int]) -> InstancePicture:
    queue = scheduler.devices[device].work.queues.get(block, 0)
    sequences, nbytes = through.get((block, device), 0), scheduler.block_map.block(block).nbytes
    return InstancePicture(block, device, nbytes, sequences, queue, scheduler.max_running)


def _chains(scheduler: Scheduler) -> tuple[ChainPicture, ...]:
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for sequence in scheduler.sequences.values():
        (running if sequence.path else waiting)[sequence.chain.version] += 1
    pictures = []
    for chain in scheduler.chains():
        paths = tuple((devices_of(chain, each.path), each.tokens) for each in scheduler.used_paths.of_chain(chain))
        blocks, version = tuple(use.block for use in chain.uses), chain.version
        pictures.append(
            ChainPicture(
                chain.model, version, blocks, scheduler.block_map.up(chain), running[version], waiting[version], paths
            )
        )
    return tuple(pictures)
