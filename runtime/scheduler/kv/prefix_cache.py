"""Keep prefixes of ended sequences, so that later ones can start from their K and V (`--prefix-caching cached`).

    end of a sequence --keep--> a sequence with a name of its own on the agents, which holds the full page sets
    --evict--> closed

Contract:
- Cached pages are free for any sequence that needs them: least recently used prefixes are evicted, before any sequence
  is preempted.
- Where one cached prefix of a path is the beginning of another, only the longer one stays.
- Once per `policy.kv.duplicates.PERIOD` prefixes are dropped that were not used since and exist on other devices too
  (BL-27). Where prompts and decoding are apart, those of the one side are no duplicates of the other's.
- A cached prefix is dropped with any device of its path.

Page accounting counts the pages; the prefix index finds the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime.policy.kv.duplicates import PERIOD, Copy, due, sweep
from runtime.policy.roles.role import Role
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixShelf
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState
from runtime.types import SamplingParams, SequenceRequest

_NOTHING = SamplingParams(0)


@dataclass(frozen=True, slots=True)
class PrefixCacheCounts:
    """Totals of the prefix cache since the start.

    Fields:
        standing: Cached prefixes now.
        kept: Prefixes added.
        displaced: Dropped for a longer one.
        evicted: Dropped for their pages.
        swept: Dropped as duplicates.
        swept_pages: Pages freed by dropping duplicates.
    """

    standing: int = 0
    kept: int = 0
    displaced: int = 0
    evicted: int = 0
    swept: int = 0
    swept_pages: int = 0


class PrefixCache:
    """The cached prefixes of ended sequences."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._prefix_cache: dict[str, CachedPrefix] = {}  # least recently used first
        self._ends: dict[tuple[PrefixShelf, bytes], CachedPrefix] = {}  # by shelf and last mark
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
        """Return the totals."""
        return PrefixCacheCounts(len(self), self._kept, self._displaced, self._evicted, self._swept, self._swept_pages)

    # -- adding --------------------------------------------------------------------------------------------------------

    def add_sequence(self, sequence: ScheduledSequence, now: int) -> None:
        """Keep the full page sets of a sequence that is about to leave.

        Not done if a cached prefix has them already, or if its version is about to be removed.
        """
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
        self._state.prompts.show(cached_prefix, sequence.chain, min(groups, sequence.prompt_groups))
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
        """Record that a sequence has started from this prefix."""
        if prefix.cached_prefix:
            prefix.used = now
            self._prefix_cache[prefix.name] = self._prefix_cache.pop(prefix.name)

    # -- removing ------------------------------------------------------------------------------------------------------

    def make_room(
        self, needs: Mapping[str, int], spared: CachedPrefix | None = None, slack: Mapping[str, int] | None = None
    ) -> bool:
        """Free this many pages by device; return False, with nothing evicted, where that is impossible.

        `spared`: a prefix that must stay. `slack`: further pages by device that must be free or evictable beside these.
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
        """Evict the least recently used prefix with idle pages on a device; return False if there is none."""
        if not self._state.devices[device].pages.idle:
            return False
        for cached_prefix in self._prefix_cache.values():
            if cached_prefix is not spared and cached_prefix.holding.idle().get(device):
                self._evicted += 1
                self._evict_prefix(cached_prefix)
                return True
        return False

    def remove_device(self, device: str) -> None:
        """Drop all prefixes with a path over a device, which has died or gives up blocks."""
        for cached_prefix in [each for each in self if any(hop.device == device for hop in each.path)]:
            self._evict_prefix(cached_prefix)

    def remove_prefix(self, name: str) -> None:
        """Drop a prefix that an agent does not have."""
        cached_prefix = self._prefix_cache.get(name)
        if cached_prefix is not None:
            self._evict_prefix(cached_prefix)

    def remove_version(self, version: str) -> None:
        """Drop all prefixes of a version of a chain that is not served any more (UN-09)."""
        for cached_prefix in [each for each in self if each.shelf.realm[0] == version]:
            self._evict_prefix(cached_prefix)

    def clear(self) -> None:
        """Drop all prefixes."""
        for cached_prefix in tuple(self):
            self._evict_prefix(cached_prefix)

    def sweep(self, now: int) -> None:
        """Drop duplicates that were not used for a period; runs once per period (BL-27)."""
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

    # -- internals -----------------------------------------------------------------------------------------------------

    def _evict_prefix(self, cached_prefix: CachedPrefix) -> None:
        state = self._state
        del self._prefix_cache[cached_prefix.name]
        del self._ends[cached_prefix.shelf, cached_prefix.marks[-1]]
        state.prompts.hide(cached_prefix.name, cached_prefix)
        state.prefixes.remove_prefix(cached_prefix)
        state.page_accounting.free(cached_prefix.holding)
        for device in sorted({hop.device for hop in cached_prefix.path}):
            if state.devices.alive(device):
                state.out.close(device, cached_prefix.name, 1)
        state.changed = True

    def _others(self, cached_prefix: CachedPrefix) -> list[CachedPrefix]:
        """Return the cached prefixes on other paths, of devices with the same roles, that include all of this one."""
        having, roles = self._state.prefixes.having(cached_prefix.shelf.realm, cached_prefix.marks[-1]), self._roles
        return [
            each
            for each in having
            if each.cached_prefix and each.shelf is not cached_prefix.shelf and roles(each) == roles(cached_prefix)
        ]

    def _roles(self, cached_prefix: CachedPrefix) -> set[Role]:
        return {self._state.devices.roles[hop.device] for hop in cached_prefix.path}

    def _copy(self, prefix: CachedPrefix, named: CachedPrefix, authoritative: bool) -> Copy:
        """Return a prefix's copy of the content of `named`, as `policy.kv.duplicates` needs it."""
        extents = list(prefix.holding.extents())
        leased = any(not extent.unused for extent in extents)
        where = " ".join(hop.device for hop in prefix.path)
        version = prefix.shelf.realm[0]
        return Copy(
            named.name, version, where, sum(extent.size for extent in extents), 1, authoritative, leased, prefix.used
        )

    def _name(self) -> str:
        """Return a name that no sequence has."""
        self._number += 1
        while f"~{self._number}" in self._state.sequences:
            self._number += 1
        return f"~{self._number}"


def _worth(prefix: CachedPrefix) -> tuple[int, int, str]:
    """Order prefixes with the same content: the longer, then the one used later is worth more."""
    return prefix.known, prefix.used, prefix.name
