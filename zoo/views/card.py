"""Write a model card from the catalogue: Markdown with YAML front matter, stored facts only.

`card_facts` reads, `render` writes; the front matter is what model hubs understand. A source that is a local folder is
given by its name only, since a card is made to be published. This module does not depend on how models are exported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from zoo.catalog import Reader
from zoo.catalog.names import not_found
from zoo.manifest import ModelKind, ModelManifest
from zoo.records import Document, Equivalence
from zoo.views.blocks import BlockView

#: Kind of model -> a hub's name for its relation to the base.
_RELATIONS: Mapping[ModelKind, str] = {
    "full": "finetune", "bitfit": "finetune", "composed": "merge", "quantized": "quantized",
    "lora": "adapter", "prefix": "adapter", "prompt": "adapter", "ia3": "adapter", "adapter": "adapter",
}  # fmt: skip
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Characters of a digest that are shown in a table.
_SHORT = 16
#: Maximum number of figures shown of one document.
_FIGURES = 60

Table = tuple[Sequence[str], Sequence[Sequence[object]]]


@dataclass(frozen=True, slots=True)
class CardFile:
    """A file beside the card: its path, size in bytes and BLAKE3 in hex."""

    path: str
    nbytes: int
    blake3: str


@dataclass(frozen=True)
class CardFacts:
    """The content of a card.

    Fields:
        base_source: The base's source; None without a base.
        tensors_own: Number of tensors that no other model references.
        bytes_own: Bytes of these tensors.
    """

    manifest: ModelManifest
    base_source: str | None
    chain: tuple[BlockView, ...]
    params: int
    tensors_own: int
    bytes: int
    bytes_own: int
    equivalences: tuple[Equivalence, ...]
    documents: tuple[Document, ...]


def card_facts(reader: Reader, manifest: ModelManifest, chain: tuple[BlockView, ...]) -> CardFacts:
    """Return a model's facts from the catalogue. Raises NotFound if the model was removed."""
    summaries = {model.name: model for model in reader.models()}
    if manifest.name not in summaries:
        raise not_found(manifest.name, [*summaries])
    summary = summaries[manifest.name]
    users = reader.users_of([tensor.digest for tensor in manifest.tensors])
    return CardFacts(
        manifest=manifest,
        base_source=None if manifest.base is None else reader.model(manifest.base).source,
        chain=chain,
        params=summary.params,
        tensors_own=sum(len(names) == 1 for names in users.values()),
        bytes=summary.bytes,
        bytes_own=summary.bytes_own,
        equivalences=tuple(reader.equivalences([manifest.name])),
        documents=tuple(reader.documents(model=manifest.name)),
    )


def render(facts: CardFacts, files: Sequence[CardFile]) -> str:
    """Return the card's text. `files`: the files beside it."""
    sections = [
        (f"# {_cell(facts.manifest.name)}", _table(_about(facts))),
        ("## Blocks", _table(_blocks(facts))),
        ("## Scores", "\n\n".join(_scores(facts))),
        ("## Files", _table(_files(files))),
        ("## How to verify", _VERIFY),
    ]
    return _front_matter(facts) + "".join(f"\n{heading}\n\n{body}\n" for heading, body in sections if body)


_VERIFY = """\
`b3sum FILE` prints a file's BLAKE3, which must be the one in the table above. In the store that it came from,
`zoo verify` re-hashes every tensor and file and names the models that damage hurts. A tensor is named by BLAKE3 over
its dtype, shape and bytes, a component by its kind, settings and tensors, a block by its components in order: equal
digests are equal weights."""


def hub_id(source: str) -> str | None:
    """Return the hub id in a model's source or name, without a revision; None for a local folder and the like."""
    name = source.split("@")[0]
    return name if _HUB_ID.fullmatch(name) else None


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float | int]]:
    """Yield (path, number) for the numbers in a JSON value; lists are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, (*path, str(key)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield " · ".join(path), value


def _front_matter(facts: CardFacts) -> str:
    """Return the front matter in YAML; its scalars and lists are written as JSON, which is valid YAML."""
    manifest = facts.manifest
    relation = _RELATIONS.get(manifest.kind)
    base = None if manifest.base is None else hub_id(facts.base_source or "") or hub_id(manifest.base)
    fields: dict[str, Any] = {"library_name": "peft" if relation == "adapter" else "transformers"}
    if base is not None:
        fields["base_model"] = base
        if relation is not None:
            fields["base_model_relation"] = relation
    fields["tags"] = ["block-zoo", manifest.family, manifest.kind]
    return (
        "---\n"
        + "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in fields.items())
        + "---\n"
    )


def _about(facts: CardFacts) -> Table:
    manifest = facts.manifest
    tensors, shared = len(manifest.tensors), facts.bytes - facts.bytes_own
    rows: list[tuple[str, object]] = [
        ("kind", manifest.kind),
        *([("base", manifest.base)] if manifest.base is not None else []),
        ("family", manifest.family),
        ("source", _origin(manifest.source)),
        ("parameters", f"{facts.params:,}"),
        ("tensors", f"{tensors:,}: {facts.tensors_own:,} its own, {tensors - facts.tensors_own:,} shared"),
        ("bytes", f"{facts.bytes:,}: {facts.bytes_own:,} its own, {shared:,} shared"),
        ("fingerprint", manifest.fingerprint),
    ]
    return ("", ""), rows


def _origin(source: str) -> str:
    return f"local folder {PurePath(source).name}" if PurePath(source).is_absolute() else source


def _blocks(facts: CardFacts) -> Table:
    rows = [
        (block.digest, _span(block.layers), len(block.components), ", ".join(block.shared_with))
        for block in facts.chain
    ]
    return ("block", "layers", "components", "shared with"), rows


def _span(layers: tuple[int, int]) -> str:
    lo, hi = layers
    return "" if lo == hi else str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}"


def _scores(facts: CardFacts) -> Iterator[str]:
    rows = [_pair(facts.manifest.name, pair) for pair in facts.equivalences]
    if rows:
        yield _table((("relation", "components", "against", "similarity", "random twin", "probe"), rows))
    for document in facts.documents:
        found = list(
            figures(
                document.value.get("results", document.value) if isinstance(document.value, dict) else document.value
            )
        )
        if found:
            more = f"\n\n{len(found) - _FIGURES:,} more figures are in the catalogue." if len(found) > _FIGURES else ""
            yield f"### {_cell(document.kind)}\n\n{_table((('what', 'value'), found[:_FIGURES]))}{more}"


def _pair(name: str, pair: Equivalence) -> tuple[object, ...]:
    mine, other = (pair.a, pair.b) if pair.a.model == name else (pair.b, pair.a)
    against = f"{other.model} {other.lo} to {other.hi - 1}"
    control = "" if pair.control is None else f"{pair.control:.4f}"
    return (
        pair.relation,
        f"{mine.lo} to {mine.hi - 1}",
        against,
        f"{pair.similarity:.4f}",
        control,
        pair.probe[:_SHORT],
    )


def _files(files: Iterable[CardFile]) -> Table:
    return ("file", "bytes", "BLAKE3"), [(file.path, f"{file.nbytes:,}", file.blake3) for file in files]


def _table(table: Table) -> str:
    headings, rows = table
    if not rows:
        return ""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    """Return text on one line, escaped so that it cannot end its cell or begin markup."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*<>|\[\]])", r"\\\1", text)
