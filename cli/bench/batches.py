"""Per-model provisioning: a client of an engine that runs batches of one model's requests, each batch to its end.

The request that waits longest decides the next model; waiting requests for the same model join it, up to a batch.
Requests that arrive in the meantime wait. A token's time is when the engine generated it, so that a short answer in a
long batch is not counted as slow.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from runtime.bench.answers import TokenTimes
from runtime.bench.workload import WorkloadRequest
from zoo.errors import InputError, Unavailable, ZooError


class Runner(Protocol):
    """An engine with its models. Called from one thread."""

    def run(self, model: str, asks: Sequence[WorkloadRequest]) -> list[tuple[float, ...]]:
        """Return the times of each request's tokens, exactly `ask.answer` of them."""
        ...

    def close(self) -> None:
        """Free memory and temporary folders."""
        ...


class _Waiting:
    """A request and the future of its answer."""

    def __init__(self, ask: WorkloadRequest) -> None:
        self.ask = ask
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[TokenTimes] = self.loop.create_future()

    def resolve(self, heard: TokenTimes) -> None:
        def set_result() -> None:
            if not self.future.done():
                self.future.set_result(heard)

        self.loop.call_soon_threadsafe(set_result)


class Batches:
    """A load client in front of a runner. Use it as a context manager: its exit waits for the running batch."""

    def __init__(self, runner: Runner, most: int) -> None:
        self._runner = runner
        self._most = most
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="zoo-bench-batches", daemon=True)

    def __enter__(self) -> Batches:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._runner.close()

    async def send_request(self, ask: WorkloadRequest) -> TokenTimes:
        """Queue a request and wait for its answer. Raises InputError for a text prompt; Unavailable once closed."""
        if isinstance(ask.prompt, str):
            raise InputError("prompts of text need a tokenizer to be run in this process")
        waiting = _Waiting(ask)
        with self._changed:
            if self._closed:
                raise Unavailable("the engine is closed")
            self._queue.append(waiting)
            self._changed.notify_all()
        return await waiting.future

    def _work(self) -> None:
        while batch := self._next():
            try:
                stamps = self._runner.run(batch[0].ask.model, [waiting.ask for waiting in batch])
                heard = [
                    TokenTimes(own, (1,) * len(own), len(own), len(waiting.ask.prompt))
                    for waiting, own in zip(batch, stamps, strict=True)
                ]
            except Exception as error:
                line = str(error) if isinstance(error, ZooError) else f"{type(error).__name__}: {error}"
                heard = [TokenTimes(error="engine", detail=" ".join(line.split())[:200])] * len(batch)
            for waiting, one in zip(batch, heard, strict=True):
                waiting.resolve(one)

    def _next(self) -> list[_Waiting]:
        """Return the next batch; empty when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return []
            model = self._queue[0].ask.model
            batch = [waiting for waiting in self._queue if waiting.ask.model == model][: self._most]
            self._queue = deque(waiting for waiting in self._queue if waiting not in batch)
            return batch
