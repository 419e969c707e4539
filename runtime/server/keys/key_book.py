"""The keys of a store's clients, as a running server knows them, and what they use.

The catalogue is read and written every `PAUSE` seconds on a thread of its own: a new key is known, and a revoked one
refused, after that time at most. Several servers of one store count together, each behind by as much.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

from runtime.frontend.errors import RequestError, overloaded
from runtime.server.keys.rates import RequestBucket
from zoo.errors import ZooError
from zoo.keys import principal_of
from zoo.records import ClientKey, KeyUsage
from zoo.store import Store

_log = logging.getLogger("blockzoo.server")
K = TypeVar("K")

PAUSE = 1.0


def _utc_day() -> str:
    return datetime.now(UTC).date().isoformat()


class KeyBook:
    """Belongs to the event loop, but for `find` and `rules`, which any thread may call."""

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic, day: Callable[[], str] = _utc_day
    ) -> None:
        self._store = store
        self._clock, self._day = clock, day
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zoo-keys")
        self._keys: Mapping[str, ClientKey] = {}
        self._buckets: dict[str, RequestBucket] = {}
        self._recorded: Mapping[str, int] = {}
        self._read_on = ""
        self._sent: dict[tuple[str, str], KeyUsage] = {}
        self._pending: dict[tuple[str, str], KeyUsage] = {}
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        #: What each key has used of this server since its start.
        self.totals: dict[str, KeyUsage] = {}
        #: Requests of each key that its limits refused.
        self.refused: Counter[str] = Counter()

    async def open(self) -> None:
        """Read the catalogue once, and follow it from then on."""
        await self._exchange()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Record what was used, and stop."""
        self._over.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def find(self, given: Iterable[str]) -> ClientKey | None:
        """Return the valid key of which one of these texts is the secret."""
        for secret in given:
            # The lookup is by a digest that a client cannot aim at; the comparison's time says nothing about a secret.
            found = self._keys.get(principal := principal_of(secret))
            if found is not None and found.revoked is None and hmac.compare_digest(found.principal, principal):
                return found
        return None

    def rules(self, principal: str) -> ClientKey | None:
        """Return the key of a principal, a revoked one too: what was accepted with it goes on."""
        return self._keys.get(principal)

    def admit(self, principal: str) -> None:
        """Count a request of a key. Raises RequestError 429: its rate is reached, or its tokens of the day are used."""
        key = self._keys.get(principal)
        if key is None:
            return
        if key.tokens_per_day is not None and self._used_today(key.name) >= key.tokens_per_day:
            self.refused[key.name] += 1
            message = f"The key {key.name} has used its {key.tokens_per_day} tokens of this day (UTC)."
            raise RequestError(message, status=429, kind="insufficient_quota", code="insufficient_quota")
        if key.requests_per_minute is not None and (wait := self._bucket(key).take_request(self._clock())) is not None:
            self.refused[key.name] += 1
            raise overloaded(f"The key {key.name} may ask {key.requests_per_minute} times a minute.", wait)
        self._add(KeyUsage(key.name, self._day(), 1))

    def charge(self, principal: str, prompt_tokens: int, generated_tokens: int) -> None:
        """Record the tokens of a request that has ended."""
        key = self._keys.get(principal)
        if key is not None and (prompt_tokens or generated_tokens):
            self._add(KeyUsage(key.name, self._day(), 0, prompt_tokens, generated_tokens))

    def _bucket(self, key: ClientKey) -> RequestBucket:
        most = key.requests_per_minute or 1
        found = self._buckets.get(key.principal)
        if found is None or found.most != most:
            found = self._buckets[key.principal] = RequestBucket(most, self._clock())
        return found

    def _used_today(self, name: str) -> int:
        day = self._day()
        one = (name, day)
        recorded = self._recorded.get(name, 0) if day == self._read_on else 0
        return recorded + sum(each[one].tokens for each in (self._sent, self._pending) if one in each)

    def _add(self, used: KeyUsage) -> None:
        _merge(self._pending, (used.name, used.day), used)
        _merge(self.totals, used.name, used)

    async def _follow(self) -> None:
        told = False
        while not self._over.is_set():  # at the end once more, for what was used since
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), PAUSE)
            try:
                await self._exchange()
                told = False
            except Exception as error:
                if not told:  # one line is enough for as long as it lasts
                    _log.warning("the keys cannot be read: %s", error, exc_info=not isinstance(error, ZooError))
                told = True

    async def _exchange(self) -> None:
        """Record what was used since the last time, and read keys and the day's usage."""
        day = self._day()
        self._sent, self._pending = self._pending, {}
        try:
            loop, sent = asyncio.get_running_loop(), tuple(self._sent.values())
            keys, used = await loop.run_in_executor(self._thread, self._record, sent, day)
        except BaseException:  # it was not recorded
            for each in self._sent.values():
                _merge(self._pending, (each.name, each.day), each)
            self._sent = {}
            raise
        self._keys = {key.principal: key for key in keys}
        self._recorded = {each.name: each.tokens for each in used if each.day == day}
        self._read_on, self._sent = day, {}

    def _record(self, used: tuple[KeyUsage, ...], day: str) -> tuple[list[ClientKey], list[KeyUsage]]:
        catalog = self._store.catalog
        if used:
            with catalog.writing() as writer:
                writer.add_key_usage(used)
                return writer.keys(), writer.key_usage(day)
        with catalog.reading() as reader:
            return reader.keys(), reader.key_usage(day)


def _merge(totals: dict[K, KeyUsage], one: K, used: KeyUsage) -> None:
    before = totals.get(one, KeyUsage(used.name, used.day))
    totals[one] = KeyUsage(
        used.name,
        used.day,
        before.requests + used.requests,
        before.prompt_tokens + used.prompt_tokens,
        before.generated_tokens + used.generated_tokens,
    )
