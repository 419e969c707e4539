"""Measure the engine on a device: decode steps against the time that memory needs, prompts, sampling, twenty variants.

The floor of a decode step is the bytes that it must read, each once (weights without the embedding, K and V), over the
bandwidth of a large copy, measured in the same process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.isolation import RunSettings
from benchmarks.gpu.models import VARIANTS, store_of
from benchmarks.gpu.stepping import Stepper
from runtime.config import EngineConfig, GraphChoice
from runtime.engine.executors.device import pool_bytes
from runtime.engine.sampling.sampler import Draw, sample
from runtime.types import SamplingParams

#: Context of each sequence before decode steps are measured, steps per measurement, and tokens of a prompt's step.
_CONTEXT, _STEPS, _CHUNK = 512, 24, 2048
_GREEDY = SamplingParams(4 * _STEPS, ignore_eos=True)


def describe_machine(settings: RunSettings) -> Mapping[str, Any]:
    """Return what the run ran on, and the bandwidth of its memory."""
    import platform

    from runtime.engine.attention.varlen import device_page_tokens, page_multiple

    device = torch.device(settings.device)
    about: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        about |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "memory GiB": total / 2**30,
            "free GiB": free / 2**30,
        }
    about["page tokens"] = device_page_tokens(device, torch.bfloat16)
    about["attention reads pages"] = page_multiple(device) > 1
    return about | {"bandwidth GB/s": _bandwidth(settings) / 1e9}


def measure_1b(settings: RunSettings) -> Mapping[str, Any]:
    """Measure decode steps of the 1B shape."""
    return _measure_decode(settings, "1b")


def measure_7b(settings: RunSettings) -> Mapping[str, Any]:
    """Measure decode steps of the 7B shape."""
    return _measure_decode(settings, "7b")


def measure_variants(settings: RunSettings) -> Mapping[str, Any]:
    """Measure decode steps over twenty variants with shared blocks, beside steps over their base alone."""
    names = ["1b", *(f"1b-lora{number}" for number in range(VARIANTS))]
    with store_of(settings) as store:
        stepper = Stepper(store, _config(settings, "auto"), names)
        rows = len(names) if settings.small else 3 * len(names) + 4
        memory = stepper.engine.memory()
        values: dict[str, Any] = {
            "rows": rows,
            "resident GB": memory.weights / 1e9,
            "without sharing GB": memory.weights_unshared / 1e9,
        }
        for what, served in (("variants", names), ("base alone", names[:1])):
            values[what] = _timed(stepper, served, rows, _context(settings))
        graphs = stepper.engine.recordings
        if graphs is not None:
            values["graphs"] = {"recorded": graphs.recorded, "replayed": graphs.replayed, "refused": graphs.refused}
            if graphs.refused or not graphs.replayed:
                raise AssertionError(f"steps over variants were not replayed: {values}")
    return values


def measure_prompts(settings: RunSettings) -> Mapping[str, Any]:
    """Measure steps of prompts of the 1B shape."""
    chunk = 64 if settings.small else _CHUNK
    with store_of(settings) as store:
        stepper = Stepper(store, _config(settings, "off"), ["1b"])
        seconds = []
        for number in range(4):
            stepper.start({f"{number}": ("1b", _tokens(chunk, number))}, _GREEDY, chunk)
            stepper.release()
            begin = time.perf_counter()
            stepper.start({f"{number}.": ("1b", _tokens(chunk, number + 9))}, _GREEDY, chunk)
            seconds.append(time.perf_counter() - begin)
            stepper.release()
        best = statistics.median(seconds)
        parameters = stepper.engine.memory().weights / 2
    return {
        "tokens": chunk,
        "ms": 1e3 * best,
        "tokens/s": chunk / best,
        "TFLOP/s": 2 * parameters * chunk / best / 1e12,
    }


def measure_sampling(settings: RunSettings) -> Mapping[str, Any]:
    """Measure the sampling of 64 rows over a vocabulary of 128 k, by kind of parameters."""
    rows, vocabulary = (4, 512) if settings.small else (64, 128256)
    logits = torch.randn(rows, vocabulary, device=settings.device)
    kinds = {
        "greedy": SamplingParams(1),
        "temperature": SamplingParams(1, temperature=0.8),
        "top-k": SamplingParams(1, temperature=0.8, top_k=50),
        "top-p": SamplingParams(1, temperature=0.8, top_p=0.9),
    }
    made: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary}
    for name, params in kinds.items():
        draws = [Draw(f"{row}", params, row, (), (), ()) for row in range(rows)]
        made[f"{name} ms"] = 1e3 * _median(lambda draws=draws: sample(logits, draws))  # type: ignore[misc]
    return made


def check_memory_share(settings: RunSettings) -> Mapping[str, Any]:
    """Allocate the page pool that half of the device's memory leaves, and check that as much is taken."""
    config = EngineConfig(device=settings.device, gpu_memory_utilization=0.5, weights_bytes=1 << 30)
    nbytes = pool_bytes(config)
    values: dict[str, Any] = {"pool GiB": nbytes / 2**30}
    if torch.device(settings.device).type == "cuda":
        from runtime.kv.pool import PagePool

        free, total = torch.cuda.mem_get_info()
        pool = PagePool(nbytes, 1 << 20, settings.device)
        after, _ = torch.cuda.mem_get_info()
        values |= {"taken GiB": (free - after) / 2**30, "share": (total - after) / total}
        if not 0.8 * nbytes <= free - after <= nbytes + (64 << 20) or pool.pages < 1:
            raise AssertionError(f"the pool takes another amount: {values}")
    return values


