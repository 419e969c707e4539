"""Run the same tokens through two stacks and sum, batch by batch, how similar their states are after each part (BL-05).

Memory beside the two models is bounded: the hidden states of one batch, and slices of its logits
(`surgery.scoring.lens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.modules.stack import Stack
from surgery.scoring.lens import Lens, alike
from surgery.scoring.partials import Sums
from surgery.scoring.runs import Pairing, ScoredUnit
from surgery.tensors.half_products import fast_products
from zoo.errors import Incomparable, InputError

#: Bytes of hidden states in memory at a time, over all positions of both models.
_HIDDEN_BUDGET = 128 << 20


@dataclass(frozen=True)
class Positions:
    """Where hidden states are taken.

    Fields:
        a: Numbers of components of a, after which states are taken.
        b: The same of b.
        pairs: (index into `a`, index into `b`) of the states to compare.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


def positions_of(plan: Pairing, a: Stack, b: Stack, matrix: bool) -> Positions:
    """Return the positions that a pairing needs; those of all units for a matrix.

    The position of the head is before it, at its input.
    """
    ends_a = _ends(plan.a if matrix else [unit for unit, _ in plan.pairs], a)
    ends_b = _ends(plan.b if matrix else [unit for _, unit in plan.pairs], b)
    pairs = tuple((ends_a.index(_end(x, a)), ends_b.index(_end(y, b))) for x, y in plan.pairs)
    return Positions(ends_a, ends_b, pairs)


def _ends(units: Sequence[ScoredUnit], stack: Stack) -> tuple[int, ...]:
    return tuple(_end(unit, stack) for unit in units)


def _end(unit: ScoredUnit, stack: Stack) -> int:
    return min(unit.components.hi, stack.end)


def check_readable(name: str, stack: Stack, ends: Sequence[int]) -> None:
    """Raise Incomparable if states are needed that the head cannot read: those before a stitch have another width."""
    stitches = [at for at, placed in enumerate(stack.placed) if placed.component.kind == "stitch"]
    if stitches and min(ends) <= stitches[-1]:
        raise Incomparable(
            f"{name} changes its width at component {stitches[-1]}, and its head reads only what comes behind: "
            "compare it whole, as one group"
        )


def batches_in(windows: Tensor, a: Stack, b: Stack, at: Positions) -> int:
    """Return the number of batches of a measurement, always the same for the same models and windows."""
    return -(-windows.shape[0] // _rows(windows, a, b, at))


def _rows(windows: Tensor, a: Stack, b: Stack, at: Positions) -> int:
    """Return the windows per batch."""
    per_token = sum(len(ends) * _width(stack) * stack.dtype.itemsize for stack, ends in ((a, at.a), (b, at.b)))
    return int(max(1, _HIDDEN_BUDGET // (per_token * windows.shape[1])))


def _width(stack: Stack) -> int:
    """Return the width of the widest hidden state, or more."""
    return max((int(getattr(config, "hidden_size", 0)) for config in stack.configs), default=0) or 1


@torch.inference_mode()
@fast_products()
def measure(
    a: Stack,
    b: Stack,
    windows: Tensor,
    at: Positions,
    vocabulary: int,
    matrix: bool,
    sums: Sums,
    keep: Callable[[Sums], None],
) -> Sums:
    """Sum up all batches from the one where `sums` stops.

    Args:
        windows: int64 [n, length].
        vocabulary: Tokens [0, vocabulary) are compared.
        keep: Called after each batch with the sums so far.

    Returns:
        Sums over tokens of `cosine`, `kl_ab`, `kl_ba`, `agreement` and, if widths agree, `hidden` ([pairs] each), of
        `matrix` [positions a, positions b] if requested, and `tokens`, the number of tokens.

    Raises:
        InputError: A model gives numbers that are not finite.
    """
    lens_a, lens_b = Lens(a.parts[a.end]), Lens(b.parts[b.end])
    for ids in _batches(windows, _rows(windows, a, b, at), sums.done):
        hidden_a, hidden_b = _hidden(a, ids, at.a), _hidden(b, ids, at.b)
        found = alike(lens_a, lens_b, hidden_a, hidden_b, at.pairs, vocabulary, matrix)
        batch = {name: getattr(found, name).double().sum(-1) for name in ("cosine", "kl_ab", "kl_ba", "agreement")}
        if hidden_a.shape[-1] == hidden_b.shape[-1]:
            batch["hidden"] = torch.stack([_cosine(hidden_a[i], hidden_b[j]).double().sum() for i, j in at.pairs])
        if found.matrix is not None:
            batch["matrix"] = found.matrix.double().sum(-1)
        _check_finite(batch)
        sums = sums.with_batch({**batch, "tokens": torch.tensor(ids.numel())})
        keep(sums)
    return sums


def _batches(windows: Tensor, rows: int, done: int) -> Iterator[Tensor]:
    for start in range(done * rows, windows.shape[0], rows):
        yield windows[start : start + rows]


def _hidden(stack: Stack, ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return the hidden states after each of these numbers of components: [positions, tokens, width]."""
    ids = ids.to(stack.device)
    course = stack.course(ids)
    kept: dict[int, Tensor] = {}
    x, reached = ids, 0
    for end in sorted(ends):
        x, reached = stack.run(x, course, reached, end), end
        kept[end] = x.flatten(0, 1)
    return torch.stack([kept[end] for end in ends])


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)


def _check_finite(batch: dict[str, Tensor]) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in batch.values()):
        raise InputError(
            "one of the models gives numbers that are not finite: nothing can be said of what is alike in them"
        )
