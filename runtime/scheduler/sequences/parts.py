"""The parts of a sequence's record (`scheduler.sequences.sequence.Member`), one for each reason why it changes.

    Place         it gets another path                 Waits        it is paused, moved, preempted
    PagesTaken    its context grows                    Predicted    a hop of it is predicted (BL-25)
    Shared        other sequences begin as it did      Offered      agents dispatch its hops (BL-23)
    Failures      devices died with it

Contract: data; each part is changed by the one mechanism that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.chains import RunAhead
from runtime.scheduler.kv.page_accounting import PageHolding
from runtime.scheduler.kv.prefix_index import CachedPrefix
from runtime.scheduler.routing.path_usage import NO_PASSES, Passes
from runtime.scheduler.speculation.in_flight import InFlightRows

#: Pages that a group takes, by device.
Weights = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Place:
    """What its path asks for and allows. `devices`: of the path; `weights`: pages that a group takes there; `path_usage`:
    where its tokens are counted. `most`: tokens that it gets at most on this path; `ends`: those that end it."""

    devices: frozenset[str] = frozenset()
    weights: Weights = ()
    path_usage: Passes = NO_PASSES
    most: int = 0
    ends: frozenset[int] = frozenset()

    def without(self, device: str) -> None:
        """Take nothing on a device any more."""
        self.weights = tuple((name, pages) for name, pages in self.weights if name != device)


@dataclass(slots=True)
class PagesTaken:
    """`groups`: page groups taken on each device of its path, `room`: tokens that they hold; `holding`: these pages in
    the ledger."""

    groups: int = 0
    room: int = 0
    holding: PageHolding = field(default_factory=PageHolding)


@dataclass(slots=True)
class Shared:
    """`prefix`: what new sequences find of it; `marks`: of its tokens, by groups of `width`. `alone`: it shares
    nothing any more. `tentative`: it was predicted here, so that no other sequence may begin with its K and V
    (UN-13)."""

    prefix: CachedPrefix | None = None
    marks: list[bytes] = field(default_factory=list)
    width: int = 0
    alone: bool = False
    tentative: bool = False


@dataclass(frozen=True, slots=True)
class Waits:
    """Why its next row does not simply go out. `paused`: since when it waits for its caller, in ns, and gets no rows;
    None while it does not. `move`: the migration it is in, 0 for none; `held`: no rows are issued, for the last stage
    of that. `doomed`: it is to be preempted when its row is back."""

    paused: int | None = None
    move: int = 0
    held: bool = False
    doomed: bool = False


#: It waits for nothing. The only object that says so, so that a check for each row is one comparison.
FREE = Waits()


@dataclass(slots=True)
class Predicted:
    """`ahead`: the hop that is predicted; `in_flight`: its rows under way."""

    ahead: RunAhead
    in_flight: InFlightRows = field(default_factory=InFlightRows)


@dataclass(frozen=True, slots=True)
class Offered:
    """`hops`: those that no device has taken yet, and the devices that may, that of the path first; `devices`: all
    others of these, and the hop of each."""

    hops: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)

    def settled(self, at: int) -> Offered:
        """The others, when a hop has been taken."""
        gone = self.hops[at]
        hops = {each: devices for each, devices in self.hops.items() if each != at}
        return Offered(hops, {device: hop for device, hop in self.devices.items() if device not in gone})

    def without(self, device: str) -> Offered:
        """The same when a device has died that is not on the path."""
        at = self.devices[device]
        hops = dict(self.hops) | {at: tuple(each for each in self.hops[at] if each != device)}
        return Offered(hops, {each: hop for each, hop in self.devices.items() if each != device})


#: No hop is open.
SETTLED = Offered()


@dataclass(frozen=True, slots=True)
class Failures:
    """Since its latest token. `deaths`: devices that died with a row of it; `strays`: rows of it that no device had any
    more."""

    deaths: int = 0
    strays: int = 0


#: None since its latest token.
NO_FAILURES = Failures()
