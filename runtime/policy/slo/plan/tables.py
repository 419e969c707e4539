"""Write a problem as columns of integers, which plain Python and compiled code read alike.

All columns lie one after another in one list of int, or in one array of int64 where the kernel is compiled; a `Layout`
says where each begins. Two dimensions are one column: `drain` of group i in scenario s by a queue of rate class k is at
`layout.drain + (k * groups + i) * scenarios + s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from runtime.policy.slo.plan.problem import HORIZON, SAME_SPEED, Problem
from runtime.policy.slo.plan.scenarios import SCORE, Integers, common_factors, samples, shuffled_scores

#: Longest run of groups that moves at once.
LONGEST_RUN = 4


class Layout(NamedTuple):
    """Sizes of a problem, and where its columns begin; (g, i, m, b, s, k): by queue, group, chain, block, scenario,
    rate class.

    Fields:
        spare: Scenarios in which a group may be late.
        classes: Number of priorities.
        longest: Bound of any one time.
        chain, due, members, weight, rank: (i). `due` from now. `weight` is 0 for groups that are late anyway, `rank`
            the number of the priority.
        drain, judged, finish: (k, i, s): time that a group holds its queue, and from its start to the moment that its
            deadline is about, and to its end.
        rate: (g): rate class.
        busy: (g, s).
        able: (g, i): 1 where the group may be in the queue.
        room, load_us, cold_us, warm_us, keeps: (g). `room` is -1 for a queue with one chain at a time.
        resident: (g, m), `warm`: (g, b): 0 or 1.
        ends: (g, m): time until what runs of the chain now has ended.
        first, blocks: The blocks of chain m are `blocks[first[m]:first[m + 1]]`.
        size: (b).
        head, mates: The groups of chain m are `mates[head[m]:head[m + 1]]`.
        users ... best_lengths: Work space of the kernel. By block: users, warm_now; by chain: next_use, used,
            resident_now, gone; by place in a queue: following, loads, upto; by scenario: clock; by chain and scenario:
            until; by queue and term: costs; by term: total, best, before, change, threshold; by group: where (its
            queue), saved, moving; by queue: best_lengths; old_lengths: of two queues; leaves: a chain for each time
            that one leaves.
        work: Size of the work space.
    """

    queues: int
    groups: int
    chains: int
    nblocks: int
    scenarios: int
    spare: int
    classes: int
    longest: int
    chain: int
    due: int
    members: int
    weight: int
    rank: int
    drain: int
    judged: int
    finish: int
    rate: int
    busy: int
    able: int
    room: int
    load_us: int
    cold_us: int
    warm_us: int
    keeps: int
    resident: int
    warm: int
    ends: int
    first: int
    blocks: int
    size: int
    head: int
    mates: int
    users: int
    warm_now: int
    next_use: int
    used: int
    resident_now: int
    gone: int
    following: int
    loads: int
    upto: int
    leaves: int
    clock: int
    until: int
    costs: int
    total: int
    best: int
    before: int
    change: int
    threshold: int
    where: int
    saved: int
    moving: int
    old_lengths: int
    best_orders: int
    best_lengths: int
    work: int

    @property
    def terms(self) -> int:
        """Number of terms of a cost."""
        return 2 * self.classes + 1


@dataclass(frozen=True, slots=True)
class Tables:
    """A problem in columns."""

    layout: Layout
    data: list[int]

    def with_weights(self, weights: Sequence[int]) -> Tables:
        """Return the same with other weights of the groups."""
        at, data = self.layout.weight, list(self.data)
        data[at : at + len(weights)] = weights
        return Tables(self.layout, data)


def tables_of(problem: Problem) -> Tables:
    """Return a problem's columns, all groups with the weight of their members."""
    groups, queues, count = problem.groups, problem.queues, problem.scenarios
    size, chains = len(groups), range(len(problem.chains))
    speeds = sorted({(each.slowness, each.drains or each.slowness) for each in problem.rates})
    drawn = shuffled_scores(2 * size + len(queues), count, problem.seed)
    drain = samples(*_columns([each.drain for each in groups]), drawn[:size])
    execution = samples(*_columns([each.execution for each in groups]), drawn[size : 2 * size])
    busy = samples(*_columns([each.busy for each in queues]), drawn[2 * size :])
    if problem.common:
        shared = common_factors(problem.common, count, problem.seed)
        drain, execution, busy = (each * shared // SCORE for each in (drain, execution, busy))
    members = np.array([each.members for each in groups], dtype=np.int64)
    waits = drain * (members - 1)[:, None] // members[:, None]
    judged = np.where(np.array([each.waits_only for each in groups], dtype=bool)[:, None], 0, execution)
    scaled: dict[str, list[Integers]] = {"drain": [], "judged": [], "finish": []}
    for slowness, drains in speeds:
        by, while_waiting = _factors(slowness, problem), _factors(drains, problem)
        for name, time in (
            ("drain", drain * while_waiting),
            ("judged", waits * while_waiting + judged * by),
            ("finish", waits * while_waiting + execution * by),
        ):
            scaled[name].append(np.minimum(time // SAME_SPEED, _longest(problem)))
    priorities = sorted({each.priority for each in groups})
    owned = [sorted(set(blocks)) for blocks in problem.chains]
    mates = [[i for i, each in enumerate(groups) if each.chain == m] for m in chains]
    columns: dict[str, Sequence[int]] = {
        "chain": [each.chain for each in groups],
        "due": [_bounded(each.due - problem.now) for each in groups],
        "members": [each.members for each in groups],
        "weight": [each.members for each in groups],
        "rank": [priorities.index(each.priority) for each in groups],
        **{name: _flat(each) for name, each in scaled.items()},
        "rate": [speeds.index((each.slowness, each.drains or each.slowness)) for each in problem.rates],
        "busy": busy.ravel().tolist(),
        "able": [int(problem.able(queue, each)) for queue in range(len(queues)) for each in groups],
        "room": [-1 if each.exclusive else each.room for each in queues],
        "load_us": [each.load_us for each in problem.rates],
        "cold_us": [each.cold_us for each in problem.rates],
        "warm_us": [each.warm_us for each in problem.rates],
        "keeps": [int(each.keeps) for each in problem.rates],
        "resident": [int(chain in each.resident) for each in queues for chain in chains],
        "warm": [int(block in each.warm) for each in problem.rates for block in range(len(problem.sizes))],
        "ends": _flat_ends(problem),
        "first": _starts(owned),
        "blocks": [block for some in owned for block in some],
        "size": problem.sizes,
        "head": _starts(mates),
        "mates": [group for some in mates for group in some],
    }
    shape = (len(queues), size, len(problem.chains), len(problem.sizes), count, max(len(priorities), 1))
    layout = _layout(problem, shape, columns)
    return Tables(layout, [value for column in columns.values() for value in column])


def _layout(problem: Problem, shape: tuple[int, ...], columns: Mapping[str, Sequence[int]]) -> Layout:
    queues, groups, chains, blocks, scenarios, classes = shape
    terms = 2 * classes + 1
    work = (
        blocks, blocks, chains, chains, chains, chains, groups, groups, groups, groups + chains, scenarios,
        chains * scenarios, queues * terms,
        terms, terms, 2 * terms, terms, terms, groups, 2 * groups, LONGEST_RUN, 2, queues * groups, queues,
    )  # fmt: skip
    there, space = _offsets([len(each) for each in columns.values()]), _offsets(work)
    sizes = (queues, groups, chains, blocks, scenarios, problem.spare, classes, _longest(problem))
    return Layout(*sizes, *there[:-1], *space)


def _columns(spreads: Sequence[tuple[int, int]]) -> tuple[Integers, Integers]:
    means, sigmas = ([_bounded(each[at]) for each in spreads] for at in (0, 1))
    return np.array(means, dtype=np.int64), np.array(sigmas, dtype=np.int64)


def _factors(speed: Sequence[int], problem: Problem) -> Integers:
    """Return the factor of each group's times, in 1/1024, as a column."""
    return np.array([min(speed[each.chain], 1 << 20) for each in problem.groups], dtype=np.int64)[:, None]


def _longest(problem: Problem) -> int:
    """Return the bound of one time: all groups one after another, with a load each, end long before the horizon."""
    return HORIZON // (8 * (len(problem.groups) + 1))


def _flat(some: Sequence[Integers]) -> list[int]:
    return [int(value) for each in some for value in each.ravel().tolist()]


def _flat_ends(problem: Problem) -> list[int]:
    """Return when what runs of each chain has ended, by queue and chain."""
    found = [0] * (len(problem.queues) * len(problem.chains))
    for number, queue in enumerate(problem.queues):
        for chain, end in zip(queue.resident, queue.ends, strict=False):
            found[number * len(problem.chains) + chain] = _bounded(end)
    return found


def _starts(some: Sequence[Sequence[int]]) -> list[int]:
    return _offsets([len(each) for each in some])


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Return where columns of these lengths begin, and where the last one ends."""
    return [0, *accumulate(lengths)]


def _bounded(time: int) -> int:
    return max(-HORIZON // 2, min(time, HORIZON // 8))
