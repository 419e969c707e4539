"""Leaving a chain early (BL-30): a model's first layers, and behind any of them its own final norm and head.

    embedding, layers [0, n), final norm and head        for every n, as `surgery.modules.stack` computes it for hidden
                                                         states anywhere

An exit is a model of its own, `MODEL@exit-n`, composed of what the model has: it costs no bytes, and where both are
served the layers are the same ones in memory, run once for the rows of both. It is fixed for a sequence. Leaving
token by token, where a token's likeliest successor is likely enough, would leave holes in K and V of the layers
behind, which later tokens attend to; filling them with what the exit's hidden state gives there (CALM) is another
model than the exact one for every token that comes after, those that do not leave included. What it could leave out
at best is measured here, `sure`, not served.

`measure` reads held-out text through the whole model once and scores every exit beside it. Knows nothing of
serving.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surgery.chains.compose import compose
from surgery.chains.composition import Composition, ModelSlice
from surgery.models.put import MadeReport
from surgery.modules.stack import Stack, open_stack
from surgery.text.text import read_text
from surgery.text.tokenizers import vocabulary_size
from zoo.errors import InputError
from zoo.handle import ModelHandle
from zoo.records import Document
from zoo.store import Store
from zoo.views.exits import ends_of, exit_name, stitch_behind

_KIND = "exits"
#: Logits of one pass, in floats: whole windows are read, as many as this holds.
_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class ExitOptions:
    """`text`: as in `surgery.text.text.read_text`. `sure`: from which probability on a next token counts as sure."""

    text: str | None = None
    tokens: int = 8192
    window: int = 128
    sure: float = 0.9
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.window < 2 or self.tokens < self.window or not 0.0 < self.sure <= 1.0:
            raise InputError("windows have at least 2 tokens, there is at least one of them, and sure is a probability")


@dataclass(frozen=True, slots=True)
class ChainExit:
    """One depth. `layers` that run; `agreement`: share of tokens whose likeliest successor is the whole model's;
    `perplexity` of the text, None where it is beyond all numbers.

    `sure`: share of tokens whose likeliest successor is at least as probable as was asked; `sure_agreement` among
    those, None without any.
    """

    layers: int
    agreement: float
    perplexity: float | None
    sure: float
    sure_agreement: float | None


@dataclass(frozen=True, slots=True)
class Exits:
    """`exits`: by layers, the whole model last, without those that no head can read (`measure`). `probe`: digest of the
    text; `text`: where it is from."""

    model: str
    text: str
    probe: str
    tokens: int
    exits: tuple[ChainExit, ...]

    def document(self) -> dict[str, Any]:
        """The JSON of `zoo exits`."""
        return asdict(self)


def make_exit(store: Store, model: ModelHandle, layers: int) -> MadeReport:
    """Put a model's exit behind so many layers into the zoo. Raises InputError for layers that it does not have; as
    `compose`.
    """
    depth = len(ends_of(model.manifest)) - 1
    if not 0 < layers < depth:
        raise InputError(
            f"{model.name} has {depth} layers: it can be left behind 1 to {depth - 1} of them, not {layers}"
        )
    return compose(
        store, Composition((ModelSlice(model.name, 0, layers),), model.name, model.name), exit_name(model.name, layers)
    )


@torch.inference_mode()
def measure(
    store: Store,
    model: ModelHandle,
    options: ExitOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exits:
    """Score every exit of a model on held-out text; the result is kept with it, by its text.

    Hidden states that are not as wide as the head reads go through the only stitch behind, as in the exit that
    `make_exit` makes there; where there are more, there is no exit.

    Raises:
        InputError: the text cannot be used.
        NotServable, DamagedObject: as `surgery.modules.stack.open_stack`.
    """
    options = options or ExitOptions()
    stack = open_stack(store, model.manifest, options.device, options.dtype)
    text = read_text(options.text)
    windows = text.tokens(
        model.tokenizer(), options.window, -(-options.tokens // options.window), "held_out", options.seed
    )
    ends, vocabulary = ends_of(model.manifest), vocabulary_size(model.manifest)
    at_once = max(1, _LOGITS // (options.window * vocabulary))
    sums: dict[int, Tensor] = {}
    for first in range(0, len(windows), at_once):
        ids = windows[first : first + at_once].to(stack.device)
        for layers, row in _scored(
            stack, ids, ends, [stitch_behind(model.manifest, end) for end in ends], vocabulary, options.sure
        ):
            sums[layers] = sums[layers] + row if layers in sums else row
        if progress is not None:
            progress(min(first + at_once, len(windows)), len(windows))
    count = windows.shape[0] * (windows.shape[1] - 1)
    exits = tuple(_exit(layers, row.tolist(), count) for layers, row in sums.items())
    found = Exits(model.name, text.origin, text.digest, count, exits)
    with store.catalog.writing() as writer:
        writer.put_document(
            Document(_KIND, model.name, f"{text.digest[:16]}-{options.window}-{options.sure:g}", found.document())
        )
    return found


def _exit(layers: int, sums: list[float], count: int) -> ChainExit:
    agreed, loss, sure, sure_agreed = sums
    return ChainExit(layers, agreed / count, _exp(loss / count), sure / count, sure_agreed / sure if sure else None)


def _exp(loss: float) -> float | None:
    """None for what is no finite number: a head was not made to read what it is given here."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else None


def _scored(
    stack: Stack, ids: Tensor, ends: Sequence[int], stitches: Sequence[int | None], vocabulary: int, sure: float
) -> Iterator[tuple[int, Tensor]]:
    """By exit its layers, and sums over the tokens of a batch: agreed, loss, sure, sure and agreed. float64 [4]."""
    course = stack.course(ids)
    states: list[Tensor] = []
    hidden, at = ids, 0
    for end in ends:
        hidden, at = stack.run(hidden, course, at, end), end
        states.append(hidden)
    whole = stack.head(hidden)[:, :-1, :vocabulary].argmax(-1)
    for layers, (state, stitch) in enumerate(zip(states, stitches, strict=True)):
        if state.shape[-1] != hidden.shape[-1]:
            if stitch is None:
                continue
            state = stack.run(state, course, stitch, stitch + 1)
        logits = stack.head(state)[:, :-1, :vocabulary].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        token = logits.argmax(-1)
        agreed, certain = token == whole, logits.softmax(-1).amax(-1) >= sure
        yield layers, torch.stack([agreed.sum(), loss, certain.sum(), (agreed & certain).sum()]).double().cpu()
