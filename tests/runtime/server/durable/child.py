"""A server with a queue in a process of its own, on the integer engine: `python -m … FOLDER TOKENIZER [--option …]`.

Its tokens depend on `--salt`, so that two lives of a server with different salts produce different tokens: then only
what the first life has written can explain that an answer goes on as it began. `--die POINT` kills it at a point of a
request's way, the `--at`th time that it comes by:

    accept    the request is about to be stored        stored     it is stored, and not started
    fetch     it was claimed after a restart           journal    in the transaction that writes its events
    written   its events are stored, and not published
    send      a chunk was handed to the client         finalise   in the transaction that writes its answer
    answered  its answer is stored, and not published
    ack       with a broker: its answer is stored, and its message not acknowledged

`--unjournalled` publishes without writing (the negative control).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import adapt_core
from runtime.queueing import requests
from runtime.queueing.broker import RabbitIntake
from runtime.queueing.database import QueueDatabase
from runtime.server.app import build_app
from runtime.server.durable.store import RequestStore
from runtime.server.openai.sse import Outlet
from runtime.server.run_server import address_of, bind, serve
from tests.runtime.cluster.whole import WholeEngine, inline
from tests.runtime.server.harness import BASE, FakeSource


def before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Let `act` happen before each call of a function."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        act()
        return original(*args, **options)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Let `act` happen after each call of a function or coroutine function."""
    original = getattr(owner, name)
    if asyncio.iscoroutinefunction(original):

        async def awaited(*args: Any, **options: Any) -> Any:
            result = await original(*args, **options)
            act()
            return result

        setattr(owner, name, awaited)
        return

    def wrapped(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        act()
        return result

    setattr(owner, name, wrapped)


#: Where each point is: before or after which function.
POINTS: dict[str, tuple[Callable[[Any, str, Callable[[], None]], None], Any, str]] = {
    "accept": (before, RequestStore, "put"),
    "stored": (after, RequestStore, "put"),
    "fetch": (after, RequestStore, "claim"),
    "journal": (after, requests, "append"),
    "written": (after, RequestStore, "append"),
    "send": (after, Outlet, "write"),
    "finalise": (after, requests, "finish"),
    "answered": (after, RequestStore, "finish"),
    "ack": (before, RabbitIntake, "ack"),
}


def arm(point: str, at: int) -> None:
    """Kill this process when it comes by a point for the `at`th time."""
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            os.kill(os.getpid(), signal.SIGKILL)

    patch, owner, name = POINTS[point]
    patch(owner, name, pass_by)


def forget_events() -> None:
    """Publish events that are not in the store."""

    async def append(self: RequestStore, request: str, ordinal: int, events: list[Any]) -> None:
        return

    RequestStore.append = append  # type: ignore[method-assign]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("queue")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--salt", default="")
    parser.add_argument("--pace", type=float, default=0.005)
    parser.add_argument("--die", choices=tuple(POINTS))
    parser.add_argument("--at", type=int, default=1)
    parser.add_argument("--unjournalled", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--broker")
    parser.add_argument("--lease", type=float, default=10.0)
    given = parser.parse_args(arguments)
    if given.die is not None:
        arm(given.die, given.at)
    if given.unjournalled:
        forget_events()
    spec = replace(BASE, blocks=("shared", f"own-base{given.salt}"))
    source = FakeSource(adapt_core(Tokenizer.from_file(str(given.tokenizer / "tokenizer.json")), None), (spec,))
    config = ServerConfig(durable="all" if given.all else "keyed", drain_seconds=20, broker=given.broker)
    bound = bind("127.0.0.1", 0)
    queue = QueueDatabase(given.queue, patience=60, lease=given.lease)
    with inline(WholeEngine([spec], 512, pace=lambda _: time.sleep(given.pace))) as driver:
        app = build_app(driver, [source.served(spec)], source, config, queue=queue)
        serve(app, config, bound, lambda: print(address_of(bound), flush=True))
    queue.close()


if __name__ == "__main__":
    main(sys.argv[1:])
