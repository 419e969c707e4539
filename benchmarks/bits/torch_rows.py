"""Show which of torch's functions give a row other bits beside other rows, or a value other bits in a longer tensor.

    python -m benchmarks.bits.torch_rows [--threads 1 2] [--output FILE]

- products: `torch.nn.functional.linear` over several numbers of rows; each of the first rows is compared with the same
  row alone.
- elementwise functions of the first values of a tensor, compared with the same values of a longer tensor.
- reductions over the last dimension of several rows, compared with one row.

Printed: per function, dtype and number of threads, how many of the compared rows or lengths differ. Why it matters:
docs/engine.md, "The same bits in any company".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.reports import deliver

#: Outputs and inputs of the products: shapes of SmolLM2-135M, of the 32 M model, and odd ones.
SHAPES = (
    (8, 576),
    (576, 576),
    (192, 576),
    (1536, 576),
    (576, 1536),
    (512, 3072),
    (77, 33),
    (512, 768),
    (49152, 576),
)
_ROWS = (2, 3, 4, 7, 16, 64, 200)
_COMPARED = 40
_LENGTHS = (1, 3, 7, 8, 15, 31, 100, 1001, 32769, 99_999)
_WIDTHS = (576, 2304, 49152)

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "cos": torch.cos,
    "erf": torch.erf,
    "relu": F.relu,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.01),
    "cube": lambda x: torch.pow(x, 3.0),
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "cumsum": lambda x: x.cumsum(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
}


def products(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield, per shape, how many of the compared rows differ from the row alone, at most over the numbers of rows."""
    for outputs, inputs in SHAPES:
        weight, rows = torch.randn(outputs, inputs).to(dtype), torch.randn(max(_ROWS), inputs).to(dtype)
        alone = [F.linear(rows[n : n + 1], weight)[0] for n in range(_COMPARED)]
        differ = {
            count: sum(
                not torch.equal(made, one) for made, one in zip(F.linear(rows[:count], weight), alone, strict=False)
            )
            for count in _ROWS
        }
        yield {
            "function": f"linear {outputs}x{inputs}",
            "compared": _COMPARED,
            "differ": max(differ.values()),
            "by": differ,
        }


def elementwise(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield, per function, for how many lengths a prefix of the tensor has other bits than in the whole tensor."""
    whole = torch.randn(max(_LENGTHS) + 64).to(dtype)
    for name, function in ELEMENTWISE.items():
        expected = function(whole)
        differ = [n for n in _LENGTHS if not torch.equal(function(whole[:n].clone()), expected[:n])]
        yield {"function": name, "compared": len(_LENGTHS), "differ": len(differ), "by": differ}


def reductions(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield, per function, for how many widths the first of 70 rows has other bits than the row alone."""
    for name, function in REDUCTIONS.items():
        differ = []
        for width in _WIDTHS:
            rows = torch.randn(70, width).to(dtype)
            if not torch.equal(function(rows)[0], function(rows[:1].clone())[0]):
                differ.append(width)
        yield {"function": name, "compared": len(_WIDTHS), "differ": len(differ), "by": differ}


def measure(threads: list[int]) -> dict[str, Any]:
    """Return the rows of the report."""
    found = []
    for count in threads:
        torch.set_num_threads(count)
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            kind = {"dtype": str(dtype).removeprefix("torch."), "threads": count}
            found += [{**kind, **row} for part in (products, elementwise, reductions) for row in part(dtype)]
    return {"torch": torch.__version__, "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with torch.inference_mode():
        deliver(measure(given.threads), given.output)


if __name__ == "__main__":
    main()
