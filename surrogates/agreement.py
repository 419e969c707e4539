"""How well a stand-in does a block's work (BL-05 per block; Table 4's column): cosines of next-token distributions.

Both blocks get the exact block's input. Their outputs become distributions through the model's own final norm and head, right behind
the block (what the paper measures), and once more behind the frozen rest of the model (what a request would see). Means over held-out
tokens. Leaving the block out altogether is scored too: what a stand-in must beat. Knows nothing of how the stand-in was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surrogates.block import States, Subject
from surrogates.importance import language_loss

#: Windows whose distributions are held at once, where the vocabulary is small.
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cosines in [0, 1]. `block`: behind the block; `end`: at the model's end; `skipped`, `skipped_end`: without any block in its place.

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
    sums = torch.zeros(6, dtype=torch.float64)
    for batch in states.batches(subject.windows_at_once(states.ids.shape[1], _BATCH), subject.device):
        exact, given, left = batch.outputs, runner(batch.inputs, batch.ids), batch.inputs
        early = [subject.exact.head(each) for each in (exact, given, left)]
        late = [subject.tail(each, batch.ids) for each in (exact, given, left)]
        scores = [cosine(early[0], early[1]), cosine(late[0], late[1]), cosine(early[0], early[2]), cosine(late[0], late[2])]
        losses = [language_loss(logits, batch.ids) for logits in (late[1], late[0])]
        sums += len(batch) * torch.stack([score.mean() for score in scores] + losses).double().cpu()
    return Agreement(*(sums / len(states)).tolist())


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the distributions that two logits [.., vocabulary] stand for -> [..], in [0, 1]."""
    p, q = a.float().softmax(-1), b.float().softmax(-1)
    return torch.nn.functional.cosine_similarity(p, q, dim=-1, eps=1e-30).clamp(0.0, 1.0)
