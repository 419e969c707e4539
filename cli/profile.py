"""`zoo profile`: measure the costs of a model's blocks on this machine and store them, or print stored ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.shared.output import (
    DEFAULT_STORE,
    DatabaseOption,
    JsonOption,
    StoreOption,
    human_bytes,
    print_json,
    print_table,
    say,
)
from cli.shared.values import DeviceOption, numbers_of
from zoo.errors import InputError, NotFound

#: Tokens of chunks that are measured unless others are given.
_CHUNKS = "64,256"


def profile(
    model: Annotated[str | None, typer.Argument(help="A model in the zoo; not with --kernels.")] = None,
    device: DeviceOption = "cpu",
    batches: Annotated[str, typer.Option(help="Rows per decode step, with commas.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens that each row attends to.")] = "64,256",
    chunks: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt's chunk. Of three sizes or more, the least one with nearly the best rate is "
            "stored, and zoo serve cuts prompts into such chunks here.",
            show_default="64,256",
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[str, typer.Option(help="The most that pages may take.")] = "1GiB",
    executors: Annotated[
        bool,
        typer.Option(
            "--executors",
            help="Time both executors instead; `zoo serve` then takes the faster one for this model here.",
        ),
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Measure the CPU kernels instead: products against the limits of this processor and its memory.",
        ),
    ] = False,
    stored: Annotated[bool, typer.Option("--stored", help="Show what was measured before; measure nothing.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's blocks: seconds by batch and context, loading, links between devices."""
    if kernels:
        _kernels(as_json)
        return
    if model is None:
        raise InputError("which model? Give its name, or --kernels")
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        if executors:
            _executors(zoo, model, device, kv_cache_memory_bytes, as_json)
            return
        documents = (
            _stored(zoo, model)
            if stored
            else [_measured(zoo, model, device, (batches, contexts, chunks), kv_cache_memory_bytes, as_json)]
        )
    if as_json:
        print_json(documents[-1])
        return
    for document in documents:
        _print(document)


def _kernels(as_json: bool) -> None:
    from runtime.engine.kernels.bindings import Kernels
    from runtime.engine.kernels.build import NoKernels
    from runtime.engine.profiling.kernel_report import measure_kernels

    try:
        report = measure_kernels(Kernels())
    except NoKernels as why:
        raise InputError(f"there are no kernels to measure: {why}") from None
    if as_json:
        print_json(report.to_document())
        return
    print(f"processor: {' '.join(report.features) or 'features are not listed'}; {report.threads} threads")
    rows = [
        (
            one.dtype,
            one.path,
            f"{one.skinny_bytes_s / 1e9:.1f}",
            f"{report.memory_bytes_s / 1e9:.1f}",
            f"{one.skinny_bytes_s / report.memory_bytes_s:.2f}",
            f"{one.prompt_flop_s / 1e9:.0f}",
            f"{one.peak_flop_s / 1e9:.0f}",
            f"{one.prompt_flop_s / one.peak_flop_s:.2f}",
        )
        for one in report.products
    ]
    head = (
        "weights",
        "products",
        "1 row, GB/s",
        "memory, GB/s",
        "share",
        "512 rows, GFLOP/s",
        "peak, GFLOP/s",
        "share",
    )
    print_table(head, rows)


def _measured(
    zoo: Any, model: str, device: str, axes: tuple[str, str, str | None], kv_cache_memory_bytes: str, silent: bool
) -> dict[str, Any]:
    from cli.serving.chunk_choice import measure_chunks
    from cli.serving.models import check_device
    from cli.shared.progress import counting
    from cli.shared.sizes import size_of
    from runtime.config import EngineConfig
    from runtime.engine.profiling.document import profile_model
    from runtime.engine.profiling.measure import MeasuredExtent
    from runtime.policy.prefill.knee import LEAST_SIZES

    check_device(device)
    names, texts = ("--batches", "--contexts", "--chunks"), (*axes[:2], axes[2] or _CHUNKS)
    extent = MeasuredExtent(*(numbers_of(name, text) for name, text in zip(names, texts, strict=True)))
    config = EngineConfig(device=device, kv_cache_memory_bytes=size_of(kv_cache_memory_bytes))
    wanted = axes[2] is not None and len(set(extent.chunks)) >= LEAST_SIZES
    found = measure_chunks(zoo, model, config, extent.chunks) if wanted else None
    with counting("measuring", silent) as progress:
        return profile_model(zoo.store, model, config, extent, progress, found)


