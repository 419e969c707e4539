"""The exact evaluator (QL-18) beside a slow one, written without its tables and with `policy.residency`'s own rule.

The times of the scenarios are the drawn ones of `scenarios`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.residency.eviction import ResidentStage, StageWeights, footprint_of, stages_to_unload
from runtime.policy.slo.plan.evaluation import Evaluator, evaluate
from runtime.policy.slo.plan.problem import SAME_SPEED, Orders, PlanQueue, PlanScore, Problem, QueueRates, Spread
from runtime.policy.slo.plan.scenarios import SCORE, common_factors, shuffled_scores
from tests.runtime.policy.slo.plan.problems import MIB, SECOND, group, problem


def _slow_score(made: Problem, orders: Orders) -> PlanScore:
    """Return the score of a problem: an order's in each scenario by itself, then what is late in too many of them."""
    priorities = sorted({each.priority for each in made.groups})
    late, lateness, completion = [0] * len(priorities), [0] * len(priorities), 0
    count, scenarios = made.scenarios, _scenarios(made)
    for queue, some in enumerate(orders):
        by_scenario = [_ends(each, queue, list(some)) for each in scenarios]
        for place, i in enumerate(some):
            each = made.groups[i]
            over = [max(ends[place][2] - each.due, 0) for ends in by_scenario]
            at = priorities.index(each.priority)
            if not _late_alone(made, scenarios, i):
                late[at] += each.members if _too_often(made, over) else 0
                lateness[at] += each.members * (sum(over) // count)
            completion += each.members * (sum(ends[place][1] for ends in by_scenario) // count)
    return PlanScore(tuple(zip(late, lateness, strict=True)), completion)


def _too_often(made: Problem, over: Sequence[int]) -> bool:
    """Return whether a group is late in a larger share of the scenarios than it may be (equation 12)."""
    return sum(each > 0 for each in over) / made.scenarios > 1 - made.alpha + 1e-12


def _scenarios(made: Problem) -> list[Problem]:
    """Return a problem without variances for each scenario: the rows of scores are of drains, executions, queues."""
    size, found = len(made.groups), []
    scores = shuffled_scores(2 * size + len(made.queues), made.scenarios, made.seed).tolist()
    common = common_factors(made.common, made.scenarios, made.seed).tolist()

    def exact(spread: Spread, row: int, scenario: int) -> Spread:
        own = max(spread.mean + spread.sigma * scores[row][scenario] // SCORE, spread.mean // 8)
        return Spread(own * common[scenario] // SCORE)

    for s in range(made.scenarios):
        groups = tuple(
            replace(each, drain=exact(each.drain, i, s), execution=exact(each.execution, size + i, s))
            for i, each in enumerate(made.groups)
        )
        queues = tuple(replace(each, busy=exact(each.busy, 2 * size + q, s)) for q, each in enumerate(made.queues))
        found.append(replace(made, groups=groups, queues=queues))
    return found


def _ends(made: Problem, queue: int, some: list[int]) -> list[tuple[int, int, int]]:
    now, found, rates = made.queues[queue].busy.mean, [], made.rates[queue]
    resident = dict.fromkeys(made.queues[queue].resident, 0)
    warm = set(rates.warm)
    until = dict(zip(made.queues[queue].resident, made.queues[queue].ends, strict=False))
    for place, i in enumerate(some):
        each = made.groups[i]
        slowness = rates.slowness[each.chain]
        before = list(resident)
        load = _load(made, queue, some, place, resident, warm)
        now = max([now, *(until.get(chain, 0) for chain in before if chain not in resident)]) + load
        drains = rates.drains[each.chain] if rates.drains else slowness
        drain = each.drain.mean * drains // SAME_SPEED
        waits = each.drain.mean * (each.members - 1) // each.members * drains
        end = (waits + each.execution.mean * slowness) // SAME_SPEED
        until[each.chain] = max(until.get(each.chain, 0), now + end)
        found.append((i, now + end, now + (waits // SAME_SPEED if each.waits_only else end)))
        now += drain
    return found


def _load(made: Problem, queue: int, some: list[int], place: int, resident: dict[int, int], warm: set[int]) -> int:
    """Return the time to load the chain of a group, and change what is resident by `stages_to_unload`."""
    rates, chain = made.rates[queue], made.groups[some[place]].chain
    known, resident[chain] = chain in resident, place + 1
    if known:
        return 0
    weights = {m: StageWeights({str(b): made.sizes[b] for b in made.chains[m]}) for m in range(len(made.chains))}
    there = footprint_of(weights[m] for m in resident if m != chain)
    missing = [b for b in set(made.chains[chain]) if there.missing(StageWeights({str(b): made.sizes[b]}))]
    time = rates.load_us + sum(made.sizes[b] * (rates.warm_us if b in warm else rates.cold_us) >> 20 for b in missing)
    warm -= set(missing)
    warm |= set(missing) if rates.keeps else set()
    uses = [made.groups[i].chain for i in some[place + 1 :]]
    stages = [
        ResidentStage(f"{m:03}", weights[m], uses.index(m) if m in uses else None, used)
        for m, used in resident.items()
        if m != chain
    ]
    for each in stages_to_unload(stages, weights[chain], made.room_with(queue, chain), "furthest") or ():
        del resident[int(each.name)]
    return time


def _late_alone(made: Problem, scenarios: Sequence[Problem], i: int) -> bool:
    each = made.groups[i]
    able = [queue for queue in range(len(made.queues)) if made.runs(queue, each.chain)]
    late = (sum(_ends(scenario, queue, [i])[0][2] > each.due for scenario in scenarios) for queue in able)
    return all(count / made.scenarios >= made.alpha - 1e-12 for count in late)


@st.composite
def _problems(draw: st.DrawFn) -> tuple[Problem, Orders]:
    numbers = st.integers
    blocks, models, queues = draw(numbers(3, 6)), draw(numbers(2, 5)), draw(numbers(1, 2))
    sizes = draw(st.lists(numbers(1, 9), min_size=blocks, max_size=blocks))
    some = st.frozensets(numbers(0, blocks - 1), min_size=1, max_size=3)
    chains = draw(st.lists(some, min_size=models, max_size=models))
    room = max(sum(sizes[b] for b in chain) for chain in chains) + draw(numbers(0, 12))
    sigmas = st.one_of(st.just(0), numbers(0, 4 * SECOND))
    groups = [
        replace(
            group(number, draw(numbers(0, models - 1)), draw(numbers(-5, 60)) * SECOND),
            drain=Spread(draw(numbers(1, 9)) * SECOND, draw(sigmas)),
            members=draw(numbers(1, 5)),
            execution=Spread(draw(numbers(0, 3 * SECOND)), draw(sigmas)),
            priority=draw(numbers(0, 1)),
            waits_only=draw(st.booleans()),
        )
        for number in range(draw(numbers(1, 7)))
    ]
    ends = numbers(0, 9 * SECOND)
    lines = [
        PlanQueue(
            "q",
            room * MIB,
            loaded,
            Spread(draw(numbers(0, 5)) * SECOND, draw(sigmas)),
            draw(st.one_of(st.just(()), st.tuples(*[ends] * len(loaded)))),
            draw(st.booleans()),
        )
        for loaded in (draw(st.sampled_from([(), (0,), (1,)])) for _ in range(queues))
    ]
    rates = [
        QueueRates(
            (draw(st.sampled_from([512, 1024, 3000])),) * models,
            draw(numbers(0, SECOND)),
            700_000,
            200_000,
            draw(st.frozensets(numbers(0, blocks - 1))),
            draw(st.booleans()),
            draw(st.sampled_from([(), (700,) * models])),
        )
        for _ in range(queues)
    ]
    made = problem(
        groups,
        queues=tuple(lines),
        chains=tuple(tuple(sorted(chain)) for chain in chains),
        sizes=tuple(size * MIB for size in sizes),
        rates=tuple(rates),
        scenarios=draw(st.sampled_from([1, 4, 7, 10])),
        alpha=draw(st.sampled_from([0.95, 0.9, 0.7, 0.5])),
        seed=draw(numbers(0, 9)),
        common=draw(st.sampled_from([0, 100, 400])),
    )
    order = draw(st.permutations(range(len(groups))))
    cut = draw(numbers(0, len(groups))) if queues == 2 else len(groups)
    return made, (tuple(order[:cut]), tuple(order[cut:]))[:queues]


@settings(max_examples=300, deadline=None)
@given(_problems())
def test_score_is_that_of_a_slow_evaluator(case: tuple[Problem, Orders]) -> None:
    made, orders = case
    assert evaluate(made, orders) == _slow_score(made, orders)


@pytest.mark.parametrize("seed", range(3))
def test_group_is_late_alone_by_its_share_of_scenarios(seed: int) -> None:
    """Whatever its deadline: each scenario has times of its own."""
    for due in range(SECOND // 4, 3 * SECOND, SECOND // 16):
        unsure = replace(
            group(0, due=due, execution=Spread(SECOND // 2, SECOND // 2)), drain=Spread(SECOND, SECOND // 2)
        )
        made = problem([unsure], alpha=0.7, scenarios=10, seed=seed)
        late = _late_alone(made, _scenarios(made), 0)
        assert Evaluator(made).hopeless == (unsure.members if late else 0)
        assert evaluate(made, ((0,),)) == _slow_score(made, ((0,),))


def test_neighbours_of_one_model_load_it_once() -> None:
    """UN-04, QL-13: a load of 2 s before each change of model, none where it is loaded."""
    made = problem([group(0, 0), group(1, 1), group(2, 0), group(3, 1)])
    last = [evaluate(made, (order,)).completion // 10 for order in ((0, 2, 1, 3), (0, 1, 2, 3))]
    # Ends at 0.9, 1.9, 4.9, 5.9 s, and with three loads at 0.9, 3.9, 6.9, 9.9 s.
    assert last == pytest.approx([13.6 * SECOND, 21.6 * SECOND], rel=1e-4)


def test_what_leaves_for_a_load_ends_first() -> None:
    """QL-13: a model's weights are in use until the last of its answers has ended, not only started."""
    long = group(0, 0, execution=Spread(20 * SECOND))
    made = problem([long, group(1, 1)])
    # The first group starts within 0.9 s and ends at 20.9; then 2 s of loading, and 0.9 s to the last start.
    assert evaluate(made, ((0, 1),)).completion // 10 == pytest.approx((20.9 + 23.8) * SECOND, rel=1e-4)
    both = problem([long, group(1, 1)], queues=(PlanQueue("q", 2048 * MIB, (0,)),))
    assert evaluate(both, ((0, 1),)).completion // 10 == pytest.approx((20.9 + 1.0 + 2.0 + 0.9) * SECOND, rel=1e-4)


def test_a_queue_of_one_model_at_a_time_loads_again() -> None:
    """QL-13 as in the paper: though there is room for both."""
    orders, groups = ((0, 1, 2),), [group(0, 0), group(1, 1), group(2, 0)]
    found = {
        alone: evaluate(problem(groups, queues=(PlanQueue("q", 2048 * MIB, (0,), exclusive=alone),)), orders)
        for alone in (False, True)
    }
    # Ends at 0.9, 3.9, 4.9 s; with the first model loaded again, and behind the end of the second, the last one later.
    assert found[True].completion - found[False].completion == pytest.approx(10 * 2 * SECOND, rel=1e-3)


def test_what_runs_now_ends_before_its_model_leaves() -> None:
    busy = problem([group(0, 1, due=6 * SECOND)], queues=(PlanQueue("q", 1024 * MIB, (0,), ends=(5 * SECOND,)),))
    assert evaluate(busy, ((0,),)).completion // 10 == pytest.approx(7.9 * SECOND, rel=1e-4)
    assert evaluate(busy, ((0,),)).late == 0  # late alone and first: it has no weight
    assert evaluate(problem([group(0, 1, due=6 * SECOND)]), ((0,),)).completion // 10 < 3 * SECOND


def test_end_for_each_resident_chain_or_none() -> None:
    with pytest.raises(ValueError, match="an end for each resident chain"):
        PlanQueue("q", 1, (0, 1), ends=(1,))


def test_only_missing_blocks_of_a_chain_cost() -> None:
    shared = {"chains": ((0, 1), (0, 2)), "sizes": (1000 * MIB, 24 * MIB, 24 * MIB)}
    made = problem([group(0, 1)], **shared)
    assert evaluate(made, ((0,),)).completion == 10 * (9 * SECOND // 10 + (24 * MIB * (2 * SECOND // 1024) >> 20))


def test_group_counts_as_late_above_its_share_of_scenarios() -> None:
    """Equation 12 over scenarios: of 32, one may be late at alpha 0.95, and two at 0.92."""
    normal = group(0, due=round(9.9 * SECOND), drain=10 * SECOND, execution=Spread(0))
    spread = replace(normal, drain=Spread(10 * SECOND, SECOND))
    # 0.9 of the drain: 9 s with sigma 0.9; the deadline is at one sigma, beyond which 5 of 32 scenarios lie.
    for alpha, late in ((0.95, 10), (0.86, 10), (0.84, 0)):
        loose = replace(spread, id=1, due=60 * SECOND)
        assert evaluate(problem([spread, loose], alpha=alpha), ((0, 1),)).classes[0][0] in (0, late)
    assert evaluate(problem([normal], alpha=0.95), ((0,),)).late == 0


def test_group_that_is_late_alone_drags_no_other() -> None:
    lost, other = group(0, due=SECOND // 2), group(1, due=2 * SECOND)
    made = problem([lost, other])
    assert evaluate(made, ((1, 0),)).classes == ((0, 0),)
    assert evaluate(made, ((0, 1),)).classes == ((0, 0),)
    assert evaluate(problem([replace(lost, due=SECOND), other]), ((1, 0),)).late == 10


def test_waiting_time_deadline_leaves_out_the_execution() -> None:
    slow = group(0, due=2 * SECOND, execution=Spread(5 * SECOND))
    assert evaluate(problem([replace(slow, waits_only=True), group(1, due=SECOND)]), ((0, 1),)).classes[0][0] == 10
    first = replace(slow, waits_only=True, due=SECOND)
    assert evaluate(problem([first]), ((0,),)) == replace(evaluate(problem([first]), ((0,),)), classes=((0, 0),))
    assert evaluate(problem([replace(first, due=SECOND // 2)]), ((0,),)).classes == ((0, 0),)  # late alone


def test_more_urgent_priority_comes_first_whatever_it_costs() -> None:
    """QL-21: one late member of the first priority is worse than many of the second."""
    urgent = replace(group(0, due=SECOND, drain=SECOND), members=1, priority=-1)
    many = replace(group(1, due=2 * SECOND, drain=2 * SECOND), members=1000)
    made = problem([urgent, many])
    assert evaluate(made, ((0, 1),)) < evaluate(made, ((1, 0),))


def test_slow_queue_takes_longer() -> None:
    """QL-22: rates by queue and model."""
    rates = (QueueRates((1024, 1024)), QueueRates((3072, 1024)))
    made = problem([group(0)], cells=2, rates=rates)
    assert evaluate(made, ((), (0,))).completion == 3 * evaluate(made, ((0,), ())).completion


def test_queue_has_a_factor_of_drains_for_each_chain_or_none() -> None:
    with pytest.raises(ValueError, match="a factor of drains for each chain"):
        QueueRates((1024, 1024), drains=(1024,))


@pytest.mark.parametrize("orders", [((0,), (0,)), ((0,), ()), ((0, 1, 1), ()), ((0, 1),), ((1,), (0,))])
def test_what_is_no_order_is_refused(orders: Orders) -> None:
    made = problem([group(0, pinned=0), group(1)], cells=2)
    with pytest.raises(ValueError, match=r"order has each group once|has begun elsewhere"):
        evaluate(made, orders)


def test_chain_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no queue can run group 0"):
        problem([group(0, 1)], sizes=(MIB, 2048 * MIB))
