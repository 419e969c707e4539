"""The scheduler's record of one sequence: its request, its progress, its path.

Contract: a `ScheduledSequence` is a LiveSequence with a chain that it keeps to its end (UN-09), a path while it runs,
and an epoch that grows whenever it is placed anew. It holds the complete prompt and output, so it can always run again.
It decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from runtime.chains import Chain, Path, RunAhead, Variant
from runtime.control.sequence import LiveSequence
from runtime.kv.pages import groups_for
from runtime.policy.lengths.forecast import LengthForecast
from runtime.scheduler.kv.prefix_index import marks_of
from runtime.scheduler.routing.path_usage import NOWHERE, Passes
from runtime.scheduler.sequences.parts import (
    FREE,
    NO_FAILURES,
    SETTLED,
    Failures,
    LostPages,
    Offered,
    PagesTaken,
    Place,
    Predicted,
    Shared,
    Swapped,
    Waits,
    Weights,
)
from runtime.types import ModelSpec, SequenceRequest


@dataclass(slots=True, eq=False)
class ScheduledSequence(LiveSequence):
    """One sequence from its arrival to its last event. Fields that every row reads are here, the rest in the parts.

    Fields:
        variant: The variant that it runs on instead of the chain it named (BL-28); None for its own chain.
        epoch: Number of its current placement; messages of an older one are ignored.
        flying: Whether a row of it is in flight.
        issued: Tokens of the row in flight.
        attempt: Number of the latest row sent while a hop of it was predicted, or sent again; always even.
        predicted: None while no hop of it is predicted.
        swapped: Its K and V in host memory; None while there are none.
        forecast: How long its answer gets (TI-10); None without a prediction.
        lenders: Devices that hold page sets of it, or are about to, without being on its path (`scheduler.lending`).
        lost: Page sets of it that are nowhere, in order, since their device died (`scheduler.lending.mending`).
        waits, failures, offered, place, pages, shared: See `scheduler.sequences.parts`.
    """

    chain: Chain = NOWHERE
    variant: Variant | None = None
    epoch: int = 0
    path: Path = ()
    flying: bool = False
    issued: int = 0
    attempt: int = 0
    waits: Waits = FREE
    predicted: Predicted | None = None
    swapped: Swapped | None = None
    forecast: LengthForecast | None = None
    lenders: frozenset[str] = frozenset()
    lost: tuple[LostPages, ...] = ()
    failures: Failures = NO_FAILURES
    offered: Offered = SETTLED
    place: Place = field(default_factory=Place)
    pages: PagesTaken = field(default_factory=PagesTaken)
    shared: Shared = field(default_factory=Shared)

    @property
    def suspect(self) -> bool:
        """Whether it may be the cause of device deaths: more than one device has died with a row of it."""
        return self.failures.deaths > 1

    @property
    def scattered(self) -> bool:
        """Whether its path does not have all of its page sets."""
        return bool(self.lenders or self.lost)

    @property
    def served(self) -> str | None:
        """Name of the variant it runs on; None where that is the chain it asked for."""
        return None if self.variant is None else self.variant.name

    @property
    def device_request(self) -> SequenceRequest:
        """Its request as sent to devices, with the name of the version that it keeps; its output is sent beside it."""
        name, request = self.chain.loaded_as, self.request
        return request if name == request.model and not request.output else replace(request, model=name, output=())

    def first(self, upto: int) -> tuple[int, ...]:
        """Return the first `upto` tokens of prompt and output."""
        return (*self.request.prompt, *self.output)[:upto]

    @property
    def longest(self) -> int:
        """Largest number of page sets that it may need, on any path."""
        spec = self.chain.spec
        return groups_for(
            spec,
            spec.virtual_tokens + min(len(self.request.prompt) + self.request.sampling.max_tokens, spec.max_model_len),
        )

    @property
    def prompt_groups(self) -> int:
        """Page sets that its prompt fills."""
        return len(self.request.prompt) // self.chain.spec.page_tokens

    @property
    def realm(self) -> tuple[str, str]:
        """Version of its chain and tenant: within these, equal tokens have equal K and V, which may be shared."""
        return self.chain.version, self.request.tenant

    def mark(self) -> list[bytes]:
        """Return the marks of all full page sets of its prompt and output; computes those that are missing."""
        shared, width = self.shared, self.chain.spec.page_tokens
        if shared.width != width:  # its chain was changed while it waited
            shared.marks, shared.width = [], width
        done = len(shared.marks)
        if (done + 1) * width <= self.length:
            more = self._visible(done * width, self.length - done * width)
            shared.marks.extend(marks_of(more, width, shared.marks[-1] if done else b""))
        return shared.marks

    # -- path ----------------------------------------------------------------------------------------------------------

    def seated(self, path_usage: Passes, weights: Weights, spec: ModelSpec) -> None:
        """Place it on a path under a new epoch, with nothing predicted yet.

        `spec`: its model, with the context limited to what this path can hold.
        """
        self.epoch += 1
        self.predicted = None
        self.path, self.spec = path_usage.path, spec
        sampling = self.request.sampling
        self.place = Place(
            frozenset(hop.device for hop in self.path),
            weights,
            path_usage,
            self.most_on(spec),
            frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids)),
        )

    def most_on(self, spec: ModelSpec) -> int:
        """Return the limit of output tokens with the context of this model spec."""
        return min(self.request.sampling.max_tokens, spec.max_model_len - len(self.request.prompt))

    def holds(self, groups: int) -> None:
        """Record that this many page sets are taken for it on each device of its path."""
        self.pages.groups, self.pages.room = groups, groups * self.spec.page_tokens

    def bereft(self, device: str) -> None:
        """Remove a dead device from its place; a migration under way puts another in its stead."""
        self.place.devices -= {device}
        self.place.without(device)
        if self.predicted is not None:
            self.predicted.in_flight.clear()

    def unseated(self) -> None:
        """Record that it is on no path any more."""
        self.path, self.place, self.lost = (), Place(), ()
        self.holds(0)
        self.flying = self.shared.tentative = False
        self.shared.entered = 0
        self._wait(Waits(self.waits.paused))
        self.predicted, self.offered = None, SETTLED

    # -- predicted and offered hops ------------------------------------------------------------------------------------

    def predict(self, ahead: RunAhead, device: str, pages: int) -> None:
        """Record that a hop of it is predicted; the stand-in takes `pages` more per page set on `device`."""
        self.predicted, self.shared.tentative = Predicted(ahead), True
        more = dict(self.place.weights)
        more[device] = more.get(device, 0) + pages
        self.place.weights = tuple((name, count) for name, count in more.items() if count)

    @property
    def ahead(self) -> RunAhead | None:
        """The hop that is predicted, None for none."""
        return None if self.predicted is None else self.predicted.ahead

    def would_end(self, token: int) -> bool:
        """Return whether this token would be its last one."""
        self.output.append(token)
        ends = self.finish() is not None
        self.output.pop()
        return ends

    def path_on(self, device: str) -> Path:
        """Return its path as sent to a device: a candidate for an offered hop gets itself in that hop's place."""
        at = self.offered.devices.get(device)
        return (
            self.path if at is None else (*self.path[:at], replace(self.path[at], device=device), *self.path[at + 1 :])
        )

    def offer(self, hops: Mapping[int, tuple[str, ...]]) -> None:
        """Record hops that devices other than those of its path may take, with pages for all candidates."""
        self.offered = Offered(hops, {device: at for at, devices in hops.items() for device in devices[1:]})
        self.place.weights += self.spare

    @property
    def spare(self) -> Weights:
        """Pages per page set on the candidates that are not on its path."""
        layers = ((device, self.path[at].layers) for device, at in self.offered.devices.items())
        return tuple((device, last - first) for device, (first, last) in layers if last > first)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def pause(self, since: int | None) -> None:
        """Stop issuing rows since this time, in ns; None: issue rows again."""
        self._wait(replace(self.waits, paused=since))

    def moves(self, number: int) -> None:
        """Record the migration it is in; 0: none, and it is not held for one."""
        self._wait(replace(self.waits, move=number, held=self.waits.held and number > 0))

    def hold(self, held: bool) -> None:
        """Stop issuing rows for the last stage of its migration, or allow them again."""
        self._wait(replace(self.waits, held=held))

    def doom(self, cause: str) -> None:
        """Mark it for preemption when its row returns."""
        self._wait(replace(self.waits, doomed=cause))

    def leave_out(self, left_out: bool) -> None:
        """Stop issuing rows while an urgent sequence runs beside it, or issue them again."""
        self._wait(replace(self.waits, left_out=left_out))

    def stay_behind(self, behind: bool) -> None:
        """Stop issuing rows of a background sequence, or issue them again."""
        self._wait(replace(self.waits, behind=behind))

    def awaits_handoff(self, waiting: bool) -> None:
        """Stop issuing rows until it is handed off, or issue them again."""
        self._wait(replace(self.waits, handoff=waiting))

    def lose(self, lost: tuple[LostPages, ...]) -> None:
        """Record the page sets that are nowhere, and issue no rows as long as there are any."""
        self.lost = lost
        self._wait(replace(self.waits, mends=bool(lost)))

    def _wait(self, waits: Waits) -> None:
        self.waits = FREE if waits == FREE else waits
