"""What is planned: groups that wait, queues that serve them, and weights that come and go (QL-03, QL-04, QL-18).

    Problem -> solver -> GroupPlan: the order of the groups in each queue, and its score

Everything is an integer: times in us, sizes in bytes. A plan is a function of its problem, on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

#: Slowness of a queue with the times of the groups themselves.
SAME_SPEED = 1024
#: Most members of all groups together, and the latest time from now in us: so that no sum leaves 64 bits.
MOST_MEMBERS = 1 << 20
HORIZON = 1 << 42

Solver = Literal["insertion", "annealing", "present", "cp-sat", "milp", "paper"]
#: Groups of each queue, in order.
Orders = tuple[tuple[int, ...], ...]


class Spread(NamedTuple):
    """A time in us: mean and standard deviation."""

    mean: int
    sigma: int = 0


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """A group that waits. Its members run in their order, one after another as places get free.

    Fields:
        id: Its number; it has no meaning here.
        chain: Number of its model among the problem's chains.
        members: Number of its requests.
        due: Its first member's deadline, in us of the problem's clock.
        drain: Time until its last member has started, and the queue is free for the next group; it is the paper's W.
        execution: Time from a member's start to its end. Both in a queue of `SAME_SPEED`.
        priority: Lower ones are served first, strictly (QL-21).
        waits_only: Whether the deadline is that of the last member's start, not of its end (QL-21).
        pinned: Number of the queue where members have run already: the group stays there (QL-12).
    """

    id: int
    chain: int
    members: int
    due: int
    drain: Spread
    execution: Spread
    priority: int = 0
    waits_only: bool = False
    pinned: int | None = None


@dataclass(frozen=True, slots=True)
class PlanQueue:
    """A virtual queue: a cell that serves groups one after the other (QL-04).

    Fields:
        room: Bytes of weights that it holds.
        resident: Chains of which the weights are there.
        busy: Time until it can start the first group: what runs there now.
        ends: By resident chain, the time until what runs of it has ended, as it has to before the chain leaves; none:
            nothing runs.
        exclusive: Whether one chain is there at a time: all other ones leave for it, even where there is room for them.
    """

    name: str
    room: int
    resident: tuple[int, ...] = ()
    busy: Spread = Spread(0)
    ends: tuple[int, ...] = ()
    exclusive: bool = False

    def __post_init__(self) -> None:
        if self.ends and len(self.ends) != len(self.resident):
            raise ValueError("a queue has an end for each resident chain, or none")


@dataclass(frozen=True, slots=True)
class QueueRates:
    """How fast a queue works (QL-22).

    Fields:
        slowness: By chain, the factor of a group's times in 1/1024; 0: the queue cannot run the chain.
        drains: By chain, that of a group's drain, which also depends on how many of its members run at a time; none:
            `slowness`.
        load_us: Time of any load, beside its bytes.
        cold_us, warm_us: Time per MiB that comes from disk, and of one that is in the host's memory.
        warm: Blocks that are in the host's memory.
        keeps: Whether blocks that leave stay in the host's memory.
    """

    slowness: tuple[int, ...]
    load_us: int = 0
    cold_us: int = 0
    warm_us: int = 0
    warm: frozenset[int] = frozenset()
    keeps: bool = False
    drains: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.drains and len(self.drains) != len(self.slowness):
            raise ValueError("a queue has a factor of drains for each chain, or none")

    def drain_factor(self, chain: int) -> int:
        """Return the factor of a drain in 1/1024."""
        return (self.drains or self.slowness)[chain]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a planner solves.

    Fields:
        now: Time in us, of the same clock as the deadlines.
        chains: Blocks of each chain, by number; chains are in the order of their names.
        sizes: Bytes of each block.
        rates: By queue.
        scenarios: Number of drawn scenarios over which times are averaged (equation 12).
        alpha: Share of the scenarios in which a group has to be on time.
        rounds: Moves that annealing tries; 0: insertion only.
        seed: Of scenarios and moves.
        common: Relative standard deviation of the error that all times of a scenario have in common, in 1/1024.
    """

    now: int
    groups: tuple[PlanGroup, ...]
    queues: tuple[PlanQueue, ...]
    chains: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    rates: tuple[QueueRates, ...]
    scenarios: int = 32
    alpha: float = 0.95
    rounds: int = 0
    seed: int = 0
    common: int = 0

    def __post_init__(self) -> None:
        if not self.queues or len(self.rates) != len(self.queues):
            raise ValueError("a problem has at least one queue, and rates for each")
        if not 0.0 < self.alpha < 1.0 or not 1 <= self.scenarios <= 1024 or self.rounds < 0:
            raise ValueError("alpha is between 0 and 1, scenarios 1 to 1024, rounds at least 0")
        if not 0 <= self.common <= SAME_SPEED:
            raise ValueError("common is between 0 and 1024")
        if sum(group.members for group in self.groups) > MOST_MEMBERS:
            raise ValueError(f"a problem has at most {MOST_MEMBERS:,} requests")
        for group in self.groups:
            if not 0 <= group.chain < len(self.chains) or group.members < 1:
                raise ValueError(f"group {group.id} has no chain, or no members")
            if not any(self.able(queue, group) for queue in range(len(self.queues))):
                raise ValueError(f"no queue can run group {group.id}, or not the one that it has begun in")

    def runs(self, queue: int, chain: int) -> bool:
        """Return whether a queue can run a chain: it is fast enough, and holds the weights."""
        return self._bytes(chain) <= self.queues[queue].room and self.rates[queue].slowness[chain] > 0

    def room_with(self, queue: int, chain: int) -> int:
        """Return the bytes of weights that a queue holds while it has a chain; its own where it is exclusive."""
        return self._bytes(chain) if self.queues[queue].exclusive else self.queues[queue].room

    def _bytes(self, chain: int) -> int:
        return sum(self.sizes[block] for block in set(self.chains[chain]))

    def able(self, queue: int, group: PlanGroup) -> bool:
        """Return whether a group may be in a queue: that can run it, and it has not begun in another one."""
        return group.pinned in (None, queue) and self.runs(queue, group.chain)

    @property
    def spare(self) -> int:
        """Scenarios in which a group may be late and still counts as on time."""
        return int((1.0 - self.alpha) * self.scenarios + 1e-9)


@dataclass(frozen=True, slots=True, order=True)
class PlanScore:
    """What an order costs; smaller is better, earlier fields first.

    Fields:
        classes: By priority, the most urgent first: members of groups that are late with a probability above
            1 - alpha, and the mean lateness in us, summed over members. Groups that would be late alone and first, with
            a probability above alpha, count for neither, so that they drag no other ones with them.
        completion: Mean completion in us, summed over members.
    """

    classes: tuple[tuple[int, int], ...]
    completion: int

    @property
    def late(self) -> int:
        """Members of groups that will most likely be late."""
        return sum(late for late, _ in self.classes)

    @property
    def lateness(self) -> int:
        """Mean lateness in us, summed over members."""
        return sum(lateness for _, lateness in self.classes)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The order of groups in each queue, by the problem's queues.

    Fields:
        orders: Ids of groups, not their numbers in the problem.
        solver: What found it.
    """

    orders: Orders
    score: PlanScore
    solver: Solver


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """A plan that is not used. `why`: in a few words."""

    why: str
