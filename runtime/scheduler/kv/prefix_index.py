"""Find the longest computed prefix of a new sequence, and the sequence or cached prefix that has it (BL-32, UN-15).

    mark of a page set = digest of its tokens and of the mark before it        equal marks are equal prefixes

A *shelf* has the marks of all sequences along one path of one version of a chain for one tenant: only there K and V of
equal tokens are interchangeable. The version covers everything upstream: adapters, stitches, dtype. Positions count
from the beginning.

Contract:
- Only full page sets that are computed on all of a path count. A match leaves at least one token to run.
- Costs are O(prompt / page tokens) per arrival, and a few operations per page set that becomes full.
- A prefix is not found any more after `remove_prefix`.
- The index holds no pages and decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from runtime.chains import Boundary, Path
from runtime.scheduler.kv.page_accounting import PageHolding

#: Bytes of a mark: enough that collisions cannot be found.
_BYTES = 16


@dataclass(slots=True, eq=False)
class PrefixShelf:
    """Marks of one path.

    Fields:
        realm: Version of the chain, and tenant.
        places: Prefixes that have a mark, by mark, in order of arrival.
    """

    realm: tuple[str, str]
    path: Path
    places: dict[bytes, dict[CachedPrefix, None]] = field(default_factory=dict)

    def longest(self, marks: Sequence[bytes]) -> int:
        """Return how many of these marks, from the first, are on the shelf.

        A binary search: a prefix with a mark has all marks before it.
        """
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high + 1) // 2
            if marks[middle - 1] in self.places:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The computed prefix of one running sequence, or one prefix of the prefix cache.

    Fields:
        name: Name on the agents.
        holding: Its pages. They may be more page sets than `known`.
        marks: Marks of full page sets; those of a prompt exist before they are computed.
        shelf: Where its marks are.
        known: Number of its marks that are on the shelf, i.e. computed.
        used: Time of the latest use in ns, for prefixes of the prefix cache.
    """

    name: str
    holding: PageHolding
    marks: list[bytes]
    shelf: PrefixShelf
    known: int = 0
    used: int = 0

    @property
    def path(self) -> Path:
        return self.shelf.path

    @property
    def cached_prefix(self) -> bool:
        """Whether it belongs to the prefix cache, not to a running sequence."""
        return self.holding.cached_prefix


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A match of a new sequence: its first `groups` page sets are computed by `prefix`.

    Fields:
        boundary: Where the chains part, if `prefix` is of another chain: only layers before it are shared (UN-15).
        own_path: The sequence's path in that case.
    """

    prefix: CachedPrefix
    groups: int
    boundary: Boundary | None = None
    own_path: Path = ()

    @property
    def path(self) -> Path:
        return self.own_path or self.prefix.path

    def pages(self, layers: int) -> int:
        """Return how many pages are shared, of a chain with this many attention layers."""
        return self.groups * (layers if self.boundary is None else self.boundary.layers)


class PrefixIndex:
    """All shelves, by realm and path."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, str], dict[Path, PrefixShelf]] = {}

    def shelf(self, realm: tuple[str, str], path: Path) -> PrefixShelf:
        """Return the shelf of this realm and path; created if needed, removed with its last mark."""
        paths = self._shelves.setdefault(realm, {})
        known = paths.get(path)
        if known is None:
            known = paths[path] = PrefixShelf(realm, path)
        return known

    def reaches(self, prefix: CachedPrefix, groups: int) -> None:
        """Record that the first `groups` page sets of a prefix are computed."""
        if not prefix.known:
            prefix.shelf = self.shelf(prefix.shelf.realm, prefix.shelf.path)
        places = prefix.shelf.places
        for mark in prefix.marks[prefix.known : groups]:
            places.setdefault(mark, {})[prefix] = None
        prefix.known = max(prefix.known, groups)

    def remove_prefix(self, prefix: CachedPrefix) -> None:
        """Remove a prefix from the index, before its pages are freed or moved."""
        shelf = prefix.shelf
        for mark in prefix.marks[: prefix.known]:
            having = shelf.places[mark]
            del having[prefix]
            if not having:
                del shelf.places[mark]
        prefix.known = 0
        if not shelf.places:
            paths = self._shelves.get(shelf.realm, {})
            if paths.get(shelf.path) is shelf:
                del paths[shelf.path]
            if not paths:
                self._shelves.pop(shelf.realm, None)

    def matches(self, realm: tuple[str, str], marks: Sequence[bytes], most: int) -> list[PrefixMatch]:
        """Return the prefixes that match a new sequence, one per path, longest first, up to `most` page sets each."""
        found: list[PrefixMatch] = []
        wanted = marks[:most]
        for shelf in self._shelves.get(realm, {}).values():
            groups = shelf.longest(wanted)
            if groups:
                found.append(PrefixMatch(next(iter(shelf.places[wanted[groups - 1]])), groups))
        return sorted(found, key=lambda match: -match.groups)

    def match_on(self, realm: tuple[str, str], path: Path, marks: Sequence[bytes]) -> PrefixMatch | None:
        """Return the longest prefix with some of these marks, from the first, on a path; None if there is none."""
        shelf = self._shelves.get(realm, {}).get(path)
        groups = 0 if shelf is None else shelf.longest(marks)
        return None if shelf is None or not groups else PrefixMatch(next(iter(shelf.places[marks[groups - 1]])), groups)

    def having(self, realm: tuple[str, str], mark: bytes) -> Iterator[CachedPrefix]:
        """Iterate over all prefixes with a mark, on any path."""
        for shelf in self._shelves.get(realm, {}).values():
            yield from shelf.places.get(mark, ())

    def check(self, prefixes: Sequence[CachedPrefix]) -> None:
        """Raise RuntimeError unless exactly these prefixes are on shelves, with all of their computed marks."""
        standing = {
            (id(shelf), mark, prefix)
            for paths in self._shelves.values() for shelf in paths.values()
            for mark, having in shelf.places.items() for prefix in having
        }  # fmt: skip
        if standing != {(id(each.shelf), mark, each) for each in prefixes for mark in each.marks[: each.known]}:
            raise RuntimeError("the index of beginnings does not have what its sequences have")


def marks_of(tokens: Sequence[int], width: int, before: bytes = b"") -> list[bytes]:
    """Return the marks of the full page sets of `width` tokens; `before`: the mark of the page set before them."""
    marks: list[bytes] = []
    numbers = array("q", tokens)
    data, size = memoryview(numbers).cast("B"), width * numbers.itemsize
    for at in range(0, len(data) - size + 1, size):
        before = blake2b(before + data[at : at + size], digest_size=_BYTES).digest()
        marks.append(before)
    return marks
