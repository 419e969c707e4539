"""Train one member of the family from its base, and save it for transformers or peft."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cli.demo.recipe import FamilyMember, Recipe
from cli.demo.tokenizer import BOS, EOS, PAD, save_tokenizer
from cli.demo.train import perplexity, train_

#: transformers' default of 0.02 would slow the first hundred steps of a model with few, narrow layers.
_INITIAL_RANGE = 0.04
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class MemberLesson:
    """One member with the training and held-out tokens of its subject, both `[tokens]` int64."""

    member: FamilyMember
    recipe: Recipe
    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor

    def perplexity(self, model: Any) -> float:
        return perplexity(model, self.held_out, self.recipe.context, self.recipe.measured)


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
    model = _foundation(member, recipe) if base is None else _prepared(member, base)
    before = None if base is None else lesson.perplexity(model)
    loss = train_(model, lesson.train, member.schedule, recipe.context, seed, on_step)
    model.save_pretrained(folder)
    if member.kind != "lora":
        save_tokenizer(lesson.tokenizer, folder, recipe.context)
    return Learned(
        lesson.perplexity(model), before, loss, member.schedule.steps * member.schedule.batch * recipe.context
    )


def _foundation(member: FamilyMember, recipe: Recipe) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

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


def _prepared(member: FamilyMember, base: Path) -> Any:
    """Return the base's model, with the parameters that this member may change set to trainable."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if member.kind == "lora":
        return _with_lora(model, member, base)
    freeze_(model, member.frozen)
    return model


def freeze_(model: Any, layers: tuple[int, ...]) -> None:
    """Freeze these layers, and the embedding before them."""
    if layers:
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
