"""The parts of `scheduler.sequences.sequence.ScheduledSequence`, one for each reason for which it changes.

    Place         it gets another path                 Waits        it is paused, moved, preempted
    PagesTaken    its context grows                    Predicted    a hop of it is predicted (BL-25)
    Shared        sequences share its prefix           Offered      agents dispatch its hops (BL-23)
    Failures      devices died with it
    Swapped       it gave way, and host memory has its K and V
    LostPages     a device died that held pages of it

Contract: data; each part is changed by one mechanism only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from runtime.chains import Path, RunAhead
from runtime.control.sequence import Phase
from runtime.scheduler.kv.page_accounting import PageHolding
from runtime.scheduler.kv.prefix_index import CachedPrefix
from runtime.scheduler.routing.path_usage import NO_PASSES, Passes
from runtime.scheduler.speculation.in_flight import InFlightRows
from runtime.types import PromptLogprobs

#: Pages per page set, by device.
Weights = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Place:
    """What a sequence's path requires and allows.

    Fields:
        devices: Devices of the path.
        weights: Pages per page set, by device.
        path_usage: Counter of the tokens that pass this path.
        most: Limit of output tokens on this path.
        ends: Tokens that end the sequence.
    """

    devices: frozenset[str] = frozenset()
    weights: Weights = ()
    path_usage: Passes = NO_PASSES
    most: int = 0
    ends: frozenset[int] = frozenset()

    def without(self, device: str) -> None:
        """Take no pages on a device any more."""
        self.weights = tuple((name, pages) for name, pages in self.weights if name != device)


@dataclass(slots=True)
class PagesTaken:
    """Pages that a sequence holds.

    Fields:
        groups: Page sets taken on each device of its path.
        room: Tokens that these page sets hold.
        holding: The same pages in the page accounting.
    """

    groups: int = 0
    room: int = 0
    holding: PageHolding = field(default_factory=PageHolding)


@dataclass(slots=True)
class Shared:
    """State of a sequence for prefix sharing.

    Fields:
        prefix: Its entry in the prefix index; None while it has none.
        marks: Marks (chained digests) of its full page sets.
        width: Tokens per page set that the marks were made with.
        alone: Whether it shares nothing any more.
        tentative: Whether a hop of it was predicted on this path, so that no other sequence may share its K and V
            (UN-13).
        entered: Tokens of its prompt that enter behind the layers that it shares with another chain (UN-15).
    """

    prefix: CachedPrefix | None = None
    marks: list[bytes] = field(default_factory=list)
    width: int = 0
    alone: bool = False
    tentative: bool = False
    entered: int = 0


@dataclass(frozen=True, slots=True)
class Waits:
    """Why the next row of a sequence is not simply sent.

    Fields:
        paused: Time in ns at which its caller paused it; None while it is not paused. A paused sequence gets no rows.
        move: Number of the migration it is in, 0 for none.
        held: Whether no rows are issued, for the last stage of that migration.
        doomed: Why it is preempted when its row returns; empty if it is not.
        left_out: Whether it gets no rows while an urgent sequence runs beside it.
        behind: Whether it is of the background, and gets no rows of the next step.
        handoff: Whether its context is computed, and it waits until its K and V are where it is to decode (TI-15).
        mends: Whether page sets of it are lost, and computed again before its next row.
    """

    paused: int | None = None
    move: int = 0
    held: bool = False
    doomed: str = ""
    left_out: bool = False
    behind: bool = False
    handoff: bool = False
    mends: bool = False

    @property
    def skipped(self) -> bool:
        """Whether steps go on without it, though it could run."""
        return self.left_out or self.behind


#: It waits for nothing. Every sequence that waits for nothing has this object, so that the check is one `is`.
FREE = Waits()


@dataclass(frozen=True, slots=True)
class Swapped:
    """K and V of a sequence in the host memory of its devices (QL-10).

    Fields:
        epoch: Epoch under which they were saved.
        path: Path that they belong to.
        tokens: Tokens with K and V.
        phase: What was run when it gave way.
        nbytes: Bytes by device of the path.
        prompt_logprobs: Log-probabilities of its prompt that were not reported yet.
        returning: Whether it is on its path again, and has not run a row there.
    """

    epoch: int
    path: Path
    tokens: int
    phase: Phase
    nbytes: tuple[tuple[str, int], ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    returning: bool = False

    @property
    def total(self) -> int:
        """Bytes on all devices."""
        return sum(nbytes for _, nbytes in self.nbytes)


@dataclass(frozen=True, slots=True)
class LostPages:
    """Page sets [first, last) of a sequence that a dead device held, as a part of this loan.

    Fields:
        hop: Number of the hop on the sequence's path.
        layers: In these layers [first, last), counted from the hop's first.
    """

    loan: int
    hop: int
    groups: tuple[int, int]
    layers: tuple[int, int]

    def behind(self, group: int) -> LostPages | None:
        """Return those from number `group` on; None if there are none."""
        return replace(self, groups=(group, self.groups[1])) if group < self.groups[1] else None

    def pages(self) -> Iterator[tuple[int, int]]:
        """Yield its pages: layer of the hop and number of the page set."""
        return product(range(*self.layers), range(*self.groups))


@dataclass(slots=True)
class Predicted:
    """Speculation of a sequence.

    Fields:
        ahead: The hop that is predicted.
        in_flight: Its rows in flight.
    """

    ahead: RunAhead
    in_flight: InFlightRows = field(default_factory=InFlightRows)


@dataclass(frozen=True, slots=True)
class Offered:
    """Hops of a sequence that have been offered to several devices and not taken yet (BL-23).

    Fields:
        hops: Candidates by hop number, the device of the path first.
        devices: Hop number by candidate, without the devices of the path.
    """

    hops: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)

    def settled(self, at: int) -> Offered:
        """Return the remaining offers after hop `at` has been taken."""
        gone = self.hops[at]
        hops = {each: devices for each, devices in self.hops.items() if each != at}
        return Offered(hops, {device: hop for device, hop in self.devices.items() if device not in gone})

    def without(self, device: str) -> Offered:
        """Return the offers after the death of a candidate that is not on the path."""
        at = self.devices[device]
        hops = dict(self.hops) | {at: tuple(each for each in self.hops[at] if each != device)}
        return Offered(hops, {each: hop for each, hop in self.devices.items() if each != device})


#: No hop is offered.
SETTLED = Offered()


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of a sequence since its latest token.

    Fields:
        deaths: Devices that died with a row of it.
        strays: Rows of it that were lost without an error (`decode.stall_detector`).
        again: Rows of it that were sent again as they were, since a creditor did not answer.
        since: When it lost page sets that another device held, in ns; 0: it has not.
    """

    deaths: int = 0
    strays: int = 0
    again: int = 0
    since: int = 0

    def with_loss(self, now: int) -> Failures:
        """Return the failures with a loss of page sets at this time in ns; an earlier one counts."""
        return replace(self, since=self.since or now)

    def once_more(self) -> Failures:
        """Return the failures with one more row that is sent again."""
        return replace(self, again=self.again + 1)


#: No failures since the latest token.
NO_FAILURES = Failures()
