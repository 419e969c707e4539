"""The keys of a store's clients, as a running server knows them, what they use, and what it costs.

The catalogue is read and written every `PAUSE` seconds on a thread of its own: a new key or price is known, and a
revoked one refused, after that time at most. Several servers of one store count together, each behind by as much.

What requests use is counted in memory until then (`charge`). That of durable requests is kept in the queue with their
answers (`usage_of`, `settle`), and comes to the catalogue from there (`Outbox`); bounds count it from its end on.
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
from typing import NamedTuple, NoReturn

from runtime.frontend.errors import RequestError, overloaded
from runtime.queueing.usage import RequestUsage
from runtime.server.keys.outbox import FoldResult, Outbox, usage_of_keys
from runtime.server.keys.rates import RequestBucket
from runtime.server.keys.usage_sums import UsageByModel, each_usage, merge_usage, move_usage
from zoo.catalog import Reader
from zoo.errors import ZooError
from zoo.keys import principal_of
from zoo.money import MOST_COST, ModelPrice, cost_text
from zoo.records import Budget, ClientKey, KeyUsage, Period
from zoo.store import Store

_log = logging.getLogger("blockzoo.server")
PAUSE = 1.0
#: Seconds for which an exchange with the catalogue waits for the queue, if there is one.
QUEUE_SECONDS = 5.0


def _utc_day() -> str:
    return datetime.now(UTC).date().isoformat()


class KeyBook:
    """Belongs to the event loop, but for `find` and `rules`, which any thread may call.

    Args:
        clock: Returns seconds.
        day: Returns the day (UTC, as 2026-01-31).
        outbox: What durable requests have used; None: there are none.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        day: Callable[[], str] = _utc_day,
        outbox: Outbox | None = None,
    ) -> None:
        self._store = store
        self._outbox = outbox
        self._clock, self._day = clock, day
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zoo-keys")
        #: A thread of its own: a queue that does not answer must not keep the catalogue from being followed.
        self._folder = ThreadPoolExecutor(1, thread_name_prefix="zoo-usage")
        self._folds: asyncio.Future[FoldResult] | None = None
        self._keys: Mapping[str, ClientKey] = {}
        self._buckets: dict[str, RequestBucket] = {}
        self._prices: Mapping[str, ModelPrice] = {}
        self._recorded: Mapping[Period, Mapping[str, KeyUsage]] = {}
        self._read_on = ""
        self._sent: UsageByModel = {}
        self._pending: UsageByModel = {}
        #: What the queue keeps and `_recorded` may lack: of this server, that which is being folded, and of the rest.
        self._settled: UsageByModel = {}
        self._folding: UsageByModel = {}
        self._others: UsageByModel = {}
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
        for thread in (self._thread, self._folder):
            thread.shutdown(wait=False, cancel_futures=True)

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
        """Count a request of a key.

        Raises RequestError 429: its rate is reached, or its tokens or its money of the day or month are used up.
        """
        key = self._keys.get(principal)
        if key is None:
            return
        for budget in key.budgets:
            self._check(key, budget)
        if key.requests_per_minute is not None and (wait := self._bucket(key).take_request(self._clock())) is not None:
            self.refused[key.name] += 1
            raise overloaded(f"The key {key.name} may ask {key.requests_per_minute} times a minute.", wait)
        self._add(KeyUsage(key.name, self._day(), 1))

    def charge(
        self, principal: str, model: str, prompt_tokens: int, generated_tokens: int, cached_tokens: int = 0
    ) -> None:
        """Record the tokens of a request that has ended, and what they cost now.

        `cached_tokens`: those of the prompt that were not computed.
        """
        key = self._keys.get(principal)
        if key is not None and (prompt_tokens or generated_tokens):
            tokens = (prompt_tokens, generated_tokens)
            cost = self._cost(model, *tokens, cached_tokens)
            self._add(KeyUsage(key.name, self._day(), 0, *tokens, model, 1, cost, cached_tokens))

    def usage_of(
        self, principal: str, model: str, prompt_tokens: int, generated_tokens: int, cached_tokens: int = 0
    ) -> RequestUsage | None:
        """Return what the queue is to keep with the answer of a durable request that ends now; None for no usage.

        It counts once the queue has it and `settle` was called. Args: as of `charge`.
        """
        if self._outbox is None or not (prompt_tokens or generated_tokens):
            return None
        tokens = (prompt_tokens, generated_tokens, cached_tokens)
        cost = min(self._cost(model, *tokens), MOST_COST)
        return RequestUsage(principal, model, self._day(), *tokens, cost, self._outbox.new_id())

    def settle(self, used: RequestUsage) -> None:
        """Count what the queue keeps from now on."""
        key = self._keys.get(used.principal)
        for each in usage_of_keys({} if key is None else {key.principal: key.name}, [used]):
            merge_usage(self._settled, each)
            self._add_total(each)

    def _cost(self, model: str, prompt_tokens: int, generated_tokens: int, cached_tokens: int) -> int:
        price = self._prices.get(model) or self._prices.get("")
        return 0 if price is None else price.cost_of(prompt_tokens, generated_tokens, cached_tokens)

    def _check(self, key: ClientKey, budget: Budget) -> None:
        """Raise RequestError 429 if a budget is used up."""
        if budget.tokens is None and budget.money is None:
            return
        used = self._used(key.name, budget.period)
        if budget.tokens is not None and used.tokens >= budget.tokens:
            self._refuse(key, f"{budget.tokens} tokens", budget.period)
        if budget.money is not None and used.cost >= budget.money:
            self._refuse(key, f"money ({cost_text(budget.money)})", budget.period)

    def _refuse(self, key: ClientKey, limit: str, period: Period) -> NoReturn:
        self.refused[key.name] += 1
        message = f"The key {key.name} has used its {limit} of this {period} (UTC)."
        raise RequestError(message, status=429, kind="insufficient_quota", code="insufficient_quota")

    def _bucket(self, key: ClientKey) -> RequestBucket:
        most = key.requests_per_minute or 1
        found = self._buckets.get(key.principal)
        if found is None or found.most != most:
            found = self._buckets[key.principal] = RequestBucket(most, self._clock())
        return found

    def _used(self, name: str, period: Period) -> KeyUsage:
        """Return what a key has used today or this month: what the catalogue has, and what is not in there yet, in
        memory or in the queue.
        """
        shown = _shown(period, self._day())
        recorded = self._recorded.get(period, {}) if _shown(period, self._read_on) == shown else {}
        used = recorded.get(name) or KeyUsage(name, shown)
        for usage in (self._sent, self._pending, self._settled, self._folding, self._others):
            for (day, _), more in usage.get(name, {}).items():
                if _shown(period, day) == shown:
                    used = used.plus(more)
        return used

    def _add(self, used: KeyUsage) -> None:
        merge_usage(self._pending, used)
        self._add_total(used)

    def _add_total(self, used: KeyUsage) -> None:
        self.totals[used.name] = self.totals.get(used.name, KeyUsage(used.name, used.day)).plus(used)

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
        """Record what was used since the last time, and read keys, prices and the usage of day and month."""
        day = self._day()
        self._sent, self._pending = self._pending, {}
        self._folding, self._settled = self._settled, {}
        folded: FoldResult | None = None
        try:
            loop, sent = asyncio.get_running_loop(), tuple(each_usage(self._sent))
            folded = await self._fold()
            found = await loop.run_in_executor(self._thread, self._record, sent, day)
        except BaseException:  # it was not recorded
            move_usage(self._sent, self._pending)
            self._end_folding(folded, False)
            raise
        self._take_page(found, day)
        self._end_folding(folded, folded is not None and folded.whole)

    async def _fold(self) -> FoldResult | None:
        """Bring what the queue keeps to the catalogue; None while that does not end."""
        if self._outbox is None or (self._folds is not None and not self._folds.done()):
            return None
        loop = asyncio.get_running_loop()
        self._folds = loop.run_in_executor(self._folder, self._outbox.fold, self._store.catalog)
        await asyncio.wait((self._folds,), timeout=QUEUE_SECONDS)
        if self._folds.done():
            return self._folds.result()
        _log.warning("what durable requests have used waits: the queue or the catalogue does not answer")
        return None

    def _end_folding(self, folded: FoldResult | None, counted: bool) -> None:
        """Note what the queue still keeps. `counted`: all that it kept when folding began is in `_recorded`."""
        if counted:
            self._folding, self._others = {}, {}
            return
        move_usage(self._folding, self._settled)
        if folded is not None and folded.others is not None:
            names = {principal: key.name for principal, key in self._keys.items()}
            self._others = {}
            for each in usage_of_keys(names, folded.others):
                merge_usage(self._others, each)

    def _take_page(self, found: _BookPage, day: str) -> None:
        self._keys = {key.principal: key for key in found.keys}
        self._prices = {price.model: price for price in found.prices}
        self._recorded = {
            "day": {each.name: each for each in found.day},
            "month": {each.name: each for each in found.month},
        }
        self._read_on, self._sent = day, {}

    def _record(self, used: tuple[KeyUsage, ...], day: str) -> _BookPage:
        catalog = self._store.catalog
        if used:
            with catalog.writing() as writer:
                writer.add_key_usage(used)
                return _recorded(writer, day)
        with catalog.reading() as reader:
            return _recorded(reader, day)


class _BookPage(NamedTuple):
    """What a book reads of the catalogue."""

    keys: list[ClientKey]
    prices: list[ModelPrice]
    day: list[KeyUsage]
    month: list[KeyUsage]


def _recorded(reader: Reader, day: str) -> _BookPage:
    month = reader.key_usage_of_month(_shown("month", day))
    return _BookPage(reader.keys(), reader.prices(), reader.key_usage_of_day(day), month)


def _shown(period: Period, day: str) -> str:
    """Return a day, or the month that it is in."""
    return day if period == "day" else day[: len("2026-01")]
