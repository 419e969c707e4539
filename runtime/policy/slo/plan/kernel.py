"""The cost of an order, and the search for a better one, in plain functions over columns of integers.

The same source runs as Python, over lists, and compiled, over arrays (`compiled.py`): integers only, no random numbers
but those passed in, so both return the same plan. Therefore no classes, no exceptions, and `//` and `%` of
non-negative numbers only. `t` says where columns begin: in `d` those of the problem, in `w` those of the work space. An
order is a matrix in one column: the groups of queue g are `orders[g * t.groups:][:lengths[g]]`.

A cost has `2 * t.classes + 1` terms, compared in their order: late members and lateness of each priority, completion.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from runtime.policy.slo.plan.tables import LONGEST_RUN, Layout

Cells = MutableSequence[int]


def load_times(t: Layout, d: Sequence[int], g: int, orders: Sequence[int], length: int, w: Cells) -> None:
    """Set `w[t.loads + j]` to the time of the load before the j-th group of a queue.

    Only blocks that are missing cost (UN-04). What does not fit beside the incoming chain leaves, the furthest next use
    first, by the rule of `policy.residency.eviction.stages_to_unload`: the chains at `w[t.leaves:]`, up to number
    `w[t.upto + j]` before the j-th group.
    """
    base, held = g * t.groups, 0
    for b in range(t.nblocks):
        w[t.users + b] = 0
        w[t.warm_now + b] = d[t.warm + g * t.nblocks + b]
    for m in range(t.chains):
        w[t.next_use + m] = -1
        w[t.used + m] = 0
        w[t.resident_now + m] = d[t.resident + g * t.chains + m]
        if w[t.resident_now + m]:
            held += _add(t, d, m, w)
    for j in range(length - 1, -1, -1):
        m = d[t.chain + orders[base + j]]
        w[t.following + j] = w[t.next_use + m]
        w[t.next_use + m] = j
    for j in range(length):
        m = d[t.chain + orders[base + j]]
        w[t.next_use + m] = w[t.following + j]
        w[t.used + m] = j + 1
        w[t.loads + j] = 0
        w[t.upto + j] = w[t.upto + j - 1] if j else 0
        if w[t.resident_now + m]:
            continue
        time = d[t.load_us + g]
        for at in range(d[t.first + m], d[t.first + m + 1]):
            b = d[t.blocks + at]
            if not w[t.users + b]:
                rate = d[t.warm_us + g] if w[t.warm_now + b] else d[t.cold_us + g]
                time += (d[t.size + b] * rate) >> 20
                w[t.warm_now + b] = d[t.keeps + g]
        w[t.loads + j] = min(time, t.longest)
        held += _add(t, d, m, w)
        w[t.resident_now + m] = 1
        room = d[t.room + g] if d[t.room + g] >= 0 else _bytes(t, d, m)
        if held > room:
            held = _make_room(t, d, room, m, held, j, w)


def _bytes(t: Layout, d: Sequence[int], m: int) -> int:
    """Return the bytes of a chain's blocks."""
    total = 0
    for at in range(d[t.first + m], d[t.first + m + 1]):
        total += d[t.size + d[t.blocks + at]]
    return total


def _add(t: Layout, d: Sequence[int], m: int, w: Cells) -> int:
    """Count a chain's blocks as used; return the bytes that were not held before."""
    more = 0
    for at in range(d[t.first + m], d[t.first + m + 1]):
        b = d[t.blocks + at]
        if not w[t.users + b]:
            more += d[t.size + b]
        w[t.users + b] += 1
    return more


def _remove(t: Layout, d: Sequence[int], m: int, w: Cells) -> int:
    """Count a chain's blocks as used no more; return the bytes that are held no more."""
    less = 0
    for at in range(d[t.first + m], d[t.first + m + 1]):
        b = d[t.blocks + at]
        w[t.users + b] -= 1
        if not w[t.users + b]:
            less += d[t.size + b]
    return less


def _make_room(t: Layout, d: Sequence[int], room: int, incoming: int, held: int, j: int, w: Cells) -> int:
    """Let chains leave before the j-th group until the rest fits; return the bytes held then."""
    count = 0
    while held > room:
        best = -1
        for m in range(t.chains):
            if w[t.resident_now + m] and m != incoming and (best < 0 or _leaves_before(t, m, best, w)):
                best = m
        if best < 0:
            break
        held -= _remove(t, d, best, w)
        w[t.resident_now + best] = 0
        w[t.gone + count] = best
        count += 1
    for at in range(count - 1, -1, -1):  # those stay that did not have to leave
        m = w[t.gone + at]
        held += _add(t, d, m, w)
        if held > room:
            held -= _remove(t, d, m, w)
            w[t.leaves + w[t.upto + j]] = m
            w[t.upto + j] += 1
        else:
            w[t.resident_now + m] = 1
    return held


def _leaves_before(t: Layout, m: int, other: int, w: Cells) -> bool:
    a, b = w[t.next_use + m], w[t.next_use + other]
    if (a < 0) != (b < 0):
        return a < 0
    if a != b:
        return a > b
    if w[t.used + m] != w[t.used + other]:
        return w[t.used + m] < w[t.used + other]
    return m < other


