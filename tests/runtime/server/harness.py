"""A real server on a free loopback port: uvicorn in a thread, the real driver, and the integer engine.

The engine's expected tokens can be computed without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import httpx
import openai

from runtime.chains import Rewriting
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import PrefixCaching, ServerConfig
from runtime.frontend.served_models import SamplingDefaults, ServedModel, StoredModel
from runtime.frontend.tokenizer import Tokenizer
from runtime.policy.profiles import BlockProfile
from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from runtime.server.app import build_app
from runtime.server.capacity import Gate
from runtime.server.context import Service
from runtime.server.http_server import make_server
from runtime.server.run_server import address_of, bind
from runtime.tracing.sink import Trace
from runtime.types import ModelSpec
from tests.runtime.cluster.whole import WholeEngine, inline
from zoo.errors import AmbiguousName, NotFound
from zoo.store import Store
from zoo.views.exits import exit_name

BASE = ModelSpec("org/base", 2, 16, 256, 320, eos_token_ids=(), blocks=("shared", "own-base"), kind="foundation")
FINE = ModelSpec(
    "org/fine", 2, 16, 256, 320, eos_token_ids=(), blocks=("shared", "own-fine"), kind="full", base="org/base"
)
SPARE = ModelSpec("org/spare", 2, 16, 256, 320, blocks=("shared", "own-spare"), kind="lora", base="org/base")


class FakeSource:
    """A catalogue of models that share one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, known: Sequence[ModelSpec] = (BASE, FINE, SPARE)) -> None:
        self._tokenizer = tokenizer
        self._specs = {spec.name: spec for spec in known}

    def resolve(self, name: str) -> str:
        found = [known for known in self._specs if known.endswith(name)]
        if len(found) > 1:
            raise AmbiguousName(f"{name} could be {', '.join(found)}")
        if not found:
            raise NotFound(f"no model named {name!r}")
        return found[0]

    def listing(self) -> list[Mapping[str, Any]]:
        return [
            {"name": spec.name, "kind": spec.kind, "base": spec.base, "family": "llama"}
            for spec in self._specs.values()
        ]

    def served(self, spec: ModelSpec) -> ServedModel:
        exits = tuple(frozenset({exit_name(spec.name, layers)}) for layers in range(4))
        return ServedModel(spec, self._tokenizer, SamplingDefaults(), 1_700_000_000, None, spec.name, exits)


@dataclass(frozen=True)
class Running:
    """A server under test."""

    address: str
    driver: ClusterDriver
    gate: Gate
    api_key: str | None
    service: Service

    def unfinished(self) -> list[str]:
        """Return the ids of durable requests that have not ended."""
        assert self.service.durable is not None
        with self.service.durable.store.database.reading() as connection:
            return [request.id for request in requests.unfinished(connection)]

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=key or self.api_key or "none", max_retries=0, timeout=20
        )

    def http(self, **options: Any) -> httpx.Client:
        headers = {b"Authorization": f"Bearer {self.api_key}".encode()} if self.api_key else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=20, trust_env=False, **options)

    def state(self) -> dict[str, Any]:
        with self.http() as client:
            return dict(client.get("/zoo/state").json())


@contextmanager
def running(
    tokenizer: Tokenizer,
    *,
    specs: Sequence[ModelSpec] = (BASE, FINE),
    pages: int = 512,
    pace: Callable[[int], None] | None = None,
    fail_at: Sequence[int] = (),
    trace: bool = False,
    config: ServerConfig | None = None,
    deltas: Mapping[str, Rewriting] = MappingProxyType({}),
    profiles: Sequence[BlockProfile] = (),
    known: Sequence[ModelSpec] = (BASE, FINE, SPARE),
    credit: int = 1,
    on_demand: Sequence[StoredModel] = (),
    queue: str | None = None,
    store: Store | None = None,
    sharing: PrefixCaching = "off",
) -> Iterator[Running]:
    """Serve until the block ends. `pace` slows each step down, for tests that act on a sequence half-way.

    `deltas`: model -> the fine-tune that it may answer for; `profiles`: of whole chains, by their versions.
    """
    engine = WholeEngine(specs, pages, (SPARE,), pace=pace, fail_at=fail_at, device="fake")
    kept = Trace() if trace else None
    with (
        inline(engine, kept, sharing=sharing, credit=credit, deltas=deltas, profiles=profiles) as driver,
        serving(
            driver, FakeSource(tokenizer, known), config or ServerConfig(), kept, on_demand, queue, store
        ) as started,
    ):
        yield started


@contextmanager
def serving(
    driver: ClusterDriver,
    source: FakeSource,
    config: ServerConfig,
    trace: Trace | None = None,
    on_demand: Sequence[StoredModel] = (),
    queue: str | None = None,
    store: Store | None = None,
) -> Iterator[Running]:
    """Serve with a given driver until the block ends; the caller closes the driver."""
    opened = None if queue is None else QueueDatabase(queue, patience=30)
    models = [source.served(spec) for spec in driver.models()]
    app = build_app(driver, models, source, config, trace, on_demand, opened, store)
    bound = bind("127.0.0.1", 0)
    ready = threading.Event()
    server = make_server(app, replace(config, drain_seconds=2), ready.set)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
    thread.start()
    if not ready.wait(60):
        raise RuntimeError("the server did not start")
    try:
        yield Running(address_of(bound), driver, app.state.service.gate, config.api_key, app.state.service)
    finally:
        server.should_exit = True
        thread.join(60)
        if opened is not None:
            opened.close()


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether a condition comes true within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
