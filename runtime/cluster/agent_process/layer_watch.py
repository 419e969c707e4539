"""Answer page requests while a step runs: the engine calls in between layers (TI-15).

Only page requests are handled then, which change nothing here. All other messages wait for the end of the step, in
their order. The step does not wait for a link: what has come is taken, and what is sent goes on a thread of the link.
Pages are read and their digests computed on the step's thread, in at most a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from runtime.agent.agent import Agent
from runtime.control.agent_io import AgentCommand
from runtime.messages import SCHEDULER, PageRequest
from runtime.transport.link import Link
from runtime.transport.messenger import Envelope, PeerCut

#: Least time in nanoseconds between two looks. Layers that are faster go together.
_PERIOD = 1_000_000
#: Times as long as a look has taken, the step goes on before the next one.
_SHARE = 4


class StepWatch:
    """`runtime.chains.LayerWatch` of one agent.

    Args:
        carry_out: Carries out commands.
        put_off: Takes messages that are to be handled after the step.
    """

    def __init__(
        self,
        agent: Agent,
        messenger: Link,
        clock: Callable[[], int],
        carry_out: Callable[[Iterable[AgentCommand]], None],
        put_off: Callable[[Envelope | PeerCut], None],
    ) -> None:
        self._agent, self._messenger, self._clock = agent, messenger, clock
        self._carry_out, self._put_off = carry_out, put_off
        self._next = 0

    def __call__(self, passed: Callable[[], Mapping[str, int]]) -> None:
        if (now := self._clock()) < self._next:
            return
        for item in self._messenger.receive(0.0):
            if isinstance(item, Envelope) and item.sender != SCHEDULER and isinstance(item.message, PageRequest):
                self._carry_out(self._agent.answer_pages(item.message, now))
            else:
                self._put_off(item)
        self._carry_out(self._agent.layers_written(passed()))
        end = self._clock()
        self._next = end + max(_PERIOD, _SHARE * (end - now))
