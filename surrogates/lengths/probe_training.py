"""Train a length probe: multinomial regression on hidden states of prompts' last tokens (ARES, TI-11).

Its second map learns from states of the answers' own tokens how many are still to come.

Contract: a function of the states and the examples on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from surrogates.lengths.buckets import LengthScore, after, edges_of, score, survived
from surrogates.lengths.probe import AnswerStates, LengthProbe
from surrogates.lengths.training import LengthExample, require_enough, scores_only

#: Weight of the squared weights in the loss, and most passes over the examples.
DECAY, _PASSES = 0.5, 150
#: Weight of the squared weights of the second map, which learns from many more states.
LATER_DECAY = 0.05
#: Tokens of an answer between two states that are learned from, and those after which forecasts are scored.
EVERY, SCORED_AFTER = 16, (64, 128)


@dataclass(frozen=True, slots=True)
class LaterScore:
    """How well whole lengths were forecast of answers that had so many tokens.

    Fields:
        answers: Number of these answers.
        again: Accuracy of what is forecast anew from their latest token.
        survived: That of what was forecast from the prompt, given that they are longer than what they have.
    """

    answers: int
    again: float
    survived: float


@dataclass(frozen=True, slots=True)
class TrainedProbe:
    """A trained probe.

    Fields:
        scores: By granularity.
        trained, scored: Number of examples.
        later: By tokens of an answer, then by granularity.
    """

    probe: LengthProbe
    scores: dict[int, LengthScore]
    trained: int
    scored: int
    later: dict[int, dict[int, LaterScore]] = field(default_factory=dict)


def train_probe(
    states: AnswerStates, examples: Sequence[LengthExample], at: int, widths: Sequence[int], limit: int
) -> TrainedProbe:
    """Train on the target's answers, and score those that `training.split` holds out.

    Args:
        states: As of `probe.answer_states`; without those of answers the probe has no map for them.
        at: Component that they enter.
        widths, limit: As in `LengthTraining`.

    Raises InputError for too few examples.
    """
    learned = torch.tensor([not scores_only(each.prompt) for each in examples])
    mine = [each for each, own in zip(examples, learned.tolist(), strict=True) if own]
    rest = [each for each, own in zip(examples, learned.tolist(), strict=True) if not own]
    require_enough(len(mine), len(rest))
    edges = edges_of(widths[0], limit)
    probe = fitted(states.prompts[learned], [each.length for each in mine], at, edges)
    held: list[list[float]] = probe.masses(states.prompts).tolist()
    lengths, before = [each.length for each in rest], [each.length for each in mine]
    masses = [mass for mass, own in zip(held, learned.tolist(), strict=True) if not own]
    scores = {width: score(masses, lengths, before, widths[0], width) for width in widths}
    own = torch.tensor([bool(learned[each]) for each in states.example], dtype=torch.bool)
    left = [_left(examples[each].length, made, edges) for each, made in zip(states.example, states.made, strict=True)]
    if own.sum() < 2:
        return TrainedProbe(probe, scores, len(mine), len(rest))
    mine_left = [each for each, mine in zip(left, own.tolist(), strict=True) if mine]
    later = fitted(states.later[own], mine_left, at, edges, LATER_DECAY)
    probe = replace(probe, later=later)
    return TrainedProbe(probe, scores, len(mine), len(rest), _later_scores(probe, states, examples, held, own, widths))


def _left(length: int, made: int, edges: Sequence[int]) -> int:
    """Return the tokens still to come; of an answer that was cut off, as many as are in the last bucket."""
    return edges[-1] if length >= edges[-1] else length - made


def _later_scores(
    probe: LengthProbe, states: AnswerStates, examples: Sequence[LengthExample], held: Sequence[Sequence[float]],
    own: torch.Tensor, widths: Sequence[int],
) -> dict[int, dict[int, LaterScore]]:  # fmt: skip
    """Return the scores of the examples that were not learned from, by tokens of their answers and granularity.

    `held`: what the probe forecasts from each example's prompt.
    """
    found: dict[int, dict[int, LaterScore]] = {}
    for made in SCORED_AFTER:
        some = [at for at, each in enumerate(states.made) if each == made and not own[at]]
        if not some or probe.later is None:
            continue
        numbers = [states.example[at] for at in some]
        lengths = [examples[number].length for number in numbers]
        again: list[list[float]] = probe.later.masses(states.later[some]).tolist()
        sides = (
            [survived(*after(probe.edges, mass, made), made, probe.edges) for mass in again],
            [survived(probe.edges, held[number], made, probe.edges) for number in numbers],
        )
        found[made] = {
            width: LaterScore(
                len(some), *(score(masses, lengths, lengths, widths[0], width).accuracy for masses in sides)
            )
            for width in widths
        }
    return found


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
