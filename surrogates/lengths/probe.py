"""A length probe: an answer's bucket from the target's own hidden state of the prompt's last token (ARES, TI-10).

    hidden state in the middle of the chain [width] -> one linear map -> a probability for each bucket
    the same of one of the answer's own tokens -> another map -> a probability for each bucket of what is still to come

Serving has these states anyway: a forecast costs one product of width by buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        later: The map for states of the answer's own tokens, whose buckets count the tokens still to come; None if
            there is none.
    """

    edges: tuple[int, ...]
    at: int
    weight: torch.Tensor
    bias: torch.Tensor
    later: LengthProbe | None = None

    def masses(self, states: torch.Tensor) -> torch.Tensor:
        """Return the probability of each bucket [prompts, buckets] for states [prompts, width] of any dtype."""
        return torch.softmax(torch.nn.functional.linear(states.float(), self.weight, self.bias), dim=-1)

    def to(self, device: torch.device, at: int) -> LengthProbe:
        """Return the probe on a device, of which the states enter component `at`."""
        later = None if self.later is None else self.later.to(device, at)
        return replace(self, at=at, weight=self.weight.to(device), bias=self.bias.to(device), later=later)


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


@dataclass(frozen=True, slots=True)
class AnswerStates:
    """Hidden states of answered prompts, float32.

    Fields:
        prompts: Of each prompt's last token, [prompts, width].
        later: Of some of the answers' own tokens, [states, width].
        example, made: Of each of these: number of its prompt, and tokens of the answer up to it.
    """

    prompts: torch.Tensor
    later: torch.Tensor
    example: tuple[int, ...] = ()
    made: tuple[int, ...] = ()


@torch.inference_mode()
def answer_states(
    store: Store, target: ModelManifest, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], at: int,
    every: int,
) -> AnswerStates:  # fmt: skip
    """Return the hidden states that enter component `at`: of each prompt's last token, and of some of its answer's.

    These are every so many; the last token of an answer has none: nothing is computed of it.

    Raises as `surgery.modules.stack.open_stack`.
    """
    stack = open_stack(store, target, dtype="float32")
    first, later, example, counts = [], [], list[int](), list[int]()
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        states = stack.run(ids, stack.course(ids), 0, at)[0].float()
        made = range(every, len(answer), every)
        first.append(states[len(prompt) - 1])
        later += [states[len(prompt) + count - 1] for count in made]
        example += [number] * len(made)
        counts += made
    behind = torch.stack(later) if later else torch.empty(0, first[0].shape[0])
    return AnswerStates(torch.stack(first), behind, tuple(example), tuple(counts))


def last_states(store: Store, target: ModelManifest, prompts: Sequence[Sequence[int]], at: int) -> torch.Tensor:
    """Return the hidden state of each prompt's last token that enters component `at`, [prompts, width], float32.

    Raises as `surgery.modules.stack.open_stack`.
    """
    return answer_states(store, target, prompts, [()] * len(prompts), at, 1).prompts
