"""A load client that calls a driver in this process: no HTTP, no text. The caller passes the driver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from runtime.bench.answers import TokenTimes
from runtime.bench.drive import Clock
from runtime.bench.workload import WorkloadRequest
from runtime.cluster.driver.base import BaseDriver
from runtime.types import SamplingParams, SequenceRequest
from zoo.errors import InputError, ZooError


class DriverClient:
    """Requests greedy answers of exactly the given length, as far as the context allows.

    Args:
        keep: Receives the tokens of each answer.
    """

    def __init__(
        self, driver: BaseDriver, clock: Clock, keep: Callable[[WorkloadRequest, Sequence[int]], object] | None = None
    ) -> None:
        self._driver, self._keep = driver, keep
        self._clock = clock
        self._numbers = itertools.count()

    async def send_request(self, ask: WorkloadRequest) -> TokenTimes:
        """Run one request and return its times. Raises InputError if the prompt is text."""
        if isinstance(ask.prompt, str):
            raise InputError("prompts of text need a tokenizer to be run in this process")
        name = f"bench-{next(self._numbers)}"
        request = SequenceRequest(
            name, name, ask.model, ask.prompt, SamplingParams(max_tokens=ask.answer, ignore_eos=True)
        )
        stamps: list[float] = []
        made: list[int] = []
        lots: list[int] = []
        failed: str | None = None
        try:
            async with self._driver.open_stream([request]) as stream:
                async for events in stream:
                    if tokens := [event.token for event in events if event.token is not None]:
                        stamps.append(self._clock.now())
                        lots.append(len(tokens))
                        made += tokens
                    failed = next(
                        (event.error or "aborted" for event in events if event.finish in ("error", "abort")), None
                    )
        except ZooError as error:
            failed = str(error)
        if self._keep is not None:
            self._keep(ask, made)
        kind = None if failed is None else "engine"
        return TokenTimes(tuple(stamps), tuple(lots), sum(lots), len(ask.prompt), kind, failed)
