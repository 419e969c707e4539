"""The text of a rewriting as token ids: one part weighs the deltas, the other scores the result. No document is in
both.
"""

from __future__ import annotations

from surgery.deltas.make import Windows
from surgery.text.text import Probe, read_text
from surgery.text.tokenizers import Tokenized, has_tokenizer, tokenizer_digest

#: Tokens per window, and windows that weigh and that score.
LENGTH = 128
TRAIN = 64
HELD = 32


def read_windows(model: Tokenized, source: str | None, context: int, seed: int = 0) -> Windows:
    """Windows of a text.

    Args:
        model: the fine-tune, which may lack a tokenizer where the text is token ids.
        source: see `surgery.text.text.read_text`.
        context: the most tokens that the model takes.

    Raises:
        InputError: the text cannot be read, or holds too little of one part.
    """
    text, length = read_text(source), min(LENGTH, context)
    tokenizer = model.tokenizer() if has_tokenizer(model) else None
    train = text.tokens(tokenizer, length, TRAIN, "train", seed)
    held = text.tokens(tokenizer, length, HELD, "held_out", seed)
    return Windows(
        train, held, Probe(text.digest, tokenizer_digest(model) if tokenizer is not None else "", held).digest
    )
