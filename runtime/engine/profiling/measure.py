"""Time a model's blocks on the engine's modules, pages and attention (BL-11): decode, prefill, loading, pairs.

A block runs as in a step: made-up rows with pages of their own, a layout, a forward context, and the units in order.
Seconds are medians of repeated warm runs. Surrogates are measured as blocks of other models. A pair is two blocks at
the same time in two threads (streams on a GPU), compared with each alone. `runtime.policy.profiles` interprets the
results.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from runtime.config import EngineConfig
from runtime.engine.attention.varlen import page_multiple
from runtime.engine.executors.paged import paged_run
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.load import load_model, release_units
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.models.registry import kernels_for, tokens_per_page
from runtime.engine.models.servable import servable
from runtime.engine.step.runner import StepRun
from runtime.kv.pages import groups_for
from runtime.kv.pool import PagePool
from runtime.types import Row, SamplingParams, SequenceRequest, StepPlan
from surgery.tensors.pool import TensorPool, stored_tensor
from zoo.errors import InputError
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Timed runs, and warm runs before them.
REPEATS = 5
WARM = 2
#: A token that every vocabulary has.
_TOKEN = 3


@dataclass(frozen=True, slots=True)
class MeasuredExtent:
    """What to measure: decode batch sizes, context lengths in tokens, prefill chunk sizes in tokens.

    Raises InputError for an empty list or a number below 1.
    """

    batches: tuple[int, ...] = (1, 4, 16, 64)
    contexts: tuple[int, ...] = (64, 256)
    chunks: tuple[int, ...] = (64, 256)

    def __post_init__(self) -> None:
        for axis in (self.batches, self.contexts, self.chunks):
            if not axis or any(each < 1 for each in axis):
                raise InputError("batch sizes, contexts and chunks are whole numbers from 1 on")


class Workbench:
    """One model on a device, with enough pages for the extent.

    Raises as an engine's loading does, and InputError if the pages do not fit.
    """

    def __init__(self, store: Store, name: str, config: EngineConfig, extent: MeasuredExtent) -> None:
        with store.keeping():
            with store.catalog.reading() as reader:
                self.manifest: ModelManifest = reader.model(reader.resolve(name))
                self.blocks = tuple(reader.chain(self.manifest.name))
            found, device = servable(store, self.manifest, None), torch.device(config.device)
            page_tokens = tokens_per_page(config, found.dtype)
            half = -(-page_tokens * found.token_bytes // 64) * 64
            layers = sum(placed.component.kind in ("attention", "layer") for placed in self.manifest.components)
            pages = max(_groups(extent, page_tokens)) * layers
            if 2 * half * pages > config.kv_cache_memory_bytes:
                raise InputError(
                    f"{max(extent.batches)} rows of {max(extent.contexts)} tokens take {2 * half * pages:,} bytes of "
                    "pages, more than "
                    f"{config.kv_cache_memory_bytes:,}: measure smaller batches or contexts, or give "
                    "--kv-cache-memory-bytes"
                )
            pool = TensorPool(store, config.device)
            self._units = ComponentPool(
                pool, device, config.layers == "fused", config.weights, kernels_for(config), True, config.quantized
            )
            self._pool = PagePool(2 * half * pages, half, config.device, page_multiple(device))
            self._model: LoadedModel = load_model(
                store, self.manifest, self.blocks, self._units, self._pool, config, None
            )
        self.device = config.device

    def close(self) -> None:
        release_units(self._units, self._model.units, self._model.adapters)

    @contextmanager
    def rows(self, count: int, tokens: int, context: int) -> Iterator[ProfileBench]:
        """Yield a bench with `count` rows of `tokens` tokens each, the last ones of `context` tokens."""
        model = self._model
        groups, layers = groups_for(model.spec, context), model.spec.kv_layers
        rows = []
        for index in range(count):
            seq, first = f"row-{index}", index * groups * layers
            model.open(SequenceRequest(seq, seq, self.manifest.name, (_TOKEN,), SamplingParams(max_tokens=1)), ())
            pages = tuple(tuple(range(first + group * layers, first + (group + 1) * layers)) for group in range(groups))
            rows.append(Row(seq, self.manifest.name, (_TOKEN,) * tokens, context - tokens, pages))
        try:
            yield ProfileBench(
                self._run(rows),
                self._run([structs.replace(row, new_pages=()) for row in rows]),
                self.manifest.name,
                self.device,
            )
        finally:
            for row in rows:
                model.close(row.seq)

    def _run(self, rows: Sequence[Row]) -> StepRun:
        return paged_run({self.manifest.name: self._model}, self._units, self._pool, StepPlan(0, tuple(rows)), False)


def _groups(extent: MeasuredExtent, page_tokens: int) -> tuple[int, int]:
    """Return the page groups that the largest decode and the largest prefill take."""
    return (
        max(extent.batches) * -(-max(extent.contexts) // page_tokens),
        -(-max(extent.chunks) // page_tokens),
    )


class ProfileBench:
    """Open rows over which blocks are run.

    `other` is a second run of the same rows, for measuring two blocks at once.
    """

    def __init__(self, run: StepRun, other: StepRun, name: str, device: str) -> None:
        self.run, self.other, self._name, self._device = run, other, name, device
        self._starts: dict[int, Tensor] = {}

    @torch.inference_mode()
    def once(self, lo: int, hi: int, run: StepRun | None = None) -> None:
        """Run components [lo, hi). The output is not read: two runs at once share pages and scratch."""
        if lo and lo not in self._starts:  # run the components before: chains may have several widths
            self._starts[lo] = self.run.run_part(self._name, 0, lo)
        (run or self.run).run_part(self._name, lo, hi, self._starts.get(lo))

    def seconds(self, lo: int, hi: int) -> float:
        """Return the median seconds of warm runs."""
        return timed(lambda: self.once(lo, hi), self._device)


def timed(work: Callable[[], object], device: str = "cpu", repeats: int = REPEATS) -> float:
    """Return the median seconds of some work, device included, after warm runs."""
    taken = []
    for attempt in range(WARM + repeats):
        begin = time.perf_counter()
        work()
        _finish(device)
        if attempt >= WARM:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def together(works: Sequence[Callable[[], object]], device: str) -> float:
    """Return the median seconds until several works are done that start together, each in its own thread and stream."""

    def run(work: Callable[[], object]) -> None:
        if device.startswith("cuda"):
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                work()
        else:
            work()

    with ThreadPoolExecutor(len(works)) as threads:
        return timed(lambda: list(threads.map(run, works)), device)


# -- one block ---------------------------------------------------------------------------------------------------------


def decode_grid(bench: Workbench, lo: int, hi: int, extent: MeasuredExtent) -> dict[str, Any]:
    """Return the seconds of one decode step by batch and context."""
    seconds = []
    for batch in extent.batches:
        row = []
        for context in extent.contexts:
            with bench.rows(batch, 1, context) as ready:
                row.append(ready.seconds(lo, hi))
        seconds.append(row)
    return {"batches": list(extent.batches), "contexts": list(extent.contexts), "seconds": seconds}


def prefill_line(bench: Workbench, lo: int, hi: int, extent: MeasuredExtent) -> dict[str, float]:
    """Return the seconds of a prompt's first chunk by its tokens."""
    found = {}
    for chunk in extent.chunks:
        with bench.rows(1, chunk, chunk) as ready:
            found[str(chunk)] = ready.seconds(lo, hi)
    return found


