"""One sequence while it lives on a device, and queues of sequences in rank order.

Contract: `LiveSequence` holds what is known of a sequence (its output, how far K and V reach); `RankedQueue` keeps
sequences by rank: priority first (lower goes first), then arrival, then the order in which they came.
Neither decides anything; pages are the page book's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from runtime.types import FinishReason, ModelSpec, PromptLogprobs, SequenceRequest

#: Why tokens are run (UN-17): `prefill` a prompt, `resume` after preemption, `decode` the next token.
Phase = Literal["prefill", "resume", "decode"]


class Rank(NamedTuple):
    """Who goes first. `ordinal` makes it unique."""

    priority: int
    arrival: int
    ordinal: int


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence from `add` to its last event. `computed`: tokens, virtual ones among them, whose K and V are in
    pages.
    """

    request: SequenceRequest
    spec: ModelSpec
    rank: Rank
    output: list[int] = field(default_factory=list)
    computed: int = 0
    phase: Phase = "prefill"
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def seq(self) -> str:
        return self.request.seq

    @property
    def tokens(self) -> int:
        """Its context: virtual tokens, prompt and output."""
        return self.spec.virtual_tokens + self.length

    @property
    def length(self) -> int:
        """What its caller sees of its context: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    @property
    def samples(self) -> bool:
        """Whether any token is wanted at all; false where only the prompt is to be scored."""
        return self.request.sampling.max_tokens > 0

    def span(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens to run, zeros for virtual ones."""
        first = self.computed
        virtual = min(max(0, self.spec.virtual_tokens - first), count)
        start = first + virtual - self.spec.virtual_tokens
        return (0,) * virtual + self._visible(start, count - virtual)

    def _visible(self, start: int, count: int) -> tuple[int, ...]:
        """`count` tokens of prompt and output, from number `start` on."""
        prompt = self.request.prompt
        if start >= len(prompt):
            first = start - len(prompt)
            return tuple(self.output[first : first + count])
        return prompt[start : start + count] + tuple(self.output[: max(0, start + count - len(prompt))])

    def restart(self) -> None:
        """Forget K and V: prompt and output will be run again, as one prompt (QL-09)."""
        self.computed = 0
        self.phase = "resume"
        # Those of a prompt that has not been answered yet will come again, from the start.
        self.prompt_logprobs.clear()

    def finish(self) -> FinishReason | None:
        """Whether the output is complete, judged after each new token. The token that stops it belongs to it."""
        sampling, made = self.request.sampling, len(self.output)
        if made and made >= sampling.min_tokens:
            token = self.output[-1]
            if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.spec.eos_token_ids):
                return "stop"
        full = made >= sampling.max_tokens or self.length >= self.spec.max_model_len
        return "length" if full else None


Live = TypeVar("Live", bound=LiveSequence)


class RankedQueue(Generic[Live]):
    """Sequences in rank order. Adding and removing cost a binary search and a move of pointers."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._sequences: dict[Rank, Live] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Live]:
        return (self._sequences[rank] for rank in self._ranks)

    def __contains__(self, live: Live) -> bool:
        return live.rank in self._sequences

    def head(self, count: int) -> list[Live]:
        """The first `count` of them, or all."""
        return [self._sequences[rank] for rank in self._ranks[: max(0, count)]]

    def add(self, live: Live) -> None:
        insort(self._ranks, live.rank)
        self._sequences[live.rank] = live

    def remove(self, live: Live) -> None:
        """Raises KeyError if it is not a member."""
        del self._sequences[live.rank]
        del self._ranks[bisect_left(self._ranks, live.rank)]
