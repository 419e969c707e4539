"""A model, or a part of one, ready to run: its chain as units, what each takes of pages and adapters, and its
sequences' page tables.

Knows what one model is; nothing of steps or of other models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from runtime.chains import Stage
from runtime.engine.models.components import SharedComponent
from runtime.kv.transfers import put
from runtime.types import ModelSpec, SequenceRequest
from zoo.errors import NotServable
from zoo.manifest import ModelManifest


@dataclass(slots=True)
class Held:
    """What the engine keeps of a sequence: the request, what it has produced, and its row in the model's tables."""

    request: SequenceRequest
    output: list[int]
    slot: int
    groups: int = 0


class PageTables:
    """Page ids of all sequences of a model: [slots, attention layers, page groups], padded with the zero page. Grows by
    doubling.

    `version` grows whenever what is in them changes.
    """

    def __init__(self, layers: int, padding: int, device: torch.device) -> None:
        self.padding = padding
        self.data = torch.full((4, layers, 8), padding, dtype=torch.int64, device=device)
        self._free = [3, 2, 1, 0]
        self.version = 0

    def open(self) -> int:
        """A slot for a new sequence, all padding."""
        if not self._free:
            slots = self.data.shape[0]
            self.data = torch.cat((self.data, torch.full_like(self.data, self.padding)))
            self._free = list(range(2 * slots - 1, slots - 1, -1))
        return self._free.pop()

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self.data[slot].fill_(self.padding)
        self.version += 1
        self._free.append(slot)

    def append(self, sequence: Held, groups: Sequence[Sequence[int]]) -> None:
        """Page groups, each one page id per layer, at the end of a sequence's table."""
        end = sequence.groups + len(groups)
        while end > self.data.shape[2]:
            self.data = torch.cat((self.data, torch.full_like(self.data, self.padding)), dim=2)
        pages = put([page for group in groups for page in group], self.data.device)
        self.data[sequence.slot, :, sequence.groups : end] = pages.view(len(groups), self.data.shape[1]).t()
        sequence.groups = end
        self.version += 1


@dataclass(slots=True)
class LoadedModel:
    """A model on this device, or components in a row of one, with a manifest that names no others (`part_of`).

    `kv_index[i]`: which attention layer component i of the chain is, None where it has none. `adapters[i]`: the key of
    its adapter parts on unit i, None for a model without any. Hidden states before it are [1, tokens, `width`] of
    `dtype`.
    """

    manifest: ModelManifest
    spec: ModelSpec
    units: tuple[SharedComponent, ...]
    kv_index: tuple[int | None, ...]
    adapters: tuple[str | None, ...]
    tables: PageTables
    width: int
    dtype: torch.dtype
    sequences: dict[str, Held] = field(default_factory=dict)
    _chain: tuple[str, ...] = ()
    _drops_from: int = 0

    def __post_init__(self) -> None:
        self._chain = tuple(unit.digest for unit in self.units)
        attention = max((at for at, index in enumerate(self.kv_index) if index is not None), default=-1)
        self._drops_from = attention + 1 if self.has_head else len(self.units)

    @property
    def chain(self) -> tuple[str, ...]:
        """Unit digests in order."""
        return self._chain

    @property
    def has_embedding(self) -> bool:
        """Whether the chain starts from token ids; else from hidden states."""
        return self.units[0].kind == "embedding"

    @property
    def has_head(self) -> bool:
        """Whether logits are behind the chain; else hidden states."""
        return self.units[-1].kind == "lm_head"

    @property
    def drops_from(self) -> int:
        """The unit of the chain from which on nobody reads tokens whose logits are not wanted; its length without a
        head.
        """
        return self._drops_from

    def open(self, request: SequenceRequest, output: Sequence[int]) -> None:
        """Learn a sequence."""
        self.sequences[request.seq] = Held(request, list(output), self.tables.open())

    def close(self, seq: str) -> None:
        """Forget a sequence."""
        self.tables.close(self.sequences.pop(seq).slot)

    def pages(self, seqs: Sequence[str], groups: int) -> Tensor:
        """Tables of these sequences: [len(seqs), attention layers, groups]."""
        slots = put([self.sequences[seq].slot for seq in seqs], self.tables.data.device)
        data = self.tables.data
        if data.shape[2] < groups:
            data = torch.nn.functional.pad(data, (0, groups - data.shape[2]), value=self.tables.padding)
        return data.index_select(0, slots)[:, :, :groups]


def part_of(manifest: ModelManifest, part: Stage) -> ModelManifest:
    """Components [lo, hi) of a model as a manifest of their own, under the part's id. Raises NotServable where there
    are none such.
    """
    if not 0 <= part.lo < part.hi <= len(manifest.components):
        raise NotServable(f"{part.id}: {manifest.name} has {len(manifest.components)} components")
    components = manifest.components[part.lo : part.hi]
    adapters = [placed.component.adapter for placed in components]
    named = {digest for placed in components for _, digest in placed.component.tensors}
    named |= {digest for adapter in adapters if adapter is not None for _, digest in adapter.tensors}
    tensors = tuple(tensor for tensor in manifest.tensors if tensor.digest in named)
    return replace(manifest, name=part.id, components=components, tensors=tensors)


def kv_indices(units: Sequence[SharedComponent]) -> tuple[int | None, ...]:
    """Attention layers numbered from 0 along the chain."""
    out: list[int | None] = []
    count = 0
    for unit in units:
        out.append(count if unit.attends else None)
        count += unit.attends
    return tuple(out)


def adapter_keys(manifest: ModelManifest) -> tuple[str | None, ...]:
    """Under which key a model's adapter parts stand on each of its units: its name, and once more for a unit that it
    uses again.

    A unit that stands twice in a chain may have another adapter each time. No model's name holds the separator, which
    is not printable.
    """
    if all(placed.component.adapter is None for placed in manifest.components):
        return (None,) * len(manifest.components)
    turns: Counter[str] = Counter()
    keys: list[str] = []
    for placed in manifest.components:
        turn = turns[placed.component.base_digest]
        turns[placed.component.base_digest] += 1
        keys.append(f"{manifest.name}\x1f{turn}" if turn else manifest.name)
    return tuple(keys)
