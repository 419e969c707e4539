"""The sides of `benchmarks.residency.more_than_fit`: clients that answer requests for more models than fit.

    blocks        blocks that models share once in memory, the furthest next use leaves first
    shared        the same, and pages get what weights leave, as `zoo serve --device-memory` does
    models        the same with whole models, the least recently used leaves first
    transformers  transformers' `generate` in batches of one model, with as many models in memory as fit

All run in this process, on one device. The sides but `shared` have the same bytes for weights; that one has the same
bytes for weights and pages together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.residency.ledger import Ledger
from cli.bench.baseline import TransformersRunner
from cli.bench.batches import Batches
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.bench.drive import Client, Clock
from runtime.bench.inside import DriverClient
from runtime.bench.workload import WorkloadRequest
from zoo.api import Zoo

SideName = Literal["blocks", "shared", "models", "transformers"]
OURS: Mapping[str, Mapping[str, str | None]] = {
    "blocks": {},
    "shared": {"kv_cache_memory_bytes": None},
    "models": {"weight_sharing": "models", "eviction": "lru"},
}
#: Requests in a batch of transformers.
_BATCH = 16


@dataclass
class OpenSide:
    """A side that is open.

    Fields:
        answers: The tokens of each answer of the latest round, by the request's number.
        ledger: The account of its device's weights; None for transformers.
    """

    name: SideName
    client: Client
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ledger: Ledger | None = None
    driver: Any = None

    def keep_answer(self, ask: WorkloadRequest, tokens: Sequence[int]) -> None:
        self.answers[ask.number] = tuple(tokens)

    def loaded_bytes(self) -> int:
        """Return the bytes that the scheduler says were loaded on demand."""
        return 0 if self.driver is None else int(self.driver.state().counters.loaded_bytes)

    def preemptions(self) -> int:
        """Return how many sequences were preempted."""
        return 0 if self.driver is None else int(self.driver.state().counters.preemptions)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of the device.

    Fields:
        models: Number of whole models that fit.
        weights: Bytes of weights that fit.
        pages: Bytes of the KV cache.
    """

    models: int
    weights: int
    pages: int

    def options(self, **changes: Any) -> ServeOptions:
        return replace(
            ServeOptions(device_memory=self.weights + self.pages, kv_cache_memory_bytes=self.pages), **changes
        )


@contextmanager
def opened(name: SideName, store: Path, names: Sequence[str], room: DeviceMemory, clock: Clock) -> Iterator[OpenSide]:
    """Open a side with all models of these names."""
    with Zoo(store, create=False) as zoo:
        if name == "transformers":
            side = OpenSide(name, client=None)  # type: ignore[arg-type]
            with Batches(TransformersRunner(zoo, clock, "cpu", None, room.models, side.keep_answer), _BATCH) as client:
                side.client = client
                yield side
            return
        options = room.options(**OURS[name])
        limit = options.shared_memory or room.weights
        ledger = Ledger(zoo, limit, private=options.weight_sharing == "models")
        with start_driver(zoo, options, choose(zoo, names), made=ledger.attach) as driver:
            side = OpenSide(name, client=None, ledger=ledger, driver=driver)  # type: ignore[arg-type]
            side.client = DriverClient(driver, clock, side.keep_answer)
            yield side


def own_answers(store: Path, asks: Sequence[WorkloadRequest], pages: int, clock: Clock) -> dict[int, tuple[int, ...]]:
    """Return each request's answer by its model, served alone in an engine of its own."""
    from runtime.types import SamplingParams, SequenceRequest

    found: dict[int, list[int]] = {ask.number: [] for ask in asks}
    with Zoo(store, create=False) as zoo:
        for name in dict.fromkeys(ask.model for ask in asks):
            own = [ask for ask in asks if ask.model == name]
            with start_driver(zoo, ServeOptions(kv_cache_memory_bytes=pages), choose(zoo, [name])) as driver:
                requests = [
                    SequenceRequest(
                        str(ask.number), str(ask.number), name, tuple(ask.prompt),  # type: ignore[arg-type]
                        SamplingParams(max_tokens=ask.answer, ignore_eos=True),
                    )
                    for ask in own
                ]  # fmt: skip
                for event in driver.run(requests):
                    if event.token is not None:
                        found[int(event.seq)].append(event.token)
    return {number: tuple(tokens) for number, tokens in found.items()}
