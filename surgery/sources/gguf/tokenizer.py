"""Tokenizer files from the vocabulary in a GGUF file's metadata: SentencePiece pieces, or byte-level BPE.

How text is split into words is named by `tokenizer.ggml.pre` and not in the file; the expressions here are those that
the models were trained with, as llama.cpp lists them. transformers' own conversion splits every model's text as GPT-2
does, and takes <s> for the end of an answer. A kind that is not known gives no tokenizer, so that no text is read
wrongly: the model then takes token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surgery.sources.base import SourceSide
from surgery.sources.gguf.header import GgufArray
from zoo.errors import MalformedCheckpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _CONTROL, _DEFINED = 1, 3, 4
#: Phi-3's special tokens take the white space behind them along, except for these.
_KEEPING_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_LARGEST_TEMPLATE = 1 << 20
#: Bound on the sum of the squared lengths of pieces: the work of finding merges. Real vocabularies stay below a tenth.
_MERGE_WORK = 1 << 29

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    """Return the expression that also splits where small letters are followed by capital ones."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}[{_UPPER}]*[{_LOWER}]+{ending}|{start}[{_UPPER}]+[{_LOWER}]*{ending}"
    return f"{words}|{digits}|{_CASED_REST}"


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How a byte-level vocabulary splits text into words.

    Fields:
        expressions: Applied one after the other to the parts that those before have left.
        whole: A word that is a token is taken whole, whatever its merges.
        starts: A text begins with the bos token unless the metadata say otherwise.
        composed: Text is brought into Unicode's form NFC first.
    """

    expressions: tuple[str, ...]
    whole: bool = False
    starts: bool = False
    composed: bool = False


_LLAMA3_SPLIT = WordSplit((_LLAMA3,), whole=True, starts=True)
_DIGITS_SPLIT = WordSplit((r"\p{N}", _GPT2))
_QWEN_SPLIT = WordSplit((rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",), composed=True)
#: By the name in `tokenizer.ggml.pre`.
SPLITS: Mapping[str, WordSplit] = {
    "default": WordSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": WordSplit((_GPT2,)),
    "phi-2": WordSplit((_GPT2,)),
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "qwen2": _QWEN_SPLIT,
    "deepseek-r1-qwen": _QWEN_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "dbrx": WordSplit((_LLAMA3,)),
    "smaug-bpe": WordSplit((_LLAMA3,)),
    "tekken": WordSplit((_cased("", r"\p{N}"),), whole=True, starts=True),
    "gpt-4o": WordSplit((_cased(f"{_SHORT}?", r"\p{N}{1,3}"),)),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """Result of a conversion: the files to store, and what was left out."""

    sides: tuple[SourceSide, ...]
    notes: tuple[str, ...] = ()


def convert_vocabulary(metadata: Mapping[str, Any], rows: int, context: int) -> GgufTokenizer:
    """Return `tokenizer.json`, `tokenizer_config.json` and the chat template of a file's metadata.

    Args:
        rows: Rows of the table of tokens.
        context: Positions, for `model_max_length`.

    Raises:
        MalformedCheckpoint: The vocabulary is damaged, or larger than the table.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return GgufTokenizer((), ("the file has no tokenizer: prompts are token ids",))
    split = SPLITS.get(str(metadata.get("tokenizer.ggml.pre", "default")))
    if kind not in ("llama", "gpt2") or (kind == "gpt2" and split is None):
        name = f"{kind!s:.40} / {metadata.get('tokenizer.ggml.pre')!s:.40}"
        return GgufTokenizer((), (f"the tokenizer ({name}) is of a kind not known here: prompts are token ids",))
    vocabulary = _Vocabulary.from_metadata(metadata, rows)
    try:
        core = _spaced(vocabulary) if kind == "llama" or split is None else _byte_level(vocabulary, split)
        _finish(core, vocabulary, starts=kind == "llama" or (split is not None and split.starts))
        text = core.to_str()
    except MalformedCheckpoint:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise MalformedCheckpoint(f"the tokenizer's metadata cannot be used: {_first_line(error)}") from None
    config = {
        **vocabulary.name_special(),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    sides = [
        SourceSide("tokenizer.json", text.encode(), derived=True),
        SourceSide(
            "tokenizer_config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(), derived=True
        ),
    ]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str) or len(template) > _LARGEST_TEMPLATE:
            raise MalformedCheckpoint("tokenizer.chat_template is not a text, or too long")
        sides.append(SourceSide("chat_template.jinja", template.encode(), derived=True))
    return GgufTokenizer(tuple(sides))


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file. `kinds` has a number per token: normal, control, defined by the user, ..."""

    metadata: Mapping[str, Any] = field(repr=False)
    tokens: Sequence[str] = field(repr=False)
    kinds: Sequence[int | float] = field(repr=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], rows: int) -> _Vocabulary:
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        if tokens is None or not 0 < len(tokens) <= rows:
            count = "none" if tokens is None else f"{len(tokens):,}"
            raise MalformedCheckpoint(f"the metadata have {count} tokens, and the table of tokens {rows:,} rows")
        kinds = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
        return cls(metadata, tokens, kinds or (_NORMAL,) * len(tokens))

    @property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def read_scores(self) -> Sequence[int | float]:
        scores = _numbers(self.metadata, "tokenizer.ggml.scores", len(self.tokens))
        if scores is None:
            raise MalformedCheckpoint("the metadata have no tokenizer.ggml.scores")
        return scores

    def find_token(self, name: str) -> str | None:
        """Return a special token: `bos`, `eos`, `unknown`, `padding`."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[value] if type(value) is int and 0 <= value < len(self.tokens) else None

    def name_special(self) -> dict[str, str]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {ours: token for ours, theirs in names.items() if (token := self.find_token(theirs))}

    def read_flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise MalformedCheckpoint(f"tokenizer.ggml.{name} is {repr(value)[:40]}, not a bool")
        return value


