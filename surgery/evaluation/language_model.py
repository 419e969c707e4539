"""A loaded model behind lm-eval's interface. Importing this module needs lm-eval.

For models with virtual tokens (prompt tuning, prefixes), which are peft's, logits of virtual tokens are dropped and the
context is shortened. Questions go to the model in batches and the answers are stored, so that an interrupted run
resumes. The rest is lm-eval's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.models.huggingface import HFLM
from torch import Tensor

from surgery.evaluation.answers import Answers
from zoo.manifest import digest_of

#: Questions per batch of stored answers.
LOT = 256


class ZooLM(HFLM):  # type: ignore[misc]
    """`HFLM` around a `PreTrainedModel` or peft's wrapper of one.

    Args:
        answers: Storage for the answers; None for none.
    """

    def __init__(self, answers: Answers | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._answers = answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        answers = self._lot_by_lot("loglikelihood", super().loglikelihood, requests, disable_tqdm)
        return [(score, greedy) for score, greedy in answers]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._lot_by_lot("loglikelihood_rolling", super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        if any(_draws(request.args[1]) for request in requests):  # a sampled answer depends on all samples before it
            drawn: list[str] = super().generate_until(requests, disable_tqdm)
            return drawn
        return self._lot_by_lot("generate_until", super().generate_until, requests, disable_tqdm)

    def _lot_by_lot(self, how: str, ask: Callable[..., list[Any]], requests: list[Any], silent: bool) -> list[Any]:
        # With "auto", lm-eval chooses the largest batch for the longest question, so it gets all of them at once.
        size = len(requests) if self._answers is None or self.batch_size == "auto" else LOT
        answers: list[Any] = []
        for lo in range(0, len(requests), max(1, size)):
            lot = requests[lo : lo + size]
            asked = digest_of([how, [repr(request.args) for request in lot]])
            known = None if self._answers is None else self._answers.load_answers(asked)
            if known is None or len(known) != len(lot):
                known = ask(lot, disable_tqdm=silent)
                if self._answers is not None:
                    self._answers.append_answers(asked, known)
            answers += known
        return answers

    @property
    def max_length(self) -> int:
        """Maximum number of text tokens per input."""
        return int(super().max_length) - virtual_tokens(self.model)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Compute ids [B, T] -> logits [B, T, vocabulary]."""
        logits: Tensor = super()._model_call(inps, attn_mask, labels)
        return logits[:, -inps.shape[1] :]


def _draws(settings: Any) -> bool:
    return isinstance(settings, dict) and bool(settings.get("do_sample") or settings.get("temperature"))


def virtual_tokens(model: Any) -> int:
    """Return the number of virtual tokens of the active adapter."""
    configs = getattr(model, "peft_config", None) or {}
    active = configs.get(getattr(model, "active_adapter", None)) if isinstance(configs, dict) else None
    return int(getattr(active, "num_virtual_tokens", None) or 0)
