"""Usage of durable requests on its way from the queue, which keeps it with the answers, to the catalogue: once each.

    requests.finish: answer and usage, one transaction of the queue
    fold: rows are added to the catalogue and marked, one transaction of the catalogue -> rows dropped -> marks dropped

A server that dies in between leaves rows with or without marks, and the next `fold`, of any server, does the rest. The
rows are read while the catalogue's writing transaction is held (`zoo.catalog.folding` says why).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.queueing import usage
from runtime.queueing.database import QueueDatabase
from runtime.queueing.usage import RequestUsage
from zoo.catalog import Catalog, Writer
from zoo.errors import StoreError, ZooError
from zoo.records import KeyUsage

_log = logging.getLogger("blockzoo.server")

#: Rows that one transaction of the catalogue adds at most, and principals whose rows it looks for.
AT_ONCE, _PRINCIPALS = 1000, 500
#: Bytes of a server's part of its ids, and of the rest.
_OWN, _REST = 8, 8


@dataclass(frozen=True, slots=True)
class FoldResult:
    """What came of a `fold`.

    Fields:
        whole: The catalogue has all that was kept when it began, but for unknown keys.
        others: Sums of what other servers, or earlier lives of this one, had kept then; None: the queue cannot be read.
    """

    whole: bool
    others: list[RequestUsage] | None


class _AddedRows(NamedTuple):
    """Rows of the queue that the catalogue has, and whether there may be more."""

    ids: list[str]
    more: bool


class Outbox:
    """The kept usage of one queue, as one server sees it. `fold` runs on one thread at a time."""

    def __init__(self, queue: QueueDatabase) -> None:
        self._queue = queue
        self._own = secrets.token_hex(_OWN)
        #: What was logged and holds on: one line is enough for as long as it lasts.
        self._told: set[str] = set()

    def new_id(self) -> str:
        """Return the id of a new row of this server. Any thread."""
        return self._own + secrets.token_hex(_REST)

    def fold(self, catalog: Catalog) -> FoldResult:
        """Add what is kept to the catalogue. Blocks. What fails is logged, and left for the next time."""
        try:
            with self._queue.reading() as connection:
                queue, waiting = usage.queue_name(connection), usage.principals(connection)
                others = usage.sums(connection, self._own) if waiting else []
        except Exception as error:
            self._warn_once("kept", "what durable requests have used cannot be read: %s", error)
            return FoldResult(False, None)
        self._told.discard("kept")
        try:
            if _is_due(catalog, queue, waiting):
                while self._fold_some(catalog, queue):
                    pass
        except Exception as error:
            self._warn_once("fold", "what durable requests have used waits in the queue: %s", error)
            return FoldResult(False, others)
        self._told.discard("fold")
        return FoldResult(True, others)

    def _fold_some(self, catalog: Catalog, queue: str) -> bool:
        """Add some rows, and drop them from the queue; return whether there may be more. Raises StoreError."""
        with catalog.writing() as writer:
            some = self._add_rows(writer, queue)
        if some.ids:
            try:
                with self._queue.writing() as connection:
                    usage.drop(connection, some.ids)
            except StoreError as error:
                if some.more:
                    raise
                self._warn_once("drop", "what is counted of durable requests stays in the queue: %s", error)
                return False
            self._told.discard("drop")
        return some.more

    def _add_rows(self, writer: Writer, queue: str) -> _AddedRows:
        """Add rows of the queue that have no marks, and drop marks without rows."""
        keys = writer.keys()
        names = {key.principal: key.name for key in keys}
        marks = writer.folded_usage(queue)
        with self._queue.reading() as connection:
            waiting = usage.principals(connection)
            known = [principal for principal in waiting if principal in names][:_PRINCIPALS]
            rows = usage.kept(connection, known, AT_ONCE)
            dropped = marks - usage.present(connection, marks)
        if unknown := sum(principal not in names for principal in waiting):
            self._warn_once("keys", "usage of %d keys that this catalogue does not know stays in the queue", unknown)
        writer.drop_folded(queue, dropped)
        writer.fold_usage(queue, {each.id: _of_key(names[each.principal], each) for each in rows})
        return _AddedRows([each.id for each in rows], len(rows) == AT_ONCE or len(known) == _PRINCIPALS)

    def _warn_once(self, what: str, message: str, value: object) -> None:
        if what not in self._told:
            self._told.add(what)
            defect = isinstance(value, Exception) and not isinstance(value, ZooError)
            _log.warning(message, value, exc_info=defect)


def _is_due(catalog: Catalog, queue: str, waiting: Sequence[str]) -> bool:
    """Return whether there is anything to write: rows of known keys, or marks to drop."""
    with catalog.reading() as reader:
        if reader.folded_usage(queue):
            return True
        keys = reader.keys() if waiting else []
        return not {key.principal for key in keys}.isdisjoint(waiting)


def _of_key(name: str, used: RequestUsage) -> KeyUsage:
    tokens = (used.prompt_tokens, used.generated_tokens)
    return KeyUsage(name, used.day, 0, *tokens, used.model, 1, used.cost, used.cached_tokens)


def usage_of_keys(names: Mapping[str, str], sums: Iterable[RequestUsage]) -> list[KeyUsage]:
    """Return sums by the names of their keys, without those of unknown ones. `names`: by principal."""
    return [_of_key(names[each.principal], each) for each in sums if each.principal in names]
