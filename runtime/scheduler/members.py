"""One sequence as the scheduler of a cluster sees it: what has become of it, and where it runs.

Contract: a `Member` is a LiveSequence with a chain that it keeps to (UN-09), a path while it runs, and an epoch that grows whenever it is
placed anew. Its prompt and output are the truth: whatever dies, it can be run again from them. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.agent.sequences import LiveSequence
from runtime.stages import Chain, Path
from runtime.types import ModelSpec

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
    `held`: no rows are issued, for its last stage.
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

    def first(self, upto: int) -> tuple[int, ...]:
        """The first tokens of its prompt and output."""
        return (*self.request.prompt, *self.output)[:upto]

    def seated(self, passes: Passes, weights: tuple[tuple[str, int], ...], spec: ModelSpec) -> None:
        """It runs there from now on, under a new epoch. `spec`: its model, with a context that this path can hold."""
        self.epoch += 1
        self.passes, self.path, self.spec = passes, passes.path, spec
        sampling = self.request.sampling
        self.most = min(sampling.max_tokens, spec.max_model_len - len(self.request.prompt))
        self.ends = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))
        self.weights = weights
        self.devices = frozenset(hop.device for hop in self.path)

    def holds(self, groups: int) -> None:
        """So many page groups are taken for it on each device."""
        self.groups, self.room = groups, groups * self.spec.page_tokens

    def bereft(self, device: str) -> None:
        """A device of its path has died, with what it held; another takes its place soon."""
        self.devices -= {device}
        self.weights = tuple((name, pages) for name, pages in self.weights if name != device)

    def unseated(self) -> None:
        """It runs nowhere."""
        self.path, self.weights, self.devices = (), (), frozenset()
        self.holds(0)
        self.flying = self.doomed = self.held = False
        self.move = 0
