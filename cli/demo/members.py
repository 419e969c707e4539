"""Train one member of the family from its base, and save it for transformers or peft."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cli.demo.recipe import FamilyMember, Recipe
from cli.demo.train import Examples, perplexity_on, train_
from surgery.tensors.half_products import multiplies_half_fast

_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class MemberLesson:
    """One member with what it learns from and what it is measured on.

    Fields:
        start: Returns the model that a foundation begins with, in float32: a random or a pretrained one.
        save_tokenizer: Writes the tokenizer's files into a folder.
    """

    member: FamilyMember
    recipe: Recipe
    train: Examples
    held_out: Examples
    start: Callable[[], Any]
    save_tokenizer: Callable[[Path], None]

    @property
    def half(self) -> bool:
        """Whether it is trained with products in bfloat16."""
        return self.recipe.dtype == "bfloat16" and multiplies_half_fast()

    def perplexity(self, model: Any) -> float:
        return perplexity_on(model, self.held_out.list_batches(self.recipe.measured), half=self.half)


@dataclass(frozen=True, slots=True)
class Learned:
    """The results of a training. Perplexities are per token on held-out files of the member's subject.

    Fields:
        before: The base's perplexity, None without a base.
        train_loss: In nats per token, over the last tenth of the steps.
        tokens: Tokens it was trained on.
    """

    perplexity: float
    before: float | None
    train_loss: float
    tokens: int


def learn(lesson: MemberLesson, folder: Path, base: Path | None, on_step: Callable[[int, float], None]) -> Learned:
    """Train a member and save it into `folder`: weights, config and tokenizer, or a PEFT folder.

    Args:
        base: The folder of its foundation, None without one.
    """
    quiet_transformers()
    member, recipe = lesson.member, lesson.recipe
    seed = _seed(recipe, member)
    torch.manual_seed(seed)
    model = lesson.start() if base is None else _prepared(member, base)
    before = None if base is None else lesson.perplexity(model)
    drawn = lesson.train.draw_batches(member.schedule.batch, seed)
    totals = train_(model, drawn, member.schedule, on_step, half=lesson.half)
    # What is measured is what is saved: the weights rounded to the family's dtype.
    model.to(getattr(torch, recipe.dtype)).save_pretrained(folder)
    if member.kind != "lora":
        lesson.save_tokenizer(folder)
    return Learned(lesson.perplexity(model.float()), before, totals.loss, totals.tokens)


def _prepared(member: FamilyMember, base: Path) -> Any:
    """Return the base's model, with the parameters that this member may change set to trainable."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if member.kind == "lora":
        return _with_lora(model, member, base)
    freeze_(model, member.frozen, embedding=member.freezes_embedding)
    return model


def freeze_(model: Any, layers: tuple[int, ...], *, embedding: bool) -> None:
    """Freeze these layers, and the embedding (with the head, where they are tied)."""
    if embedding:
        model.model.embed_tokens.requires_grad_(False)
    for layer in layers:
        model.model.layers[layer].requires_grad_(False)


def _with_lora(model: Any, member: FamilyMember, base: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=member.rank, lora_alpha=2 * member.rank, target_modules=list(_LORA_TARGETS)
    )
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(base.resolve())
    return adapted


def _seed(recipe: Recipe, member: FamilyMember) -> int:
    return int.from_bytes(hashlib.sha256(f"{recipe.seed} {member.name}".encode()).digest()[:4], "big")


def quiet_transformers() -> None:
    """Disable transformers' progress bars and log messages; the demo has its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
