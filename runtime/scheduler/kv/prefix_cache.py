"""Keep ended sequences, so that later ones can start from their K and V (prefix cache, `--prefix-caching cached`).

    leave --keep--> a sequence of its own name on the agents, with the ended one's full page sets --drop--> closed

Contract: cached pages are free for any sequence that needs them: the least recently used go first, before any sequence
is preempted. Of two cached prefixes on one path, of which one begins as the other does, only the longer stays. Once in
`policy.kv.duplicates.PERIOD` those are dropped that were not used since and that exist on other devices, too (BL-27). A
cached prefix ends with any device of its path. Page accounting counts its pages; the prefix index finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime.policy.kv.duplicates import PERIOD, Copy, due, sweep
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixShelf
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState
from runtime.types import SamplingParams, SequenceRequest

_NOTHING = SamplingParams(0)


@dataclass(frozen=True, slots=True)
class PrefixCacheCounts:
    """Totals since the beginning: `kept` became donors, `displaced` went for a longer one, `evicted` for pages, `swept`
    as duplicates (with `swept_pages`). `standing`: now."""

    standing: int = 0
    kept: int = 0
    displaced: int = 0
    evicted: int = 0
    swept: int = 0
    swept_pages: int = 0


class PrefixCache:
    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._prefix_cache: dict[str, CachedPrefix] = {}  # least recently used first
        self._ends: dict[tuple[PrefixShelf, bytes], CachedPrefix] = {}  # by the last mark
        self._number = 0
        self._swept_at = 0
        self._kept = self._displaced = self._evicted = self._swept = self._swept_pages = 0

    def __len__(self) -> int:
        return len(self._prefix_cache)

    def __iter__(self) -> Iterator[CachedPrefix]:
        return iter(self._prefix_cache.values())

    def __contains__(self, name: str) -> bool:
        return name in self._prefix_cache

    def counts(self) -> PrefixCacheCounts:
        return PrefixCacheCounts(len(self), self._kept, self._displaced, self._evicted, self._swept, self._swept_pages)

    # -- coming --------------------------------------------------------------------------------------------------------

    def add_sequence(self, sequence: ScheduledSequence, now: int) -> None:
        """A sequence is about to leave: its full groups stay, if they are worth it."""
        prefix = sequence.shared.prefix
        if (
            self._state.config.prefix_caching != "cached"
            or prefix is None
            or not prefix.known
            or not sequence.pages.holding.ends
        ):
            return
        if sequence.chain.loaded_as in self._state.leaving:
            return
        shelf, groups = prefix.shelf, prefix.known
        longer = next((each for each in shelf.places[prefix.marks[groups - 1]] if each.cached_prefix), None)
        if longer is not None:
            self.used(longer, now)
            return
        name = self._name()
        cached_prefix = CachedPrefix(
            name,
            self._state.page_accounting.share_groups(sequence.pages.holding, groups),
            prefix.marks[:groups],
            shelf,
            used=now,
        )
        self._state.prefixes.reaches(cached_prefix, groups)
        self._prefix_cache[name] = self._ends[shelf, cached_prefix.marks[-1]] = cached_prefix
        self._kept += 1
        request = SequenceRequest(name, name, sequence.chain.loaded_as, (), _NOTHING, tenant=sequence.request.tenant)
        for device in sorted(sequence.place.devices):
            self._state.out.hold_sequence(
                device, request, shelf.path, (sequence.seq, groups * sequence.chain.spec.page_tokens)
            )
        for shorter in [self._ends.get((shelf, mark)) for mark in cached_prefix.marks[:-1]]:
            if shorter is not None:
                self._displaced += 1
                self._evict_prefix(shorter)

    def used(self, prefix: CachedPrefix, now: int) -> None:
        """Somebody has begun as it did."""
        if prefix.cached_prefix:
            prefix.used = now
            self._prefix_cache[prefix.name] = self._prefix_cache.pop(prefix.name)

    # -- going ---------------------------------------------------------------------------------------------------------

    def make_room(
        self, needs: Mapping[str, int], spared: CachedPrefix | None = None, slack: Mapping[str, int] | None = None
    ) -> bool:
        """See to it that so many pages are free, by device; false, and nothing has gone, where that cannot be.

        `spared`: stays. `slack`: pages by device that must be free, or a cached prefix's, beside these.
        """
        devices = self._state.devices
        own = spared.holding.idle() if spared is not None else {}
        for name, pages in needs.items():
            device = devices[name]
            if device.pages.free + device.pages.idle - own.get(name, 0) < pages + (slack or {}).get(name, 0):
                return False
        for name, pages in needs.items():
            while devices[name].pages.free < pages:
                if not self.give_way(name, spared):
                    raise RuntimeError(f"{name} has idle pages that are nobody's")
        return True

    def give_way(self, device: str, spared: CachedPrefix | None = None) -> bool:
        """The least recently used that has idle pages on a device goes; false if there is none."""
        if not self._state.devices[device].pages.idle:
            return False
        for cached_prefix in self._prefix_cache.values():
            if cached_prefix is not spared and cached_prefix.holding.idle().get(device):
                self._evicted += 1
                self._evict_prefix(cached_prefix)
                return True
        return False

    def remove_device(self, device: str) -> None:
        """A device has died, or gives blocks up."""
        for cached_prefix in [each for each in self if any(hop.device == device for hop in each.path)]:
            self._evict_prefix(cached_prefix)

    def remove_prefix(self, name: str) -> None:
        """An agent does not have it."""
        cached_prefix = self._prefix_cache.get(name)
        if cached_prefix is not None:
            self._evict_prefix(cached_prefix)

    def remove_version(self, version: str) -> None:
        """A version of a chain is served no more (UN-09)."""
        for cached_prefix in [each for each in self if each.shelf.realm[0] == version]:
            self._evict_prefix(cached_prefix)

    def clear(self) -> None:
        """All of them."""
        for cached_prefix in tuple(self):
            self._evict_prefix(cached_prefix)

    def sweep(self, now: int) -> None:
        """Once a minute: what is there more than once, and was not needed since, goes (BL-27)."""
        if not due(self._swept_at, now):
            return
        self._swept_at = now
        copies: dict[str, Copy] = {}
        owners: dict[str, Copy] = {}
        for cached_prefix in self:
            owner = max(self._others(cached_prefix), key=_worth, default=cached_prefix)
            if _worth(owner) > _worth(cached_prefix):
                copies[cached_prefix.name] = self._copy(cached_prefix, cached_prefix, False)
                owners[cached_prefix.name] = self._copy(owner, cached_prefix, True)
        for copy in sweep([*owners.values(), *copies.values()], now, PERIOD).dropped:
            cached_prefix = self._prefix_cache[copy.seq]
            self._swept += 1
            self._swept_pages += sum(cached_prefix.holding.idle().values())
            self._evict_prefix(cached_prefix)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _evict_prefix(self, cached_prefix: CachedPrefix) -> None:
        state = self._state
        del self._prefix_cache[cached_prefix.name]
        del self._ends[cached_prefix.shelf, cached_prefix.marks[-1]]
        state.prefixes.remove_prefix(cached_prefix)
        state.page_accounting.free(cached_prefix.holding)
        for device in sorted({hop.device for hop in cached_prefix.path}):
            if state.devices.alive(device):
                state.out.close(device, cached_prefix.name, 1)
        state.changed = True

    def _others(self, cached_prefix: CachedPrefix) -> list[CachedPrefix]:
        """Donors on other paths that have all that it has."""
        having = self._state.prefixes.having(cached_prefix.shelf.realm, cached_prefix.marks[-1])
        return [each for each in having if each.cached_prefix and each.shelf is not cached_prefix.shelf]

    def _copy(self, prefix: CachedPrefix, named: CachedPrefix, authoritative: bool) -> Copy:
        """What a cached prefix has of the beginning that `named` is, as the sweep sees it."""
        extents = list(prefix.holding.extents())
        leased = any(not extent.unused for extent in extents)
        where = " ".join(hop.device for hop in prefix.path)
        version = prefix.shelf.realm[0]
        return Copy(
            named.name, version, where, sum(extent.size for extent in extents), 1, authoritative, leased, prefix.used
        )

    def _name(self) -> str:
        """One that no sequence has."""
        self._number += 1
        while f"~{self._number}" in self._state.sequences:
            self._number += 1
        return f"~{self._number}"


def _worth(prefix: CachedPrefix) -> tuple[int, int, str]:
    """Of two that have the same, the longer stays, then the one used later."""
    return prefix.known, prefix.used, prefix.name
