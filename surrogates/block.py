"""A run of a stored model's components beside the whole model, for measuring, training and timing in pruning.

    subject = open_subject(store, manifest, layers, (lo, hi), device)
    states = record(subject, windows)                       # the exact block's inputs and outputs on calibration text
    block = subject.block()                                 # the exact block alone, over the same weights
    smaller = subject.block(run)                            # another run in its place

Everything is computed in float32 for any stored dtype: in half precision, sums of many small steps are lost or
overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.chains.plan import ChainPlan, plan_of
from surgery.families.settings import config_of
from surgery.modules.stack import Course, Stack, assemble
from surgery.tensors.pool import map_tensor
from zoo.errors import InputError
from zoo.manifest import ModelManifest, Placed
from zoo.store import Store

#: Maximum bytes of hidden states kept for calibration; fewer windows are drawn for wide models.
STATES_LIMIT = 1 << 30
#: Maximum bytes of one set of logits, where vocabulary distributions are computed.
LOGITS_LIMIT = 1 << 27


class ParentBlock(nn.Module):
    """Consecutive components of a chain without those around them, and the chain's head to decode their output.

    Fields:
        names: `names[i]` are the weights of component i under their names within it.
        changed: Components that differ from the exact block's.
    """

    def __init__(self, stack: Stack, changed: Sequence[int] = ()) -> None:
        super().__init__()
        self.stack = stack
        self.names = tuple(stack.weights(at) for at in range(stack.end))
        self.changed = tuple(changed)

    @property
    def parts(self) -> Sequence[Any]:
        """The components' modules, without the head."""
        return list(self.stack.parts)[:-1]

    def course(self, ids: Tensor, cache: Any = None, positions: Tensor | None = None) -> Course:
        """Return the course of a batch [B, T], of which only the shape counts.

        `cache` numbers attention from this block's first.
        """
        return self.stack.course(ids, cache=cache, positions=positions)

    def forward(self, hidden: Tensor, course: Course) -> Tensor:
        """Run hidden states [B, T, width] through the block."""
        return self.stack.run(hidden, course, 0, self.stack.end)


