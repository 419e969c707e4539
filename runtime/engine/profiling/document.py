"""The profile of a model on a device as one document: blocks, surrogates, pairs of blocks, and the device's links.

It is stored in the catalogue under the device's key, with the hardware and versions that it is valid for;
`runtime.policy.profiles` reads it.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from runtime.config import EngineConfig
from runtime.engine.models.servable import servable
from runtime.engine.profiling.links import measure_links
from runtime.engine.profiling.measure import MeasuredExtent, Workbench, decode_grid, load_times, pair, prefill_line
from surgery.families.settings import context_length
from zoo.errors import NotServable
from zoo.manifest import ModelManifest, block_digest
from zoo.records import Document, ScoredRun
from zoo.store import Store

KIND = "profile"
#: Maximum number of pairs of neighbouring blocks that are measured, and the rows of each block.
_PAIRS = 4
_PAIR_ROWS = 4

#: Called with (blocks done, total blocks).
Progress = Callable[[int, int], None]


def profile_model(
    store: Store, name: str, config: EngineConfig, extent: MeasuredExtent, progress: Progress | None = None,
    chunks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a model and store the result; it replaces an older profile of the same device.

    Args:
        chunks: What was measured of chunks of prompts; None: what the older profile has of them stays.

    Returns:
        {"model", "device", "key", "hardware", "versions", "blocks", "pairs", "links", "left_out"}, and "chunks" where
        they were measured; times in seconds.

    Raises:
        NotServable: no executor runs the model.
        NotFound, AmbiguousName, DamagedObject, InputError: as loading and `MeasuredExtent` raise them.
    """
    with store.catalog.reading() as reader:
        manifest = reader.model(reader.resolve(name))
        chain = reader.chain(manifest.name)
        pairs = [
            each
            for each in reader.equivalences([manifest.name])
            if each.relation == "surrogate" and each.a.model == manifest.name
        ]
    surrogates = {each.b: each.a for each in pairs}
    finished = _counted(progress, len(chain) + len(surrogates))
    with _bench(store, manifest.name, config, extent) as (bench, fitting):
        blocks = [
            finished(_block(store, bench, ScoredRun(manifest.name, each.lo, each.hi), each.digest, fitting))
            for each in chain
        ]
        together = [
            _pair(bench, a, b, fitting)
            for a, b in list(pairwise([*chain, chain[-1]]))[: max(1, min(_PAIRS, len(chain) - 1))]
        ]
    stand_ins, left_out = _surrogates(store, manifest, surrogates, config, extent, finished)
    document = _document(manifest.name, config.device, [*blocks, *stand_ins], together, left_out)
    known = chunks or _known_chunks(store, manifest.name, str(document["key"]))
    if known:
        document["chunks"] = dict(known)
    with store.catalog.writing() as writer:
        writer.put_document(Document(KIND, manifest.name, str(document["key"]), document))
    return document


def _known_chunks(store: Store, name: str, key: str) -> Mapping[str, Any] | None:
    """Return what the stored profile of a device has of chunks of prompts."""
    with store.catalog.reading() as reader:
        return next((each.value.get("chunks") for each in reader.documents(KIND, name) if each.key == key), None)


