"""The targets of a benchmark: a server behind an address, or an engine in this process, as a `BenchmarkTarget`.

The engine `zoo` gets one stream per request, as from the server. Other engines run batches, one model after the other
(`batches`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.bench.drive import Client, Clock
from runtime.bench.memory import listener, peak_bytes
from zoo.errors import InputError
from zoo.manifest import PARTS

if TYPE_CHECKING:
    from cli.bench.batches import Runner
    from cli.serving.options import ServeOptions
    from zoo.api import Zoo

_LOCAL = ("localhost", "127.0.0.1", "::1")
_BATCHED = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are reached.

    Fields:
        timeout: Seconds without a byte.
    """

    api_key: str | None = None
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """How engines are run in this process.

    Fields:
        config: Options of the engine `zoo`; device and data type apply to all.
        batch: Requests per batch of the other engines.
        resident: Models that transformers keeps in memory.
    """

    store: Path
    database: str | None
    config: ServeOptions
    batch: int = 16
    resident: int = 1


@dataclass(frozen=True, slots=True)
class BenchmarkTarget:
    """A target that is open.

    Fields:
        memory: Returns the current bytes by kind.
        vocabulary: Least vocabulary of its models, None if unknown.
        longest: Least context length of its models in tokens, None if unknown.
    """

    name: str
    client: Client
    models: tuple[str, ...]
    memory: Callable[[], Mapping[str, int | None]]
    vocabulary: int | None = None
    longest: int | None = None


@contextlib.asynccontextmanager
async def opened(
    name: str, models: Sequence[str], clock: Clock, access: Access, inside: EngineTarget
) -> AsyncIterator[BenchmarkTarget]:
    """Open a target by its address or its engine's name. Raises InputError, Unavailable and the errors of loading."""
    if name.startswith(("http://", "https://")):
        async with _server(name, models, clock, access) as target:
            yield target
        return
    if name != "zoo" and name not in _BATCHED:
        raise InputError(f"{name!r} is neither an address (http://…) nor one of zoo, {', '.join(_BATCHED)}")
    from zoo.api import Zoo

    with contextlib.ExitStack() as stack:
        zoo = stack.enter_context(Zoo(inside.store, inside.database, create=False))
        yield stack.enter_context(
            _engine(zoo, models, clock, inside) if name == "zoo" else _batched(zoo, name, models, clock, inside)
        )


@contextlib.asynccontextmanager
async def _server(url: str, models: Sequence[str], clock: Clock, access: Access) -> AsyncIterator[BenchmarkTarget]:
    import httpx

    from runtime.bench.http import HttpClient

    async with HttpClient.connected(url, clock, access.api_key, access.timeout) as client:
        known = tuple(models) or tuple(await client.models())
        address = httpx.URL(url)
        port = address.port or (443 if address.scheme == "https" else 80)
        process = listener(port) if address.host in _LOCAL else None
        yield BenchmarkTarget(
            url, client, known, lambda: {} if process is None else {"server_peak": peak_bytes(process)}
        )


@contextlib.contextmanager
def _engine(zoo: Zoo, models: Sequence[str], clock: Clock, inside: EngineTarget) -> Iterator[BenchmarkTarget]:
    from cli.serving.driver import start_driver
    from cli.serving.models import choose
    from runtime.bench.inside import DriverClient

    chosen = choose(zoo, models, inside.config.dtype, inside.config.executor, inside.config.device)
    with start_driver(zoo, inside.config, chosen) as driver:
        specs = driver.models()
        yield BenchmarkTarget(
            "zoo", DriverClient(driver, clock), chosen.names, lambda: {**asdict(driver.memory()), **_process()},
            min(spec.vocab_size for spec in specs), min(spec.max_model_len for spec in specs),
        )  # fmt: skip


@contextlib.contextmanager
def _batched(
    zoo: Zoo, name: str, models: Sequence[str], clock: Clock, inside: EngineTarget
) -> Iterator[BenchmarkTarget]:
    from cli.bench.batches import Batches

    names = tuple(zoo.model(model).name for model in models) or tuple(
        one.name for one in zoo.entries() if one.kind not in PARTS
    )
    configs = [zoo.model(model).config for model in names]
    with Batches(_runner(zoo, name, names, clock, inside), inside.batch) as client:
        yield BenchmarkTarget(
            name, client, names, _process, _least(configs, "vocab_size"), _least(configs, "max_position_embeddings")
        )


def _runner(zoo: Zoo, name: str, models: Sequence[str], clock: Clock, inside: EngineTarget) -> Runner:
    if name == "vllm":
        from cli.bench.vllm import VllmRunner

        return VllmRunner(zoo, clock, inside.config.dtype, models)
    from cli.bench.baseline import TransformersRunner

    return TransformersRunner(zoo, clock, inside.config.device, inside.config.dtype, inside.resident)


def _least(configs: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Return the least value of a key over all configs, None if one lacks it."""
    values = [config.get(key) for config in configs]
    return min(values) if all(isinstance(value, int) for value in values) else None  # type: ignore[type-var]


def _process() -> dict[str, int | None]:
    """Return the peak memory of this process, which two engines in it share."""
    return {"process_peak": peak_bytes(os.getpid())}