@dataclass(frozen=True)
class BlockRun:
    """Components in order, with their plan and the tensors that the subject does not have.

    Fields:
        plan: `plan.links` has one entry per component; `plan.sources` begin with those of the subject.
        tensors: Tensors by digest, beyond the subject's.
        changed: Indices of components that differ from the exact block's.
    """

    placed: tuple[Placed, ...]
    plan: ChainPlan
    tensors: Mapping[str, Tensor]
    changed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The model with the block that gets a stand-in. The block is components [lo, hi).

    Fields:
        layers: The block's first and last layer, inclusive.
        tensors: digest -> tensor, float32, on the device.
        exact: All components of the model.
    """

    manifest: ModelManifest
    plan: ChainPlan
    layers: tuple[int, int]
    lo: int
    hi: int
    tensors: Mapping[str, Tensor]
    exact: Stack

    @property
    def device(self) -> torch.device:
        return self.exact.device

    @property
    def width(self) -> int:
        """Width of the hidden states that the block reads."""
        source = self.plan.links[self.lo].source
        return int(self.exact.configs[source or 0].hidden_size)

    @property
    def vocabulary(self) -> int:
        """Number of ids that the model has an embedding for."""
        table: Any = self.exact.parts[0].table
        return int(table.weight.shape[0])

    def windows_at_once(self, length: int, most: int) -> int:
        """Return how many windows of `length` tokens fit into `LOGITS_LIMIT` at once, at most `most`."""
        return max(1, min(most, LOGITS_LIMIT // (4 * length * self.vocabulary)))

    @property
    def placed(self) -> tuple[Placed, ...]:
        """The block's components."""
        return self.manifest.components[self.lo : self.hi]

    @property
    def run(self) -> BlockRun:
        """The exact block, as data."""
        return BlockRun(self.placed, ChainPlan(self.plan.sources, self.plan.links[self.lo : self.hi]), {})

    def block(self, run: BlockRun | None = None, dtype: torch.dtype = torch.float32) -> ParentBlock:
        """Return a block with its own modules: the exact one over the subject's weights, or another run.

        In another dtype than float32 it uses copies of the weights.
        """
        run = self.run if run is None else run
        plan = ChainPlan(run.plan.sources, (*run.plan.links, self.plan.links[-1]))
        known = {
            digest: _cast(tensor, dtype)
            for digest, tensor in {**self.tensors, **run.tensors}.items()
            if digest in _used(run, self)
        }
        stack = assemble(plan, (*run.placed, self.manifest.components[-1]), known)
        return ParentBlock(stack.to(self.device), run.changed)

    def tail(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Run everything after the block on its output: logits [B, T, vocabulary]."""
        return self.exact.run(hidden, self.exact.course(ids), self.hi, len(self.exact.parts))


def open_subject(
    store: Store, manifest: ModelManifest, layers: tuple[int, int], bounds: tuple[int, int], device: str = "cpu"
) -> Subject:
    """Load a stored model for work on components [lo, hi) = `bounds`.

    Raises DamagedObject, NotServable, MalformedCheckpoint.
    """
    plan = plan_of(config_of(store, manifest), manifest.components)
    tensors = {
        tensor.digest: as_float32(map_tensor(store.open_tensor(tensor.digest)), device) for tensor in manifest.tensors
    }
    exact = assemble(plan, manifest.components, tensors).to(device)
    return Subject(manifest, plan, layers, *bounds, tensors, exact)


def _used(run: BlockRun, subject: Subject) -> set[str]:
    """Return the digests of the tensors of a run and of the head after it, adapters' included."""
    found: set[str] = set()
    for placed in (*run.placed, subject.manifest.components[-1]):
        adapter = placed.component.adapter
        found.update(digest for _, digest in (*placed.component.tensors, *(adapter.tensors if adapter else ())))
    return found


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def as_float32(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return the tensor on a device, with floating-point values in float32."""
    return tensor.to(device=device, dtype=torch.float32) if tensor.is_floating_point() else tensor.to(device)


@dataclass(frozen=True)
class States:
    """The exact block on windows of text, on the CPU.

    Fields:
        ids: [n, T].
        inputs: [n, T, width], float32.
        outputs: [n, T, width], float32.
    """

    ids: Tensor
    inputs: Tensor
    outputs: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def select_windows(self, which: Tensor | slice, device: torch.device | str = "cpu") -> States:
        """Return some windows, on a device."""
        return States(*(each[which].to(device) for each in (self.ids, self.inputs, self.outputs)))

    def batches(self, size: int, device: torch.device | str = "cpu") -> Iterator[States]:
        """Yield all windows in order, `size` at a time."""
        for at in range(0, len(self), size):
            yield self.select_windows(slice(at, at + size), device)


@torch.no_grad()
def record(subject: Subject, windows: Tensor, batch: int = 16) -> States:
    """Run the exact model up to the block's end on windows of token ids, int64 [n, T].

    Raises:
        InputError: Ids outside the vocabulary, or hidden states that are not finite.
    """
    exact = subject.exact
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for at in range(0, len(windows), batch):
        ids = windows[at : at + batch].to(subject.device)
        course = exact.course(ids)
        before = exact.run(ids, course, 0, subject.lo)
        inputs.append(before.cpu())
        outputs.append(exact.run(before, course, subject.lo, subject.hi).cpu())
    states = States(windows, torch.cat(inputs), torch.cat(outputs))
    if not (bool(states.inputs.isfinite().all()) and bool(states.outputs.isfinite().all())):
        raise InputError(
            f"{subject.manifest.name} gives values that are not finite on this text: nothing can be learned from them"
        )
    return states


def windows_that_fit(count: int, length: int, width: int) -> int:
    """Return how many of `count` windows of `length` tokens have states within the limit."""
    return max(1, min(count, STATES_LIMIT // (2 * 4 * length * width)))
