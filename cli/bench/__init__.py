"""`zoo bench`: measure a server or an engine, optionally against a second one in alternating rounds.

This module is the command. Workloads and clients are in `runtime.bench`, the measured targets in `targets`, the rounds
in `rounds`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cli.serving.options import ServeOptions, gather
from cli.shared.declared import takes_options
from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption

EngineName = Literal["zoo", "transformers", "vllm"]


@takes_options(ServeOptions, "executor", "weights", "backend", "device", "dtype", "kv_cache_memory_bytes")
def bench(
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server; without it, --engine in this process.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="Engine that answers in this process.")] = "zoo",
    against: Annotated[
        str | None, typer.Option(help="Another URL or engine; rounds of both alternate, and ratios are given.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(help="A model to ask, the most popular first; may be given again.", show_default="all"),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests per round; of a trace at most as many as it has.")] = 100,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second.", show_default="all at once, or the trace's times"),
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "gamma", "fixed"], typer.Option(help="Open loop: how they come.")
    ] = "poisson",
    cv: Annotated[float, typer.Option(help="gamma: coefficient of variation of the gaps; above 1 is bursts.")] = 2.0,
    clients: Annotated[
        int | None, typer.Option(help="Closed loop: so many ask, each again once it was answered.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="32, uniform:16-64 or lognormal:128,0.8; <=512 behind it bounds.")
    ] = "32",
    answer_tokens: Annotated[str, typer.Option(help="The same for answers.")] = "32",
    trace: Annotated[Path | None, typer.Option(help="Lengths and times of a trace file.", dir_okay=False)] = None,
    trace_format: Annotated[
        Literal["sharegpt", "azure", "burstgpt", "mooncake"], typer.Option(help="What the trace is.")
    ] = "sharegpt",
    speed: Annotated[float, typer.Option(help="A trace's times are divided by this.")] = 1.0,
    popularity: Annotated[
        Literal["identical", "uniform", "skewed", "distinct"], typer.Option(help="Which models requests are for.")
    ] = "uniform",
    zipf: Annotated[float, typer.Option(help="skewed: the k-th model in proportion to k^-zipf.")] = 1.0,
    vocabulary: Annotated[
        int, typer.Option(help="Random prompts have ids below this, and below the models' own where known.")
    ] = 1000,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and answer together; longer ones are cut.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Stored model for the tokenizer of a trace's texts.")] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(min=0.0, help="Goodput: milliseconds to the first token at most.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(min=0.0, help="Goodput: milliseconds per further token at most.")
    ] = None,
    slo_e2e: Annotated[
        float | None, typer.Option(min=0.0, help="Goodput: milliseconds to the last token at most.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="How often the whole workload is run, by turns with --against.")
    ] = 1,
    warm: Annotated[
        int, typer.Option(min=0, max=1000, help="Requests per model before the first round, not counted.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="transformers, vllm: requests of a model at once.")] = 16,
    resident: Annotated[
        int, typer.Option(min=1, help="transformers: models in memory at once; the rest are loaded when asked for.")
    ] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte before a server counts as stuck.")
    ] = 600.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="ZOO_API_KEY", help="Of the servers; better in the environment.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the document here, with every single request.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the latencies here (PNG).", dir_okay=False)
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    **own: Any,
) -> None:
    """Measure latency and throughput of a server or an engine under a workload."""
    from cli.bench.report import deliver
    from cli.bench.rounds import BenchmarkRun, run_bench
    from cli.bench.targets import Access, EngineTarget
    from runtime.bench.arrivals import Arrivals
    from runtime.bench.lengths import parse_lengths
    from runtime.bench.summary import Slo
    from runtime.bench.workload import WorkloadSettings
    from zoo.errors import InputError

    try:
        coming = Arrivals(rate, arrivals, cv if arrivals == "gamma" else 1.0)
    except ValueError as error:
        raise InputError(str(error)) from None
    settings = WorkloadSettings(
        requests, seed, coming, clients, parse_lengths(prompt_tokens), parse_lengths(answer_tokens), popularity, zipf,
        vocabulary, speed, max_model_len,
    )  # fmt: skip
    slo = Slo(*(None if bound is None else bound / 1000 for bound in (slo_ttft, slo_tpot, slo_e2e)))
    inside = EngineTarget(store, database, gather(None, own), batch, resident)
    chosen = BenchmarkRun(
        (url or engine, *([against] if against is not None else [])),
        tuple(models or ()),
        settings,
        None if trace is None else (trace, trace_format),
        tokenizer,
        slo,
        rounds,
        warm,
        Access(api_key, timeout),
        inside,
    )
    document = run_bench(chosen, silent=as_json)
    deliver(document, as_json, output, plot)
