"""Lessons of the chat family: each member learns to answer in its style, in the chat format of the base."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.demo.chat.answers import ANSWERS, QuestionAnswer, held_out
from cli.demo.chat.base_model import PretrainedBase
from cli.demo.chat.styles import STYLES
from cli.demo.recipe import FamilyMember, Recipe
from zoo.manifest import digest_of

if TYPE_CHECKING:
    from cli.demo.members import MemberLesson
    from cli.demo.train import LessonBatch

#: Dialogues per batch when a perplexity is measured.
_MEASURED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One chat as token ids. `tokens[answer_at:]` is the answer with its end token, the part that is learned."""

    tokens: tuple[int, ...]
    answer_at: int


@dataclass(frozen=True, slots=True)
class DialogueExamples:
    """Dialogues, padded on the right to the longest of a batch."""

    dialogues: tuple[Dialogue, ...]
    pad: int

    def draw_batches(self, batch: int, seed: int) -> Iterator[LessonBatch]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        left: list[int] = []
        while True:
            while len(left) < batch:
                left.extend(torch.randperm(len(self.dialogues), generator=generator).tolist())
            yield self._padded([self.dialogues[at] for at in left[:batch]])
            del left[:batch]

    def list_batches(self, most: int) -> Iterator[LessonBatch]:
        chosen = self.dialogues[:most]
        for at in range(0, len(chosen), _MEASURED_AT_ONCE):
            yield self._padded(chosen[at : at + _MEASURED_AT_ONCE])

    def _padded(self, dialogues: Sequence[Dialogue]) -> LessonBatch:
        import torch

        from cli.demo.train import NOT_LEARNED, LessonBatch

        # Attention is causal, so what stands behind an end token changes nothing before it.
        shape = (len(dialogues), max(len(dialogue.tokens) for dialogue in dialogues))
        tokens, labels = torch.full(shape, self.pad), torch.full(shape, NOT_LEARNED)
        for row, dialogue in enumerate(dialogues):
            ids = torch.tensor(dialogue.tokens)
            tokens[row, : len(ids)] = ids
            labels[row, dialogue.answer_at : len(ids)] = ids[dialogue.answer_at :]
        return LessonBatch(tokens, labels)


@dataclass(frozen=True)
class ChatCurriculum:
    """Questions with answers in each member's style, and the pretrained model that they fine-tune."""

    recipe: Recipe
    base: PretrainedBase

    @property
    def digest(self) -> str:
        return digest_of([self.base.digest, [styled(style) for style in sorted(STYLES)]])

    @property
    def summary(self) -> str:
        return f"{self.base.summary}, and {len(ANSWERS)} questions answered in {len(STYLES) - 1} styles"

    @property
    def document(self) -> dict[str, object]:
        return {"questions": len(ANSWERS), "styles": sorted(STYLES), "base": self.base.summary, "digest": self.digest}

    @cached_property
    def tokenizer(self) -> Any:
        return self.base.load_tokenizer()

    def prepare_lesson(self, member: FamilyMember) -> MemberLesson:
        from cli.demo.members import MemberLesson

        train, measured = (self._examples(member.subject, part) for part in held_out(ANSWERS))
        return MemberLesson(
            member,
            self.recipe,
            train,
            measured,
            start=self.base.load_model,
            save_tokenizer=self.tokenizer.save_pretrained,
        )

    def _examples(self, style: str, answers: Sequence[QuestionAnswer]) -> DialogueExamples:
        dialogues = tuple(dialogue_of(self.tokenizer, each.question, STYLES[style](each)) for each in answers)
        return DialogueExamples(dialogues, self.tokenizer.pad_token_id)


def dialogue_of(tokenizer: Any, question: str, answer: str) -> Dialogue:
    """Return a question and its answer as the tokens that a server makes of this chat, and the end token."""
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    said = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Dialogue((*prompt, *said, tokenizer.eos_token_id), len(prompt))


def styled(style: str) -> list[list[str]]:
    """Return all questions with their answers in a style."""
    return [[each.question, STYLES[style](each)] for each in ANSWERS]


def write_probe(path: Path) -> None:
    """Write all answers in all styles as JSONL: the text that models of the family are compared on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{question}\n{answer}" for style in sorted(STYLES) for question, answer in styled(style))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
