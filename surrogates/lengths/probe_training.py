"""Train a length probe: multinomial regression on hidden states of prompts' last tokens (ARES, TI-11).

Contract: a function of the states and the examples on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surrogates.lengths.buckets import LengthScore, edges_of, score
from surrogates.lengths.probe import LengthProbe
from surrogates.lengths.training import LengthExample, require_enough, scores_only

#: Weight of the squared weights in the loss, and most passes over the examples.
DECAY, _PASSES = 0.5, 150


@dataclass(frozen=True, slots=True)
class TrainedProbe:
    """A trained probe.

    Fields:
        scores: By granularity.
        trained, scored: Number of examples.
    """

    probe: LengthProbe
    scores: dict[int, LengthScore]
    trained: int
    scored: int


def train_probe(
    states: torch.Tensor, examples: Sequence[LengthExample], at: int, widths: Sequence[int], limit: int
) -> TrainedProbe:
    """Train on the target's answers, and score those that `training.split` holds out.

    Args:
        states: [examples, width]; as of `probe.last_states`.
        at: Component that they enter.
        widths, limit: As in `LengthTraining`.

    Raises InputError for too few examples.
    """
    learned = torch.tensor([not scores_only(each.prompt) for each in examples])
    mine = [each for each, own in zip(examples, learned.tolist(), strict=True) if own]
    rest = [each for each, own in zip(examples, learned.tolist(), strict=True) if not own]
    require_enough(len(mine), len(rest))
    probe = fitted(states[learned], [each.length for each in mine], at, edges_of(widths[0], limit))
    masses: list[list[float]] = probe.masses(states[~learned]).tolist()
    lengths, before = [each.length for each in rest], [each.length for each in mine]
    scores = {width: score(masses, lengths, before, widths[0], width) for width in widths}
    return TrainedProbe(probe, scores, len(mine), len(rest))


def fitted(
    states: torch.Tensor, lengths: Sequence[int], at: int, edges: Sequence[int], decay: float = DECAY
) -> LengthProbe:
    """Return the probe that fits these states [examples, width] and lengths best, with small weights.

    It is fitted to states of mean 0 and deviation 1; weights and bias are then those for the states themselves.
    """
    mean, spread = states.mean(0), states.std(0) + 1e-6
    scaled = (states - mean) / spread
    buckets = torch.bucketize(torch.tensor(lengths), torch.tensor(edges), right=True) - 1
    weight = torch.zeros(len(edges), states.shape[1], requires_grad=True)
    bias = torch.zeros(len(edges), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_PASSES)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        lost = torch.nn.functional.cross_entropy(torch.nn.functional.linear(scaled, weight, bias), buckets)
        lost = lost + decay * weight.pow(2).sum() / 2
        lost.backward()  # type: ignore[no-untyped-call]
        return lost

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    own = (weight / spread).detach()
    return LengthProbe(tuple(edges), at, own, (bias - own @ mean).detach())
