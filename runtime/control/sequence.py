"""Hold the state of one live sequence, and queues of sequences in rank order.

`LiveSequence` holds a sequence's output and the length of its K and V; `RankedQueue` orders sequences by priority
(lower first), then arrival or deadline, then order of addition. Neither decides. Pages are in `kv.pages.PageBook`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from runtime.types import FinishReason, ModelSpec, PromptLogprobs, SequenceRequest

#: Why tokens are run (UN-17): `prefill` a prompt, `resume` after a preemption, `decode` the next token.
Phase = Literal["prefill", "resume", "decode"]


class Rank(NamedTuple):
    """Order sequences. `order`: arrival or deadline in ns; `ordinal` makes the rank unique."""

    priority: int
    order: int
    ordinal: int


@dataclass(slots=True, eq=False)
class LiveSequence:
    """Hold a sequence from its arrival to its last event.

    Fields:
        computed: Tokens with K and V in pages, virtual ones included.
        prompt_logprobs: Log-probabilities that are computed but not yet reported.
        cached: Tokens of the prompt that cached pages had when its present run began.
    """

    request: SequenceRequest
    spec: ModelSpec
    rank: Rank
    output: list[int] = field(default_factory=list)
    computed: int = 0
    phase: Phase = "prefill"
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    cached: int = 0

    def __post_init__(self) -> None:
        if self.request.output:
            self.output, self.phase = list(self.request.output), "resume"

    @property
    def seq(self) -> str:
        return self.request.seq

    @property
    def tokens(self) -> int:
        """Return the context length: virtual tokens, prompt and output."""
        return self.spec.virtual_tokens + self.length

    @property
    def length(self) -> int:
        """Return the context length that the client sees: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    @property
    def samples(self) -> bool:
        """Return whether any token is to be generated; false if only the prompt is scored."""
        return self.request.sampling.max_tokens > 0

    def span(self, count: int) -> tuple[int, ...]:
        """Return the next `count` tokens to run, zeros for virtual ones."""
        first = self.computed
        virtual = min(max(0, self.spec.virtual_tokens - first), count)
        start = first + virtual - self.spec.virtual_tokens
        return (0,) * virtual + self._visible(start, count - virtual)

    def _visible(self, start: int, count: int) -> tuple[int, ...]:
        """Return `count` tokens of prompt and output, starting at index `start`."""
        prompt = self.request.prompt
        if start >= len(prompt):
            first = start - len(prompt)
            return tuple(self.output[first : first + count])
        return prompt[start : start + count] + tuple(self.output[: max(0, start + count - len(prompt))])

    def restart(self) -> None:
        """Forget K and V: prompt and output run again as one prompt (QL-09)."""
        self.computed = 0
        self.phase = "resume"
        # Log-probabilities that are not yet reported are computed again from the start.
        self.prompt_logprobs.clear()

    def finish(self) -> FinishReason | None:
        """Return why the output is complete, or None.

        Called after each new token; the token that stops it is part of it.
        """
        sampling, made = self.request.sampling, len(self.output)
        if made and made >= sampling.min_tokens:
            token = self.output[-1]
            if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.spec.eos_token_ids):
                return "stop"
        full = made >= sampling.max_tokens or self.length >= self.spec.max_model_len
        return "length" if full else None


Live = TypeVar("Live", bound=LiveSequence)


class RankedQueue(Generic[Live]):
    """Keep sequences in rank order. Adding and removing cost a binary search and a shift of the list."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._sequences: dict[Rank, Live] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Live]:
        return (self._sequences[rank] for rank in self._ranks)

    def __contains__(self, live: Live) -> bool:
        return live.rank in self._sequences

    def first(self) -> Live:
        """Return the first sequence. Raises IndexError if there is none."""
        return self._sequences[self._ranks[0]]

    def add(self, live: Live) -> None:
        insort(self._ranks, live.rank)
        self._sequences[live.rank] = live

    def remove(self, live: Live) -> None:
        """Remove a sequence. Raises KeyError if it is not in the queue."""
        del self._sequences[live.rank]
        del self._ranks[bisect_left(self._ranks, live.rank)]
