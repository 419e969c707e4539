"""Two models side by side: which components are the same, and what the catalogue has scored between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.server.page.drawing.strip import StripPart
from runtime.server.page.model_view import strip_parts
from zoo.catalog import Reader
from zoo.manifest import ModelManifest, Placed
from zoo.records import Equivalence

#: `same`: one component of the store. `adapter`: the same but for an adapter. `one`: only one model has the place.
Likeness = Literal["same", "adapter", "differs", "one"]


@dataclass(frozen=True, slots=True)
class PartPair:
    """What two models have at one place: a kind of component of a layer. One side may lack it."""

    place: str
    a: Placed | None
    b: Placed | None
    likeness: Likeness


@dataclass(frozen=True)
class SideBySide:
    """Two models.

    Fields:
        strips: The components of each, coloured by their likeness (`LIKENESS_COLOURS`).
        bytes_shared: Bytes of the tensors that both have.
        scores: What was scored between them, oldest first; `a` of a pair may be a run of either model.
    """

    a: ModelManifest
    b: ModelManifest
    pairs: Sequence[PartPair]
    strips: tuple[Sequence[StripPart], Sequence[StripPart]]
    bytes_shared: int
    scores: Sequence[Equivalence]

    @property
    def count(self) -> Counter[Likeness]:
        return Counter(pair.likeness for pair in self.pairs)


#: Colours of the strips, as the strip of a chain numbers them.
LIKENESS_COLOURS: dict[Likeness, int] = {"differs": 0, "same": 1, "adapter": 4, "one": 8}


def side_by_side(reader: Reader, first: str, second: str) -> SideBySide:
    """Return two models side by side. Raises NotFound, AmbiguousName."""
    a, b = (reader.model(reader.resolve(name)) for name in (first, second))
    pairs = list(_pairs(a, b))
    tensors = {tensor.digest for tensor in b.tensors}
    both = {a.name, b.name}
    scores = [each for each in reader.equivalences([a.name]) if {each.a.model, each.b.model} == both]
    return SideBySide(
        a=a,
        b=b,
        pairs=pairs,
        strips=(_strip(reader, a, {pair.a: pair.likeness for pair in pairs if pair.a is not None}),
                _strip(reader, b, {pair.b: pair.likeness for pair in pairs if pair.b is not None})),
        bytes_shared=sum(tensor.nbytes for tensor in a.tensors if tensor.digest in tensors),
        scores=scores,
    )  # fmt: skip


def _pairs(a: ModelManifest, b: ModelManifest) -> Iterator[PartPair]:
    """Yield the pairs in the order of the first model, then what only the second one has."""
    left, right = _by_place(a), _by_place(b)
    for place in dict.fromkeys([*left, *right]):
        one, other = left.get(place), right.get(place)
        yield PartPair(_said(place), one, other, _likeness(one, other))


def _by_place(manifest: ModelManifest) -> dict[tuple[str, int | None, int], Placed]:
    """Return (kind, layer, number among equals) -> component: a chain may have several of a kind in one layer."""
    found: dict[tuple[str, int | None, int], Placed] = {}
    seen: Counter[tuple[str, int | None]] = Counter()
    for placed in manifest.components:
        key = (placed.component.kind, placed.layer)
        found[*key, seen[key]] = placed
        seen[key] += 1
    return found


def _said(place: tuple[str, int | None, int]) -> str:
    kind, layer, number = place
    return kind + ("" if layer is None else f" {layer}") + (f", number {number + 1}" if number else "")


def _likeness(a: Placed | None, b: Placed | None) -> Likeness:
    if a is None or b is None:
        return "one"
    if a.component.digest == b.component.digest:
        return "same"
    return "adapter" if a.component.base_digest == b.component.base_digest else "differs"


def _strip(reader: Reader, manifest: ModelManifest, likeness: dict[Placed, Likeness]) -> list[StripPart]:
    return [
        StripPart(part.position, part.placed, part.users, part.nbytes, LIKENESS_COLOURS[likeness[part.placed]])
        for part in strip_parts(reader, manifest)
    ]
