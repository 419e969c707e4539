"""Price of the same bits in any company: our products and activations against torch's, which depend on the rows beside.

    python -m benchmarks.bits.same_bits_price --threads 2

By turns, the best of several rounds, in microseconds per call, by number of rows. The weights of one shape are many
enough not to fit the cache. "rows that differ": rows of torch's product that have other bits than the same row alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.operands import Parts
from runtime.engine.layers.activations import Uniform
from runtime.engine.layers.matmul import OneDnn, native_linear

ROWS = (1, 2, 3, 4, 7, 16, 64, 200)
SHAPES = ((576, 576), (1536, 576), (576, 1536), (3072, 768))
_BYTES, _ROUNDS = 32 << 20, 5
#: Seconds before each side's turn.
_REST = 0.02


def time_by_turns(sides: Sequence[Callable[[], object]]) -> list[float]:
    """Return the shortest time of each side in microseconds, measured by turns.

    Before each turn the threads of the side before end their spinning: kernels that lose a core to them run on one
    thread.
    """
    best = [float("inf")] * len(sides)
    for _ in range(_ROUNDS):
        for side, run in enumerate(sides):
            time.sleep(_REST)
            begin = time.perf_counter()
            run()
            best[side] = min(best[side], (time.perf_counter() - begin) * 1e6)
    return best


def count_differing(x: Tensor, weight: Tensor) -> int:
    """Return how many rows of torch's product have other bits than the same row alone."""
    together = F.linear(x, weight)
    return sum(not torch.equal(F.linear(x[row : row + 1], weight)[0], together[row]) for row in range(x.shape[0]))


def report_products(kernels: Kernels, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Print the times of one shape: packed for the kernels, as stored, torch's product and oneDNN's packed one."""
    size = torch.empty(0, dtype=dtype).element_size()
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(-(-_BYTES // (outputs * inputs * size)))]
    packed = [Parts([kernels.pack(weight)], [outputs], [None]) for weight in weights]
    layout, stored = OneDnn(), native_linear(kernels)
    theirs = [layout.product(layout.pack(weight), outputs, None) for weight in weights]
    for rows in ROWS:
        x = torch.randn(1, rows, inputs)
        given = x.to(dtype)
        times = time_by_turns([
            lambda x=x: [kernels.linear(x, parts) for parts in packed],  # type: ignore[misc]
            lambda x=given: [stored(x, weight) for weight in weights],  # type: ignore[misc]
            lambda x=given: [F.linear(x, weight) for weight in weights],  # type: ignore[misc]
            lambda x=given: [product.multiply(x) for product in theirs],  # type: ignore[misc]
        ])  # fmt: skip
        cells = " | ".join(f"{each / len(weights):.0f}" for each in times)
        print(f"| {str(dtype)[6:]} {outputs} x {inputs} | {rows} | {cells} | {count_differing(given[0], weights[0])} |")


def report_activations() -> None:
    """Print the times of activation functions as torch computes them, and on whole vectors."""
    for name, function in (("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))):
        uniform = Uniform(function)
        for rows in ROWS:
            x = torch.randn(1, rows, 3072)
            plain, ours = time_by_turns([lambda x=x, f=function: f(x), lambda x=x, f=uniform: f(x)])  # type: ignore[misc]
            print(f"| {name} of 3072 | {rows} | {ours:.0f} | {plain:.0f} |")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kernels = Kernels(threads)
    print("| weight | rows | packed | as stored | torch | oneDNN, packed | torch's rows that differ |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            report_products(kernels, dtype, *shape)
    print("\n| activation | rows | whole vectors | torch |\n|---|---|---|---|")
    report_activations()


if __name__ == "__main__":
    main()
