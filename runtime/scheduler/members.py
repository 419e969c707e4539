"""One sequence as the scheduler of a cluster sees it: what has become of it, and where it runs.

Contract: a `Member` is a LiveSequence with a chain that it keeps to (UN-09), a path while it runs, and an epoch that grows whenever it is
placed anew. Its prompt and output are the truth: whatever dies, it can be run again from them. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.agent.sequences import LiveSequence
from runtime.stages import Chain, Path
from runtime.types import ModelSpec

#: The chain of nobody.
NOWHERE = Chain(ModelSpec("", 0, 1, 0, 0), "", ())


@dataclass(slots=True, eq=False)
class Member(LiveSequence):
    """`weights`: pages that a group takes, by device of the path. `groups`: page groups taken on each of them.

    `flying`: a row of it is under way. `doomed`: to be preempted when that is back. `move`: the migration it is in, 0 for none;
    `held`: no rows are issued, for its last stage.
    """

    chain: Chain = NOWHERE
    epoch: int = 0
    path: Path = ()
    weights: tuple[tuple[str, int], ...] = ()
    groups: int = 0
    flying: bool = False
    doomed: bool = False
    held: bool = False
    move: int = 0
    devices: frozenset[str] = field(default=frozenset())

    def context(self, upto: int) -> tuple[int, ...]:
        """The first tokens of its prompt and output."""
        return (*self.request.prompt, *self.output)[:upto]

    def seated(self, path: Path, weights: tuple[tuple[str, int], ...]) -> None:
        """It runs there from now on, under a new epoch."""
        self.epoch += 1
        self.path = path
        self.weights = weights
        self.devices = frozenset(hop.device for hop in path)

    def bereft(self, device: str) -> None:
        """A device of its path has died, with what it held; another takes its place soon."""
        self.devices -= {device}
        self.weights = tuple((name, pages) for name, pages in self.weights if name != device)

    def unseated(self) -> None:
        """Its K and V are gone; prompt and output will run again as one prompt."""
        self.restart()
        self.path, self.weights, self.devices, self.groups = (), (), frozenset(), 0
        self.flying = self.doomed = self.held = False
        self.move = 0
