"""One step of continuous batching: which sequences run, how many tokens each, who waits, who gives way.

Contract: `decide` is a pure function of a frozen snapshot and the limits of a step. In *rank* order (priority, then
arrival), it

  1. gives the first sequence and every decoding one their next token; short of pages, the last in rank is preempted
     and will be recomputed (QL-09, through UN-17's one prefill path). The first in rank is never preempted: whatever
     the load, it advances each step, so every sequence finishes in the end;
  2. gives prompts their chunks from what is left of the token budget (TI-08), within the pages that are free;
  3. admits waiting sequences in order, while each one's whole context fits beside what the running prompts still need
     and the watermark. It stops at the first that does not fit: nobody overtakes, so within a priority nobody starves.
     On an empty device the watermark does not count: who fits at all is admitted at once.

It does not know clocks, tokens, tensors or which pages; it trusts that no sequence is larger than the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from runtime.config import BatchingConfig
from runtime.kv.pages import groups_for
from runtime.types import ModelSpec

#: Why tokens are run (UN-17): `prefill` a prompt, `resume` after preemption, `decode` the next token.
Phase = Literal["prefill", "resume", "decode"]


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as the policy sees it.

    `tokens`: prompt and output so far; `computed`: how many of them have K and V in pages; `groups`: page groups held.
    """

    seq: str
    spec: ModelSpec
    tokens: int
    computed: int
    groups: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """A device between two steps. `running` and `waiting` in rank order; `waiting` may be the head of a longer
    queue.
    """

    capacity: int
    free: int
    running: tuple[SequenceView, ...]
    waiting: tuple[SequenceView, ...]


@dataclass(frozen=True, slots=True)
class TokenShare:
    """What one sequence gets of a step: the next `tokens` of its context, and `groups` more page groups for them."""

    seq: str
    tokens: int
    groups: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """One step. `preempted` lose their pages before anything else; `admitted` are among the `shares`."""

    shares: tuple[TokenShare, ...]
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


def decide(snapshot: DeviceSnapshot, config: BatchingConfig) -> BatchDecision:
    """The next step of a device. No sequence twice, never more tokens than the budget, never more pages than free."""
    step = _Step(snapshot, config)
    step.give_next_tokens()
    step.give_prompt_chunks()
    step.admit()
    return step.decision()


class _Step:
    """The ledger of one decision: what is left of pages and tokens while shares are handed out."""

    def __init__(self, snapshot: DeviceSnapshot, config: BatchingConfig) -> None:
        self._waiting = snapshot.waiting
        self._running = list(snapshot.running)  # preempted ones leave from the end
        self._free = snapshot.free
        self._budget = config.max_num_batched_tokens
        self._max_sequences = config.max_num_seqs
        self._watermark = math.ceil(config.watermark * snapshot.capacity)
        self._short_of_pages = False
        self._shares: dict[str, TokenShare] = {}
        self._admitted: list[SequenceView] = []
        self._preempted: list[str] = []

    def give_next_tokens(self) -> None:
        place = 0
        while place < len(self._running) and self._budget > 0:
            view = self._running[place]
            if (place == 0 or view.phase == "decode") and self._make_room(view, place):
                self._grant(view, 1)
            place += 1

    def give_prompt_chunks(self) -> None:
        for view in self._running:
            if view.phase == "decode":
                continue
            given = self._given(view)
            wanted = min(view.tokens - view.computed, given + self._budget)
            chunk = min(wanted, self._affordable(view))
            if chunk < wanted:
                self._short_of_pages = True
            if chunk > given:
                self._grant(view, chunk)

    def admit(self) -> None:
        if self._preempted:
            return
        owed = sum(self._still_owed(view) for view in self._running if view.phase != "decode")
        for view in self._waiting:
            if self._budget < 1 or len(self._running) + len(self._admitted) >= self._max_sequences:
                return
            alone = not self._running and not self._admitted
            if self._free - owed - self._pages_missing(view, view.tokens) < (0 if alone else self._watermark):
                return
            self._admitted.append(view)
            # Only the last one admitted can get less than its whole context: nothing is owed to those before it.
            self._grant(view, min(view.tokens - view.computed, self._budget))

    def decision(self) -> BatchDecision:
        admitted = tuple(view.seq for view in self._admitted)
        return BatchDecision(tuple(self._shares.values()), admitted, tuple(self._preempted))

    def _make_room(self, view: SequenceView, place: int) -> bool:
        """Preempt from the end of the ranks until one more token of `view` fits; false if it had to go itself."""
        while self._pages_missing(view, view.computed + 1) > self._free:
            if len(self._running) == 1:  # the first in rank never gives way
                return False
            victim = self._running.pop()
            self._free += victim.groups * victim.spec.kv_layers
            self._preempted.append(victim.seq)
            if len(self._running) == place:
                return False
        return True

    def _grant(self, view: SequenceView, tokens: int) -> None:
        """Set the share of `view` to `tokens`, and take what that needs beyond its share so far."""
        groups = max(0, groups_for(view.spec, view.computed + tokens) - view.groups)
        self._budget -= tokens - self._given(view)
        self._free -= (groups - self._given_groups(view)) * view.spec.kv_layers
        self._shares[view.seq] = TokenShare(view.seq, tokens, groups, view.phase)

    def _given(self, view: SequenceView) -> int:
        share = self._shares.get(view.seq)
        return 0 if share is None else share.tokens

    def _given_groups(self, view: SequenceView) -> int:
        share = self._shares.get(view.seq)
        return 0 if share is None else share.groups

    def _affordable(self, view: SequenceView) -> int:
        """Tokens of `view` that fit the pages it has, those granted in this step, and, in turn, the free ones."""
        spare = 0 if self._short_of_pages else self._free // view.spec.kv_layers
        return (view.groups + self._given_groups(view) + spare) * view.spec.page_tokens - view.computed

    def _pages_missing(self, view: SequenceView, tokens: int) -> int:
        """Pages that a context of `tokens` tokens needs beyond those held."""
        return max(0, groups_for(view.spec, tokens) - view.groups) * view.spec.kv_layers

    def _still_owed(self, view: SequenceView) -> int:
        """Pages that the rest of a context will need after this step."""
        return self._pages_missing(view, view.tokens) - self._given_groups(view) * view.spec.kv_layers
