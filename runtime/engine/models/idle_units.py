"""Units that no loaded model uses: built ahead for a stage that is about to be loaded, or kept in case one comes again.

They are ready to be adopted: read, verified, decoded and packed. Kept ones count against the host's memory, and the one
that was used least recently goes first; those of the models that are needed next go last (QL-13).

Only attention, FFN and whole layers are kept: embeddings and heads may share one tensor, in a form that depends on what
else is loaded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from runtime.engine.layers.packed_weights import PackedWeights
from surgery.tensors.pool import TensorPool
from zoo.manifest import ComponentKind

if TYPE_CHECKING:  # the modules import each other: a pool of units has idle ones
    from runtime.engine.models.components import SharedComponent

#: Kinds of components that may be idle.
KEPT: frozenset[ComponentKind] = frozenset(["attention", "ffn", "layer"])


class IdleUnits:
    """Units without users, by digest.

    Args:
        pool, packs: The tensors that units hold.
        limit: Bytes that are kept beside those built ahead.
    """

    def __init__(self, pool: TensorPool, packs: PackedWeights, limit: int) -> None:
        self._pool, self._packs, self._limit = pool, packs, limit
        #: Bytes of all units, as they count against the limit.
        self.held = 0
        self._units: OrderedDict[str, SharedComponent] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._pins: dict[str, set[str]] = {}
        self._expected: tuple[str, frozenset[str]] = ("", frozenset())
        self._changed: set[str] = set()
        self._preferred: dict[str, int] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._units

    def pin(self, stage: str, digest: str) -> None:
        """Keep a unit, whatever the limit, until `unpin` of this stage."""
        self._pins.setdefault(stage, set()).add(digest)

    def expect(self, stage: str, digests: Iterable[str]) -> list[SharedComponent]:
        """Keep those of a stage's units that are here until `unpin` of it, or until another stage is expected.

        Only one stage is expected at a time, so that loads which never come keep little. Returns the units to be freed.
        """
        self._expected = stage, frozenset(digests).intersection(self._units)
        return self._drop_excess()

    def prefer(self, digests: Sequence[str]) -> None:
        """Let these units go last, the first of them after the rest; instead of those of the last call."""
        self._preferred = {digest: place for place, digest in reversed(list(enumerate(digests)))}

    def unpin(self, stage: str) -> list[SharedComponent]:
        """End the pins of a stage, expected or not; return the units that are to be freed."""
        self._pins.pop(stage, None)
        if self._expected[0] == stage:
            self._expected = "", frozenset()
        return self._drop_excess()

    def add(self, unit: SharedComponent) -> list[SharedComponent]:
        """Add a unit; return the units that are to be freed, possibly this one."""
        if unit.kind not in KEPT:
            return [unit]
        self._units[unit.digest] = unit
        self._sizes[unit.digest] = size = self.size(unit)
        self.held += size
        self._changed.add(unit.digest)
        return self._drop_excess()

    def limit_units(self, limit: int) -> list[SharedComponent]:
        """Set the limit; return the units that are to be freed."""
        self._limit = limit
        return self._drop_excess()

    def take_unit(self, digest: str) -> SharedComponent | None:
        """Remove and return a unit, None if it is not here."""
        if digest in self._units:
            self._changed.add(digest)
        self.held -= self._sizes.pop(digest, 0)
        return self._units.pop(digest, None)

    def drain_changes(self) -> dict[str, int]:
        """Return the bytes of each unit that came or went since the last call, by digest; 0 for those that are gone."""
        changed, self._changed = self._changed, set()
        return {digest: self._sizes.get(digest, 0) for digest in changed}

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that only idle units hold, counted in the pools' bytes."""
        tensors = Counter(digest for unit in self._units.values() for digest in unit.tensors)
        packs = Counter(key for unit in self._units.values() for key in unit.packs)
        return sum(
            self._pool.nbytes_of(each) for each, uses in tensors.items() if self._pool.users(each) == uses
        ) + sum(self._packs.nbytes_of(each) for each, uses in packs.items() if self._packs.users(each) == uses)

    def _drop_excess(self) -> list[SharedComponent]:
        """Remove and return units until the rest is within the limit."""
        pinned = {digest for some in self._pins.values() for digest in some} | self._expected[1]
        kept = [digest for digest in self._units if digest not in pinned]
        if self._preferred:
            kept.sort(key=lambda digest: -self._preferred.get(digest, len(self._preferred)))
        held, gone = sum(self._sizes[digest] for digest in kept), []
        for digest in kept:
            if held <= self._limit:
                break
            size = self._sizes.pop(digest)
            held, self.held = held - size, self.held - size
            gone.append(self._units.pop(digest))
            self._changed.add(digest)
        return gone

    def size(self, unit: SharedComponent) -> int:
        """Return the bytes of a unit, shared tensors included."""
        tensors = sum(map(self._pool.nbytes_of, unit.tensors)) + sum(map(self._packs.nbytes_of, unit.packs))
        return tensors + unit.private_bytes
