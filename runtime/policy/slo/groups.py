"""Waiting requests by group: those that are alike for all that a plan decides (QL-03).

A group is a chain, a priority, a class of objectives, and one of prompts and answers. Its members run in their order of
deadline. Groups hold names and sums, no prompts.

    key        16 groups at most, in their members' order: each but the last of `size` members at most
    group      open: takes new members; started: a member has run, it takes none any more
    place      0, unless there is a plan (`policy.slo.queues`)

So a queue of 400,000 requests is about a hundred groups: the last one of a key holds what is far away, and is split
when the groups before it have ended. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.policy.slo.forecast import Occupancy
from runtime.policy.slo.lengths import AnswerClass
from runtime.policy.slo.objectives import TimeObjective

#: Groups of one key; the last one has no limit of its members.
_GROUPS = 16
#: Changed groups that are told one by one.
_TOUCHED = 64

#: Order within a group: deadline in ns, number of the request's arrival.
Turn = tuple[int, int]
#: Place in the order of all groups: priority, place by the plan, deadline in ns.
Rank = tuple[int, int, int]


class GroupKey(NamedTuple):
    """What the members of a group have in common.

    Fields:
        objective: The shortest of its class; None for requests without a deadline of their own.
        chain: Version of the chain that they run on.
        late: Whether they cannot be on time any more.
    """

    priority: int
    objective: TimeObjective | None
    answers: AnswerClass
    chain: str = ""
    late: bool = False


class Member(NamedTuple):
    """A waiting request: tokens to compute before its next one, tokens of its answer so far, and their limit."""

    seq: str
    context: int
    made: int
    most: int


@dataclass(slots=True)
class Group:
    """A group with waiting or running members.

    Fields:
        id: Its number; none is used twice.
        cell: Name of the cell that it is assigned to; empty while there is no assignment.
        place: Its place in the order of its cell, before deadlines.
        planned: Whether a plan gave it its place.
        later: By how much its deadlines count later in the order, in ns (`policy.slo.short_first`).
        started: Whether a member of it has run.
        live: Number of its members that have not ended.
        context, made, most: Sums over the waiting members.
        changes: Number of its changes of members.
        work: What a mean member's work was found to be, after the versions of what that was found from; None where it
            was not.
    """

    id: int
    key: GroupKey
    cell: str = ""
    place: int = 0
    planned: bool = False
    later: int = 0
    started: bool = False
    live: int = 0
    context: int = 0
    made: int = 0
    most: int = 0
    changes: int = 0
    work: tuple[tuple[int, int, int, str], Occupancy] | None = None
    _turns: list[Turn] = field(default_factory=list)
    _members: dict[Turn, Member] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of waiting members."""
        return len(self._turns)

    def __iter__(self) -> Iterator[Member]:
        """Iterate over the waiting members in their order."""
        return (self._members[turn] for turn in self._turns)

    @property
    def due(self) -> int:
        """The first waiting member's deadline in ns."""
        return self._turns[0][0]

    @property
    def last_due(self) -> int:
        """The last waiting member's deadline in ns."""
        return self._turns[-1][0]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Where it stands among all groups with waiting members."""
        due, number = self._turns[0]
        return (self.key.priority, self.place, due + self.later, number)

    @property
    def rank(self) -> Rank:
        """Where its first waiting member stands."""
        return (self.key.priority, self.place, self._turns[0][0] + self.later)

    @property
    def mean(self) -> tuple[float, int, int]:
        """Tokens to compute, tokens made and the limit of the mean waiting member."""
        count = len(self._turns)
        return self.context / count, round(self.made / count), round(self.most / count)

    def _add(self, turn: Turn, member: Member) -> None:
        insort(self._turns, turn)
        self._members[turn] = member
        self._count(member, 1)

    def _remove(self, turn: Turn) -> Member:
        member = self._members.pop(turn)
        del self._turns[bisect_left(self._turns, turn)]
        self._count(member, -1)
        return member

    def _count(self, member: Member, sign: int) -> None:
        self.changes += 1
        self.context += sign * member.context
        self.made += sign * member.made
        self.most += sign * member.most

    def _split(self, rest: Group, size: int) -> list[str]:
        """Give all but the first members to another group; return their names."""
        later = self._turns[size:]
        for turn in later:
            rest._add(turn, self._remove(turn))
        return [rest._members[turn].seq for turn in later]


class WaitingGroups:
    """The groups of one scheduler. Adding and removing a member cost O(log members), a look O(groups of the chain).

    Args:
        opened, ended: Called with each new group when it has its first member, and with each one that has none left.
    """

    def __init__(
        self, opened: Callable[[Group], None] = lambda group: None, ended: Callable[[Group], None] = lambda group: None
    ) -> None:
        self._opened, self._ended = opened, ended
        self._groups: dict[int, Group] = {}
        self._by_key: dict[GroupKey, list[Group]] = {}
        self._by_chain: dict[str, dict[int, Group]] = {}
        self._of: dict[str, Group] = {}
        self._turns: dict[str, Turn] = {}
        self._firsts: dict[str, dict[str, Member]] = {}
        self._last = self._told = 0
        #: Most members of a group: the paper's delta x mean batch.
        self.size = 1 << 30
        #: Changes with places and cells of groups, and when the waiting members of many groups have changed.
        self.version = 0
        #: Groups by number that have other waiting members since the latest version began.
        self.touched: dict[int, Group] = {}

    def __len__(self) -> int:
        """Return the number of groups, with those of which all members run."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups with waiting members, in their order."""
        return iter(sorted((group for group in self._groups.values() if len(group)), key=lambda group: group.order))

    def get(self, number: int) -> Group | None:
        """Return a group, None if it has ended."""
        return self._groups.get(number)

    def all(self) -> Iterator[Group]:
        """Iterate over all groups, the oldest first."""
        return iter(self._groups.values())

    def group_of(self, seq: str) -> Group | None:
        """Return the group of a live request, None for one that never waited."""
        return self._of.get(seq)

    def first(self, chain: str, cell: str = "") -> Member | None:
        """Return the first waiting request of a chain in a cell; None if none waits there."""
        return self._firsts_of(chain).get(cell)

    def firsts(self, chain: str) -> list[Member]:
        """Return the first waiting request of a chain in each cell, by the cells' names."""
        return [member for _, member in sorted(self._firsts_of(chain).items())]

    def waiting(self) -> Iterator[Group]:
        """Iterate over the groups with waiting members, in any order."""
        return (group for group in self._groups.values() if group._turns)

    def reorder(self) -> None:
        """Note that places or cells of groups have changed."""
        self._firsts.clear()
        self.begin_version()

    def begin_version(self) -> None:
        """Begin a version: what was found from all groups before does not hold any more."""
        self.version += 1
        self.touched = {}

    def _touch(self, *groups: Group) -> None:
        self.touched.update((group.id, group) for group in groups)
        if len(self.touched) > _TOUCHED:
            self.begin_version()

    def _firsts_of(self, chain: str) -> dict[str, Member]:
        """Return the first waiting request by cell; kept until a group of the chain changes."""
        known = self._firsts.get(chain)
        if known is None:
            best: dict[str, Group] = {}
            for group in self._by_chain.get(chain, {}).values():
                if len(group) and (group.cell not in best or group.order < best[group.cell].order):
                    best[group.cell] = group
            known = self._firsts[chain] = {cell: next(iter(group)) for cell, group in best.items()}
        return known

    def take_first(self, group: Group, count: int) -> Group:
        """Return a new group with the first waiting members of a group, at least 1; the group itself if that is all."""
        if count >= len(group) and not group.started:
            return group
        rest, turns = self._new(group.key, before=group), group._turns[:count]
        for turn in turns:
            member = group._remove(turn)
            rest._add(turn, member)
            self._of[member.seq] = rest
        group.live, rest.live = group.live - len(turns), len(turns)
        self._told = rest.id
        if not group.live:
            self._remove_group(group)
        self._firsts.pop(group.key.chain, None)
        self._touch(group, rest)
        return rest

    def of_chain(self, chain: str) -> list[Group]:
        """Return the groups of a chain with waiting members, in their order."""
        groups = (group for group in self._by_chain.get(chain, {}).values() if len(group))
        return sorted(groups, key=lambda group: group.order)

    def add(self, key: GroupKey, turn: Turn, member: Member) -> None:
        """Add a waiting request to its group: that which it was in before, else the last one of its key."""
        group = self._of.get(member.seq)
        if group is None or group.key != key:
            self.end_member(member.seq)
            group = self._of[member.seq] = self._open(key)
            group.live += 1
        group._add(turn, member)
        self._touch(group)
        self._turns[member.seq] = turn
        if group.id > self._told:
            self._told = group.id
            self._opened(group)
        self._firsts.pop(key.chain, None)

    def remove(self, seq: str) -> None:
        """Remove a request that waits no more. It stays a live member until `end_member`."""
        group = self._of[seq]
        group._remove(self._turns.pop(seq))
        self._touch(group)
        self._firsts.pop(group.key.chain, None)

    def start(self, seq: str) -> None:
        """Record that a request runs: from now on its group takes no new members."""
        group = self._of.get(seq)
        if group is not None:
            group.started = True

    def end_member(self, seq: str) -> None:
        """Remove a request that neither waits nor runs."""
        group = self._of.pop(seq, None)
        if group is None:
            return
        group.live -= 1
        if not group.live:
            self._remove_group(group)
            self._firsts.pop(group.key.chain, None)

    def _remove_group(self, group: Group) -> None:
        key = group.key
        del self._groups[group.id], self._by_chain[key.chain][group.id]
        self._by_key[key].remove(group)
        self._ended(group)
        if not self._by_chain[key.chain]:
            del self._by_chain[key.chain]
        if not self._by_key[key]:
            del self._by_key[key]
        else:
            self._split_last(key)

    def _open(self, key: GroupKey) -> Group:
        """Return the last group of a key, a new one if that is full or has started."""
        groups = self._by_key.setdefault(key, [])
        waiting = sum(not group.started for group in groups)
        if groups and not groups[-1].started and (len(groups[-1]) < self.size or waiting >= _GROUPS):
            return groups[-1]
        return self._new(key)

    def _new(self, key: GroupKey, before: Group | None = None) -> Group:
        self._last += 1
        group = self._groups[self._last] = Group(self._last, key)
        groups = self._by_key.setdefault(key, [])
        groups.insert(len(groups) if before is None else groups.index(before), group)
        self._by_chain.setdefault(key.chain, {})[group.id] = group
        return group

    def _split_last(self, key: GroupKey) -> None:
        """Split the last group of a key where it is larger than a group may be."""
        last = self._by_key[key][-1]
        if last.started or len(last) <= self.size:
            return
        rest = self._new(key)
        for seq in last._split(rest, self.size):
            self._of[seq] = rest
            last.live, rest.live = last.live - 1, rest.live + 1
        self._touch(last, rest)
        self._told = rest.id
        self._opened(rest)
