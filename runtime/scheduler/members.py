"""One sequence as the scheduler of a cluster sees it: what has become of it, and where it runs.

Contract: a `Member` is a LiveSequence with a chain that it keeps to (UN-09), a path while it runs, and an epoch that grows whenever it is
placed anew. Its prompt and output are the truth: whatever dies, it can be run again from them. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from runtime.agent.sequences import LiveSequence
from runtime.scheduler.tries import Tries
from runtime.stages import Chain, Path, RunAhead, Variant
from runtime.types import ModelSpec, SequenceRequest

#: The chain of nobody.
NOWHERE = Chain(ModelSpec("", 0, 1, 0, 0), "", ())


@dataclass(slots=True, eq=False)
class Passes:
    """Tokens that have gone along one path of one chain."""

    chain: Chain
    path: Path
    tokens: int = 0


NO_PASSES = Passes(NOWHERE, ())


@dataclass(slots=True, eq=False)
class Member(LiveSequence):
    """`weights`: pages that a group takes, by device of the path. `groups`: groups taken on each of them, `room`: tokens that they hold.

    `most`: tokens that it gets at most on this path; `ends`: those that end it. `passes`: what goes along its path is counted there.

    `flying`: a row of it is under way. `doomed`: to be preempted when that is back. `move`: the migration it is in, 0 for none;
    `held`: no rows are issued, for its last stage. `ahead`: the hop that is predicted; `tries`: its rows then; `turn`: of the latest.
    `variant`: what it runs on instead of the chain that it named (BL-28).
    """

    chain: Chain = NOWHERE
    epoch: int = 0
    path: Path = ()
    weights: tuple[tuple[str, int], ...] = ()
    groups: int = 0
    room: int = 0
    most: int = 0
    ends: frozenset[int] = frozenset()
    passes: Passes = NO_PASSES
    flying: bool = False
    doomed: bool = False
    held: bool = False
    move: int = 0
    devices: frozenset[str] = frozenset()
    ahead: RunAhead | None = None
    tries: Tries = field(default_factory=Tries)
    turn: int = 0
    variant: Variant | None = None

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

    def seated(self, passes: Passes, weights: tuple[tuple[str, int], ...], spec: ModelSpec) -> None:
        """It runs there from now on, under a new epoch; nothing is predicted (yet). `spec`: its model, with a context that this path can
        hold."""
        self.epoch += 1
        self.ahead = None
        self.tries.clear()
        self.passes, self.path, self.spec = passes, passes.path, spec
        sampling = self.request.sampling
        self.most = min(sampling.max_tokens, spec.max_model_len - len(self.request.prompt))
        self.ends = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))
        self.weights = weights
        self.devices = frozenset(hop.device for hop in self.path)

    def holds(self, groups: int) -> None:
        """So many page groups are taken for it on each device."""
        self.groups, self.room = groups, groups * self.spec.page_tokens

    def predicted(self, ahead: RunAhead, device: str, pages: int) -> None:
        """A hop of it is predicted; of a group the stand-in takes so many more pages there."""
        self.ahead = ahead
        more = dict(self.weights)
        more[device] = more.get(device, 0) + pages
        self.weights = tuple((name, count) for name, count in more.items() if count)

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
        self.flying = self.doomed = self.held = False
        self.ahead = None
        self.tries.clear()
        self.move = 0
