"""One engine of per-model provisioning: its own queue, its own reserved memory, its own step loop.

    waiting -> next_step(): the prompts that fit, else one token of every running request -> finish_step()

As vLLM of the paper's time: prompts first, whole and in a step of their own; K and V grow token by token; if the
reserve is full, the latest request is preempted and computed again. With `run_to_completion` no request joins a batch
that runs. Pure state: it has no clock and knows nothing of other engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.sim.cost.blocks import BlockWork
from runtime.types import SequenceRequest
from zoo.errors import InputError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of all engines of a baseline.

    Fields:
        start_s: Seconds from the begin of an engine until it serves, beside loading its weights: process, profiling run
            and recorded steps.
        reserve_seqs: Sequences of the greatest length for whose K and V an engine reserves memory; the paper's batch.
        max_num_seqs: Requests in a step.
        max_num_batched_tokens: Tokens of prompts in a step.
        run_to_completion: A batch takes no request until all of its requests have ended.
    """

    start_s: float = 15.0
    reserve_seqs: int = 32
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    run_to_completion: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < 1e6 or min(self.reserve_seqs, self.max_num_seqs, self.max_num_batched_tokens) < 1:
            raise InputError("an engine starts in some seconds, and its other limits are at least 1")


@dataclass(slots=True)
class EngineRequest:
    """A request in an engine. `context`: tokens with K and V; `made`: generated tokens."""

    request: SequenceRequest
    context: int = 0
    made: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that its prefill computes: the prompt, and what was generated before a preemption."""
        return len(self.request.prompt) + self.made

    @property
    def complete(self) -> bool:
        return self.made >= self.request.sampling.max_tokens


@dataclass(slots=True)
class ModelEngine:
    """An engine of one group of models on one device.

    Fields:
        group: The models that it serves have this name together.
        capacity: Tokens of K and V that its reserve holds.
        nbytes: Bytes of its weights and its reserve.
        up: Whether it serves; False while it starts.
        draining: Whether it takes no more requests, and stops when its own have ended.
        since: When it became idle, in ns.
    """

    group: str
    device: str
    capacity: int
    nbytes: int
    settings: EngineSettings
    up: bool = False
    draining: bool = False
    since: int = 0
    preemptions: int = 0
    waiting: deque[EngineRequest] = field(default_factory=deque)
    running: list[EngineRequest] = field(default_factory=list)
    _step: list[EngineRequest] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.up and not self.waiting and not self.running

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def used(self) -> int:
        """Tokens of K and V in use, those of prompts that run now among them."""
        return sum(each.context or each.tokens for each in self.running)

    @property
    def full(self) -> bool:
        """Whether the first waiting request does not fit beside the running ones."""
        return bool(self.waiting) and not self._fits(self.waiting[0], self.used, len(self.running))

    def next_step(self) -> Sequence[EngineRequest]:
        """Return the requests of the next step, none if there is nothing to do: new ones, or all running ones."""
        if not self.up:
            return ()
        self._step = self._admitted()
        if not self._step:
            while self.used + len(self.running) > self.capacity:
                latest = self.running.pop()
                latest.context = 0
                self.waiting.appendleft(latest)
                self.preemptions += 1
            self._step = list(self.running)
        return self._step

    def work(self) -> dict[str, BlockWork]:
        """Return the work of the step by model."""
        works: dict[str, BlockWork] = {}
        for each in self._step:
            work = works.setdefault(each.request.model, BlockWork())
            if each.context:
                work.rows += 1
                work.context += each.context + 1
            else:
                work.add_row(0, each.tokens)
        return works

    def finish_step(self) -> Sequence[EngineRequest]:
        """Advance every request of the step by a token and return them; those that are done have left."""
        for each in self._step:
            each.context = each.context + 1 if each.context else each.tokens
            each.made += 1
        self.running = [each for each in self.running if not each.complete]
        step, self._step = self._step, []
        return step

    def _admitted(self) -> list[EngineRequest]:
        """Take the waiting requests that run their prompts now."""
        found: list[EngineRequest] = []
        if self.settings.run_to_completion and self.running:
            return found
        used, tokens, before = self.used, 0, len(self.running)
        while self.waiting and self._fits(self.waiting[0], used, before + len(found)):
            first = self.waiting[0]
            if found and tokens + first.tokens > self.settings.max_num_batched_tokens:
                break
            found.append(self.waiting.popleft())
            used += first.tokens + 1
            tokens += first.tokens
        self.running += found
        return found

    def _fits(self, request: EngineRequest, used: int, count: int) -> bool:
        if self.settings.run_to_completion:  # what a batch may come to need is reserved
            return count < min(self.settings.reserve_seqs, self.settings.max_num_seqs)
        return count < self.settings.max_num_seqs and used + request.tokens + 1 <= self.capacity