def _byte_level(vocabulary: _Vocabulary, split: WordSplit) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = _strings(vocabulary.metadata, "tokenizer.ggml.merges")
    if merges is None:
        raise MalformedCheckpoint("the metadata have no tokenizer.ggml.merges")
    core = Tokenizer(models.BPE(vocabulary.ids, [_pair(merge) for merge in merges], ignore_merges=split.whole))
    words = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.expressions]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if split.composed:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _pair(merge: str) -> tuple[str, str]:
    """Return the two sides of a merge; the first may itself begin with a space."""
    at = merge.find(" ", 1)
    if at < 0:
        raise MalformedCheckpoint(f"the merge {merge[:40]!r} does not have two sides")
    return merge[:at], merge[at + 1 :]


def _spaced(vocabulary: _Vocabulary) -> Tokenizer:
    """Return SentencePiece's BPE: spaces are marks, unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.find_token("unknown")
    core = Tokenizer(
        models.BPE(vocabulary.ids, list(find_merges(vocabulary)), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaced = vocabulary.read_flag("add_space_prefix", True)
    marks = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if spaced else marks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if spaced else steps)
    return core


def find_merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield the merges that pieces and scores imply, best first: every cut of a piece into two pieces.

    Raises MalformedCheckpoint for pieces too long to be a vocabulary's.
    """
    usual = (_NORMAL, _DEFINED)
    pieces = {token: number for number, token in enumerate(vocabulary.tokens) if vocabulary.kinds[number] in usual}
    if sum(len(piece) ** 2 for piece in pieces) > _MERGE_WORK:
        raise MalformedCheckpoint("the pieces of the vocabulary are too long")
    scores = vocabulary.read_scores()
    found = [
        (-scores[number], at, len(piece) - at, number, piece)
        for piece, number in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    found.sort(key=lambda each: (each[0], -each[1], -each[2]))
    return ((piece[:at], piece[at:]) for _, at, _, _, piece in found)


def _finish(core: Tokenizer, vocabulary: _Vocabulary, starts: bool) -> None:
    """Add special tokens, and the tokens that begin and end a text."""
    from tokenizers import AddedToken, processors

    phi = (
        vocabulary.metadata.get("general.architecture") == "phi3"
        and vocabulary.metadata["tokenizer.ggml.model"] == "llama"
    )

    def of(kind: int, special: bool) -> list[AddedToken]:
        tokens = (token for token, each in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if each == kind)
        return [
            AddedToken(token, normalized=False, special=special, rstrip=phi and token not in _KEEPING_SPACE)
            for token in tokens
            if token
        ]

    core.add_special_tokens(of(_CONTROL, special=True))
    core.add_tokens(of(_DEFINED, special=False))
    bos = vocabulary.find_token("bos") if vocabulary.read_flag("add_bos_token", starts) else None
    eos = vocabulary.find_token("eos") if vocabulary.read_flag("add_eos_token", False) else None
    if bos is None and eos is None:
        return

    def around(part: str, type_id: int) -> str:
        pieces = [bos and f"{bos}:{type_id}", f"${part}:{type_id}", eos and f"{eos}:{type_id}"]
        return " ".join(piece for piece in pieces if piece)

    ids = vocabulary.ids
    core.post_processor = processors.TemplateProcessing(
        single=around("A", 0),
        pair=f"{around('A', 0)} {around('B', 1)}",
        special_tokens=[(token, ids[token]) for token in dict.fromkeys((bos, eos)) if token],
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str] | None:
    """Return an array of strings; None if absent. Raises MalformedCheckpoint for any other value."""
    value = metadata.get(key)
    found = value.strings() if isinstance(value, GgufArray) else None
    if value is not None and found is None:
        raise MalformedCheckpoint(f"{key} is not an array of strings")
    return found


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> tuple[int | float, ...] | None:
    """Return an array with a number per token; None if absent. Raises MalformedCheckpoint for any other value."""
    value = metadata.get(key)
    found = value.numbers() if isinstance(value, GgufArray) else None
    if value is not None and (found is None or len(found) != count or any(each != each for each in found)):
        raise MalformedCheckpoint(f"{key} is not an array of {count:,} numbers, one per token")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
