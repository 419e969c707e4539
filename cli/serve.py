"""`zoo serve`: serve stored models over OpenAI's HTTP interface.

Standard output gets only the address (one JSON document with `--json`), once requests are accepted. Everything else
goes to standard error.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.serving.needs import SAID
from cli.serving.options import ServeOptions, gather
from cli.shared.declared import takes_options
from cli.shared.output import DEFAULT_STORE, DatabaseOption, StoreOption, say
from zoo.errors import InputError

if TYPE_CHECKING:
    from runtime.queueing.database import QueueDatabase
    from runtime.tracing.sink import Trace, TraceSink
    from zoo.api import Zoo

ServeJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the address and the models as one JSON document once ready.")
]


@takes_options(ServeOptions, needs=SAID)
def serve(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models to serve, as --models.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML or JSON file of the same options, with underscores.", dir_okay=False),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: ServeJsonOption = False,
    **given: Any,
) -> None:
    """Serve models over HTTP as OpenAI does: their shared blocks once in memory, one batch for all of them."""
    given["models"] = [*(given["models"] or ()), *(names or ())] or None
    options = gather(config, given)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from zoo.api import Zoo

    with ended_by_sigterm(), Zoo(store, database, create=False) as zoo:
        _run(zoo, options, database, as_json)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit during startup, so that agents and sockets are closed as for Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(zoo: Zoo, options: ServeOptions, database: str | None, as_json: bool) -> None:
    from cli.serving.beside import beside
    from cli.serving.chunk_choice import with_measured_chunk
    from cli.serving.driver import start_driver
    from cli.serving.models import all_on_demand, choose, with_exits
    from cli.serving.source import ZooSource
    from runtime.server.run_server import address_of, bind, is_local, serve

    settings, engine_config, source = options.server(), options.engine(), ZooSource(zoo)
    with ExitStack() as stack:
        bound = stack.enter_context(bind(settings.host, settings.port))
        queue = _open_queue(options.queue, options.lease_seconds, stack)
        executor = "paged" if options.clustered else options.executor
        wanted = with_exits(zoo, options.models) if options.early_exit else options.models
        chosen = (
            all_on_demand(zoo, engine_config.dtype)
            if options.on_demand
            else choose(zoo, wanted, engine_config.dtype, executor, engine_config.device)
        )
        for reason in chosen.skipped:
            say(f"warning: left out: {reason}")
        if settings.api_key is None and not is_local(bound):
            say("warning: no API key is set, and the server can be reached from other machines")
        trace = _open_trace(options.trace, stack)
        sink = _open_spans(options.otlp_traces_endpoint, trace, stack)
        settled = with_measured_chunk(zoo, options.settled(), chosen)
        if settled.long_prefill_token_threshold != options.long_prefill_token_threshold:
            say(f"prompts run in chunks of {settled.long_prefill_token_threshold} tokens, as measured")
        count = len(chosen.names)
        what = f"loading {count} of the store's models" if count else f"{len(chosen.on_demand)} models on demand"
        say(f"{what} for the {chosen.executor} executor ({settled.backend})")
        log = _open_log(options.scheduler_log, stack)

        def prepare() -> None:
            import runtime.server.app
            import runtime.server.http_server  # noqa: F401

            source.read_tokenizers(chosen.names)

        with beside(prepare):
            driver = stack.enter_context(start_driver(zoo, settled, chosen, database, sink, log))
        from runtime.server.app import build_app

        served = [source.served(spec) for spec in driver.models()]
        app = build_app(driver, served, source, settings, trace, chosen.on_demand, queue, zoo.store)
        names = [*(model.name for model in served), *(model.name for model in chosen.on_demand)]
        serve(app, settings, bound, ready=lambda: _announce(address_of(bound), names, as_json))


def _announce(address: str, names: Sequence[str], as_json: bool) -> None:
    """Print the address, or the document, once requests are accepted."""
    if as_json:
        # One line, because a reader parses it while this process keeps running.
        print(json.dumps({"address": address, "models": list(names)}), flush=True)
    else:
        print(address, flush=True)


def _open_spans(endpoint: str | None, trace: Trace | None, stack: ExitStack) -> TraceSink | None:
    """Return the sink of trace events: the trace file, and an OpenTelemetry collector if `endpoint` is set.

    Raises InputError without the packages for it.
    """
    if endpoint is None:
        return trace
    from runtime.tracing.otel import OtelSpans, exporting

    provider = exporting(endpoint)
    stack.callback(provider.shutdown)
    return OtelSpans(provider, trace)


def _open_log(path: str | None, stack: ExitStack) -> Callable[[bytes], object] | None:
    """Return the function that writes lines of the scheduler's log."""
    if path is None:
        return None
    from runtime.cluster.driver.log_file import LogFile

    log_file = LogFile(Path(path))
    stack.callback(log_file.close)
    return log_file.write


def _open_queue(target: str, lease_seconds: float, stack: ExitStack) -> QueueDatabase | None:
    """Return the queue of durable requests. Raises InputError or StoreError, also if another server has it."""
    if target == "off":
        return None
    from runtime.queueing.database import QueueDatabase

    database = QueueDatabase(target, lease=lease_seconds)
    stack.callback(database.close)
    return database


def _open_trace(path: str | None, stack: ExitStack) -> Trace | None:
    if path is None:
        return None
    from runtime.tracing.sink import Trace

    try:
        trace = Trace(Path(path))
    except OSError as error:
        raise InputError(f"the trace cannot be written to {path}: {error.strerror}") from None
    stack.callback(trace.close)
    return trace
