"""The tokenizer of a demo family: a byte-level BPE trained on the corpus, saved in transformers' format.

Special tokens: `<pad>` 0, `<s>` 1 (begins every document), `</s>` 2 (ends it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BOS, EOS = 0, 1, 2
_SPECIAL = ("<pad>", "<s>", "</s>")
#: Joins the messages: these models are not trained for chat, but chat requests must work.
_CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE with at most `vocabulary` tokens. Any text round-trips, since every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which AutoTokenizer loads as a fast tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "pad_token": _SPECIAL[PAD],
        "bos_token": _SPECIAL[BOS],
        "eos_token": _SPECIAL[EOS],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
