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


def read_windows(model: Tokenized, source: str | None, context: int, seed: int = 0) -> Windows:
    """Return windows of a text.

    Args:
        model: The fine-tune; it may lack a tokenizer if the text is token ids.
        source: See `surgery.text.text.read_text`.
        context: Maximum number of tokens of the model.

    Raises:
        InputError: The text cannot be read, or holds too little of one part.
    """
    text, length = read_text(source), min(LENGTH, context)
    tokenizer = model.tokenizer() if has_tokenizer(model) else None
    train = text.tokens(tokenizer, length, TRAIN, "train", seed)
    held = text.tokens(tokenizer, length, HELD, "held_out", seed)
    return Windows(
        train, held, Probe(text.digest, tokenizer_digest(model) if tokenizer is not None else "", held).digest
    )
