"""Account for the pages of all devices; pages that sequences share are counted once (BL-32).

An *extent* is a run of page sets that one block of a chain has on one device, after another extent (`before`) or at the
beginning:

    system prompt (3 users) <- question A (2 users) <- A's answer (1)
                            <- question B (1 user)

Extents form trees. A sequence holds one path of a tree with all of its page sets, recorded as the path's end. A
sequence that starts from another's prefix continues after one of its extents, which is split where only a part is
shared; other users of it are not affected. The part that a sequence has alone grows in place.

Contract:
- `DevicePages.used` is the sum over extents with users, and over migrations under way (`moving`); `idle` is the part
  that only the prefix cache uses (`scheduler.kv.prefix_cache`), free as soon as the cache evicts it.
- Extents of a device that died are removed with it.
- The caller has checked that there is room. The accounting decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product

from runtime.policy.lending.shapes import PageRectangle
from runtime.policy.migration.order import Mover
from runtime.scheduler.devices.devices import Device, DeviceFacts, DevicePages, Devices, Plan

#: Page numbers reserved per extent: far more than a device has pages.
_NUMBERS = 1 << 40

#: For each block of a chain, its device and the pages per page set there; then further devices on which the sequence
#: takes pages (a stand-in, candidates of an offered hop).
Places = Sequence[tuple[str, int]]


@dataclass(slots=True, eq=False)
class PageExtent:
    """A run of page sets of one block on one device.

    Fields:
        pages: Pages per page set.
        groups: Page sets.
        first: Number of its first page. Page numbers are unique in the cluster, and serve to compare holdings.
        before: The extent that it continues, None at the beginning.
        users: Holdings that include it.
        idle: Cached prefixes among `users`.
    """

    device: Device
    pages: int
    groups: int
    first: int
    before: PageExtent | None = None
    users: int = 1
    idle: int = 0

    @property
    def size(self) -> int:
        """Pages of this extent."""
        return self.pages * self.groups

    @property
    def unused(self) -> bool:
        """Whether only cached prefixes hold it."""
        return self.users == self.idle

    def path(self) -> Iterator[PageExtent]:
        """Iterate over this extent and all before it, from the end."""
        extent: PageExtent | None = self
        while extent is not None:
            yield extent
            extent = extent.before


@dataclass(slots=True, eq=False)
class PageHolding:
    """The pages of one sequence or cached prefix.

    Fields:
        ends: Last extent, by number of the block in the chain; blocks without attention layers have none.
        groups: Page sets, the same for each block.
        cached_prefix: Whether it belongs to the prefix cache.
        bounds: Layers at which its extents begin and end if it is cut by layers instead of blocks, from 0 to the number
            of layers: then `ends` are numbered in this order. Only on a path of one device.
    """

    ends: dict[int, PageExtent] = field(default_factory=dict)
    groups: int = 0
    cached_prefix: bool = False
    bounds: tuple[int, ...] = ()

    def extents(self) -> Iterator[PageExtent]:
        """Iterate over all extents."""
        return (extent for end in self.ends.values() for extent in end.path())

    def idle(self) -> Mapping[str, int]:
        """Return its pages that only cached prefixes hold, by device."""
        pages: Counter[str] = Counter()
        for extent in self.extents():
            if extent.unused:
                pages[extent.device.name] += extent.size
        return pages


class PageAccounting:
    """Take and free pages of sequences, cached prefixes and their shared parts."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        #: Stands for the device of page sets that are lost.
        self._nowhere = Device("", DeviceFacts(), DevicePages(0), Plan(0), alive=False)
        self._numbers = 0

    def allocate(self, places: Places, groups: int, like: PageHolding | None = None, shared: int = 0) -> PageHolding:
        """Return a new holding of `groups` page sets; the first `shared`, fewer than all, are those of `like`.

        `like` must be at the same places.
        """
        made = PageHolding(groups=groups)
        for at, (name, pages) in enumerate(places):
            if pages:
                before = _upto(like.ends[at], shared) if like is not None and shared else None
                made.ends[at] = self._new(name, pages, groups - shared, before)
                for extent in before.path() if before is not None else ():
                    _use(extent, 1, 0)
        return made

    def allocate_cut(
        self, device: str, bounds: tuple[int, ...], groups: int, like: PageHolding | None = None, shared: int = 0,
        layers: int = 0,
    ) -> PageHolding:  # fmt: skip
        """Return a new holding on one device, cut at these layers, so that chains can share its first layers (UN-15).

        The first `shared` page sets, fewer than all, of the first `layers` layers are those of `like`, which must be
        cut at the same layers up to there.
        """
        made = PageHolding(groups=groups, bounds=bounds)
        for at, (lo, hi) in enumerate(pairwise(bounds)):
            before = _upto(like.ends[at], shared) if like is not None and hi <= layers else None
            made.ends[at] = self._new(device, hi - lo, groups - (0 if before is None else shared), before)
            for extent in before.path() if before is not None else ():
                _use(extent, 1, 0)
        return made

    def grow(self, holding: PageHolding, groups: int) -> None:
        """Add page sets to a holding."""
        holding.groups += groups
        for at, end in holding.ends.items():
            if end.users == 1:
                end.groups += groups
                end.device.pages.used += end.pages * groups
            else:
                holding.ends[at] = self._new(end.device.name, end.pages, groups, end)

    def free(self, holding: PageHolding) -> None:
        """Free all pages of a holding; extents with other users stay."""
        for extent in holding.extents():
            _use(extent, -1, -1 if holding.cached_prefix else 0)
        holding.ends, holding.groups, holding.bounds = {}, 0, ()

    def share_groups(self, holding: PageHolding, groups: int) -> PageHolding:
        """Return a holding for the prefix cache of the first page sets of another holding."""
        made = PageHolding({at: _upto(end, groups) for at, end in holding.ends.items()}, groups, True, holding.bounds)
        for extent in made.extents():
            _use(extent, 1, 1)
        return made

    def pin(self, holding: PageHolding, groups: int, blocks: Collection[int]) -> PageHolding:
        """Return a holding of the first page sets that another one has of these blocks: they stay until it is freed."""
        ends = {at: _upto(end, groups) for at, end in holding.ends.items() if at in blocks}
        made = PageHolding(ends, groups)
        for extent in made.extents():
            _use(extent, 1, 0)
        return made

    def shared_pages(self, holding: PageHolding, device: Device, groups: int | None = None, users: int = 2) -> int:
        """Return how many pages of a holding on a device so many sequences or migrations hold, or more.

        `groups`: count its first page sets only.
        """
        found, upto = 0, holding.groups if groups is None else groups
        for end in holding.ends.values():
            stop = holding.groups
            for extent in end.path() if end.device is device else ():
                start = stop - extent.groups
                if extent.users - extent.idle >= users:
                    found += extent.pages * max(min(stop, upto) - start, 0)
                stop = start
        return found

    def lendable(self, holding: PageHolding, device: str, layers: int) -> list[PageRectangle]:
        """Return the first pages that a holding has on a device of its path, in runs of layers, and nothing else uses.

        The last page set of all never counts: what is written next is on the path. `layers`: those of the path there;
        the pages of a stand-in, which may be written again, come behind them.
        """
        found = list[PageRectangle]()
        for layer, end in (each for each in _on(holding, device) if each[0] < layers):
            first, last, stop = 0, 0, holding.groups
            for extent in end.path():
                start = stop - extent.groups
                if extent.device.name == device:
                    if extent.users > 1 or extent.idle:
                        return []
                    first, last = start, last if first == stop and last else stop
                stop = start
            groups = first, min(last, holding.groups - 1)
            begin = found.pop().layers[0] if found and found[-1].groups == groups else layer
            found.append(PageRectangle((begin, layer + end.pages), groups))
        return found

    def change_place(
        self, holding: PageHolding, device: str, target: str, first: int, last: int, layers: tuple[int, int]
    ) -> None:
        """Record that another device has page sets [first, last) of a holding in some layers on a device of its path.

        Or that this one has them again (`target` is `device`), or none any more (`target` is empty).

        `layers`: counted from the device's first one. Some of them only: on a path of one device.
        """
        there = self._devices[target] if target else self._nowhere
        for cut in layers:
            self._cut(holding, device, cut)
        for end in [end for lo, end in _on(holding, device) if layers[0] <= lo < layers[1]]:
            if first:
                _upto(end, first)
            left = last - first
            for extent in _upto(end, last).path():
                if left <= 0:
                    break
                left -= extent.groups
                if extent.device.alive:
                    extent.device.pages.used -= extent.size
                extent.device = there
                if there.alive:
                    there.pages.used += extent.size

    def lost_pages(self, holding: PageHolding) -> set[tuple[int, int]]:
        """Return the pages of a holding that no device has: layer, from its first on, and number of the page set."""
        found, layer = set[tuple[int, int]](), 0
        for _, end in sorted(holding.ends.items()):
            stop = holding.groups
            for extent in end.path():
                if extent.device is self._nowhere:
                    found.update(product(range(layer, layer + extent.pages), range(stop - extent.groups, stop)))
                stop -= extent.groups
            layer += end.pages
        return found

    def rehouse(self, holding: PageHolding, places: Places, there: PageHolding | None = None) -> None:
        """Update a holding after its sequence changed its path: blocks on another device get new pages there.

        Their former pages are released; other users of them keep them. A holding cut by layers is cut by blocks again.
        `there`: a pinned holding of page sets that are the first ones on the other devices; it is empty then.
        """
        there = there or PageHolding()
        for at in list(holding.ends) if holding.bounds else ():
            self._release_at(holding, at)
        holding.bounds = ()
        for at, (name, pages) in enumerate(places):
            if pages and (at not in holding.ends or holding.ends[at].device is not self._devices[name]):
                self._release_at(holding, at)
                before = there.ends.pop(at, None)
                more = holding.groups - (0 if before is None else there.groups)
                holding.ends[at] = before if before is not None and not more else self._new(name, pages, more, before)
        self.free(there)
        for at in [at for at in holding.ends if at >= len(places)]:  # of a stand-in or of former candidates
            self._release_at(holding, at)

    def bereft(self, holding: PageHolding, device: str) -> None:
        """Release the pages of a holding on a device that has died."""
        for at in [at for at, end in holding.ends.items() if end.device.name == device]:
            self._release_at(holding, at)

    def mover(self, seq: str, holding: PageHolding, groups: int, device: str, resume: int = 0) -> Mover:
        """Return a sequence as `policy.migration.order` needs it: the numbers of its pages on a device.

        Counts its first `groups` page sets, those that are computed; later ones are tentative and not shared (UN-13).
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
        """Raise RuntimeError unless all counts match these holdings.

        `moving`: pages by device that are taken for migrations.
        """
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
        for extent in [each for each in users if each.device is not self._nowhere]:
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

    # -- internals -----------------------------------------------------------------------------------------------------

    def _new(self, name: str, pages: int, groups: int, before: PageExtent | None) -> PageExtent:
        device = self._devices[name]
        self._numbers += _NUMBERS
        device.pages.used += pages * groups
        return PageExtent(device, pages, groups, self._numbers, before)

    def _cut(self, holding: PageHolding, device: str, layer: int) -> None:
        """Cut a holding that shares nothing in front of a layer of a device, which has all of its path then.

        Raises ValueError where it is cut by blocks and those are on several devices.
        """
        ends = _on(holding, device)
        if all(not lo < layer < lo + end.pages for lo, end in ends):
            return
        if len(ends) != len(holding.ends):
            raise ValueError(f"pages of a path of several devices cannot be cut at layer {layer}")
        made = list[PageExtent]()
        for lo, end in ends:
            made.append(end)
            if lo < layer < lo + end.pages:
                rest: PageExtent | None = None
                for extent in list(end.path())[::-1]:
                    self._numbers += _NUMBERS
                    behind = extent.pages - (layer - lo)
                    rest = PageExtent(extent.device, behind, extent.groups, self._numbers, rest, extent.users)
                    extent.pages = layer - lo
                made += [rest] if rest is not None else []
        holding.ends = dict(enumerate(made))
        holding.bounds = tuple(accumulate((end.pages for end in made), initial=0))

    def _release_at(self, holding: PageHolding, at: int) -> None:
        end = holding.ends.pop(at, None)
        for extent in end.path() if end is not None else ():
            _use(extent, -1, 0)


def _on(holding: PageHolding, device: str) -> list[tuple[int, PageExtent]]:
    """Return the last extents of a holding on a device of its path, each with its first layer there."""
    ends = [end for _, end in sorted(holding.ends.items()) if end.device.name == device]
    return list(zip(accumulate((end.pages for end in ends), initial=0), ends, strict=False))


def _upto(end: PageExtent, groups: int) -> PageExtent:
    """Return the extent that ends a path's first `groups` page sets, split off where it goes on after them.

    Changes no page count. Raises ValueError for 0, or for more than there are.
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
    """Add users to an extent, or remove them, and update the device's counts."""
    device, before = extent.device, extent.size if extent.unused else 0
    extent.users += users
    extent.idle += idle
    if device.alive:
        device.pages.idle += (extent.size if extent.unused and extent.users else 0) - before
        device.pages.used -= 0 if extent.users else extent.size
