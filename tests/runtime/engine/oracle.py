"""Compare an engine's tokens with those of stock transformers; a token may differ only at a tie within rounding.

`same_tokens` demands equality. Where a token differs, the reference's two best logits there must be closer than the
dtype rounds. Then both continuations are legitimate and the rest of that sequence proves nothing, so the function
returns where the agreement ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from surgery.modules.stack import open_stack
from tests.chains import manifest_of
from zoo.store import Store

#: Largest gap between the two best logits that rounding may reverse, relative to their size. In bfloat16 the reference
#: itself is rounded at every operation.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-5}


def reference(folder: Path) -> Any:
    """Load the checkpoint in stock transformers.

    Families listed here run eager attention: the fused kernels ignore Gemma 2's soft cap, and some have no other.
    """
    from transformers import AutoConfig

    eager = AutoConfig.from_pretrained(folder).model_type in ("gemma2", "bloom", "gptj", "mpt")
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager" if eager else "sdpa").eval()


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """Return the tokens of `generate` for one prompt alone, without sampling."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def gap(model: Any, tokens: Sequence[int]) -> float:
    """Return the distance of the two best logits after `tokens`, relative to the best one's size."""
    logits = model(torch.tensor([list(tokens)])).logits[0, -1].float()
    best, second = torch.topk(logits, 2).values.tolist()
    return (best - second) / max(abs(best), 1.0)


def same_tokens(
    model: Any, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], rounding: float | None = None
) -> int:
    """Return the number of tokens that agree: all of them unless a tie within rounding comes first. Fails otherwise.

    `rounding`: Largest gap that counts as a tie; by default that of the dtype of the model's first parameter.
    """
    for index, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want != have:
            margin = gap(model, [*prompt, *expected[:index]])
            allowed = ROUNDING[next(model.parameters()).dtype] if rounding is None else rounding
            assert margin <= allowed, (
                f"token {index}: {have} for {want}, though the reference's margin is {margin:.2e} > {allowed:.2e}"
            )
            return index
    assert len(expected) == len(got), f"{len(got)} tokens for {len(expected)}"
    return len(expected)


class Answers:
    """A reference's greedy answers, each computed once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def agreeing(self, prompt: tuple[int, ...], got: Sequence[int], count: int, rounding: float | None = None) -> int:
        """Return `same_tokens` for an answer of `count` tokens."""
        key = (prompt, count)
        if key not in self._known:
            self._known[key] = greedy(self.model, prompt, count)
        return same_tokens(self.model, prompt, self._known[key], got, rounding)


class Recomputed:
    """A stored model as a reference outside the engine: a stack that recomputes all tokens at every step."""

    def __init__(self, store: Store, name: str, dtype: torch.dtype | None = None) -> None:
        self.stack = open_stack(store, manifest_of(store, name), dtype=dtype)

    def __call__(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.stack(ids))

    def parameters(self) -> Any:
        return self.stack.parameters()

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        """Return greedy tokens behind `input_ids` [1, T]; no token ends the sequence."""
        for _step in range(max_new_tokens):
            best = self.stack(input_ids)[0, -1].float().argmax()
            input_ids = torch.cat((input_ids, best.view(1, 1)), dim=1)
        return input_ids
