"""Compare tokenizers: blocks of models that map text to different token ids can never replace each other (BL-05).

Compared is what turns text into ids: vocabulary, merges, added tokens, normaliser, pre-tokenizer. Settings that only
wrap prompts (chat templates, the token that ends an answer, whether a text begins with one) are ignored: fine-tunes
change them and still share. Reads side files; runs no code from a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from surgery.families.quantized import HEADS
from zoo.errors import Incomparable, MalformedCheckpoint
from zoo.manifest import ModelManifest, canonical_json, digest_of

#: Any of these files means that a model has a tokenizer.
_MARKS = frozenset(
    (
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tokenizer_config.json",
    )
)
_SHOWN = 40


class Tokenized(Protocol):
    """The interface of a model that is needed here; `zoo.api.ModelHandle` implements it."""

    manifest: ModelManifest

    @property
    def name(self) -> str: ...

    def side_file(self, path: str) -> bytes | None: ...

    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class Reading:
    """How text becomes ids.

    Fields:
        rules: Named parts of the tokenizer as canonical JSON, in the order in which differences are reported.
    """

    vocabulary: Mapping[int, str] = field(repr=False)
    added: Mapping[int, str] = field(repr=False)
    merges: Sequence[str] = field(repr=False)
    rules: Mapping[str, str] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Equal for readings that give the same ids."""
        return digest_of(
            [sorted(self.vocabulary.items()), sorted(self.added.items()), list(self.merges), dict(self.rules)]
        )


def has_tokenizer(model: Tokenized) -> bool:
    """Return whether the model has a tokenizer, its own or its base's."""
    return any(side.path in _MARKS or side.path.endswith(".tiktoken") for side in model.manifest.side_files)


def vocabulary_size(manifest: ModelManifest) -> int:
    """Return the rows of the head: the ids that the model gives a probability. Raises Incomparable without a head."""
    shapes = {tensor.digest: tensor.shape for tensor in manifest.tensors}
    for placed in reversed(manifest.components):
        if placed.component.kind == "lm_head":
            for name, digest in placed.component.tensors:
                if name in HEADS:
                    return shapes[digest][0]
    raise Incomparable(f"{manifest.name} has no head that gives tokens a probability")


def tokenizer_digest(model: Tokenized) -> str:
    """Return the digest of a model's tokenizer, equal for equal tokenizers in any format; "" if it has none."""
    return reading_of(model).digest if has_tokenizer(model) else ""


def difference(a: Tokenized, b: Tokenized) -> str | None:
    """Return why two models' token ids differ in meaning, or None if they do not.

    Files with the same content are equal at once; else their content is compared. If either model has no tokenizer,
    only the sizes of the vocabularies are compared: with equal sizes its ids are taken to be the other's, and between
    two such models only token ids can be a probe. Heads padded to different sizes over the same tokenizer are no
    difference.

    Raises:
        MalformedCheckpoint: A tokenizer that cannot be read.
    """
    if not (has_tokenizer(a) and has_tokenizer(b)):
        return _other_size(a, b)
    if _same_files(a, b):
        return None
    return _other_reading(a.name, reading_of(a), b.name, reading_of(b))


def require_same(a: Tokenized, b: Tokenized) -> None:
    """Raise Incomparable with the reason if two models' token ids differ in meaning."""
    reason = difference(a, b)
    if reason is not None:
        raise Incomparable(
            f"{a.name} and {b.name} have different tokenizers, so no block of one can stand in for one of the other: "
            f"{reason}"
        )


def _other_size(a: Tokenized, b: Tokenized) -> str | None:
    sizes = vocabulary_size(a.manifest), vocabulary_size(b.manifest)
    if sizes[0] == sizes[1]:
        return None
    return (
        f"vocabularies of {sizes[0]:,} and {sizes[1]:,} tokens, and {b.name if has_tokenizer(a) else a.name} has "
        "no tokenizer to compare"
    )


def _same_files(a: Tokenized, b: Tokenized) -> bool:
    """Return whether the files that turn text into ids have the same content."""
    blobs = [{side.path: side.blob for side in model.manifest.side_files} for model in (a, b)]
    if "tokenizer.json" in blobs[0]:  # complete by itself
        return blobs[0]["tokenizer.json"] == blobs[1].get("tokenizer.json")
    marks = [{path: blob for path, blob in each.items() if path in _MARKS or path == "merges.txt"} for each in blobs]
    return marks[0] == marks[1]


