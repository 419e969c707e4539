"""What a family learns from: a curriculum gives each member its text, its tokenizer and its foundation's first weights.

There are two: `LibraryCurriculum` here, for families trained from random weights on Python's standard library, and
`cli.demo.chat.curriculum` for fine-tunes of a pretrained chat model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from cli.demo.recipe import FamilyMember, Recipe
from surgery.text.library import EVERYTHING, Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from cli.demo.members import MemberLesson

#: transformers' default of 0.02 would slow the first hundred steps of a model with few, narrow layers.
_INITIAL_RANGE = 0.04


class Curriculum(Protocol):
    """The text of a family, with the tokenizer and the foundation that belong to it."""

    @property
    def digest(self) -> str:
        """Digest of all that members learn from, and of a pretrained foundation: equal ones give equal models."""

    @property
    def summary(self) -> str:
        """What is learned from, as the end of a sentence."""

    @property
    def document(self) -> dict[str, object]:
        """The field `corpus` of the report."""

    def prepare_lesson(self, member: FamilyMember) -> MemberLesson:
        """Return a member's lesson. The members before it have been made."""


@dataclass(frozen=True)
class LibraryCurriculum:
    """Slices of the built-in text by subject. The tokenizer is trained only if something has to be trained."""

    recipe: Recipe
    corpus: Corpus

    @property
    def digest(self) -> str:
        return self.corpus.digest

    @property
    def summary(self) -> str:
        from cli.shared.output import human_bytes

        return f"{len(self.corpus.documents)} files ({human_bytes(self.corpus.nbytes)}) of Python's standard library"

    @property
    def document(self) -> dict[str, object]:
        return {"files": len(self.corpus.documents), "bytes": self.corpus.nbytes, "sha256": self.corpus.digest}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from cli.demo.tokenizer import train_tokenizer

        return train_tokenizer(self.corpus.slice(EVERYTHING).train, self.recipe.vocabulary)

    def prepare_lesson(self, member: FamilyMember) -> MemberLesson:
        from cli.demo.members import MemberLesson
        from cli.demo.tokenizer import save_tokenizer
        from cli.demo.train import StreamExamples, stream_of

        texts, context = self.corpus.slice(member.subject), self.recipe.context
        train, held_out = (
            StreamExamples(stream_of(self.tokenizer, part), context) for part in (texts.train, texts.held_out)
        )
        return MemberLesson(
            member,
            self.recipe,
            train,
            held_out,
            start=lambda: random_llama(member, self.recipe),
            save_tokenizer=lambda folder: save_tokenizer(self.tokenizer, folder, context),
        )


def random_llama(member: FamilyMember, recipe: Recipe) -> Any:
    """Return a Llama model of the member's shape with random weights. Raises ValueError if it has no shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cli.demo.tokenizer import BOS, EOS, PAD

    if member.shape is None:
        raise ValueError(f"{member.name} has neither a shape nor a base")
    shape = member.shape
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=recipe.context,
        initializer_range=_INITIAL_RANGE,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)
