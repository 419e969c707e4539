"""A server with a queue in a process of its own, on the integer engine: `python -m … FOLDER TOKENIZER [--option …]`.

Its tokens depend on `--salt`, so that two lives of a server with different salts produce different tokens: then only
what the first life has written can explain that an answer goes on as it began. `--die POINT` kills it at a point of a
request's way, the `--at`th time that it comes by; with `--victim GROUP` it kills that group of processes instead, and
goes on:

    accept    the request is about to be stored        stored     it is stored, and not started
    fetch     it was claimed after a restart           journal    in the transaction that writes its events
    written   its events are stored, and not published
    send      a chunk was handed to the client         finalise   in the transaction that writes its answer
    answered  its answer is stored, and not published
    aborted   its end is stored, which a client or the end of its batch has asked for
    offer     with a broker: the request is about to be published
    offered   so: the broker has confirmed it, and no row is written
    claiming  so: in the transaction that writes the rows of what was delivered, and claims them
    claimed   so: they are claimed, and nothing of them runs
    ack       so: its answer is stored, and its message not acknowledged
    fold      with `--store`: in the catalogue's transaction that counts what the queue has kept
    folded    so: it is counted, and the queue still has it
    unfolded  so: the queue has dropped it, and the catalogue still has its marks
    plan      with `--crowded`: an order of the waiting requests is being searched
    swap-out  so: K and V of a request that gives way are in host memory, and count as such next
    swap-in   so: they are on the device again, and count as such next
    load      so: a model has been loaded in the place of another one

`--store FOLDER` takes the keys of a store's clients, and `--flush SECONDS` says how often usage is exchanged with its
catalogue; `--linger SECONDS` pass between a point and the death there. `--unjournalled` publishes without writing (the
negative control). `--crowded` serves two models of which one fits, with pages for few requests, in a planned order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from runtime.agent.sequences.host_copies import HostCopies
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.driver.plan_thread import PlanThread
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, OrderConfig, ServerConfig
from runtime.frontend.tokenizer import adapt_core
from runtime.queueing import requests, usage
from runtime.queueing.broker import RabbitIntake
from runtime.queueing.database import QueueDatabase
from runtime.server.app import build_app
from runtime.server.durable.store import RequestStore
from runtime.server.keys import key_book
from runtime.server.openai.sse import Outlet
from runtime.server.run_server import address_of, bind, serve
from runtime.types import ModelSpec
from tests.runtime.cluster.whole import WholeEngine, blocks_of, chain_of, inline
from tests.runtime.server.harness import BASE, FINE, FakeSource
from zoo.catalog import Writer
from zoo.store import Store


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
    "aborted": (after, RequestStore, "abort"),
    "offer": (before, RabbitIntake, "put"),
    "offered": (after, RabbitIntake, "put"),
    "claiming": (after, requests, "claim"),
    "claimed": (after, RabbitIntake, "_claim_came"),
    "ack": (before, RabbitIntake, "ack"),
    "fold": (after, Writer, "fold_usage"),
    "folded": (before, usage, "drop"),
    "unfolded": (before, Writer, "drop_folded"),
    "plan": (before, PlanThread, "_solve"),
    "swap-out": (before, HostCopies, "copied_out"),
    "swap-in": (before, HostCopies, "copied_in"),
    "load": (after, WholeEngine, "load"),
}


def arm(point: str, at: int, victim: int | None, linger: float) -> None:
    """Kill this process, or a group of other ones, when it comes by a point for the `at`th time."""
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        passed += 1
        if passed == at and victim is not None:
            os.killpg(victim, signal.SIGKILL)
        elif passed == at:
            time.sleep(linger)
            os.kill(os.getpid(), signal.SIGKILL)

    patch, owner, name = POINTS[point]
    patch(owner, name, pass_by)


def forget_events() -> None:
    """Publish events that are not in the store."""

    async def append(self: RequestStore, request: str, ordinal: int, events: list[Any]) -> bool:
        return True

    RequestStore.append = append  # type: ignore[method-assign]


def crowded(specs: Sequence[ModelSpec], pace: float) -> ClusterDriver:
    """Return a driver for two models of which one fits, with pages for one request of a hundred tokens."""
    engine = WholeEngine(specs, 14, pace=lambda _: time.sleep(pace))
    agent = AgentConfig(max_num_seqs=2, host_memory_bytes=1 << 20, chunk_prefill=True)
    only = InlineAgent(lambda: engine, agent, AgentSettings(weights=2500, report_seconds=0.05))
    blocks = {block.id: block for spec in specs for block in blocks_of(spec)}
    order = OrderConfig("qlm")
    config = ClusterConfig(
        max_num_seqs=2, residency="swap", preemption_mode="swap", order=order, control=ControlConfig.off()
    )
    return ClusterDriver([chain_of(spec) for spec in specs], [*blocks.values()], [only.device], only, config)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("queue")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--salt", default="")
    parser.add_argument("--pace", type=float, default=0.005)
    parser.add_argument("--die", choices=tuple(POINTS))
    parser.add_argument("--at", type=int, default=1)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--unjournalled", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--crowded", action="store_true")
    parser.add_argument("--broker")
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--linger", type=float, default=0.0)
    parser.add_argument("--flush", type=float, default=0.05)
    given = parser.parse_args(arguments)
    if given.die is not None:
        arm(given.die, given.at, given.victim, given.linger)
    if given.unjournalled:
        forget_events()
    specs = [replace(BASE, blocks=("shared", f"own-base{given.salt}"))]
    if given.crowded:
        specs.append(replace(FINE, blocks=("shared", f"own-fine{given.salt}")))
    source = FakeSource(adapt_core(Tokenizer.from_file(str(given.tokenizer / "tokenizer.json")), None), specs)
    store = None if given.store is None else Store.open(given.store)
    own = None if store is None else "the-server's-own"
    durable: Literal["keyed", "all"] = "all" if given.all else "keyed"
    config = ServerConfig(
        durable=durable, drain_seconds=20, broker=given.broker, api_key=own, client_keys=store is not None
    )
    key_book.PAUSE = given.flush
    bound = bind("127.0.0.1", 0)
    queue = QueueDatabase(given.queue, patience=60, lease=given.lease)
    whole = WholeEngine(specs, 512, pace=lambda _: time.sleep(given.pace))
    with crowded(specs, given.pace) if given.crowded else inline(whole) as driver:
        app = build_app(driver, [source.served(spec) for spec in specs], source, config, queue=queue, store=store)
        serve(app, config, bound, lambda: print(address_of(bound), flush=True))
    queue.close()


if __name__ == "__main__":
    main(sys.argv[1:])
