"""What an agent's plans are made of: the device as the policy sees it, who comes in, and the rows of who runs.

Contract: `snapshot` changes nothing; `admit` and `row` do what was decided, sequence by sequence. It decides nothing
itself.
"""

from __future__ import annotations

from runtime.agent.local.planned import PlannedSequence
from runtime.agent.local.roster import Roster
from runtime.config import BatchingConfig
from runtime.control.trace_events import TraceEvents
from runtime.kv.pages import PageBook
from runtime.policy.batching.continuous import DeviceSnapshot, TokenShare
from runtime.types import Opened, Row


class Planner:
    def __init__(self, config: BatchingConfig, book: PageBook, roster: Roster, tell: TraceEvents) -> None:
        self._config = config
        self._book = book
        self._roster = roster
        self._tell = tell

    def snapshot(self) -> DeviceSnapshot:
        """The device as it will be when what is under way is over, whoever ends by then left out; their pages are not
        free yet.
        """
        running = tuple(live.view(self._book.holds(live.seq)) for live in self._roster.running if not live.concluding)
        # A step admits no more than there are places and tokens for: the rest of the queue is not worth a picture.
        places = min(self._config.max_num_seqs - len(running), self._config.max_num_batched_tokens)
        waiting = tuple(live.view(0) for live in self._roster.waiting.head(places))
        return DeviceSnapshot(self._book.capacity, self._book.free, running, waiting)

    def admit(self, live: PlannedSequence, now: int) -> Opened:
        self._roster.admit(live)
        self._book.open(live.seq, live.spec)
        self._tell.inserted(now, live.request, live.phase, live.tokens)
        return Opened(live.request, tuple(live.output))

    def row(self, share: TokenShare, step: int, now: int) -> Row:
        live = self._roster[share.seq]
        groups = self._book.extend(share.seq, live.ahead + share.tokens)
        if groups:
            self._tell.allocated(now, live.request, len(groups) * live.spec.kv_layers, self._book.free)
        if share.phase != "decode":
            self._tell.chunk(now, live.request, share.phase, live.computed + live.ahead, share.tokens, step)
        return live.row(share.tokens, groups)
