"""Find the longest computed prefix of a new sequence, and the sequence that has it (BL-32, UN-15).

    mark of a page set = digest of its tokens and of the mark before it        equal marks are equal prefixes

A *shelf* has the marks of all sequences that run, or have run, along one path of one version of a chain for one tenant:
only there K and V of equal tokens are interchangeable. The version names everything upstream: adapters, stitches,
dtype. Positions count from the beginning.

Contract: only whole page sets that are computed on all of a path count. A match leaves at least one token to run. Costs
are O(prompt / page tokens) per arrival, and a few operations per page set that becomes full. A sequence is not found
any more once `leave` was called. Holds no pages and decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from runtime.chains import Path
from runtime.scheduler.kv.page_accounting import PageHolding

#: Bytes of a mark: nobody can find two beginnings with one.
_BYTES = 16


@dataclass(slots=True, eq=False)
class PrefixShelf:
    """By mark who has it, first come first. `realm`: version of the chain, and tenant."""

    realm: tuple[str, str]
    path: Path
    places: dict[bytes, dict[CachedPrefix, None]] = field(default_factory=dict)

    def longest(self, marks: Sequence[bytes]) -> int:
        """How many of these somebody has: a binary search, for whoever has one has those before it."""
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
    """What one sequence has in pages: `known` of its `marks` stand on a shelf. `name`: on the agents. `used`: when
    last, for donors.

    `groups` may be more than are known; marks of prompts are there before they are computed.
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
        return self.holding.cached_prefix


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The first `groups` groups are there already, with `prefix`."""

    prefix: CachedPrefix
    groups: int

    @property
    def path(self) -> Path:
        return self.prefix.path


class PrefixIndex:
    def __init__(self) -> None:
        self._shelves: dict[tuple[str, str], dict[Path, PrefixShelf]] = {}

    def shelf(self, realm: tuple[str, str], path: Path) -> PrefixShelf:
        """Where marks of this realm and path stand; it is there as long as any do."""
        paths = self._shelves.setdefault(realm, {})
        known = paths.get(path)
        if known is None:
            known = paths[path] = PrefixShelf(realm, path)
        return known

    def reaches(self, prefix: CachedPrefix, groups: int) -> None:
        """So many groups of it are computed now."""
        if not prefix.known:
            prefix.shelf = self.shelf(prefix.shelf.realm, prefix.shelf.path)
        places = prefix.shelf.places
        for mark in prefix.marks[prefix.known : groups]:
            places.setdefault(mark, {})[prefix] = None
        prefix.known = max(prefix.known, groups)

    def remove_prefix(self, prefix: CachedPrefix) -> None:
        """Its pages are about to go, or to be elsewhere."""
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
        """Who has the first groups of a new sequence, at most `most` of them: one for each path, the longest first."""
        found: list[PrefixMatch] = []
        wanted = marks[:most]
        for shelf in self._shelves.get(realm, {}).values():
            groups = shelf.longest(wanted)
            if groups:
                found.append(PrefixMatch(next(iter(shelf.places[wanted[groups - 1]])), groups))
        return sorted(found, key=lambda match: -match.groups)

    def having(self, realm: tuple[str, str], mark: bytes) -> Iterator[CachedPrefix]:
        """All that have a mark, on whatever path."""
        for shelf in self._shelves.get(realm, {}).values():
            yield from shelf.places.get(mark, ())

    def check(self, prefixes: Sequence[CachedPrefix]) -> None:
        """Verify that exactly these are on shelves, with all that they know. Raises RuntimeError."""
        standing = {
            (id(shelf), mark, prefix)
            for paths in self._shelves.values() for shelf in paths.values()
            for mark, having in shelf.places.items() for prefix in having
        }  # fmt: skip
        if standing != {(id(each.shelf), mark, each) for each in prefixes for mark in each.marks[: each.known]}:
            raise RuntimeError("the index of beginnings does not have what its sequences have")


def marks_of(tokens: Sequence[int], width: int, before: bytes = b"") -> list[bytes]:
    """Marks of whole groups of `width` tokens; `before`: the mark of the group before them."""
    marks: list[bytes] = []
    numbers = array("q", tokens)
    data, size = memoryview(numbers).cast("B"), width * numbers.itemsize
    for at in range(0, len(data) - size + 1, size):
        before = blake2b(before + data[at : at + size], digest_size=_BYTES).digest()
        marks.append(before)
    return marks
