"""Baseline engine: transformers' `generate` in left-padded batches, with models loaded from the store on demand.

The `resident` most recently used models stay in memory. Decoding is greedy and runs to the longest answer of a batch;
each answer counts to its own length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from runtime.bench.drive import Clock
from runtime.bench.workload import WorkloadRequest

if TYPE_CHECKING:
    from zoo.api import Zoo


class TransformersRunner:
    """A `cli.bench.batches.Runner` over transformers.

    Args:
        keep: Receives the tokens of each answer.
    """

    def __init__(
        self, zoo: Zoo, clock: Clock, device: str, dtype: str | None, resident: int,
        keep: Callable[[WorkloadRequest, Sequence[int]], object] | None = None,
    ) -> None:  # fmt: skip
        from cli.shared.progress import hush

        hush()
        self._zoo = zoo
        self._clock = clock
        self._device = device
        self._dtype = dtype
        self._resident = resident
        self._keep = keep
        self._models: OrderedDict[str, Any] = OrderedDict()

    @torch.inference_mode()
    def run(self, model: str, asks: Sequence[WorkloadRequest]) -> list[tuple[float, ...]]:
        """Run one batch. The time to load the model counts, since the requests wait for it."""
        held = self._model(model)
        longest, steps = max(len(ask.prompt) for ask in asks), max(ask.answer for ask in asks)
        ids = torch.zeros(len(asks), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, longest - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, longest - len(ask.prompt) :] = 1
        stamps: list[float] = []
        made = held.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=_stamping(self._clock, stamps),
        )
        if self._keep is not None:
            for ask, answer in zip(asks, made[:, longest:].tolist(), strict=True):
                self._keep(ask, answer[: ask.answer])
        return [tuple(stamps[: ask.answer]) for ask in asks]

    def close(self) -> None:
        self._models.clear()

    def _model(self, name: str) -> Any:
        if name not in self._models:
            while len(self._models) >= self._resident:
                self._models.popitem(last=False)
            self._models[name] = self._zoo.model(name).load(self._device, self._dtype).eval()
        self._models.move_to_end(name)
        return self._models[name]


def _stamping(clock: Clock, stamps: list[float]) -> Any:
    """Return a stopping criterion that never stops and records the time of each token."""
    from transformers import StoppingCriteriaList

    def stamp(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids[0, -1].item()  # waits for the device
        stamps.append(clock.now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([stamp])
