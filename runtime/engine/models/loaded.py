"""A loaded model or stage: its chain as units, the attention layer and adapter key of each, and its page tables.

Describes one model, independent of steps and of other models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from runtime.chains import Stage
from runtime.engine.models.components import SharedComponent
from runtime.engine.sampling.constraints import Constraint, Constraints, prepare_masks
from runtime.engine.sampling.penalties import SeenTokens, penalises
from runtime.kv.transfers import put
from runtime.loans import with_change
from runtime.types import ALL_LAYERS, AWAY, CameBack, ModelSpec, PlaceChange, SentAway, SequenceRequest
from surrogates.lengths.probe import LengthProbe
from zoo.errors import NotServable
from zoo.manifest import ModelManifest


@dataclass(slots=True)
class Held:
    """The engine's state of one sequence.

    Fields:
        request: The request that opened it.
        output: Tokens that it has produced.
        slot: Its row in the model's page tables.
        groups: Page groups in its table.
        away: What other devices hold of it, the first tokens first.
        constraint: The grammar that its answer follows.
        seen: The tokens that its penalties count.
    """

    request: SequenceRequest
    output: list[int]
    slot: int
    groups: int = 0
    away: tuple[SentAway, ...] = ()
    constraint: Constraint | None = None
    seen: SeenTokens | None = None


class PageTables:
    """Page ids of all sequences of a model: [slots, attention layers, page groups], padded with the zero page.

    Grows by doubling. `version` increases with every change of the contents that can affect an open sequence.
    """

    def __init__(self, layers: int, padding: int, device: torch.device) -> None:
        self.padding = padding
        self.data = torch.full((4, layers, 8), padding, dtype=torch.int64, device=device)
        self._free = [3, 2, 1, 0]
        self.version = 0

    def open(self) -> int:
        """Return a slot for a new sequence; all its entries are padding."""
        if not self._free:
            slots = self.data.shape[0]
            self.data = torch.cat((self.data, torch.full_like(self.data, self.padding)))
            self._free = list(range(2 * slots - 1, slots - 1, -1))
        return self._free.pop()

    def close(self, slot: int) -> None:
        """Free a slot."""
        self.data[slot].fill_(self.padding)
        self.version += 1
        self._free.append(slot)

    def append(self, sequence: Held, groups: Sequence[Sequence[int]]) -> None:
        """Append page groups, each one page id per layer, to a sequence's table; `AWAY`: on another device."""
        first, end = sequence.groups, sequence.groups + len(groups)
        while end > self.data.shape[2]:
            self.data = torch.cat((self.data, torch.full_like(self.data, self.padding)), dim=2)
        sequence.groups = end
        self.replace(sequence, first, groups)

    def replace(
        self, sequence: Held, first: int, groups: Sequence[Sequence[int]], layers: tuple[int, int] = ALL_LAYERS
    ) -> None:
        """Replace page groups of a sequence, from number `first` on, in these layers; `AWAY`: on another device."""
        lo, hi = layers[0], min(layers[1], self.data.shape[1])
        pages = put([self.padding if page == AWAY else page for group in groups for page in group], self.data.device)
        self.data[sequence.slot, lo:hi, first : first + len(groups)] = pages.view(len(groups), hi - lo).t()
        self.version += 1