def _executors(zoo: Any, model: str, device: str, kv_cache_memory_bytes: str, as_json: bool) -> None:
    from cli.serving.executor_choice import ROWS, measure_executors
    from cli.serving.models import check_device
    from cli.shared.sizes import size_of
    from runtime.config import EngineConfig

    check_device(device)
    document = measure_executors(
        zoo, model, EngineConfig(device=device, kv_cache_memory_bytes=size_of(kv_cache_memory_bytes))
    )
    if as_json:
        print_json(document)
        return
    print(f"{document['model']} on {document['key']}")
    rows = [(name, *(f"{1e3 * own[str(count)]:.2f}" for count in ROWS)) for name, own in document["seconds"].items()]
    print_table(("executor", *(f"{count} rows, ms" for count in ROWS)), rows)
    print(f"dense takes {document['dense_over_paged']:.2f} times as long as paged")


def _stored(zoo: Any, model: str) -> list[dict[str, Any]]:
    from runtime.engine.profiling.document import stored_profiles

    found = stored_profiles(zoo.store, model)
    if not found:
        raise NotFound(f"{model} was not measured yet: run zoo profile {model}")
    return found


def _print(document: dict[str, Any]) -> None:
    print(f"{document['model']} on {document['key']}")
    batches = list(document["blocks"][0]["batch"])
    rows = [
        (
            _name(block),
            human_bytes(block["bytes"]),
            *(f"{1e3 * seconds:.2f}" for seconds in block["batch"].values()),
            f"{1e3 * max(block['prefill'].values()):.2f}",
            f"{1e3 * block['load_seconds']:.1f}",
        )
        for block in document["blocks"]
    ]
    print_table(("block", "bytes", *(f"{batch} rows, ms" for batch in batches), "prompt, ms", "load, ms"), rows)
    for pair in document["pairs"]:
        print(f"  {pair['a'][:12]} and {pair['b'][:12]} at once: {pair['slowdown']:.2f} x the slower alone")
    for link in document["links"]:
        size, seconds = max(((int(size), seconds) for size, seconds in link["seconds"].items()))
        print(f"  {link['a']} to {link['b']}: {human_bytes(int(size / max(seconds, 1e-12)))}/s")
    if "chunks" in document:
        _print_chunks(document["chunks"])
    for reason in document["left_out"]:
        say(f"note: left out: {reason}")


def _print_chunks(chunks: dict[str, Any]) -> None:
    best = max(chunks["rates"].values())
    rows = [
        (size, f"{1e3 * chunks['seconds'][size]:.2f}", f"{rate:.0f}", f"{rate / best:.2f}")
        for size, rate in sorted(chunks["rates"].items(), key=lambda each: int(each[0]))
    ]
    print_table(("prompt's chunk, tokens", "ms", "tokens/s", "of the best"), rows)
    if chunks["chosen"] is None:
        print("  the rate still grows at the largest chunk, so none is chosen: give larger ones to --chunks")
    else:
        print(f"  zoo serve runs prompts in chunks of {chunks['chosen']} tokens here")


def _name(block: dict[str, Any]) -> str:
    lo, hi = block["layers"]
    of = f" for {block['surrogate_of'][:12]}" if "surrogate_of" in block else ""
    return f"{block['block'][:12]} (layers {lo}-{hi}){of}"
