"""The network of a length predictor: an answer's bucket from the tokens of its prompt (TI-10, TI-12).

    tokens -> the target's own embedding, frozen -> width 128 -> two bidirectional layers -> mean and maximum -> buckets

The paper fine-tunes OPT-125M for sequence classification. Here the knowledge of words comes from the target's
embedding, which the zoo has already, so that a predictor costs two megabytes.
Plain torch: serving needs no transformers for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

#: Longest prompt that is read whole, in tokens; of longer ones both ends are.
LONGEST = 2048
#: Width, layers, heads.
_WIDTH, _LAYERS, _HEADS = 128, 2, 4


class LengthClassifier(nn.Module):
    """Logits of buckets of lengths.

    Args:
        embedding: The target's embedding, [vocabulary, width of the target]; never trained, and not among the
            parameters.
        buckets: Number of buckets.
        spread: Standard deviation of the embedding's values; None: measured.
    """

    def __init__(self, embedding: torch.Tensor, buckets: int, spread: float | None = None) -> None:
        super().__init__()
        self.buckets = buckets
        self._embedding = [embedding]  # in a list, so that it is no part of the module
        self.spread = float(embedding[:4096].float().std()) if spread is None else spread
        self.narrow = nn.Linear(embedding.shape[1], _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 2 * _WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(2 * _WIDTH)
        self.head = nn.Linear(2 * _WIDTH, buckets)

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Return logits [prompts, buckets], and the loss where there are labels.

        Args:
            tokens: [prompts, positions], padded.
            mask: The same shape, True where there is a token.
            labels: Bucket of each answer.
        """
        embedded = torch.nn.functional.embedding(tokens, self._embedding[0]).to(self.head.weight.dtype) / self.spread
        hidden = self.narrow(embedded) + _positions(tokens.shape[1]).to(embedded)
        hidden = self.layers(hidden, src_key_padding_mask=~mask)
        kept = mask.unsqueeze(-1)
        mean = (hidden * kept).sum(1) / kept.sum(1)
        most = hidden.masked_fill(~kept, -math.inf).amax(1)
        logits = self.head(self.norm(torch.cat([mean, most], dim=-1)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels, label_smoothing=0.05), "logits": logits}


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return prompts as tokens and mask, padded to the longest (TI-12)."""
    shown = [_ends(prompt) for prompt in prompts]
    most = max(len(each) for each in shown)
    tokens = torch.zeros(len(shown), most, dtype=torch.long)
    mask = torch.zeros(len(shown), most, dtype=torch.bool)
    for at, each in enumerate(shown):
        tokens[at, : len(each)] = torch.tensor(each, dtype=torch.long)
        mask[at, : len(each)] = True
    return {"tokens": tokens, "mask": mask}


def trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what was trained, by name."""
    return {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}


def _ends(prompt: Sequence[int]) -> Sequence[int]:
    half = LONGEST // 2
    return prompt if len(prompt) <= LONGEST else (*prompt[:half], *prompt[-half:])


def _positions(count: int) -> Any:
    """Return sinusoidal positions, [count, width]."""
    at = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    rates = torch.exp(torch.arange(0, _WIDTH, 2, dtype=torch.float32) * (-math.log(10_000.0) / _WIDTH))
    return torch.stack([torch.sin(at * rates), torch.cos(at * rates)], dim=-1).flatten(1)
