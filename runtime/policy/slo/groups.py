"""Waiting requests by group: those that are alike for all that a plan decides (QL-03).

A group is a priority, a deadline's length, a model, and a class of prompts and answers. Its members run in their order
of arrival. Groups hold names and sums, no prompts. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.policy.slo.lengths import AnswerClass


class GroupKey(NamedTuple):
    """What the members of a group have in common. `slo_ms`: None for requests without a deadline of their own."""

    priority: int
    slo_ms: int | None
    answers: AnswerClass


@dataclass(slots=True)
class Group:
    """A group that waits.

    Fields:
        members: Deadline in ns by sequence, in the order of their addition.
        context: Tokens to compute before their next ones, of all members.
        made: Tokens of their answers so far, of all members.
        most: Limits of their answers, of all members.
    """

    key: GroupKey
    members: dict[str, int] = field(default_factory=dict)
    context: int = 0
    made: int = 0
    most: int = 0

    @property
    def due(self) -> int:
        """The first member's deadline in ns."""
        return next(iter(self.members.values()))

    @property
    def mean(self) -> tuple[float, int, int]:
        """Tokens to compute, tokens made and the limit of the mean member."""
        count = len(self.members)
        return self.context / count, round(self.made / count), round(self.most / count)


class WaitingGroups:
    """The groups of what waits. Adding and removing a member cost O(1)."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups in their order: by priority, then by the first member's deadline."""
        return iter(sorted(self._groups.values(), key=lambda group: (group.key.priority, group.due)))

    def add(self, key: GroupKey, seq: str, due: int, context: int, made: int, most: int) -> None:
        """Add a last member to its group."""
        group = self._groups.setdefault(key, Group(key))
        group.members[seq] = due
        group.context += context
        group.made += made
        group.most += most

    def remove(self, key: GroupKey, seq: str, context: int, made: int, most: int) -> None:
        """Remove a member, with the numbers that it was added with."""
        group = self._groups[key]
        del group.members[seq]
        group.context -= context
        group.made -= made
        group.most -= most
        if not group.members:
            del self._groups[key]
