"""Train a causal language model on a stream of tokens, and measure its perplexity. CPU, fp32, seeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cli.demo.optim import Muon
from cli.demo.recipe import Schedule
from cli.demo.tokenizer import EOS
from surgery.training.schedule import rate_share

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WARM_UP = 0.06
_FLOOR = 0.03


def stream_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return all texts joined as `[tokens]` int64, each between `<s>` and `</s>`."""
    return torch.tensor(
        [token for encoding in tokenizer.encode_batch(list(texts)) for token in (*encoding.ids, EOS)], dtype=torch.int64
    )


def batches(stream: Tensor, context: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield endless batches `[batch, context]`: each window once per epoch, in a seeded order, from a seeded offset."""
    generator = torch.Generator().manual_seed(seed)
    stream = _at_least(stream, context + 1)
    left: list[Tensor] = []
    while True:
        while len(left) < batch:
            offset = int(torch.randint(min(context, len(stream) - context), (1,), generator=generator))
            windows = stream[offset:].unfold(0, context, context)
            left.extend(windows[torch.randperm(len(windows), generator=generator)])
        yield torch.stack(left[:batch])
        del left[:batch]


def _at_least(stream: Tensor, length: int) -> Tensor:
    """Return the stream, repeated if it is shorter than one window."""
    return stream.repeat(-(-length // max(len(stream), 1))) if len(stream) < length else stream


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate's factor in (0, 1]: linear warm-up, then half a cosine down to a small floor."""
    return rate_share(step, steps, _WARM_UP, _FLOOR)


def _optimizers(model: Any, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices if the schedule has a rate for it, and fused AdamW for the rest."""
    learning = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in learning if schedule.matrix_rate and p.dim() == 2 and ".layers." in name]
    chosen = set(map(id, matrices))
    rest = [p for _, p in learning if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    return [adam, Muon(matrices, lr=schedule.matrix_rate)] if matrices else [adam]


def train_(
    model: Any, stream: Tensor, schedule: Schedule, context: int, seed: int, on_step: Callable[[int, float], None]
) -> float:
    """Train the model's trainable parameters in place.

    Args:
        on_step: Called after each step with (steps done, training loss in nats per token).

    Returns:
        The mean training loss of the last tenth of the steps.
    """
    optimizers = _optimizers(model, schedule)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    losses: list[float] = []
    model.train()
    for step, tokens in zip(range(schedule.steps), batches(stream, context, schedule.batch, seed), strict=False):
        for group, rate in groups:
            group["lr"] = rate * rate_factor(step, schedule.steps)
        losses.append(_step_(model, tokens, optimizers))
        on_step(step + 1, losses[-1])
    model.eval()
    last = losses[-max(1, schedule.steps // 10) :]
    return sum(last) / len(last)


def _step_(model: Any, tokens: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> float:
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.grad is not None), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


@torch.no_grad()
def perplexity(model: Any, stream: Tensor, context: int, most: int) -> float:
    """Return exp of the mean loss per token over the first `most` windows of `context` tokens."""
    windows = _at_least(stream, context).unfold(0, context, context)[:most]
    total = math.fsum(
        float(model(input_ids=part, labels=part, use_cache=False).loss) * len(part) for part in torch.split(windows, 8)
    )
    return math.exp(min(total / len(windows), 50.0))
