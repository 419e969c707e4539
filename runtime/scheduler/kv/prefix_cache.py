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
        self._donors: dict[str, CachedPrefix] = {}  # least recently used first
        self._ends: dict[tuple[PrefixShelf, bytes], CachedPrefix] = {}  # by the last mark
        self._number = 0
        self._swept_at = 0
        self._kept = self._displaced = self._evicted = self._swept = self._swept_pages = 0

    def __len__(self) -> int:
        return len(self._donors)

    def __iter__(self) -> Iterator[CachedPrefix]:
        return iter(self._donors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._donors

    def counts(self) -> PrefixCacheCounts:
        return PrefixCacheCounts(len(self), self._kept, self._displaced, self._evicted, self._swept, self._swept_pages)

    # -- coming --------------------------------------------------------------------------------------------------------

    def add_sequence(self, member: ScheduledSequence, now: int) -> None:
        """A sequence is about to leave: its full groups stay, if they are worth it."""
        beginning = member.shared.beginning
        if (
            self._state.config.prefix_caching != "cached"
            or beginning is None
            or not beginning.known
            or not member.pages.holding.ends
        ):
            return
        if member.chain.loaded_as in self._state.leaving:
            return
        shelf, groups = beginning.shelf, beginning.known
        longer = next((each for each in shelf.places[beginning.marks[groups - 1]] if each.donor), None)
        if longer is not None:
            self.used(longer, now)
            return
        name = self._name()
        donor = CachedPrefix(
            name,
            self._state.ledger.share_groups(member.pages.holding, groups),
            beginning.marks[:groups],
            shelf,
            used=now,
        )
        self._state.prefixes.reaches(donor, groups)
        self._donors[name] = self._ends[shelf, donor.marks[-1]] = donor
        self._kept += 1
        request = SequenceRequest(name, name, member.chain.loaded_as, (), _NOTHING, tenant=member.request.tenant)
        for device in sorted(member.place.devices):
            self._state.out.hold_sequence(
                device, request, shelf.path, (member.seq, groups * member.chain.spec.page_tokens)
            )
        for shorter in [self._ends.get((shelf, mark)) for mark in donor.marks[:-1]]:
            if shorter is not None:
                self._displaced += 1
                self._evict_prefix(shorter)

    def used(self, beginning: CachedPrefix, now: int) -> None:
        """Somebody has begun as it did."""
        if beginning.donor:
            beginning.used = now
            self._donors[beginning.name] = self._donors.pop(beginning.name)

    # -- going ---------------------------------------------------------------------------------------------------------

    def make_room(
        self, needs: Mapping[str, int], spared: CachedPrefix | None = None, slack: Mapping[str, int] | None = None
    ) -> bool:
        """See to it that so many pages are free, by device; false, and nothing has gone, where that cannot be.

        `spared`: stays. `slack`: pages by device that must be free, or a donor's, beside these.
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
        for donor in self._donors.values():
            if donor is not spared and donor.holding.idle().get(device):
                self._evicted += 1
                self._evict_prefix(donor)
                return True
        return False

    def remove_device(self, device: str) -> None:
        """A device has died, or gives blocks up."""
        for donor in [each for each in self if any(hop.device == device for hop in each.path)]:
            self._evict_prefix(donor)

    def remove_prefix(self, name: str) -> None:
        """An agent does not have it."""
        donor = self._donors.get(name)
        if donor is not None:
            self._evict_prefix(donor)

    def remove_version(self, version: str) -> None:
        """A version of a chain is served no more (UN-09)."""
        for donor in [each for each in self if each.shelf.realm[0] == version]:
            self._evict_prefix(donor)

    def clear(self) -> None:
        """All of them."""
        for donor in tuple(self):
            self._evict_prefix(donor)

    def sweep(self, now: int) -> None:
        """Once a minute: what is there more than once, and was not needed since, goes (BL-27)."""
        if not due(self._swept_at, now):
            return
        self._swept_at = now
        copies: dict[str, Copy] = {}
        owners: dict[str, Copy] = {}
        for donor in self:
            owner = max(self._others(donor), key=_worth, default=donor)
            if _worth(owner) > _worth(donor):
                copies[donor.name] = self._copy(donor, donor, False)
                owners[donor.name] = self._copy(owner, donor, True)
        for copy in sweep([*owners.values(), *copies.values()], now, PERIOD).dropped:
            donor = self._donors[copy.seq]
            self._swept += 1
            self._swept_pages += sum(donor.holding.idle().values())
            self._evict_prefix(donor)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _evict_prefix(self, donor: CachedPrefix) -> None:
        state = self._state
        del self._donors[donor.name]
        del self._ends[donor.shelf, donor.marks[-1]]
        state.prefixes.remove_prefix(donor)
        state.ledger.free(donor.holding)
        for device in sorted({hop.device for hop in donor.path}):
            if state.devices.alive(device):
                state.out.close(device, donor.name, 1)
        state.changed = True

    def _others(self, donor: CachedPrefix) -> list[CachedPrefix]:
        """Donors on other paths that have all that it has."""
        having = self._state.prefixes.having(donor.shelf.realm, donor.marks[-1])
        return [each for each in having if each.donor and each.shelf is not donor.shelf]

    def _copy(self, beginning: CachedPrefix, named: CachedPrefix, authoritative: bool) -> Copy:
        """What a donor has of the beginning that `named` is, as the sweep sees it."""
        extents = list(beginning.holding.extents())
        leased = any(not extent.unused for extent in extents)
        where = " ".join(hop.device for hop in beginning.path)
        version = beginning.shelf.realm[0]
        return Copy(
            named.name, version, where, sum(extent.size for extent in extents), 1, authoritative, leased, beginning.used
        )

    def _name(self) -> str:
        """One that no sequence has."""
        self._number += 1
        while f"~{self._number}" in self._state.members:
            self._number += 1
        return f"~{self._number}"


def _worth(beginning: CachedPrefix) -> tuple[int, int, str]:
    """Of two that have the same, the longer stays, then the one used later."""
    return beginning.known, beginning.used, beginning.name
