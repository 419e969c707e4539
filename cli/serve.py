"""`zoo serve`: models of the store behind OpenAI's HTTP interface.

Standard output gets exactly one line, the address, once requests are answered; all else goes to standard error.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import DEFAULT_STORE, DatabaseOption, StoreOption, say
from cli.serve_options import ServeOptions, gather
from zoo.errors import InputError

if TYPE_CHECKING:
    from runtime.cluster.driver import ClusterDriver
    from runtime.trace import Trace, TraceSink
    from zoo.api import Zoo

_LOCAL = ("127.", "::1", "localhost")


def serve(
    names: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models to serve; all when none is named.")] = None,
    models: Annotated[list[str] | None, typer.Option("--models", help="The same, as an option: --models A B.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.", show_default="8000")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ZOO_API_KEY", help="Key that every request must bring.")] = None,
    trace: Annotated[str | None, typer.Option(help="Write every event to this file (JSON lines), and keep /zoo/trace.")] = None,
    otel: Annotated[
        str | None, typer.Option(help="Send requests as OpenTelemetry spans to this OTLP/HTTP address: http://host:4318/v1/traces.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cpu")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="each model's own")] = None,
    layers: Annotated[str | None, typer.Option(help="fused, or stock: transformers' own layers.", show_default="fused")] = None,
    weights: Annotated[
        str | None, typer.Option(help="plain, packed, or auto: how a CPU holds the weights of linear layers.", show_default="auto")
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="native: compiled on first use; stock: torch's own; or auto.", show_default="auto")
    ] = None,
    graphs: Annotated[
        str | None, typer.Option(help="on, off, or auto: decode steps as CUDA graphs, where there is CUDA.", show_default="auto")
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="paged, or dense: what some families need, and any model can have.", show_default="auto")
    ] = None,
    dense_mode: Annotated[
        str | None, typer.Option(help="baton-pd, baton, pd or run-to-completion: how dense batches are filled.", show_default="baton-pd")
    ] = None,
    dense_slots: Annotated[int | None, typer.Option(help="Rows of a dense batch.", show_default="16")] = None,
    kv_bytes: Annotated[str | None, typer.Option(help="Size of the page pool of all models.", show_default="1GiB")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Cap on every model's context, in tokens.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens per step.", show_default="512")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Sequences per step.", show_default="256")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Sequences in the server at once; more get 429.", show_default="4096")] = None,
    drain_seconds: Annotated[float | None, typer.Option(help="Patience with running requests on SIGTERM.", show_default="30")] = None,
    agents: Annotated[int | None, typer.Option(help="Devices, each with an agent, that chains are spread over.", show_default="1")] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Where agents run: processes, threads of this one, or ray (an extra); local is one device without agents.",
            show_default="local",
        ),
    ] = None,
    placing: Annotated[
        str | None,
        typer.Option(
            help="Where blocks are put: copies on each agent, split over all, demand: one copy and more by load, or auto.",
            show_default="auto",
        ),
    ] = None,
    sharing: Annotated[
        str | None,
        typer.Option(
            help="Agents share pages of prompts that begin alike: off, running, or cached (ended ones too).", show_default="running"
        ),
    ] = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            help="Predict hops with long queues by the zoo's surrogates: off; exact: every token is the chain's own; similarity: in "
            "adaptive requests predictions stand that are alike enough.",
            show_default="off",
        ),
    ] = None,
    agent_weights: Annotated[str | None, typer.Option(help="Bytes of weights that an agent takes; 0 for any.", show_default="0")] = None,
    deltas: Annotated[
        bool | None, typer.Option("--deltas", help="Serve adaptive requests by a model's low-rank rewriting, where that is served too.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or JSON file with the same options.", dir_okay=False)] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
) -> None:
    """Serve models over HTTP as OpenAI does: their shared blocks once in memory, one batch for all of them."""
    wanted = [*(models or ()), *(names or ())]
    given: dict[str, Any] = {
        "host": host, "port": port, "models": wanted or None, "api_key": api_key, "trace": trace, "otel": otel,
        "device": device, "dtype": dtype,
        "layers": layers, "weights": weights, "kernels": kernels, "graphs": graphs, "executor": executor, "dense_mode": dense_mode,
        "dense_slots": dense_slots,
        "kv_bytes": kv_bytes, "max_model_len": max_model_len, "token_budget": token_budget, "max_sequences": max_sequences,
        "max_queued": max_queued, "drain_seconds": drain_seconds, "agents": agents, "backend": backend, "placing": placing,
        "agent_weights": agent_weights, "deltas": deltas, "speculation": speculation, "sharing": sharing,
    }  # fmt: skip
    options = gather(config, given)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        _run(zoo, options, database)


def _run(zoo: Zoo, options: ServeOptions, database: str | None) -> None:
    from cli.clusters import start_cluster
    from cli.wiring import ZooSource, choose, start_engine
    from runtime.cluster.local import LocalDriver
    from runtime.server.app import build_app
    from runtime.server.serving import address_of, bind, serve

    settings, engine_config, batching = options.server(), options.engine(), options.batching()
    with ExitStack() as stack:
        bound = stack.enter_context(bind(settings.host, settings.port))
        executor = "paged" if options.clustered else options.executor
        chosen = choose(zoo, options.models, engine_config.dtype, executor, engine_config.device)
        for reason in chosen.skipped:
            say(f"warning: left out: {reason}")
        if settings.api_key is None and not settings.host.startswith(_LOCAL):
            say("warning: no API key is set, and the server can be reached from other machines")
        trace = _open_trace(settings.trace, stack)
        sink = _open_spans(options.otel, trace, stack)
        say(f"loading {len(chosen.names)} of the store's models for the {chosen.executor} executor")
        driver: LocalDriver | ClusterDriver
        if options.clustered:
            driver = stack.enter_context(start_cluster(zoo, options, chosen.names, database, sink))
        else:
            engine = start_engine(zoo, engine_config, chosen.names, chosen.executor)
            driver = stack.enter_context(LocalDriver(engine, batching, sink))
        source = ZooSource(zoo, options.deltas, engine_config.device)
        served = [source.served(spec) for spec in driver.models()]
        app = build_app(driver, served, source, settings, trace)
        serve(app, settings, bound, ready=lambda: print(address_of(bound), flush=True))


def _open_spans(endpoint: str | None, trace: Trace | None, stack: ExitStack) -> TraceSink | None:
    """Where events go: to the trace, and as spans to a collector if there is one. Raises InputError without the packages for that."""
    if endpoint is None:
        return trace
    from runtime.spans import Spans, exporting

    provider = exporting(endpoint)
    stack.callback(provider.shutdown)
    return Spans(provider, trace)


def _open_trace(path: str | None, stack: ExitStack) -> Trace | None:
    if path is None:
        return None
    from runtime.trace import Trace

    try:
        trace = Trace(Path(path))
    except OSError as error:
        raise InputError(f"the trace cannot be written to {path}: {error.strerror}") from None
    stack.callback(trace.close)
    return trace