def pair(bench: Workbench, a: tuple[int, int], b: tuple[int, int], batch: int, context: int) -> dict[str, float]:
    """Time two blocks at once and each alone.

    `slowdown` is 1 if they do not affect each other, 2 if two equal ones alternate.
    """
    with bench.rows(batch, 1, context) as ready:
        alone = [ready.seconds(*each) for each in (a, b)]
        both = together([lambda: ready.once(*a), lambda: ready.once(*b, ready.other)], bench.device)
    return {"alone_a": alone[0], "alone_b": alone[1], "together": both, "slowdown": both / max(alone)}


def load_times(store: Store, manifest: ModelManifest, lo: int, hi: int, device: str) -> dict[str, float]:
    """Return the bytes of a block's tensors, and the seconds to read and to copy them to the device.

    They are read from disk and from memory; the disk time is cold as far as the system drops the files from its cache.
    """
    digests = tensors_of(manifest, lo, hi)
    for digest in digests:
        _forget(store, digest)
    begin = time.perf_counter()
    held = [stored_tensor(store, digest).clone() for digest in digests]
    cold = time.perf_counter() - begin
    hot = timed(lambda: [stored_tensor(store, digest).clone() for digest in digests], repeats=3)
    onto = 0.0 if device == "cpu" else timed(lambda: [tensor.to(device) for tensor in held], device, repeats=3)
    return {
        "disk_to_host": cold,
        "cache_to_host": hot,
        "host_to_device": onto,
        "bytes": float(sum(tensor.nbytes for tensor in held)),
    }


def tensors_of(manifest: ModelManifest, lo: int, hi: int) -> list[str]:
    """Return the digests of components [lo, hi), adapters included, each once."""
    found: dict[str, None] = {}
    for placed in manifest.components[lo:hi]:
        adapter = placed.component.adapter
        for _, digest in (*placed.component.tensors, *(adapter.tensors if adapter else ())):
            found.setdefault(digest)
    return list(found)


def _forget(store: Store, digest: str) -> None:
    """Ask the system to drop a file from its cache; where it cannot, the disk time is a warm one."""
    path = getattr(store.open_tensor(digest), "path", None)
    if path is None or not hasattr(os, "posix_fadvise"):
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
