"""Score how well a stand-in replaces a block (BL-05 per block; Table 4's column): cosines of next-token distributions.

Both blocks get the exact block's input. Their outputs become distributions through the model's own final norm and head,
directly after the block (as the paper measures), and again after the frozen rest of the model (as a request would get
it). Values are means over held-out tokens. Leaving the block out is scored too, as the lower bound for a stand-in.
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

#: Windows per batch, if the vocabulary is small enough.
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """Scores of a stand-in; cosines are in [0, 1].

    Fields:
        block: Cosine after the block.
        end: Cosine at the model's end.
        skipped: Cosine after the block, without any block in its place; `skipped_end` likewise.
        loss: The model's loss per token on the same text with the stand-in.
        loss_exact: The same without the stand-in.
    """

    block: float
    end: float
    skipped: float
    skipped_end: float
    loss: float
    loss_exact: float


#: A block as a function: hidden states [B, T, width] and ids [B, T] -> hidden states.
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
    """Return the mean over tokens of the cosine of the first with each of the rest: [len - 1]."""
    first, *others = (each.flatten(0, 1) for each in hidden)
    pairs = [(0, at) for at in range(len(others))]
    return alike(lens, lens, first[None], torch.stack(others), pairs, vocabulary).cosine.mean(-1)
