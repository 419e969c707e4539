"""Plain torch stand-ins for kernels and CUDA graphs that need a GPU; they check their inputs as strictly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from runtime.engine.attention.varlen import Kernel
from runtime.engine.recording.recorder import Rerun, Unrecordable, Work


class PlainVarlen:
    """A `engine.attention.varlen.VarlenCall` that computes row by row, and notes its rows and whether it read pages.

    `page_multiple`: As `Kernel.page_multiple`; 0: it reads no pages. `ends`: Act as a kernel that requires the
    cumulative lengths of K beside a block table; without it they are refused.
    """

    def __init__(self, page_multiple: int = 1, ends: bool = False) -> None:
        self.calls = 0
        self.rows: list[int] = []
        self.read: list[bool] = []
        self._multiple, self._ends = page_multiple, ends

    @property
    def kernel(self) -> Kernel:
        return Kernel(self, self._multiple, self._ends, (torch.float32, torch.bfloat16))

    def __call__(
        self,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        scale,
        window_size,
        enable_gqa,
        seqused_k,
        block_table,
    ) -> Tensor:
        with (
            _disable_current_modes()
        ):  # a kernel reads its inputs on the device; only this stand-in needs them on the host
            return self._call(
                query,
                key,
                value,
                cu_seq_q,
                cu_seq_k,
                max_q,
                max_k,
                scale,
                window_size,
                enable_gqa,
                seqused_k,
                block_table,
            )

    def _call(
        self,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale,
        window_size,
        enable_gqa,
        seqused_k,
        block_table,
    ) -> Tensor:
        rows = self._check(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table)
        assert enable_gqa == (query.shape[1] != key.shape[-2])
        assert window_size[1] == 0 or (window_size == (-1, -1) and max_q == 1), "only one token may see all"
        starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
        assert max(b - a for a, b in pairwise(starts)) <= max_q and max(lengths) <= max_k
        self.calls += 1
        self.rows.append(rows)
        self.read.append(block_table is not None)
        out = torch.empty(query.shape, dtype=query.dtype)
        for row in range(rows):
            q = query[starts[row] : starts[row + 1]]
            if block_table is None:
                k, v = (slots[int(cu_seq_k[row]) :][: lengths[row]] for slots in (key, value))
            else:
                k, v = (pool[block_table[row].long()].flatten(0, 1)[: lengths[row]] for pool in (key, value))
            out[starts[row] : starts[row + 1]] = _attend(q, k, v, scale, window_size[0])
        return out

    def _check(self, query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table) -> int:
        """Return the number of rows; fail on inputs that a kernel would refuse or silently read wrongly."""
        rows, tokens, paged = seqused_k.shape[0], query.shape[0], block_table is not None
        given = [cu_seq_q, seqused_k] + ([block_table] if paged else []) + ([cu_seq_k] if self._ends else [])
        assert all(each.dtype == torch.int32 and each.stride(-1) == 1 for each in given)
        assert query.dim() == 3 and key.dim() == value.dim() == 3 + paged and query.dtype == key.dtype == value.dtype
        assert all(each.stride(-1) == 1 for each in (query, key, value))
        assert cu_seq_q.shape == (rows + 1,) and int(cu_seq_q[-1]) == tokens and int(seqused_k.min()) > 0
        if paged:
            assert self._multiple > 0 and key.shape[1] % self._multiple == 0
            assert block_table.shape[0] == rows
            assert int(block_table.min()) >= 0 and int(block_table.max()) < key.shape[0]
        if paged and self._ends:
            assert cu_seq_k.tolist() == [0, *seqused_k.cumsum(0).tolist()]
        elif paged:
            assert cu_seq_k is None
        else:
            assert self._multiple != 1, "a kernel that reads pages of any size gathers none"
            assert cu_seq_k.shape == (rows + 1,) and int(cu_seq_k[-1]) <= key.shape[0]
            assert bool((cu_seq_k.diff() >= seqused_k).all())
        return rows


class _Watch(TorchDispatchMode):
    """Raise `Unrecordable` on what a CUDA graph cannot hold: copies from the host, and waiting for a value."""

    HELD = ("aten.lift_fresh", "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(self.HELD):
            raise Unrecordable(str(func))
        return func(*args, **(kwargs or {}))


class Waited(Exception):
    """A tensor on the device was read, which makes the host wait for it."""


@contextmanager
def watching() -> Iterator[None]:
    """Make everything raise that would make the host wait for a GPU.

    That is reading values, and copies from the host other than those by `kv.transfers`.
    """

    def refuse(*_: object, **__: object) -> None:
        raise Waited("a tensor was read")

    names = ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__")
    before = {name: getattr(Tensor, name) for name in names}
    try:
        for name in names:
            setattr(Tensor, name, refuse)
        with _Watch():
            yield
    finally:
        for name, was in before.items():
            setattr(Tensor, name, was)


@contextmanager
def _recording() -> Iterator[None]:
    """Apply `_Watch`, and make copies from the host by `kv.transfers` raise as well.

    A replay would repeat such a copy with whatever the host buffer holds by then.
    """

    def refuse(*_: object, **__: object) -> Tensor:
        raise Unrecordable("a copy from the host")

    before, torch.frombuffer = torch.frombuffer, refuse
    try:
        with _Watch():
            yield
    finally:
        torch.frombuffer = before


class Watched(Rerun):
    """An `engine.recording.recorder.Recorder` as strict as CUDA's.

    It runs the work once to warm up, watches it, and keeps its results in the same tensors.
    """

    def __init__(self) -> None:
        self.asked = 0

    def record(self, work: Work) -> Work:
        self.asked += 1
        work()
        with _recording():
            made = work()

        def replay():
            with _recording():
                for name, logits in work().items():
                    made[name].copy_(logits)
            return made

        return replay


class Refusing(Watched):
    """A recorder that can record nothing."""

    def record(self, work: Work) -> Work:
        super().record(work)
        raise Unrecordable("it waits")


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int) -> Tensor:
    """Compute one row's attention, causal, aligned at its end.

    `left`: How many tokens before its own a token sees; -1 for all.
    """
    at, mine = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = at > mine
    if left >= 0:
        hidden |= at < mine - left
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
