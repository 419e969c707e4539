"""Train a causal language model on batches of tokens, and measure its perplexity. CPU, float32 weights, seeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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
#: Windows per batch when a perplexity is measured.
_MEASURED_AT_ONCE = 8
#: Label of a token that is not learned (transformers' convention).
NOT_LEARNED = -100


@dataclass(frozen=True, slots=True)
class LessonBatch:
    """Sequences to learn: `tokens` and `labels`, both `[batch, length]` int64.

    Fields:
        labels: The tokens themselves where they are learned, `NOT_LEARNED` elsewhere.
    """

    tokens: Tensor
    labels: Tensor

    @property
    def tail_length(self) -> int:
        """Length of the shortest end of the sequences that has all labels, and the position before them."""
        learned = (self.labels != NOT_LEARNED).any(0).nonzero()
        length = self.tokens.shape[1]
        return length if len(learned) == 0 else min(length, length - int(learned[0]) + 1)


class Examples(Protocol):
    """What a model learns from, or is measured on."""

    def draw_batches(self, batch: int, seed: int) -> Iterator[LessonBatch]:
        """Yield endless batches of `batch` sequences, in a seeded order."""

    def list_batches(self, most: int) -> Iterator[LessonBatch]:
        """Yield the first `most` sequences in order, some at a time."""


@dataclass(frozen=True, slots=True)
class StreamExamples:
    """Windows of `context` tokens of a stream `[tokens]` int64; every token is learned."""

    stream: Tensor
    context: int

    def draw_batches(self, batch: int, seed: int) -> Iterator[LessonBatch]:
        return (LessonBatch(tokens, tokens) for tokens in batches(self.stream, self.context, batch, seed))

    def list_batches(self, most: int) -> Iterator[LessonBatch]:
        windows = _at_least(self.stream, self.context).unfold(0, self.context, self.context)[:most]
        return (LessonBatch(part, part) for part in torch.split(windows, _MEASURED_AT_ONCE))


@dataclass(frozen=True, slots=True)
class TrainTotals:
    """The outcome of a training.

    Fields:
        loss: Mean training loss of the last tenth of the steps, in nats per token; 0 without steps.
        tokens: Tokens that it ran over.
    """

    loss: float
    tokens: int


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
    model: Any,
    examples: Iterable[LessonBatch],
    schedule: Schedule,
    on_step: Callable[[int, float], None],
    *,
    half: bool = False,
) -> TrainTotals:
    """Train the model's trainable parameters in place, on the first `schedule.steps` batches.

    Args:
        on_step: Called after each step with (steps done, training loss in nats per token).
        half: Multiply in bfloat16 (autocast); weights, sums and the optimizer's state stay float32.
    """
    if not schedule.steps:
        return TrainTotals(0.0, 0)
    optimizers = _optimizers(model, schedule)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    losses: list[float] = []
    tokens = 0
    model.train()
    for step, batch in zip(range(schedule.steps), examples, strict=False):
        for group, rate in groups:
            group["lr"] = rate * rate_factor(step, schedule.steps)
        losses.append(_step_(model, batch, optimizers, half))
        tokens += batch.tokens.numel()
        on_step(step + 1, losses[-1])
    model.eval()
    last = losses[-max(1, schedule.steps // 10) :]
    return TrainTotals(sum(last) / len(last), tokens)


def _step_(model: Any, batch: LessonBatch, optimizers: Sequence[torch.optim.Optimizer], half: bool) -> float:
    with _precision(half):
        loss: Any = _loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.grad is not None), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _precision(half: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()


def _loss(model: Any, batch: LessonBatch) -> Tensor:
    """Return the mean loss per learned token. The head runs over no position before the first that predicts one."""
    kept = batch.tail_length
    if kept == batch.tokens.shape[1]:
        loss: Tensor = model(input_ids=batch.tokens, labels=batch.labels, use_cache=False).loss
    else:
        loss = model(input_ids=batch.tokens, labels=batch.labels[:, -kept:], logits_to_keep=kept, use_cache=False).loss
    return loss


def perplexity(model: Any, stream: Tensor, context: int, most: int) -> float:
    """Return exp of the mean loss per token over the first `most` windows of `context` tokens."""
    return perplexity_on(model, StreamExamples(stream, context).list_batches(most))


@torch.no_grad()
def perplexity_on(model: Any, examples: Iterable[LessonBatch], *, half: bool = False) -> float:
    """Return exp of the mean loss per learned token."""
    counted = [
        (_measured_loss(model, batch, half), int((batch.labels[:, 1:] != NOT_LEARNED).sum())) for batch in examples
    ]
    tokens = sum(count for _, count in counted)
    return math.exp(min(math.fsum(loss * count for loss, count in counted) / tokens, 50.0))


def _measured_loss(model: Any, batch: LessonBatch, half: bool) -> float:
    with _precision(half):
        return float(_loss(model, batch))
