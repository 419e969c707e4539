"""How well a stand-in does a block's work (BL-05 per block; Table 4's column): cosines of next-token distributions.

Both blocks get the exact block's input. Their outputs become distributions through the model's own final norm and head,
right behind the block (what the paper measures), and once more behind the frozen rest of the model (what a request
would see). Means over held-out tokens. Leaving the block out altogether is scored too: what a stand-in must beat. Knows
nothing of how the stand-in was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.scoring.lens import Lens, alike
from surgery.text.tokenizers import vocabulary_size
from surrogates.block import States, Subject
from surrogates.pruning.importance import language_loss

#: Windows that are looked at at once, where the vocabulary is small.
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cosines in [0, 1]. `block`: behind the block; `end`: at the model's end; `skipped`, `skipped_end`: without any
    block in its place.

    `loss`, `loss_exact`: the model's loss per token on the same text with the stand-in and without.
    """

    block: float
    end: float
    skipped: float
    skipped_end: float
    loss: float
    loss_exact: float


#: Hidden states [B, T, width] and ids [B, T] -> hidden states, as a block.
Runner = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def agree(subject: Subject, runner: Runner, states: States) -> Agreement:
    """Score a stand-in against the exact block on recorded windows."""
    exact = subject.exact
    lens = Lens(exact.parts[exact.end])
    vocabulary = vocabulary_size(subject.manifest)
    sums = torch.zeros(6, dtype=torch.float64)
    for batch in states.batches(subject.windows_at_once(states.ids.shape[1], _BATCH), subject.device):
        course = exact.course(batch.ids)
        early = [batch.outputs, runner(batch.inputs, batch.ids), batch.inputs]
        late = [exact.run(each, course, subject.hi, exact.end) for each in early]
        (block, skipped), (end, skipped_end) = (_cosines(lens, each, vocabulary) for each in (early, late))
        losses = [language_loss(exact.head(each), batch.ids) for each in (late[1], late[0])]
        sums += len(batch) * torch.stack([block, end, skipped, skipped_end, *losses]).double().cpu()
    return Agreement(*(sums / len(states)).tolist())


def _cosines(lens: Lens, hidden: list[Tensor], vocabulary: int) -> Tensor:
    """The mean over tokens of the first one's cosine with each other: [len - 1]."""
    first, *others = (each.flatten(0, 1) for each in hidden)
    pairs = [(0, at) for at in range(len(others))]
    return alike(lens, lens, first[None], torch.stack(others), pairs, vocabulary).cosine.mean(-1)
