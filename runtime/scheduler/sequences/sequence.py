"""One sequence as the scheduler of a cluster sees it: what has become of it, and where it runs.

Contract: a `ScheduledSequence` is a LiveSequence with a chain that it keeps to (UN-09), a path while it runs, and an
epoch that grows whenever it is placed anew. Its prompt and output are the truth: whatever dies, it can be run again
from them. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from runtime.chains import Chain, Path, RunAhead, Variant
from runtime.control.sequence import LiveSequence
from runtime.kv.pages import groups_for
from runtime.scheduler.kv.page_accounting import PageHolding, Places
from runtime.scheduler.kv.prefix_index import CachedPrefix, marks_of
from runtime.scheduler.speculation.in_flight import InFlightRows
from runtime.types import ModelSpec, SequenceRequest

#: The chain of nobody.
NOWHERE = Chain(ModelSpec("", 0, 1, 0, 0), "", ())


@dataclass(slots=True, eq=False)
class PathUsage:
    """Tokens that have gone along one path of one chain; `counted` of them are in `flow`. `users`: sequences that are
    on it. `places`: by block its device, and the pages that a group takes there.
    """

    chain: Chain
    path: Path
    tokens: int = 0
    places: Places = ()
    users: int = 0
    counted: int = 0


NO_PASSES = PathUsage(NOWHERE, ())


@dataclass(slots=True, eq=False)
class ScheduledSequence(LiveSequence):
    """`weights`: pages that a group takes, by device of the path. `groups`: groups taken on each of them, `room`:
    tokens that they hold.

    `holding`: these pages in the ledger. `beginning`: what others find of it; `marks`: of its tokens, by groups of
    `width`. `alone`: it shares nothing any more.

    `most`: tokens that it gets at most on this path; `ends`: those that end it. `passes`: what goes along its path is
    counted there.

    `flying`: a row of it is under way, of `issued` tokens. `doomed`: to be preempted when that is back. `move`: the
    migration it is in, 0 for none; `held`: no rows are issued, for its last stage. `ahead`: the hop that is predicted;
    `tries`: its rows then; `turn`: of the
    latest. `tentative`: it was predicted here, so that nobody may begin with its K and V (UN-13).
    `offers`: hops that nobody has taken yet, and who may (BL-23), that of the path first; `asked`: the others, and the
    hop of each.
    `variant`: what it runs on instead of the chain that it named (BL-28). `paused`: since when it waits for somebody
    else, and gets no rows; None while it does not. `deaths`: devices that died with a row of it since its latest token;
    `strays`: rows of it that nobody had any more, likewise.
    """

    chain: Chain = NOWHERE
    epoch: int = 0
    path: Path = ()
    weights: tuple[tuple[str, int], ...] = ()
    groups: int = 0
    room: int = 0
    holding: PageHolding = field(default_factory=PageHolding)
    beginning: CachedPrefix | None = None
    marks: list[bytes] = field(default_factory=list)
    width: int = 0
    alone: bool = False
    most: int = 0
    ends: frozenset[int] = frozenset()
    passes: PathUsage = NO_PASSES
    flying: bool = False
    issued: int = 0
    doomed: bool = False
    held: bool = False
    paused: int | None = None
    move: int = 0
    devices: frozenset[str] = frozenset()
    ahead: RunAhead | None = None
    tries: InFlightRows = field(default_factory=InFlightRows)
    turn: int = 0
    tentative: bool = False
    variant: Variant | None = None
    deaths: int = 0
    strays: int = 0
    offers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    @property
    def suspect(self) -> bool:
        """Whether it may be what kills devices: more than one has died with it."""
        return self.deaths > 1

    @property
    def served(self) -> str | None:
        """What it runs on, where that is not what it asked for."""
        return None if self.variant is None else self.variant.name

    @property
    def told(self) -> SequenceRequest:
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
        width = self.chain.spec.page_tokens
        if self.width != width:  # it has got another chain while it waited
            self.marks, self.width = [], width
        done = len(self.marks)
        if (done + 1) * width <= self.length:
            more = self._visible(done * width, self.length - done * width)
            self.marks.extend(marks_of(more, width, self.marks[-1] if done else b""))
        return self.marks

    def seated(self, passes: PathUsage, weights: tuple[tuple[str, int], ...], spec: ModelSpec) -> None:
        """It runs there from now on, under a new epoch; nothing is predicted (yet). `spec`: its model, with a context
        that this path can hold."""
        self.epoch += 1
        self.ahead = None
        self.tries.clear()
        self.passes, self.path, self.spec = passes, passes.path, spec
        sampling = self.request.sampling
        self.most = self.most_on(spec)
        self.ends = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))
        self.weights = weights
        self.devices = frozenset(hop.device for hop in self.path)

    def most_on(self, spec: ModelSpec) -> int:
        """Tokens that it gets at most where its model has this context."""
        return min(self.request.sampling.max_tokens, spec.max_model_len - len(self.request.prompt))

    def holds(self, groups: int) -> None:
        """So many page groups are taken for it on each device."""
        self.groups, self.room = groups, groups * self.spec.page_tokens

    def predicted(self, ahead: RunAhead, device: str, pages: int) -> None:
        """A hop of it is predicted; of a group the stand-in takes so many more pages there."""
        self.ahead, self.tentative = ahead, True
        more = dict(self.weights)
        more[device] = more.get(device, 0) + pages
        self.weights = tuple((name, count) for name, count in more.items() if count)

    def path_on(self, device: str) -> Path:
        """Its path, as whoever may take a hop of it sees it: with that hop there."""
        at = self.asked.get(device)
        return (
            self.path if at is None else (*self.path[:at], replace(self.path[at], device=device), *self.path[at + 1 :])
        )

    def offered(self, offers: dict[int, tuple[str, ...]]) -> None:
        """Others than those of its path may take these hops."""
        self.offers = offers
        self.asked = {device: at for at, devices in offers.items() for device in devices[1:]}
        self.weights += self.spare

    @property
    def spare(self) -> tuple[tuple[str, int], ...]:
        """Pages of a group on those that may take a hop, beside its path."""
        layers = ((device, self.path[at].layers) for device, at in self.asked.items())
        return tuple((device, last - first) for device, (first, last) in layers if last > first)

    def bereft(self, device: str) -> None:
        """A device of its path has died, with what it held; another takes its place soon."""
        self.devices -= {device}
        self.tries.clear()
        self.weights = tuple((name, pages) for name, pages in self.weights if name != device)

    def would_end(self, token: int) -> bool:
        """Whether this token would be its last one."""
        self.output.append(token)
        ends = self.finish() is not None
        self.output.pop()
        return ends

    def unseated(self) -> None:
        """It runs nowhere."""
        self.path, self.weights, self.devices = (), (), frozenset()
        self.holds(0)
        self.flying = self.doomed = self.held = self.tentative = False
        self.ahead = None
        self.tries.clear()
        self.offers, self.asked = {}, {}
        self.move = 0
