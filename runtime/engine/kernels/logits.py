"""The compiled kernels on rows of logits: masks, penalties, draws, log-probabilities."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from runtime.engine.kernels.signatures import MOST_BEST, PenaltiesData
from runtime.engine.sampling.choice import Masks, SamplingColumns
from runtime.kv.transfers import put


class LogitKernels:
    """Functions of rows of float32 logits on a CPU.

    Args:
        found: The loaded library.
        threads: Returns how many threads a call may use.
    """

    def __init__(self, found: ctypes.CDLL, threads: Callable[[], int]) -> None:
        self._found, self._threads = found, threads

    def allow_(self, x: Tensor, masks: Masks) -> None:
        """Set to minus infinity what a row's mask does not allow, in contiguous x [rows, width].

        `masks`: as `engine.sampling.choice.TokenChoice.allow_`, contiguous.
        """
        rows = put(list(masks), x.device)
        addresses = put([words.ctypes.data for words in masks.values()], x.device)
        counts = put([len(words) for words in masks.values()], x.device)
        tables = (rows.data_ptr(), addresses.data_ptr(), counts.data_ptr())
        self._found.zoo_allow(x.data_ptr(), x.shape[1], len(masks), *tables, self._threads())

    def penalise_(self, x: Tensor, rows: Sequence[PenaltiesData]) -> None:
        """Apply penalties to rows of contiguous x [.., width]; `row` of each points to its logits."""
        self._found.zoo_penalise((PenaltiesData * len(rows))(*rows), len(rows), x.shape[-1])

    def scored(self, x: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of x [rows, width], as `engine.sampling.choice.TokenChoice.scored`.

        `chosen`: indexes in [0, width). `count`: at most `MOST_BEST`.
        """
        x, chosen = _contiguous(x), chosen.contiguous()
        rows, width = x.shape
        if count > MOST_BEST or chosen.shape != (rows,) or chosen.dtype != torch.int64:
            raise ValueError(f"{count} best, and {list(chosen.shape)} chosen of {rows} rows")
        own, values = torch.empty(rows), torch.empty((rows, count))
        ids = torch.empty((rows, count), dtype=torch.int64)
        made = (own.data_ptr(), values.data_ptr(), ids.data_ptr())
        self._found.zoo_scored(x.data_ptr(), rows, width, chosen.data_ptr(), count, *made, self._threads())
        return own, values, ids

    def chosen(self, x: Tensor, by: SamplingColumns, masks: Masks) -> Tensor:
        """Return one token for each row of x [rows, width], as `engine.sampling.choice.TokenChoice.chosen`.

        `masks`: contiguous. Raises MemoryError.
        """
        x = _contiguous(x)
        rows, width = x.shape
        out = torch.empty(rows, dtype=torch.int64)
        tables: tuple[int | None, int | None] = None, None
        if masks:
            words, counts = (c_int64 * rows)(), (c_int64 * rows)()
            for row, mask in masks.items():
                words[row], counts[row] = mask.ctypes.data, len(mask)
            tables = ctypes.addressof(words), ctypes.addressof(counts)
        count = rows - len(by.rows)
        if count:
            rest = put(sorted(set(range(rows)).difference(by.rows)), x.device) if by.rows else None
            at = None if rest is None else rest.data_ptr()
            self._found.zoo_argmax(x.data_ptr(), count, width, at, *tables, out.data_ptr(), self._threads())
        if by.rows:
            drawn, columns = put(by.rows, x.device), by.tensors(x.device)
            pointers = (drawn.data_ptr(), *tables, *[each.data_ptr() for each in columns], out.data_ptr())
            if self._found.zoo_sampled(x.data_ptr(), len(by.rows), width, *pointers, self._threads()):
                raise MemoryError(f"no memory to sample {len(by.rows)} rows of {width} logits")
        return out


def _contiguous(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"logits are float32 on a CPU, not {x.dtype} on {x.device}")
    return x.contiguous()
