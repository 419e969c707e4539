"""Early exits of a chain (BL-30): a model's first layers, followed by its own final norm and head.

    embedding, layers [0, n), final norm and head        for every n, as `surgery.modules.stack` computes it for hidden
                                                         states anywhere

An exit is a model of its own, `MODEL@exit-n`, composed of the model's components: it costs no bytes, and if both are
served, the layers are shared in memory and run once for the rows of both. The exit is fixed for a sequence.

Exiting per token, when the likeliest next token is probable enough, would leave holes in K and V of the skipped layers,
which later tokens attend to. Filling them from the exit's hidden state (CALM) is no longer the exact model for any
later token. Its best possible saving is measured here (`sure`), not served.

`measure` runs held-out text through the whole model once and scores every exit on the way.
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
#: Maximum size of the logits of one pass, in floats; a pass reads as many whole windows as fit.
_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class ExitOptions:
    """Options of `measure`.

    Fields:
        text: As in `surgery.text.text.read_text`.
        tokens: Tokens to score.
        window: Tokens per window.
        sure: Probability from which a predicted token counts as sure.
    """

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
    """Scores of one exit.

    Fields:
        layers: Layers that run.
        agreement: Share of tokens with the same likeliest successor as the whole model.
        perplexity: Perplexity of the text; None if it is not a finite number.
        sure: Share of tokens with a likeliest successor at least as probable as `ExitOptions.sure`.
        sure_agreement: Agreement among those; None without any.
    """

    layers: int
    agreement: float
    perplexity: float | None
    sure: float
    sure_agreement: float | None


@dataclass(frozen=True, slots=True)
class Exits:
    """Scores of a model's exits.

    Fields:
        text: Origin of the text.
        probe: Digest of the text.
        tokens: Tokens scored.
        exits: By layers, the whole model last, without exits that no head can read (`measure`).
    """

    model: str
    text: str
    probe: str
    tokens: int
    exits: tuple[ChainExit, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON of `zoo exits`."""
        return asdict(self)


def make_exit(store: Store, model: ModelHandle, layers: int) -> MadeReport:
    """Add a model's exit after `layers` layers to the zoo.

    Raises InputError for a number of layers that it does not have, and as `compose`.
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
    """Score every exit of a model on held-out text; the result is stored with the model, by its text.

    Hidden states of another width than the head's go through the only later stitch, as in the exit that `make_exit`
    makes there; with several stitches there is no exit.

    Raises:
        InputError: The text cannot be used.
        NotServable, DamagedObject: As `surgery.modules.stack.open_stack`.
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
    """Return exp(loss); None if it is not a finite number, as when a head reads states it was not trained on."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else None


def _scored(
    stack: Stack, ids: Tensor, ends: Sequence[int], stitches: Sequence[int | None], vocabulary: int, sure: float
) -> Iterator[tuple[int, Tensor]]:
    """Yield (layers, sums) per exit.

    The sums, float64 [4], are over the tokens of a batch: agreed, loss, sure, sure and agreed.
    """
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
