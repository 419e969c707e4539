"""Usage that queues of requests keep until it is counted here: added once, whatever fails and how often it comes.

A row of a queue is added to `model_usage` and marked in one transaction; a row with a mark adds nothing. The queue
drops a row once its mark is durable, and the mark is dropped after the row. Queue and catalogue may be different
databases.

Contract: the caller reads the queue's rows while it holds the catalogue's writing transaction. Marks are dropped in
such transactions alone, and only of rows that the queue does not have any more: so a row that was read then has its
mark if it was added ever, however long any other server has been stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from sqlalchemy import Connection, delete, insert, select

from zoo.catalog import keys
from zoo.catalog import schema as t
from zoo.records import KeyUsage

#: Ids in one statement; databases bound their number.
_AT_ONCE = 500


def folded_ids(connection: Connection, queue: str) -> set[str]:
    """Return the ids of a queue's usage that is marked as added."""
    return set(connection.execute(select(t.FoldedUsageRow.id).where(t.FoldedUsageRow.queue == queue)).scalars())


def fold_usage(connection: Connection, queue: str, used: Mapping[str, KeyUsage]) -> int:
    """Add usage of a queue, by its ids, and mark it; return how much of it was new. What has its mark adds nothing."""
    marked = folded_ids(connection, queue)
    fresh = {name: each for name, each in used.items() if name not in marked}
    if fresh:
        connection.execute(insert(t.FoldedUsageRow), [{"queue": queue, "id": name} for name in fresh])
        keys.add_usage(connection, _summed(fresh).values())
    return len(fresh)


def drop_folded(connection: Connection, queue: str, ids: Collection[str]) -> None:
    """Drop marks of usage that the queue does not have any more."""
    rest: Iterator[str] = iter(ids)
    while chunk := list(islice(rest, _AT_ONCE)):
        rows = (t.FoldedUsageRow.queue == queue) & t.FoldedUsageRow.id.in_(chunk)
        connection.execute(delete(t.FoldedUsageRow).where(rows))


def _summed(used: Mapping[str, KeyUsage]) -> dict[tuple[str, str, str], KeyUsage]:
    """Return the sums by key, day and model: one statement each adds them."""
    found: dict[tuple[str, str, str], KeyUsage] = {}
    for each in used.values():
        place = (each.name, each.day, each.model)
        found[place] = found[place].plus(each) if place in found else each
    return found
