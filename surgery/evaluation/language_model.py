"""A loaded model as lm-eval asks it. Importing this file needs lm-eval.

Models with virtual tokens in front (prompt tuning, prefixes) are peft's: logits of the virtual ones are no answer to anything, and take
from the context. Everything else is lm-eval's own.
"""

from __future__ import annotations

from typing import Any

from lm_eval.models.huggingface import HFLM
from torch import Tensor


class ZooLM(HFLM):  # type: ignore[misc]
    """`HFLM` around a `PreTrainedModel`, or around what peft makes of one."""

    @property
    def max_length(self) -> int:
        """Tokens of text that the model reads at once."""
        return int(super().max_length) - virtual_tokens(self.model)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """ids [B, T] -> logits [B, T, vocabulary]."""
        logits: Tensor = super()._model_call(inps, attn_mask, labels)
        return logits[:, -inps.shape[1] :]


def virtual_tokens(model: Any) -> int:
    """How many positions stand in front of every text, of the active adapter."""
    configs = getattr(model, "peft_config", None) or {}
    active = configs.get(getattr(model, "active_adapter", None)) if isinstance(configs, dict) else None
    return int(getattr(active, "num_virtual_tokens", None) or 0)
