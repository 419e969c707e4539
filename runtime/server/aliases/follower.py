"""Follow the catalogue's aliases while the server runs.

The catalogue is read every `PAUSE` seconds, on a thread of its own. An alias is switched at one moment on the event
loop, once all its new targets are served; until then it answers as before. A request has the model that its alias
points to when the request is accepted, and keeps it.

A server answers for an alias if it serves one of its targets, or has answered for it before: then it loads what a
change brings. What an alias has pointed to stays served, so that going back takes no load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from runtime.frontend.aliases import ServedAlias
from runtime.server.context import Service
from runtime.server.model_loading import ensure_served
from zoo.errors import ZooError
from zoo.records import Alias
from zoo.store import Store

_log = logging.getLogger("blockzoo.server")

#: Seconds between two looks at the catalogue, and before a model that could not be loaded is tried again.
PAUSE = 0.2
AGAIN = 30.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the targets of a change could not be served, and when they are tried again (monotonic seconds)."""

    change: int
    reason: str
    again: float


class AliasFollower:
    """Keeps the aliases of one server's `ServedModels` as the catalogue has them. Belongs to the event loop.

    Attributes:
        store: Where the aliases are.
    """

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zoo-aliases")
        self._wanted: Sequence[ServedAlias] = ()
        self._seen = -1
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, _Failure] = {}
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the catalogue once, and follow it from then on."""
        await self._look()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = [*self._loading.values(), *(() if self._task is None else (self._task,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def document(self) -> list[dict[str, Any]]:
        """Return every alias of the catalogue: what it answers with here, and what it waits for."""
        models = self._service.models
        return [_document(wanted, models.alias(wanted.name), self._failed.get(wanted.name)) for wanted in self._wanted]

    async def _follow(self) -> None:
        told = False
        while True:
            await asyncio.sleep(PAUSE)
            try:
                await self._look()
                told = False
            except Exception as error:
                if not told:  # the aliases stay as they are; one line is enough for as long as it lasts
                    _log.warning("the aliases cannot be read: %s", error, exc_info=not isinstance(error, ZooError))
                told = True

    async def _look(self) -> None:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, self._seen)
        if found is not None:
            self._seen, self._wanted = found
        self._settle()

    def _read(self, seen: int) -> tuple[int, list[ServedAlias]] | None:
        """Return the latest change and all aliases; None if there is none behind `seen`."""
        with self.store.catalog.reading() as reader:
            latest = reader.latest_alias_change()
            return None if latest == seen else (latest, [_served(alias) for alias in reader.aliases()])

    def _settle(self) -> None:
        """Switch the aliases that have all their targets served, at one moment; begin to load those of the rest."""
        models, live = self._service.models, dict[str, ServedAlias]()
        for wanted in self._wanted:
            before = models.alias(wanted.name)
            if self._is_ready(wanted, before):
                live[wanted.name] = wanted
                self._failed.pop(wanted.name, None)
                continue
            if before is not None:
                live[wanted.name] = before
            if before is not None or any(models.knows(name) for name in wanted.models):
                self._load(wanted)
        models.set_aliases(live)

    def _is_ready(self, wanted: ServedAlias, before: ServedAlias | None) -> bool:
        models = self._service.models
        if all(models.has(name) for name in wanted.models):
            return True
        # Served on demand: the first request loads it, unless requests are being answered without a wait.
        waits = before is None or before.change == wanted.change or not any(map(models.has, before.models))
        return waits and all(models.knows(name) for name in wanted.models)

    def _load(self, wanted: ServedAlias) -> None:
        failure = self._failed.get(wanted.name)
        late = failure is None or failure.change != wanted.change or time.monotonic() >= failure.again
        if late and wanted.name not in self._loading:
            self._loading[wanted.name] = asyncio.create_task(self._serve(wanted))

    async def _serve(self, wanted: ServedAlias) -> None:
        try:
            for name in wanted.models:
                await ensure_served(self._service, name)
        except Exception as error:
            self._failed[wanted.name] = _Failure(wanted.change, str(error), time.monotonic() + AGAIN)
            _log.warning("alias %s stays as it is: %s", wanted.name, error, exc_info=not isinstance(error, ZooError))
        finally:
            self._loading.pop(wanted.name, None)
        self._settle()


def _served(alias: Alias) -> ServedAlias:
    return ServedAlias(alias.name, alias.targets, alias.now.id, int(alias.now.created.timestamp()))


def _document(wanted: ServedAlias, live: ServedAlias | None, failure: _Failure | None) -> dict[str, Any]:
    waits = live is None or live.change != wanted.change
    failed = failure is not None and failure.change == wanted.change
    return {
        "name": wanted.name,
        "targets": None if live is None else _targets(live),
        "change": None if live is None else live.change,
        "wanted": {"targets": _targets(wanted), "change": wanted.change} if waits else None,
        "error": failure.reason if failure is not None and failed and waits else None,
    }


def _targets(alias: ServedAlias) -> list[dict[str, Any]]:
    return [{"model": target.model, "share": target.share} for target in alias.targets]
