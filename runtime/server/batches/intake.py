"""Check a batch's input file and make its lines requests of the queue: all of them, or none.

Blocks: runs on a worker thread. It lets the event loop run between lines, waits a little for interactive requests, and
writes in short transactions, so that other requests go on beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from runtime.frontend.schemas import ServedBody
from runtime.frontend.served_models import NotServedYet
from runtime.queueing import batches
from runtime.queueing.batches import Status, StoredBatch
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import chunks
from runtime.queueing.records import DurableRequest, FileRange
from runtime.server.answers.forms import form_of_body
from runtime.server.batches.documents import derived
from runtime.server.batches.lines import ENDPOINTS, LineCheck, LineError, LineTask, split_lines
from runtime.server.context import Service
from runtime.server.model_choice import model_for
from runtime.types import BACKGROUND

#: Added to the priority of lines, which is of 32 bits: every request of an interactive client goes first.
BEHIND = 2 * BACKGROUND
#: Lines between two moments at which other threads may run, and lines of a transaction.
_PAUSE_LINES = 16
_LOT = 50
#: Seconds for which one pause waits for interactive requests at most, and between two looks: work on lines takes the
#: interpreter from them, and goes on for seconds.
_PATIENCE, _LOOK = 0.025, 0.001
_SEEDS = 1 << 63
_CHECKED: tuple[Status, ...] = ("validating",)


class StoppedEarly(Exception):
    """The server is shutting down; the next one begins again."""


def check_file(
    service: Service, database: QueueDatabase, batch: StoredBatch, stopping: threading.Event, busy: Callable[[], bool]
) -> LineCheck:
    """Return the checked lines of a batch's input file. Raises StoppedEarly."""

    def served(body: ServedBody) -> None:
        with suppress(NotServedYet):  # loaded once a line of it runs
            model_for(service, body)

    check = LineCheck(batch.endpoint, service.config.max_body_bytes, service.config.batches.max_lines, served)
    for count, line in enumerate(split_lines(chunks(database, batch.input_file), service.config.max_body_bytes), 1):
        check.add(*line)
        if count % _PAUSE_LINES == 0:
            pause(stopping, busy)
        if check.full:
            break
    return check


def pause(stopping: threading.Event, busy: Callable[[], bool], seconds: float = 0.0) -> None:
    """Let other threads run, for so long and, a little, while the server is `busy`. Raises StoppedEarly."""
    time.sleep(seconds)
    end = time.monotonic() + _PATIENCE
    while busy() and time.monotonic() < end:
        time.sleep(_LOOK)
    if stopping.is_set():
        raise StoppedEarly


def take_in(
    service: Service,
    database: QueueDatabase,
    batch: StoredBatch,
    stopping: threading.Event,
    put: Callable[[list[DurableRequest]], None] | None = None,
    busy: Callable[[], bool] = lambda: False,
) -> bool:
    """Check a batch that is being validated, and queue its lines; it is `in_progress` then, or `failed`.

    May be repeated after a restart. Returns whether it is in progress: not if it was cancelled meanwhile.

    Args:
        put: Gives lines to a broker; None: they are written to the tables.
        busy: Returns whether interactive requests are in the server.

    Raises StoppedEarly.
    """
    check = check_file(service, database, batch, stopping, busy)
    errors = check.result()
    if errors:
        return refuse(database, batch, errors)
    lines = _requests(batch, check.tasks())
    while lot := list(islice(lines, _LOT)):
        if put is not None:
            put(lot)
            continue
        with database.writing(synced=False) as connection:
            batches.add_lines(connection, lot)
        pause(stopping, busy, 0.001)  # the journal may write between two lots
    with database.writing() as connection:
        return batches.change(connection, batch.id, _CHECKED, time.time_ns(), status="in_progress", total=len(check))


def refuse(database: QueueDatabase, batch: StoredBatch, errors: list[LineError]) -> bool:
    """Fail a batch that is being validated, for these errors. Returns False, as `take_in` then does."""
    documents = [error.document() for error in errors]
    with database.writing() as connection:
        batches.change(connection, batch.id, _CHECKED, time.time_ns(), status="failed", errors=documents)
    return False


def _requests(batch: StoredBatch, tasks: Iterator[LineTask]) -> Iterator[DurableRequest]:
    form = form_of_body(ENDPOINTS[batch.endpoint])
    for task in tasks:
        yield DurableRequest(
            id=derived(form.prefix, batch.id, task.line),
            kind=form.kind,
            digest=b"",
            seed=int(derived("", batch.id, task.line, "seed"), 16) % _SEEDS,
            created=batch.created + task.line,  # the queue's index gives lines in order then, without sorting
            principal=batch.principal,
            source=FileRange(batch.input_file, task.offset, task.length),
            deadline=batch.deadline,
            priority=BEHIND + task.priority,
            batch=batch.id,
            line=task.line,
        )
