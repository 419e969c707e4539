"""Measure the native kernels' products against what the processor and its memory can do at most.

Decode steps of one row read all weights and compute little, so their limit is the memory's bandwidth; prompts compute
much with the weights in a cache, so theirs is the rate of multiply-adds. Both limits are measured here, by the same
threads and instructions as the products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.operands import Parts

#: Features of x86-64 processors that the kernels use, as Linux names them.
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
#: Bytes of the weights of a skinny product, and of the memory that is read: more than caches hold.
_SKINNY_BYTES, _READ_BYTES = 192 << 20, 256 << 20
#: Inputs and outputs of each weight, and rows of a prompt's product.
_WIDTH, _PROMPT_ROWS = 1024, 512
_ROUNDS, _CHAIN_ROUNDS = 5, 100_000


@dataclass(frozen=True, slots=True)
class ProductReport:
    """One dtype of weights.

    Fields:
        dtype, path: Of the weights; how they are multiplied.
        skinny_bytes_s: Bytes of weights per second of products of one row.
        prompt_flop_s, peak_flop_s: Floating-point operations per second of a product of 512 rows, and in registers.
    """

    dtype: str
    path: str
    skinny_bytes_s: float
    prompt_flop_s: float
    peak_flop_s: float


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The processor and its products.

    Fields:
        features: Those of `FEATURES` that it has; empty where Linux does not list them.
        memory_bytes_s: Bytes per second when memory is read front to back.
    """

    features: tuple[str, ...]
    threads: int
    memory_bytes_s: float
    products: tuple[ProductReport, ...]

    def to_document(self) -> dict[str, Any]:
        return asdict(self)


def measure_kernels(kernels: Kernels) -> KernelReport:
    """Measure products of both dtypes, on the kernels' own number of threads; takes some seconds."""
    memory = torch.zeros(_READ_BYTES, dtype=torch.uint8).fill_(1)
    read = _READ_BYTES / _fastest(lambda: kernels.read_(memory))
    products = tuple(_measure_products(kernels, dtype) for dtype in (torch.float32, torch.bfloat16))
    return KernelReport(_features(), kernels.threads, read, products)


def _measure_products(kernels: Kernels, dtype: torch.dtype) -> ProductReport:
    narrow = dtype == torch.bfloat16
    chance = torch.Generator().manual_seed(0)
    one = torch.randn(_WIDTH, _WIDTH, generator=chance).to(dtype)
    count = _SKINNY_BYTES // (one.numel() * one.element_size())
    weights = [Parts([kernels.pack(one)], [_WIDTH], [None]) for _ in range(count)]
    row, prompt = (torch.randn(1, rows, _WIDTH, generator=chance) for rows in (1, _PROMPT_ROWS))
    skinny = _fastest(lambda: [kernels.linear(row, each) for each in weights])
    wide = _fastest(lambda: kernels.linear(prompt, weights[0]))
    operations = kernels.multiply_add(1, narrow)
    rounds = 1 if kernels.path == "emulated" else _CHAIN_ROUNDS
    chains = _fastest(lambda: kernels.multiply_add(rounds, narrow))
    return ProductReport(
        str(dtype).removeprefix("torch."),
        kernels.path if narrow else "float32",
        _SKINNY_BYTES / skinny,
        2.0 * _PROMPT_ROWS * _WIDTH * _WIDTH / wide,
        operations * rounds / chains,
    )


def _fastest(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _features() -> tuple[str, ...]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    found = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    return tuple(name for name in FEATURES if name in found)