@dataclass(slots=True)
class LoadedModel:
    """A model on this device, or consecutive components of one with a manifest that lists only those (`part_of`).

    Fields:
        kv_index: Number of the attention layer of each component of the chain; None for components without one.
        adapters: Key of the model's adapter parts on each unit; None for a model without adapters.
        widths: Size of the hidden states [1, tokens, width] that each component reads.
        dtype: Dtype of these hidden states between stages.
        widened: Whether they are float32 inside a step (`engine.layers.mixed_precision`).
        sequences: Open sequences by name.
        probe: What forecasts lengths of answers here, its component counted from the stage's first one; None: nothing.
        constraints: What makes the constraints of its sequences; None where no sequence may have a grammar.
    """

    manifest: ModelManifest
    spec: ModelSpec
    units: tuple[SharedComponent, ...]
    kv_index: tuple[int | None, ...]
    adapters: tuple[str | None, ...]
    tables: PageTables
    widths: tuple[int, ...]
    dtype: torch.dtype
    widened: bool = False
    sequences: dict[str, Held] = field(default_factory=dict)
    probe: LengthProbe | None = None
    constraints: Constraints | None = None
    _chain: tuple[str, ...] = ()
    _drops_from: int = 0
    _parts: dict[tuple[int, int], LoadedModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chain = tuple(unit.digest for unit in self.units)
        attention = max((at for at, index in enumerate(self.kv_index) if index is not None), default=-1)
        self._drops_from = attention + 1 if self.has_head else len(self.units)

    @property
    def width(self) -> int:
        """Size of the hidden states that the first component reads."""
        return self.widths[0]

    def part(self, at: int, layers: int = 0) -> LoadedModel:
        """Return some components as a view, with the same sequences, page tables and layer numbers.

        Args:
            at: The first component, which its rows enter with hidden states (`types.Row.enters`).
            layers: The last component is the one with attention layer number `layers` (`types.Row.layers`); 0: the
                last one of all.

        Raises:
            ValueError: There is no such component, or no such layer.
        """
        if not at and not layers:
            return self
        if at and not 0 < at < len(self.units):
            raise ValueError(f"{self.spec.name} has no component {at} to enter at")
        end = self.kv_index.index(layers - 1) + 1 if layers else len(self.units)
        known = self._parts.get((at, end))
        if known is None:
            manifest = replace(self.manifest, components=self.manifest.components[at:end])
            known = self._parts[at, end] = replace(
                self, manifest=manifest, units=self.units[at:end], kv_index=self.kv_index[at:end],
                adapters=self.adapters[at:end], widths=self.widths[at:end], _parts={},
            )  # fmt: skip
        return known

    @property
    def inside(self) -> torch.dtype:
        """The dtype of hidden states inside a step."""
        return torch.float32 if self.widened else self.dtype

    @property
    def chain(self) -> tuple[str, ...]:
        """Unit digests in order."""
        return self._chain

    @property
    def has_embedding(self) -> bool:
        """Whether the chain starts from token ids; otherwise it starts from hidden states."""
        return self.units[0].kind == "embedding"

    @property
    def has_head(self) -> bool:
        """Whether the chain ends with logits; otherwise it ends with hidden states."""
        return self.units[-1].kind == "lm_head"

    @property
    def drops_from(self) -> int:
        """Index of the first unit that needs only tokens with wanted logits; the chain's length without a head.

        It is the unit after the last attention layer: nothing after it reads other tokens.
        """
        return self._drops_from

    def open(self, request: SequenceRequest, output: Sequence[int]) -> None:
        """Open a sequence: allocate its slot in the page tables."""
        held = self.sequences[request.seq] = Held(request, list(output), self.tables.open())
        if penalises(request.sampling) and self.has_head:
            held.seen = SeenTokens(request.sampling, request.prompt)
        if request.sampling.grammar and self.constraints is not None and self.has_head:
            held.constraint = self.constraints.open(self.manifest, self.spec, request.sampling)
            if held.constraint is not None:
                prepare_masks([(held.constraint, 0, output)])

    def change_place(self, one: PlaceChange) -> None:
        """Record that another device has page sets of a sequence, or no longer; one that is not open is ignored."""
        held, width = self.sequences.get(one.seq), self.spec.page_tokens
        if held is not None:
            held.away = with_change(held.away, one)
            depth = min(one.layers[1], self.spec.kv_layers) - one.layers[0]
            nowhere = ((AWAY,) * depth,) * ((one.last - one.first) // width)
            groups = one.groups if isinstance(one, CameBack) else nowhere
            if one.first // width < held.groups:  # those of a new sequence come with its row
                self.tables.replace(held, one.first // width, groups, one.layers)

    def close(self, seq: str) -> None:
        """Drop a sequence and free its slot."""
        self.tables.close(self.sequences.pop(seq).slot)

    def pages(self, seqs: Sequence[str], groups: int) -> Tensor:
        """Return the page tables of these sequences: [len(seqs), attention layers, groups]."""
        slots = put([self.sequences[seq].slot for seq in seqs], self.tables.data.device)
        data = self.tables.data
        if data.shape[2] < groups:
            data = torch.nn.functional.pad(data, (0, groups - data.shape[2]), value=self.tables.padding)
        return data.index_select(0, slots)[:, :, :groups]


def part_of(manifest: ModelManifest, part: Stage) -> ModelManifest:
    """Return components [lo, hi) of a model as a manifest of their own, named by the stage's id.

    Raises NotServable if the model does not have these components.
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
    """Return the number of each unit's attention layer along the chain, from 0; None for units without attention."""
    out: list[int | None] = []
    count = 0
    for unit in units:
        out.append(count if unit.attends else None)
        count += unit.attends
    return tuple(out)


def adapter_keys(manifest: ModelManifest) -> tuple[str | None, ...]:
    """Return the key under which a model's adapter parts are attached to each of its units; None without adapters.

    The key is the model's name, plus a number for further uses of the same unit, which may have another adapter each
    time. The separator is not printable, so no model name contains it.
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
