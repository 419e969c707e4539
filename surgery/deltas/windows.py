"""The text of a rewriting as token ids: one part weights the deltas, the other scores the result.

No document is in both.
"""

from __future__ import annotations

from surgery.deltas.make import Windows
from surgery.text.text import Probe, read_text
from surgery.text.tokenizers import Tokenized, has_tokenizer, tokenizer_digest

#: Tokens per window, and numbers of windows for weighting and for scoring.
LENGTH = 128
TRAIN = 64
HELD = 32


def read_windows(
    model: Tokenized, source: str | None, context: int, seed: int = 0, *, train: int = TRAIN, held: int = HELD
) -> Windows:
    """Return windows of a text.

    Args:
        model: The fine-tune; it may lack a tokenizer if the text is token ids.
        source: See `surgery.text.text.read_text`.
        context: Maximum number of tokens of the model.
        train: Maximum number of windows for weighting.
        held: Maximum number of windows for scoring.

    Raises:
        InputError: The text cannot be read, or holds too little of one part.
    """
    text, length = read_text(source), min(LENGTH, context)
    tokenizer = model.tokenizer() if has_tokenizer(model) else None
    weighting = text.tokens(tokenizer, length, train, "train", seed)
    scoring = text.tokens(tokenizer, length, held, "held_out", seed)
    return Windows(
        weighting,
        scoring,
        Probe(text.digest, tokenizer_digest(model) if tokenizer is not None else "", scoring).digest,
    )