def _measure_decode(settings: RunSettings, name: str) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    with store_of(settings) as store:
        for graphs in ("off", "auto"):
            stepper = Stepper(store, _config(settings, graphs), [name])
            for rows in (1, 4) if settings.small else (1, 16, 64):
                if not stepper.has_room(name, rows, _context(settings) + 3 * _STEPS):
                    continue
                values[f"{'recorded' if graphs == 'auto' else 'by module'}, {rows} rows"] = _timed(
                    stepper, [name], rows, _context(settings)
                )
            recordings = stepper.engine.recordings
            if recordings is not None and (recordings.refused or not recordings.replayed):
                raise AssertionError(f"decode steps were not replayed: {recordings.refused} refused; {values}")
            del stepper
    return values


def _timed(stepper: Stepper, names: Sequence[str], rows: int, context: int) -> Mapping[str, float]:
    """Return the milliseconds of a decode step: read before the next, launched ahead, and the floor of its bytes."""
    prompts = {f"{row}": (names[row % len(names)], _tokens(context, row)) for row in range(rows)}
    stepper.start(prompts, _GREEDY, max(context, 512))
    stepper.decode(4)  # the second step of a shape records it
    each = statistics.median(stepper.decode(_STEPS))
    ahead = stepper.decode_ahead(_STEPS)
    floor = stepper.floor_bytes(names) / stepper_bandwidth(stepper)
    stepper.release()
    return {"ms": 1e3 * each, "ahead ms": 1e3 * ahead, "floor ms": 1e3 * floor, "of floor": floor / ahead}


def stepper_bandwidth(stepper: Stepper) -> float:
    """Return the bandwidth of the device that an engine runs on, in bytes per second; measured once per process."""
    device = stepper.device
    if device not in _BANDWIDTHS:
        _BANDWIDTHS[device] = _copy_bandwidth(device, 64 << 20 if device == "cpu" else 2 << 30)
    return _BANDWIDTHS[device]


_BANDWIDTHS: dict[str, float] = {}


def _bandwidth(settings: RunSettings) -> float:
    return _copy_bandwidth(settings.device, 64 << 20 if settings.small else 2 << 30)


def _copy_bandwidth(device: str, nbytes: int) -> float:
    """Return the bytes read and written per second by a copy within the device's memory."""
    source = torch.empty(nbytes // 4, device=device).normal_()
    into = torch.empty_like(source)
    return 2 * nbytes / _median(lambda: _synchronized(into.copy_(source)))


def _synchronized(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor


def _median(work: Callable[[], object], repeats: int = 9) -> float:
    """Return the median of the seconds of runs that wait for the device, after three warm ones."""
    took = []
    for number in range(repeats + 3):
        begin = time.perf_counter()
        work()
        if number >= 3:
            took.append(time.perf_counter() - begin)
    return statistics.median(took)


def _config(settings: RunSettings, graphs: GraphChoice) -> EngineConfig:
    pool = 64 << 20
    if not settings.small:
        free = torch.cuda.mem_get_info(settings.device)[0] if settings.device != "cpu" else 4 << 30
        pool = min(32 << 30, 2 * free // 5)
    on = "on" if settings.small and graphs == "auto" else graphs
    return EngineConfig(device=settings.device, kv_cache_memory_bytes=pool, graphs=on, kernels="stock")


def _context(settings: RunSettings) -> int:
    return 40 if settings.small else _CONTEXT


def _tokens(count: int, seed: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(3, 250) for _ in range(count)]