def _other_reading(a_name: str, a: Reading, b_name: str, b: Reading) -> str | None:
    return (
        _other_vocabulary(a_name, a.vocabulary, b_name, b.vocabulary)
        or _other_added(a_name, a.added, b_name, b.added)
        or _other_merges(a_name, a.merges, b_name, b.merges)
        or next(_other_rules(a.rules, b.rules), None)
    )


def _other_vocabulary(a_name: str, a: Mapping[int, str], b_name: str, b: Mapping[int, str]) -> str | None:
    if len(a) != len(b):
        return f"vocabularies of {len(a):,} and {len(b):,} tokens"
    for id_ in sorted(a.keys() | b.keys()):
        if a.get(id_) != b.get(id_):
            return f"token {id_} is {_shown(a.get(id_))} in {a_name} and {_shown(b.get(id_))} in {b_name}"
    return None


def _other_added(a_name: str, a: Mapping[int, str], b_name: str, b: Mapping[int, str]) -> str | None:
    for id_ in sorted(a.keys() | b.keys()):
        if a.get(id_) != b.get(id_):
            return f"the special token {id_} is {_shown(a.get(id_))} in {a_name} and {_shown(b.get(id_))} in {b_name}"
    return None


def _other_merges(a_name: str, a: Sequence[str], b_name: str, b: Sequence[str]) -> str | None:
    for number, (left, right) in enumerate(zip(a, b, strict=False), 1):
        if left != right:
            return f"merge {number} is {_shown(left)} in {a_name} and {_shown(right)} in {b_name}"
    return None if len(a) == len(b) else f"{len(a):,} and {len(b):,} merges"


def _other_rules(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    for name in {**a, **b}:
        if a.get(name) != b.get(name):
            yield f"another {name}: {a.get(name, 'none')[:_SHOWN]} and {b.get(name, 'none')[:_SHOWN]}"


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token[:_SHOWN])


def reading_of(model: Tokenized) -> Reading:
    """Return how a model reads text. Raises MalformedCheckpoint.

    A tokenizer without a `tokenizer.json` is converted by transformers first.
    """
    data = model.side_file("tokenizer.json")
    try:
        if data is not None:
            return _parsed(json.loads(data))
        tokenizer = model.tokenizer()
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is not None:
            return _parsed(json.loads(inner.to_str()))
        return Reading(
            {id_: token for token, id_ in tokenizer.get_vocab().items()},
            {},
            (),
            {"tokenizer": type(tokenizer).__name__},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedCheckpoint(f"the tokenizer of {model.name} cannot be read: {error}") from error


def _parsed(saved: Mapping[str, Any]) -> Reading:
    """Parse the content of a `tokenizer.json`. Merges are pairs or one text, by version."""
    model = dict(saved["model"])
    vocabulary = model.pop("vocab")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.pop("merges", None) or ()]
    rules = {
        "kind of tokenizer": _canonical(model),
        "normaliser": _canonical(saved.get("normalizer")),
        "way of cutting words": _canonical(saved.get("pre_tokenizer")),
    }
    if isinstance(vocabulary, Mapping):
        tokens = {id_: token for token, id_ in vocabulary.items()}
    else:  # unigram: [token, score] in order of ids
        tokens = {id_: token for id_, (token, _) in enumerate(vocabulary)}
        rules["scores"] = digest_of([score for _, score in vocabulary])
    added = {each["id"]: each["content"] for each in saved.get("added_tokens") or ()}
    return Reading({**tokens, **added}, added, merges, rules)


def _canonical(part: Any) -> str:
    """Return a part of a tokenizer as text, without empty fields: versions differ in which of them they write."""
    if isinstance(part, Mapping):
        kept = {name: value for name, value in part.items() if value not in (None, False, "", [])}
        return canonical_json({name: json.loads(_canonical(value)) for name, value in kept.items()})
    if isinstance(part, list):
        return canonical_json([json.loads(_canonical(value)) for value in part])
    return canonical_json(part)
