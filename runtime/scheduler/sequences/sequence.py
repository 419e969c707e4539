"""Record one sequence as the scheduler knows it: its request, its progress, where it runs.

Contract: a `ScheduledSequence` is a LiveSequence with a chain that it keeps to its end (UN-09), a path while it runs,
and an epoch that grows whenever it is placed anew. Prompt and output are complete here, so it can always run again. It
decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from runtime.chains import Chain, Path, RunAhead, Variant
from runtime.control.sequence import LiveSequence
from runtime.kv.pages import groups_for
from runtime.scheduler.kv.prefix_index import marks_of
from runtime.scheduler.routing.path_usage import NOWHERE, Passes
from runtime.scheduler.sequences.parts import (
    FREE,
    NO_FAILURES,
    SETTLED,
    Failures,
    Offered,
    PagesTaken,
    Place,
    Predicted,
    Shared,
    Waits,
    Weights,
)
from runtime.types import ModelSpec, SequenceRequest


@dataclass(slots=True, eq=False)
class ScheduledSequence(LiveSequence):
    """`variant`: what it runs on instead of the chain that it named (BL-28). `flying`: a row of it is under way, of
    `issued` tokens; `attempt`: of the latest one that was predicted, or could have been. The parts are explained where
    they are defined; `predicted`: None while no hop of it is. What a row looks at each time stands here itself.
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
    failures: Failures = NO_FAILURES
    offered: Offered = SETTLED
    place: Place = field(default_factory=Place)
    pages: PagesTaken = field(default_factory=PagesTaken)
    shared: Shared = field(default_factory=Shared)

    @property
    def suspect(self) -> bool:
        """Whether it may be what kills devices: more than one has died with it."""
        return self.failures.deaths > 1

    @property
    def served(self) -> str | None:
        """What it runs on, where that is not what it asked for."""
        return None if self.variant is None else self.variant.name

    @property
    def device_request(self) -> SequenceRequest:
        """Its request as devices are told of it: for the version that it keeps to."""
        name = self.chain.loaded_as
        return self.request if name == self.request.model else replace(self.request, model=name)

    def first(self, upto: int) -> tuple[int, ...]:
        """The first tokens of its prompt and output."""
        return (*self.request.prompt, *self.output)[:upto]

    @property
    def longest(self) -> int:
        """Page groups that it comes to at most, wherever it runs."""
        spec = self.chain.spec
        return groups_for(
            spec,
            spec.virtual_tokens + min(len(self.request.prompt) + self.request.sampling.max_tokens, spec.max_model_len),
        )

    @property
    def realm(self) -> tuple[str, str]:
        """Within which K and V of equal tokens are equal, and may be shared."""
        return self.chain.version, self.request.tenant

    def mark(self) -> list[bytes]:
        """The marks of all whole groups of its prompt and output."""
        shared, width = self.shared, self.chain.spec.page_tokens
        if shared.width != width:  # it has got another chain while it waited
            shared.marks, shared.width = [], width
        done = len(shared.marks)
        if (done + 1) * width <= self.length:
            more = self._visible(done * width, self.length - done * width)
            shared.marks.extend(marks_of(more, width, shared.marks[-1] if done else b""))
        return shared.marks

    # -- where it runs -------------------------------------------------------------------------------------------------

    def seated(self, path_usage: Passes, weights: Weights, spec: ModelSpec) -> None:
        """It runs there from now on, under a new epoch; nothing is predicted (yet). `spec`: its model, with a context
        that this path can hold."""
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
        """Tokens that it gets at most where its model has this context."""
        return min(self.request.sampling.max_tokens, spec.max_model_len - len(self.request.prompt))

    def holds(self, groups: int) -> None:
        """So many page groups are taken for it on each device."""
        self.pages.groups, self.pages.room = groups, groups * self.spec.page_tokens

    def bereft(self, device: str) -> None:
        """A device of its path has died, with what it held; another takes its place soon."""
        self.place.devices -= {device}
        self.place.without(device)
        if self.predicted is not None:
            self.predicted.in_flight.clear()

    def unseated(self) -> None:
        """It runs nowhere."""
        self.path, self.place = (), Place()
        self.holds(0)
        self.flying = self.shared.tentative = False
        self._wait(Waits(self.waits.paused))
        self.predicted, self.offered = None, SETTLED

    # -- hops that are predicted, or open ------------------------------------------------------------------------------

    def predict(self, ahead: RunAhead, device: str, pages: int) -> None:
        """A hop of it is predicted; of a group the stand-in takes so many more pages there."""
        self.predicted, self.shared.tentative = Predicted(ahead), True
        more = dict(self.place.weights)
        more[device] = more.get(device, 0) + pages
        self.place.weights = tuple((name, count) for name, count in more.items() if count)

    @property
    def ahead(self) -> RunAhead | None:
        """The hop that is predicted."""
        return None if self.predicted is None else self.predicted.ahead

    def would_end(self, token: int) -> bool:
        """Whether this token would be its last one."""
        self.output.append(token)
        ends = self.finish() is not None
        self.output.pop()
        return ends

    def path_on(self, device: str) -> Path:
        """Its path, as a device that may take a hop of it sees it: with that hop there."""
        at = self.offered.devices.get(device)
        return (
            self.path if at is None else (*self.path[:at], replace(self.path[at], device=device), *self.path[at + 1 :])
        )

    def offer(self, hops: Mapping[int, tuple[str, ...]]) -> None:
        """Others than the devices of its path may take these hops."""
        self.offered = Offered(hops, {device: at for at, devices in hops.items() for device in devices[1:]})
        self.place.weights += self.spare

    @property
    def spare(self) -> Weights:
        """Pages of a group on those that may take a hop, beside its path."""
        layers = ((device, self.path[at].layers) for device, at in self.offered.devices.items())
        return tuple((device, last - first) for device, (first, last) in layers if last > first)

    # -- what it waits for ---------------------------------------------------------------------------------------------

    def pause(self, since: int | None) -> None:
        """It gets no rows from now on; None: it goes on."""
        self._wait(replace(self.waits, paused=since))

    def moves(self, number: int) -> None:
        """It is in this migration; 0: in none any more, and nothing is held for it."""
        self._wait(replace(self.waits, move=number, held=self.waits.held and number > 0))

    def hold(self, held: bool) -> None:
        """No rows are issued, for the last stage of its migration."""
        self._wait(replace(self.waits, held=held))

    def doom(self) -> None:
        """It is preempted when its row is back."""
        self._wait(replace(self.waits, doomed=True))

    def _wait(self, waits: Waits) -> None:
        self.waits = FREE if waits == FREE else waits
