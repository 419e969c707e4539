"""A length probe: an answer's bucket from the target's own hidden state of the prompt's last token (ARES, TI-10).

    hidden state in the middle of the chain [width] -> one linear map -> a probability for each bucket

Serving has this state anyway: a probe costs one product of width by buckets for each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surgery.modules.stack import open_stack
from zoo.errors import InputError
from zoo.manifest import ModelManifest
from zoo.store import Store


@dataclass(frozen=True, slots=True)
class LengthProbe:
    """A probe of one model.

    Fields:
        edges: Least length of each bucket, in tokens; the last one has no end.
        at: Component of the model that the state enters.
        weight, bias: [buckets, width] and [buckets], float32.
    """

    edges: tuple[int, ...]
    at: int
    weight: torch.Tensor
    bias: torch.Tensor

    def masses(self, states: torch.Tensor) -> torch.Tensor:
        """Return the probability of each bucket [prompts, buckets] for states [prompts, width] of any dtype."""
        return torch.softmax(torch.nn.functional.linear(states.float(), self.weight, self.bias), dim=-1)


def probed_component(target: ModelManifest, layer: int | None) -> int:
    """Return the component that a state behind so many layers enters; None: behind half of them.

    Raises InputError for a model with fewer layers than two, with virtual tokens, or without that layer.
    """
    if target.kind in ("prompt", "prefix"):
        raise InputError(f"{target.name} has virtual tokens, behind which no probe is trained: leave out --kind probe")
    starts = [at for at, placed in enumerate(target.components) if placed.component.kind in ("attention", "layer")]
    behind = len(starts) // 2 if layer is None else layer
    if not 0 < behind < len(starts):
        raise InputError(f"--layer is from 1 to {len(starts) - 1} for {target.name}, which has {len(starts)} layers")
    return starts[behind]


@torch.inference_mode()
def last_states(store: Store, target: ModelManifest, prompts: Sequence[Sequence[int]], at: int) -> torch.Tensor:
    """Return the hidden state of each prompt's last token that enters component `at`, [prompts, width], float32.

    Raises as `surgery.modules.stack.open_stack`.
    """
    stack = open_stack(store, target, dtype="float32")
    rows = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        rows.append(stack.run(ids, stack.course(ids), 0, at)[0, -1].float())
    return torch.stack(rows)
