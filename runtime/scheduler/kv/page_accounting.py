"""Account for the pages of all devices: pages that sequences share are counted once (BL-32).

An *extent* is a run of page sets that one block of a chain has on one device, behind another extent (`before`) or at
the beginning:

    system prompt (3 users) <- question A (2 users) <- A's answer (1)
                            <- question B (1 user)

Extents form a tree for each beginning. A sequence holds one path of it, all of its page sets, known by the path's end.
A sequence that starts with another's prefix continues behind one of its extents, which is split where only a part is
shared; its other users are not affected. What a sequence has for itself grows in place.

Contract: `DevicePages.used` is the sum over extents that have a user, and over migrations under way (`moving`); `idle`
is the part that only the prefix cache uses (`scheduler.kv.prefix_cache`), free as soon as that lets go. Extents of a
device that died go with it. The caller has checked that there is room. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.policy.migration.order import Mover
from runtime.scheduler.devices.devices import Device, Devices

#: Numbers of pages that an extent may come to have: far more than a device.
_NUMBERS = 1 << 40

#: By block of a chain: its device, and the pages that a group takes there. Behind them whatever else the sequence has
#: for itself.
Places = Sequence[tuple[str, int]]


@dataclass(slots=True, eq=False)
class PageExtent:
    """`groups` page groups of `pages` pages each. `users` hold it, `idle` of them are donors. `first`: the number of
    its first page, which no other page of the cluster ever has."""

    device: Device
    pages: int
    groups: int
    first: int
    before: PageExtent | None = None
    users: int = 1
    idle: int = 0

    @property
    def size(self) -> int:
        """Its pages."""
        return self.pages * self.groups

    @property
    def unused(self) -> bool:
        """Whether it is there for donors only."""
        return self.users == self.idle

    def path(self) -> Iterator[PageExtent]:
        """It, and all before it: the end first."""
        extent: PageExtent | None = self
        while extent is not None:
            yield extent
            extent = extent.before


@dataclass(slots=True, eq=False)
class PageHolding:
    """By block of the chain, of those that attend: its last extent. `groups`: in each of them. `cached_prefix`: of a sequence
    that has ended.
    """

    ends: dict[int, PageExtent] = field(default_factory=dict)
    groups: int = 0
    cached_prefix: bool = False

    def extents(self) -> Iterator[PageExtent]:
        return (extent for end in self.ends.values() for extent in end.path())

    def idle(self) -> Mapping[str, int]:
        """Pages of it that only donors use, by device."""
        pages: Counter[str] = Counter()
        for extent in self.extents():
            if extent.unused:
                pages[extent.device.name] += extent.size
        return pages


class PageAccounting:
    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._numbers = 0

    def allocate(self, places: Places, groups: int, like: PageHolding | None = None, shared: int = 0) -> PageHolding:
        """A new holding. Its first `shared` groups, fewer than all, are those of `like`, which is at the same
        places.
        """
        made = PageHolding(groups=groups)
        for at, (name, pages) in enumerate(places):
            if pages:
                before = _upto(like.ends[at], shared) if like is not None and shared else None
                made.ends[at] = self._new(name, pages, groups - shared, before)
                for extent in before.path() if before is not None else ():
                    _use(extent, 1, 0)
        return made

    def grow(self, holding: PageHolding, groups: int) -> None:
        """So many groups more."""
        holding.groups += groups
        for at, end in holding.ends.items():
            if end.users == 1:
                end.groups += groups
                end.device.pages.used += end.pages * groups
            else:
                holding.ends[at] = self._new(end.device.name, end.pages, groups, end)

    def free(self, holding: PageHolding) -> None:
        """All of it is given back; what others use too stays."""
        for extent in holding.extents():
            _use(extent, -1, -1 if holding.cached_prefix else 0)
        holding.ends, holding.groups = {}, 0

    def share_groups(self, holding: PageHolding, groups: int) -> PageHolding:
        """A cached prefix's: the first groups of a holding."""
        made = PageHolding({at: _upto(end, groups) for at, end in holding.ends.items()}, groups, True)
        for extent in made.extents():
            _use(extent, 1, 1)
        return made

    def rehouse(self, holding: PageHolding, places: Places) -> None:
        """A sequence has moved: blocks on another device have pages of their own there; what they had is others', or
        free.
        """
        for at, (name, pages) in enumerate(places):
            if pages and (at not in holding.ends or holding.ends[at].device is not self._devices[name]):
                self._release_at(holding, at)
                holding.ends[at] = self._new(name, pages, holding.groups, None)
        for at in [at for at in holding.ends if at >= len(places)]:  # a stand-in's, which does not come along
            self._release_at(holding, at)

    def bereft(self, holding: PageHolding, device: str) -> None:
        """A device has died: what it held is gone."""
        for at in [at for at, end in holding.ends.items() if end.device.name == device]:
            self._release_at(holding, at)

    def mover(self, seq: str, holding: PageHolding, groups: int, device: str, resume: int = 0) -> Mover:
        """A sequence as the order of moves sees it (`policy.migration.order`): the pages of its first `groups` groups
        on a device, by number.

        Groups beyond those that are computed are tentative, and nobody's but its own (UN-13).
        """
        pages: set[int] = set()
        for end in holding.ends.values():
            stop = holding.groups
            for extent in end.path() if end.device.name == device else ():
                start = stop - extent.groups
                pages.update(range(extent.first, extent.first + extent.pages * max(0, min(groups, stop) - start)))
                stop = start
        return Mover(seq, frozenset(pages), resume)

    def check(self, holdings: Iterable[PageHolding], moving: Mapping[str, int]) -> None:
        """Verify counts from scratch; `moving`: pages by device that are taken for moves. Raises RuntimeError."""
        users: Counter[PageExtent] = Counter()
        idle: Counter[PageExtent] = Counter()
        for holding in holdings:
            if any(sum(extent.groups for extent in end.path()) != holding.groups for end in holding.ends.values()):
                raise RuntimeError("a holding's extents are not all its groups")
            users.update(holding.extents())
            idle.update(holding.extents() if holding.cached_prefix else ())
        if any((extent.users, extent.idle) != (count, idle[extent]) for extent, count in users.items()):
            raise RuntimeError("an extent's users are not those that hold it")
        used, unused = Counter(moving), Counter[str]()
        for extent in users:
            if not extent.device.alive or extent.device is not self._devices[extent.device.name]:
                raise RuntimeError(f"pages of a life of {extent.device.name} that is over are held")
            used[extent.device.name] += extent.size
            unused[extent.device.name] += extent.size if extent.unused else 0
        for device in self._devices:
            if device.alive and (device.pages.used, device.pages.idle) != (used[device.name], unused[device.name]):
                raise RuntimeError(
                    f"{device.name}: {device.pages.used} pages are spoken for, {device.pages.idle} of them idle; "
                    f"sequences hold {used[device.name]}, {unused[device.name]} of them only donors"
                )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new(self, name: str, pages: int, groups: int, before: PageExtent | None) -> PageExtent:
        device = self._devices[name]
        self._numbers += _NUMBERS
        device.pages.used += pages * groups
        return PageExtent(device, pages, groups, self._numbers, before)

    def _release_at(self, holding: PageHolding, at: int) -> None:
        end = holding.ends.pop(at, None)
        for extent in end.path() if end is not None else ():
            _use(extent, -1, 0)


def _upto(end: PageExtent, groups: int) -> PageExtent:
    """The extent with which the first `groups` groups of a path end; cut off, if it goes on behind them. Changes no
    count of pages.

    Raises ValueError for none of them, or for more than there are.
    """
    path = list(end.path())[::-1]
    for extent in path if groups else ():
        if extent.groups > groups:
            first = PageExtent(
                extent.device, extent.pages, groups, extent.first, extent.before, extent.users, extent.idle
            )
            extent.groups, extent.first, extent.before = (
                extent.groups - groups,
                extent.first + extent.pages * groups,
                first,
            )
            return first
        groups -= extent.groups
        if not groups:
            return extent
    raise ValueError("only groups that are there can be shared")


def _use(extent: PageExtent, users: int, idle: int) -> None:
    """More users, or fewer."""
    device, before = extent.device, extent.size if extent.unused else 0
    extent.users += users
    extent.idle += idle
    if device.alive:
        device.pages.idle += (extent.size if extent.unused and extent.users else 0) - before
        device.pages.used -= 0 if extent.users else extent.size