def _counted(progress: Progress | None, total: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that reports progress for each block and returns the block."""
    count = itertools.count(1)

    def finished(block: dict[str, Any]) -> dict[str, Any]:
        if progress is not None:
            progress(next(count), total)
        return block

    return finished


def _surrogates(
    store: Store,
    manifest: ModelManifest,
    surrogates: Mapping[ScoredRun, ScoredRun],
    config: EngineConfig,
    extent: MeasuredExtent,
    finished: Callable[[dict[str, Any]], dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure the surrogates of the model's blocks. Returns them, and the reasons why some are left out."""
    blocks, left_out = [], []
    for stand_in, parent in surrogates.items():
        try:
            with _bench(store, stand_in.model, config, extent) as (bench, fitting):
                block = _block(store, bench, stand_in, _digest(bench.manifest, stand_in), fitting)
            blocks.append(finished({**block, "surrogate_of": _digest(manifest, parent), "model": stand_in.model}))
        except NotServable as error:
            left_out.append(str(error))
    return blocks, left_out


def _document(
    name: str, device: str, blocks: list[dict[str, Any]], together: list[dict[str, Any]], left_out: list[str]
) -> dict[str, Any]:
    hardware = hardware_of(device)
    return {
        "model": name,
        "device": device,
        "key": device_key(device, hardware),
        "hardware": hardware,
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "blocks": blocks,
        "pairs": together,
        "links": measure_links(device),
        "left_out": left_out,
    }


def stored_profiles(store: Store, name: str) -> list[dict[str, Any]]:
    """Return all profiles of a model, oldest first. Raises NotFound, AmbiguousName."""
    with store.catalog.reading() as reader:
        return [dict(document.value) for document in reader.documents(KIND, reader.resolve(name))]


@contextmanager
def _bench(
    store: Store, name: str, config: EngineConfig, extent: MeasuredExtent
) -> Iterator[tuple[Workbench, MeasuredExtent]]:
    """Yield a model's workbench, and the extent limited to the model's context length."""
    with store.catalog.reading() as reader:
        longest = context_length(servable(store, reader.model(name), None).settings)

    def capped(axis: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({min(each, longest) for each in axis}))

    fitting = replace(
        extent,
        batches=tuple(sorted(set(extent.batches))),
        contexts=capped(extent.contexts),
        chunks=capped(extent.chunks),
    )
    bench = Workbench(store, name, config, fitting)
    try:
        yield bench, fitting
    finally:
        bench.close()


def _block(store: Store, bench: Workbench, run: ScoredRun, digest: str, extent: MeasuredExtent) -> dict[str, Any]:
    decode = decode_grid(bench, run.lo, run.hi, extent)
    load = load_times(store, bench.manifest, run.lo, run.hi, bench.device)
    layers = [placed.layer for placed in bench.manifest.components[run.lo : run.hi] if placed.layer is not None]
    return {
        "block": digest,
        "components": [run.lo, run.hi],
        "layers": [min(layers), max(layers) + 1] if layers else [0, 0],
        "batch": {str(batch): row[0] for batch, row in zip(decode["batches"], decode["seconds"], strict=True)},
        "decode": decode,
        "prefill": prefill_line(bench, run.lo, run.hi, extent),
        "load_seconds": load["disk_to_host"] + load["host_to_device"],
        "load": {part: seconds for part, seconds in load.items() if part != "bytes"},
        "bytes": int(load["bytes"]),
    }


def _pair(bench: Workbench, a: Any, b: Any, extent: MeasuredExtent) -> dict[str, Any]:
    rows = min(_PAIR_ROWS, max(extent.batches))
    figures = pair(bench, (a.lo, a.hi), (b.lo, b.hi), rows, extent.contexts[0])
    return {"a": a.digest, "b": b.digest, "rows": rows, "context": extent.contexts[0], **figures}


def _digest(manifest: ModelManifest, run: ScoredRun) -> str:
    return block_digest([placed.component.digest for placed in manifest.components[run.lo : run.hi]])


def hardware_of(device: str) -> dict[str, Any]:
    """Return the hardware that measurements on this device are valid for."""
    if device.startswith("cuda"):
        found = torch.cuda.get_device_properties(device)
        return {"name": found.name, "memory": found.total_memory}
    return {"name": _processor(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def _processor() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def device_key(device: str, hardware: dict[str, Any]) -> str:
    """Return the key of a device's profiles: its kind, name and, on a CPU, number of threads.

    A new profile replaces an older one of the same key.
    """
    threads = f", {hardware['threads']} threads" if "threads" in hardware else ""
    return f"{device.partition(':')[0]}: {hardware['name']}{threads}"