def queue_cost(t: Layout, d: Sequence[int], g: int, orders: Sequence[int], length: int, w: Cells) -> None:
    """Set the terms of one queue's cost, at `w[t.costs + g * terms:]`.

    A load begins once the groups ahead have started, and those of the chains that leave for it have ended.
    """
    terms, base, count = 2 * t.classes + 1, g * t.groups, t.scenarios
    out = g * terms
    for c in range(terms):
        w[t.costs + out + c] = 0
    load_times(t, d, g, orders, length, w)
    for k in range(count):
        w[t.clock + k] = d[t.busy + g * count + k]
    for n in range(w[t.upto + length - 1] if length else 0):
        for k in range(count):
            w[t.until + w[t.leaves + n] * count + k] = d[t.ends + g * t.chains + w[t.leaves + n]]
    clock = t.clock
    for j in range(length):
        i = orders[base + j]
        at, due, load = (d[t.rate + g] * t.groups + i) * count, d[t.due + i], w[t.loads + j]
        own, left, gone = t.until + d[t.chain + i] * count, w[t.upto + j - 1] if j else 0, w[t.upto + j]
        judged, finish, drain = t.judged + at, t.finish + at, t.drain + at
        late, lateness, completion = 0, 0, 0
        for k in range(count):
            start = w[clock + k]
            if gone > left:
                for n in range(left, gone):
                    start = max(start, w[t.until + w[t.leaves + n] * count + k])
            start += load
            over, end = start + d[judged + k] - due, start + d[finish + k]
            if over > 0:
                late += 1
                lateness += over
            completion += end
            if end > w[own + k]:
                w[own + k] = end
            w[clock + k] = start + d[drain + k]
        if d[t.weight + i]:
            rank = out + 2 * d[t.rank + i]
            if late > t.spare:
                w[t.costs + rank] += d[t.weight + i]
            w[t.costs + rank + 1] += d[t.weight + i] * (lateness // count)
        w[t.costs + out + terms - 1] += d[t.members + i] * (completion // count)


def search(
    t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, draws: Sequence[int], rounds: int, cycles: int, w: Cells
) -> None:
    """Improve an order by threshold accepting; the best order found replaces it.

    A move is taken if the first term that it changes gets less, or more by no more than a threshold. Thresholds fall to
    zero in each of the cycles; a cycle starts from the best order so far.

    Args:
        draws: Four numbers for each of the rounds.
    """
    terms = 2 * t.classes + 1
    for c in range(terms):
        w[t.total + c] = 0
    for g in range(t.queues):
        queue_cost(t, d, g, orders, lengths[g], w)
        for c in range(terms):
            w[t.total + c] += w[t.costs + g * terms + c]
        for j in range(lengths[g]):
            w[t.where + orders[g * t.groups + j]] = g
    _keep(t, d, orders, lengths, w)
    span, typical = max(rounds // cycles, 1), 0
    for i in range(t.groups):
        typical += d[t.members + i]
    typical //= t.groups
    for number in range(rounds):
        left = span - number % span
        if number % span == 0 and number:
            _restore(t, d, orders, lengths, w)
        if number % 64 == 0 or number % span == 0:
            for c in range(terms):
                # A group's share of each term, at first; nothing in the last quarter of a cycle.
                share = w[t.total + c] // (2 * t.groups) + (typical if c % 2 == 0 and c < terms - 1 else 0)
                part, whole = max(4 * left - span, 0), 3 * span  # share * part // whole, within 64 bits
                w[t.threshold + c] = share // whole * part + share % whole * part // whole
        if _move(t, d, orders, lengths, draws, 4 * number, w) and _improves(t, w):
            _keep(t, d, orders, lengths, w)
    _restore(t, d, orders, lengths, w)


def _move(t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, draws: Sequence[int], at: int, w: Cells) -> bool:
    """Try one move; return whether it is taken, else undo it."""
    i = draws[at + 1] % t.groups
    kind = draws[at] % 8
    m, a = d[t.chain + i], w[t.where + i]
    p = _place(t, d, orders, lengths, a, i)
    if kind < 2:  # two groups change places
        j = draws[at + 2] % t.groups
        b = w[t.where + j]
        if j == i or not d[t.able + b * t.groups + i] or not d[t.able + a * t.groups + j]:
            return False
        q = _place(t, d, orders, lengths, b, j)
        _save(t, d, orders, lengths, a, b, w)
        orders[a * t.groups + p], orders[b * t.groups + q] = j, i
        w[t.where + i], w[t.where + j] = b, a
        return _judge(t, d, orders, lengths, a, b, w)
    run = 1
    if kind >= 6:
        run = min(1 + draws[at + 3] // t.groups % LONGEST_RUN, lengths[a] - p)
    if kind < 5 and d[t.head + m + 1] - d[t.head + m] > 1:  # behind a group of the same chain
        j = d[t.mates + d[t.head + m] + draws[at + 2] % (d[t.head + m + 1] - d[t.head + m])]
        if j == i:
            return False
        b = w[t.where + j]
        q = _place(t, d, orders, lengths, b, j) + (1 if draws[at + 3] % 4 else 0)
    else:
        b = draws[at + 2] % t.queues
        q = draws[at + 3] % (lengths[b] + 1)
    return _shift(t, d, orders, lengths, a, p, run, b, q, w)


def _shift(
    t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, a: int, p: int, run: int, b: int, q: int, w: Cells
) -> bool:
    """Try to move `run` groups from place p of queue a to before place q of queue b."""
    here, there = a * t.groups, b * t.groups
    if a == b and p <= q <= p + run:
        return False
    for k in range(run):
        if not d[t.able + b * t.groups + orders[here + p + k]]:
            return False
    _save(t, d, orders, lengths, a, b, w)
    for k in range(run):
        w[t.moving + k] = orders[here + p + k]
        w[t.where + w[t.moving + k]] = b
    for k in range(p, lengths[a] - run):
        orders[here + k] = orders[here + k + run]
    lengths[a] -= run
    if a == b and q > p:
        q -= run
    for k in range(lengths[b] - 1, q - 1, -1):
        orders[there + k + run] = orders[there + k]
    for k in range(run):
        orders[there + q + k] = w[t.moving + k]
    lengths[b] += run
    return _judge(t, d, orders, lengths, a, b, w)


def _place(t: Layout, d: Sequence[int], orders: Sequence[int], lengths: Sequence[int], g: int, i: int) -> int:
    base = g * t.groups
    for p in range(lengths[g]):
        if orders[base + p] == i:
            return p
    return -1


def _judge(t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, a: int, b: int, w: Cells) -> bool:
    """Evaluate queues a and b, and keep their new orders or restore the saved ones."""
    terms = 2 * t.classes + 1
    for c in range(terms):
        w[t.before + c] = w[t.costs + a * terms + c]
        w[t.before + terms + c] = w[t.costs + b * terms + c]
    queue_cost(t, d, a, orders, lengths[a], w)
    if a != b:
        queue_cost(t, d, b, orders, lengths[b], w)
    taken = True
    for c in range(terms):
        more = w[t.costs + a * terms + c] - w[t.before + c]
        if a != b:
            more += w[t.costs + b * terms + c] - w[t.before + terms + c]
        w[t.change + c] = more
    for c in range(terms):
        if w[t.change + c] != 0:
            taken = w[t.change + c] <= w[t.threshold + c]
            break
    if taken:
        for c in range(terms):
            w[t.total + c] += w[t.change + c]
        return True
    for c in range(terms):
        w[t.costs + a * terms + c] = w[t.before + c]
        w[t.costs + b * terms + c] = w[t.before + terms + c]
    lengths[a], lengths[b] = w[t.old_lengths], w[t.old_lengths + 1]
    for j in range(lengths[a]):
        orders[a * t.groups + j] = w[t.saved + j]
        w[t.where + w[t.saved + j]] = a
    for j in range(lengths[b] if a != b else 0):
        orders[b * t.groups + j] = w[t.saved + t.groups + j]
        w[t.where + w[t.saved + t.groups + j]] = b
    return False


def _save(t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, a: int, b: int, w: Cells) -> None:
    w[t.old_lengths], w[t.old_lengths + 1] = lengths[a], lengths[b]
    for j in range(lengths[a]):
        w[t.saved + j] = orders[a * t.groups + j]
    for j in range(lengths[b]):
        w[t.saved + t.groups + j] = orders[b * t.groups + j]


def _keep(t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, w: Cells) -> None:
    for c in range(2 * t.classes + 1):
        w[t.best + c] = w[t.total + c]
    for g in range(t.queues):
        w[t.best_lengths + g] = lengths[g]
        for j in range(lengths[g]):
            w[t.best_orders + g * t.groups + j] = orders[g * t.groups + j]


def _restore(t: Layout, d: Sequence[int], orders: Cells, lengths: Cells, w: Cells) -> None:
    """Return to the best order so far."""
    terms = 2 * t.classes + 1
    for c in range(terms):
        w[t.total + c] = w[t.best + c]
    for g in range(t.queues):
        lengths[g] = w[t.best_lengths + g]
        for j in range(lengths[g]):
            i = w[t.best_orders + g * t.groups + j]
            orders[g * t.groups + j] = i
            w[t.where + i] = g
        queue_cost(t, d, g, orders, lengths[g], w)


def _improves(t: Layout, w: Cells) -> bool:
    """Return whether the present order costs less than the best one so far."""
    for c in range(2 * t.classes + 1):
        if w[t.total + c] != w[t.best + c]:
            return w[t.total + c] < w[t.best + c]
    return False


#: All functions, callees first: in this order they are compiled.
FUNCTIONS = (
    _add, _remove, _bytes, _leaves_before, _make_room, load_times, queue_cost, _improves, _keep, _restore, _save,
    _place, _judge, _shift, _move, search,
)  # fmt: skip
