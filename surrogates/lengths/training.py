"""Train a length predictor on the target's own answers, by transformers' Trainer (TI-11).

    examples -> split by digest of the prompt -> training -> scores of the rest

Contract: a function of the examples and the seed on one machine. Labels hold for one target and one way of sampling.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surrogates.lengths.buckets import LengthScore, edges_of, score
from surrogates.lengths.classifier import LengthClassifier, padded
from zoo.errors import InputError

#: Share of the examples that only score.
_HELD_OUT = 0.2
#: Fewest examples that are trained on, and that score.
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class LengthExample:
    """A prompt, how many tokens the target's answer to it has, and these tokens if they are known."""

    prompt: tuple[int, ...]
    length: int
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LengthTraining:
    """Settings of a training.

    Fields:
        widths: Tokens of a bucket, growing; the first is what is trained.
        limit: Most tokens of an answer.
    """

    widths: tuple[int, ...]
    limit: int
    epochs: int = 6
    batch: int = 32
    rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainedLengths:
    """A trained predictor.

    Fields:
        scores: By granularity.
        trained, scored: Number of examples.
    """

    module: LengthClassifier
    scores: dict[int, LengthScore]
    trained: int
    scored: int


def split(examples: Sequence[LengthExample]) -> tuple[list[LengthExample], list[LengthExample]]:
    """Return the examples that are trained on, and those that score; a prompt is always on the same side."""
    parts: tuple[list[LengthExample], list[LengthExample]] = ([], [])
    for each in examples:
        parts[scores_only(each.prompt)].append(each)
    return parts


def scores_only(prompt: Sequence[int]) -> bool:
    """Return whether answers to a prompt score instead of being learned from, by the prompt's digest."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < _HELD_OUT


def require_enough(learned: int, held_out: int) -> None:
    """Raise InputError if so many examples are too few to learn from, or to score."""
    if min(learned, held_out) < _FEWEST:
        raise InputError(
            f"{learned + held_out} answers are too few: {learned} to learn from and {held_out} to score; at least "
            f"{_FEWEST} of each are needed"
        )


def train(
    embedding: torch.Tensor, examples: Sequence[LengthExample], settings: LengthTraining, quiet: bool = True
) -> TrainedLengths:
    """Train on the target's answers, and score.

    Args:
        embedding: The target's, [vocabulary, width].

    Raises InputError for too few examples.
    """
    return train_apart(embedding, *split(examples), settings, quiet)


def train_apart(
    embedding: torch.Tensor,
    learned: Sequence[LengthExample],
    held_out: Sequence[LengthExample],
    settings: LengthTraining,
    quiet: bool = True,
) -> TrainedLengths:
    """Train on some answers, and score others. Arguments and errors as of `train`."""
    from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

    require_enough(len(learned), len(held_out))
    finest, buckets = settings.widths[0], len(edges_of(settings.widths[0], settings.limit))
    set_seed(settings.seed)
    module = LengthClassifier(embedding, buckets)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=settings.batch, num_train_epochs=settings.epochs,
            learning_rate=settings.rate, weight_decay=0.01, lr_scheduler_type="cosine", warmup_steps=20,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=quiet, seed=settings.seed,
            remove_unused_columns=False, use_cpu=True, dataloader_num_workers=0, dataloader_pin_memory=False,
        )  # fmt: skip
        collate = _collated(finest, buckets)
        trainer = Trainer(model=module, args=arguments, train_dataset=_Items(learned), data_collator=collate)
        trainer.remove_callback(PrinterCallback)  # it prints to standard output
        trainer.train()
    masses = predict(module, [each.prompt for each in held_out])
    lengths, before = [each.length for each in held_out], [each.length for each in learned]
    scores = {width: score(masses, lengths, before, finest, width) for width in settings.widths}
    return TrainedLengths(module.eval(), scores, len(learned), len(held_out))


@torch.inference_mode()
def predict(module: LengthClassifier, prompts: Sequence[Sequence[int]], batch: int = 64) -> list[list[float]]:
    """Return the probability of each bucket, for each prompt."""
    module.eval()
    found: list[list[float]] = []
    for at in range(0, len(prompts), batch):
        logits = module(**padded(prompts[at : at + batch]))["logits"]
        found += torch.softmax(logits.float(), dim=-1).tolist()
    return found


class _Items(torch.utils.data.Dataset[LengthExample]):
    """Examples as a dataset."""

    def __init__(self, examples: Sequence[LengthExample]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, at: int) -> LengthExample:
        return self._examples[at]


def _collated(finest: int, buckets: int) -> Any:
    def collate(examples: Sequence[LengthExample]) -> dict[str, torch.Tensor]:
        labels = [min(each.length // finest, buckets - 1) for each in examples]
        return {**padded([each.prompt for each in examples]), "labels": torch.tensor(labels)}

    return collate
