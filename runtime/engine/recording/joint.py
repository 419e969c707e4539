"""Models that differ in adapters only, as one: their rows run in any mix through one recorded step.

    rows of base, lora-1, lora-2 … --back to back--> one batch, and for each row the index of its adapter

A recorded step computes the low-rank parts of all adapters that are attached to the chain, and a mask limits each row
to its own. This module is independent of how steps are recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from runtime.engine.layers.linear import SharedEmbedding
from runtime.engine.models.components import SharedComponent
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.context import AdapterMix
from runtime.engine.step.layout import StepLayout, TokenPlace
from runtime.kv.transfers import put

#: The name of joint models in a step: the same for each mix, because one recording serves them all.
JOINT = ""
#: With more attached adapters a step would mostly compute parts that none of its rows uses.
MOST_ADAPTERS = 64


class JointModels:
    """The adapters of each chain, found once; `clear` when models or adapters are loaded or dropped."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, ...], tuple[str, ...] | None] = {}

    def clear(self) -> None:
        """Forget all chains."""
        self._adapters.clear()

    def adapters_of(self, models: Sequence[LoadedModel]) -> tuple[str, ...] | None:
        """Return the adapters attached to the chain of these models, none if no model has one.

        Returns None if their rows cannot run as one.
        """
        chain = models[0].chain
        if any(model.chain != chain for model in models[1:]):
            return None
        if chain not in self._adapters:
            self._adapters[chain] = _attached(models[0].units)
        names = self._adapters[chain]
        own = {_adapter(model) for model in models}
        if names is None or not own <= {None, *names}:
            return None
        return () if own == {None} else names

    def mix_of(self, names: tuple[str, ...], batches: Iterable[ModelBatch], device: torch.device) -> AdapterMix:
        """Return which of these adapters each token of the batches uses; padding rows use their model's."""
        index: list[int] = []
        for batch in batches:
            own = _adapter(batch.model)
            index += [len(names) if own is None else names.index(own)] * batch.tokens
        return AdapterMix(names, put(index, device))


def join_layout(layout: StepLayout) -> StepLayout:
    """Return the layout of several models' rows as that of one model, `JOINT`."""
    return replace(layout, members=(JOINT,), places={JOINT: TokenPlace(0, 0)})


def _adapter(model: LoadedModel) -> str | None:
    """Return the one adapter of a model on all its units; None if it has none. An empty name fits no adapter."""
    first = model.adapters[0]
    return first if all(key == first for key in model.adapters) else ""


def _attached(units: Sequence[SharedComponent]) -> tuple[str, ...] | None:
    """Return the adapters attached to these units; None if one of them needs to know its rows on the host."""
    names: set[str] = set()
    for unit in units:
        for target in unit.targets.values():
            if isinstance(target, SharedEmbedding):
                if target.adapters:
                    return None
            else:
                names |= target.adapter_names
        if unit.side is not None:
            if not unit.side.joins_all:
                return None
            names |= unit.side.names
    return tuple(sorted(names)) if len(names) <= MOST_ADAPTERS else None
