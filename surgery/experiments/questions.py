"""The fixed questions of an experiment, as token ids: windows of text, and lines of which one follows.

The same text, tokenizer and numbers give the same questions, and the same digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from surgery.evaluation.items import CHOICES, Cloze, cloze_items
from surgery.text.library import EVERYTHING, read_library
from surgery.text.text import Text
from zoo.errors import InputError

#: With fewer files than this, a text takes wrong choices from all of the library.
_ENOUGH_FILES = 8


@dataclass(frozen=True, slots=True)
class Question:
    """Amount of questions.

    Fields:
        windows: Windows of `length` tokens.
        lines: Questions of which line follows.
        batch: Rows per batch; a line question takes four.
    """

    windows: int = 64
    length: int = 256
    lines: int = 96
    batch: int = 8
    seed: int = 0


@dataclass(frozen=True, eq=False)
class QuestionBatch:
    """Questions that run together.

    Fields:
        key: The batch's name in files.
        ids: int64 [B, T].
        scored: bool [B, T]: the tokens that count, each predicted from those before it.
        answers: int64 [B / 4], the right one of each four rows; None for plain text, where every row is a window.
    """

    key: str
    ids: Tensor
    scored: Tensor
    answers: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Questions:
    """All batches, with the number of text tokens and of line questions."""

    batches: tuple[QuestionBatch, ...]
    tokens: int
    lines: int

    @property
    def digest(self) -> str:
        """BLAKE3 over all ids, scored masks and answers."""
        whole = blake3()
        for batch in self.batches:
            for tensor in (batch.ids, batch.scored, batch.answers):
                if tensor is not None:
                    whole.update(
                        f"{tuple(tensor.shape)}".encode() + tensor.to(torch.int64).numpy().astype("<i8").tobytes()
                    )
        return whole.hexdigest()


def questions(text: Text, tokenizer: Any, ask: Question, context: int) -> Questions:
    """Make the questions from the text's held-out part.

    Args:
        tokenizer: A transformers tokenizer; None if the text is token ids, which gives no line questions.
        context: Maximum number of tokens of the models.

    Raises:
        InputError: The text gives no questions.
    """
    length = min(ask.length, context)
    if length < 2 or ask.windows < 1 or ask.batch < 1 or ask.lines < 0:
        raise InputError("an experiment needs windows of at least two tokens, and at least one of them at once")
    windows = text.tokens(tokenizer, length, ask.windows, part="held_out", seed=ask.seed)
    batches = [_window_batch(f"text:{at}", part) for at, part in enumerate(torch.split(windows, ask.batch))]
    items = [] if tokenizer is None else _lines(text, ask.lines)
    at_once = max(1, ask.batch // CHOICES)
    for at in range(0, len(items), at_once):
        batches.append(_line_batch(f"lines:{at // at_once}", items[at : at + at_once], tokenizer, context))
    return Questions(tuple(batches), windows.numel(), len(items))


def _lines(text: Text, most: int) -> list[Cloze]:
    own = [document for document in text.part("held_out") if isinstance(document, str)]
    others: list[str] = []
    if len(own) < _ENOUGH_FILES and text.origin.startswith("library:"):
        others = list(read_library().slice(EVERYTHING).held_out)
    return cloze_items(own, most, others)


def _window_batch(key: str, windows: Tensor) -> QuestionBatch:
    scored = torch.ones_like(windows, dtype=torch.bool)
    scored[:, 0] = False
    return QuestionBatch(key, windows, scored)


def _line_batch(key: str, items: list[Cloze], tokenizer: Any, context: int) -> QuestionBatch:
    rows = [_line_ids(item.context, choice, tokenizer, context) for item in items for choice in item.choices]
    longest = max(len(ids) for ids, _ in rows)
    # Padding comes after everything that counts, out of reach of causal attention, so any id will do.
    ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row, _ in rows], dtype=torch.int64)
    scored = torch.zeros_like(ids, dtype=torch.bool)
    for at, (row, new) in enumerate(rows):
        scored[at, len(row) - new : len(row)] = True
    return QuestionBatch(key, ids, scored, torch.tensor([item.answer for item in items]))


def _line_ids(before: str, choice: str, tokenizer: Any, context: int) -> tuple[list[int], int]:
    """Return the ids of both texts, cut on the left to the context, and the number of ids of the choice.

    Splits as lm-eval does: white space goes with the choice.
    """
    stem = tokenizer.encode(before.rstrip())
    ids = tokenizer.encode(before + choice)
    new = min(max(1, len(ids) - len(stem)), context - 1)
    return ids[-context:], new
