"""The relay: the state machine of one device in a cluster. Rows of sequences come in, steps go out, what they give goes to the next hop.

Contract: a driver calls, from one thread at a time, with `now` in nanoseconds of its own clock,

    handle(message or event, arrays, now)     whatever came; returns commands (`agent.commands`)
    next_step(now)                            a step for the engine, or None while nothing can run
    finish_step(result, now)                  once per step; or fail_step(reason, now)

(each of the last two with a lane, where steps that predict run on a stream of their own; `agent.ahead`)

A row waits in the queue of the stage that it enters at and runs in the next step that has room: nobody waits for a batch to fill (BL-14).
Rows of older epochs and of hops that are not here are dropped: whoever moved or closed the sequence knows. Rows that come before their
sequence is opened wait for that (`agent.early`).
Pages of what is closed while a step writes them are free when it is over. Rows that find no page wait, up to `patience`; then
they are told to be lost, and the scheduler sees what is to be done.

It knows no tensors, clocks, sockets or models' contents; whose turn it is decides `policy`; which device is next stands in the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from runtime.agent.ahead import Ahead, Alike, Judged, same_bits
from runtime.agent.answers import sampled_by_seq
from runtime.agent.commands import (
    SCHEDULER,
    LoadStage,
    PagesWritten,
    RelayCommand,
    RelayEvent,
    Send,
    StageFailed,
    StageLoaded,
    StageStep,
)
from runtime.agent.early import Early
from runtime.agent.guests import Guest, Waiting
from runtime.agent.moves import Moves
from runtime.agent.parting import Parting
from runtime.agent.returns import Returns
from runtime.agent.tables import Piece, Tables
from runtime.config import RelayConfig
from runtime.messages import (
    Close,
    Done,
    Drop,
    Go,
    Gone,
    Load,
    Loaded,
    Lost,
    Message,
    Open,
    Pages,
    Pass,
    Receive,
    Refused,
    Report,
    Settle,
    Want,
)
from runtime.policy.hops import Blocks, HopLimits, decide
from runtime.stages import Array, Hop, Stage, StageResult
from runtime.types import ModelSpec, Opened, PageCounts, PromptLogprobs, Row, Sampled, StepPlan

#: A driver with one stream takes all rows in turn, what predicts before what is predicted; one with two takes either kind on its own.
Lane = Literal["all", "real", "ahead"]


class Relay:
    """See the top of the file.

    Args:
        device: its name in paths.
        page_capacity: pages of the device.
        config: limits of a step, patience.
        alike: how predictions are compared (BL-25).
    """

    def __init__(self, device: str, page_capacity: int, config: RelayConfig, alike: Alike = same_bits) -> None:
        self.device = device
        self._alike = alike
        self._config = config
        self._tables = Tables(page_capacity)
        self._guests: dict[str, Guest] = {}
        self._queue: list[Waiting] = []
        self._under_way: dict[Lane, tuple[StepPlan, list[Waiting]]] = {}
        self._moves = Moves(device, self._tables, config)
        self._stages: dict[str, ModelSpec] = {}
        self._parting = Parting(self._tables)
        self._blocks: dict[str, tuple[str, ...]] = {}
        self._limits: dict[str, int] = {}
        self._returns = Returns(config.slack)
        self._early = Early()
        self._ahead = Ahead(device, self._tables)
        self._steps = self._busy = self._tokens = 0

    @property
    def busy(self) -> bool:
        """Whether a step is under way or rows wait for one."""
        return bool(self._under_way) or bool(self._queue) or bool(self._ahead.queue)

    def handle(self, event: Message | RelayEvent, arrays: Sequence[Array], now: int) -> list[RelayCommand]:
        """Take a message or an event. What is stale is dropped; what cannot be done is answered. Raises TypeError for others' messages."""
        match event:
            case Go():
                self._go(event, now)
                return []
            case Pass():
                self._take(event, arrays, now)
                return []
            case Open():
                return self._open(event, now)
            case Close():
                for seq, epoch in zip(event.seqs, event.epochs, strict=True):
                    self._close(seq, epoch)
                return []
            case Load() | Drop() | StageLoaded() | StageFailed():
                return self._provide(event)
            case Receive() | Settle() | Want() | Pages() | PagesWritten() | Gone():
                return self._move(event, arrays, now)
        raise TypeError(f"{type(event).__name__} is not for relays")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_step(self, now: int, lane: Lane = "all") -> StageStep | None:
        """Rows for the engine, or None. Raises RuntimeError while a step of this lane is under way."""
        if lane in self._under_way:
            raise RuntimeError("a step is still under way")
        chosen = self._choose(now, lane)
        if not chosen and (lane == "ahead" or not self._tables.released):
            return None
        opened: list[Opened] = []
        rows = tuple(self._row(each, opened) for each in chosen)
        self._steps += 1
        plan = StepPlan(self._steps, rows, tuple(opened), self._tables.take_released())
        self._under_way[lane] = plan, chosen
        inputs = {each.name: each.array for each in chosen if each.array is not None}
        return StageStep(plan, inputs, {each.name: each.steps for each in chosen if each.steps > 1})

    def finish_step(self, result: StageResult, now: int, lane: Lane = "all") -> list[RelayCommand]:
        """Take what the engine made of the step. Raises ValueError, and changes nothing, if it does not answer the plan."""
        plan, rows = self._step_of(lane)
        sampled = sampled_by_seq(plan, result.result)
        del self._under_way[lane]
        self._busy += result.result.busy
        self._tokens += plan.tokens
        prompts: dict[str, list[PromptLogprobs]] = {}
        for scores in result.result.prompt_logprobs:
            prompts.setdefault(scores.seq, []).append(scores)
        through: list[Waiting] = []
        onward: dict[str, list[Waiting]] = {}
        arrays: dict[str, list[Array]] = {}
        judged = Judged(self.device, self._alike)
        out: list[RelayCommand] = []
        for each in rows:
            if each.move:
                out += self._moves.ran(each, now)
                self._queue.extend(self._moves.take_rows())
                continue
            self._tables.fill(each.name, each.work)
            if not self._stands(each):
                continue
            if each.hop + 1 < len(each.guest.path):
                output = result.outputs[each.name]
                going = self._onward(each, output, judged) if each.turn else each
                if going is not None:
                    device = each.guest.path[each.hop + 1].device
                    onward.setdefault(device, []).append(going)
                    arrays.setdefault(device, []).append(output)
                if not each.shadow:
                    self._returns.leaves(each, now)
            else:
                through.append(each)
                self._returns.leaves(each, now)
        self._tables.settle(each.name for each in rows)
        for device, passed in onward.items():
            out.append(Send(device, _pass_of(passed), tuple(arrays[device])))
        if through:
            out.append(Send(SCHEDULER, self._done(through, sampled, prompts)))
        return [*out, *judged.told(), *self._parted()]

    def fail_step(self, reason: str, now: int, lane: Lane = "all") -> list[RelayCommand]:
        """The engine failed on the step: its rows are lost, all others go on. How far it got is unknown: it forgets their tables."""
        plan, rows = self._step_of(lane)
        del self._under_way[lane]
        self._tables.forget([row.seq for row in plan.rows], plan.released)
        self._tables.settle(each.name for each in rows)
        out: list[RelayCommand] = []
        for each in rows:
            out += self._moves.failed(each, reason) if each.move else []
        self._ahead.failed([each for each in rows if each.shadow])
        lost = self._lost([each for each in rows if not each.move and not each.shadow], reason, retry=False)
        return [*out, *lost, *self._parted()]

    def starved(self, now: int) -> list[RelayCommand]:
        """Rows that have waited too long for pages are lost here. To be called now and then."""
        due = now - self._config.patience_ms * 1_000_000
        late = [each for each in self._queue if each.since < due and self._stands(each) and not self._tables.fits(each.name, each.work)]
        gone = set(map(id, late))
        self._early.expire(now)
        self._queue = [each for each in self._queue if id(each) not in gone]
        return self._lost(late, f"no pages for its next tokens on {self.device}", retry=True)

    # -- looking in ----------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        entered = Counter(each.stage for each in self._queue)
        queues = tuple((self._blocks.get(stage, (stage,))[0], count) for stage, count in sorted(entered.items()))
        return Report(self.device, len(self._queue), self._steps, self._busy, self._tokens, self._tables.book.free, queues)

    def pages(self) -> PageCounts:
        return self._tables.book.counts()

    def check(self) -> None:
        """Verify that tables and sequences agree. Raises PageBookDamaged or RuntimeError. For tests, after every event."""
        held = {key for guest in self._guests.values() for key in guest.keys.values()} | self._moves.keys()
        held |= {guest.shadow for guest in self._guests.values() if guest.shadow is not None}
        self._tables.check(held)

    # -- inside: sequences ---------------------------------------------------------------------------------------------

    def _open(self, message: Open, now: int) -> list[RelayCommand]:
        refused: list[tuple[str, int]] = []
        for at, request in enumerate(message.requests):
            epoch = message.epochs[at]
            known = self._guests.get(request.seq)
            if known is not None and known.epoch >= epoch:
                continue
            guest = Guest(request, epoch, message.paths[at], message.outputs[at], ahead=message.ahead[at] if message.ahead else None)
            self._guests[guest.seq] = guest
            if message.keep[at]:
                if known is not None:
                    self._ahead.closed(known)
                seated = self._reseat(guest, known, message.computed[at])
            else:
                if known is not None:
                    self._let_go(known)
                seated = self._seat(guest, message.shared[at])
            if not seated:
                self._forget(guest)
                refused.append((request.seq, epoch))
                continue
            self._ahead.opened(guest, self._stages)
            if (early := self._early.take(request.seq, epoch)) is not None:
                self._take(early.rows, (early.array,), now)
        if not refused:
            return []
        seqs, epochs = zip(*refused, strict=True)
        return [Send(SCHEDULER, Lost(self.device, seqs, epochs, "a stage of its path, or K and V that it needs, is not here", True))]

    def _seat(self, guest: Guest, shared: tuple[str, int] | None) -> bool:
        """Give a sequence empty tables, or ones that begin as another's; false where a stage, or what it is to share, is missing."""
        other = self._guests.get(shared[0]) if shared is not None else None
        for hop in _here(guest, self.device):
            spec = self._stages.get(Stage(guest.request.model, hop.lo, hop.hi).id)
            if spec is None:
                return False
            guest.keys[hop.lo] = self._tables.open(guest.seq, hop.lo, spec)
            if shared is None:
                continue
            if other is None or hop.lo not in other.keys or not self._tables.share(guest.keys[hop.lo], other.keys[hop.lo], shared[1]):
                return False
        return True

    def _reseat(self, guest: Guest, known: Guest | None, computed: int) -> bool:
        """Give a sequence that goes on here the layers that it has here, and those that came, in tables of its new hops.

        False, and nothing of it stays, where any are missing, or are being written: by a row that is lost, for a device before it died.
        """
        had = [] if known is None else [(hop.layers, known.keys[hop.lo]) for hop in _here(known, self.device) if hop.lo in known.keys]
        had += self._moves.adopted(guest.seq, guest.epoch)
        new: list[tuple[int, ModelSpec, list[Piece]]] = []
        for hop in _here(guest, self.device):
            spec, pieces = self._stages.get(Stage(guest.request.model, hop.lo, hop.hi).id), _pieces(hop, had)
            if (
                any(self._tables.writes(key) for _, key in had)
                or spec is None
                or pieces is None
                or any(self._tables.book.tokens_of(piece.key) < computed for piece in pieces)
            ):
                for _, key in had:
                    self._tables.release(key)
                return False
            new.append((hop.lo, spec, pieces))
        keys = self._tables.recut(guest.seq, new, [key for _, key in had], computed)
        guest.keys.update(zip((lo for lo, _, _ in new), keys, strict=True))
        return True

    def _close(self, seq: str, epoch: int) -> None:
        guest = self._guests.get(seq)
        if guest is not None and guest.epoch <= epoch:
            self._forget(guest)
        self._early.take(seq, epoch)
        self._moves.closed(seq, epoch)

    def _forget(self, guest: Guest) -> None:
        del self._guests[guest.seq]
        self._let_go(guest)

    def _let_go(self, guest: Guest) -> None:
        self._ahead.closed(guest)
        for key in guest.keys.values():
            self._tables.release(key)
            self._returns.gone(key)

    # -- inside: rows --------------------------------------------------------------------------------------------------

    def _go(self, go: Go, now: int) -> None:
        at = 0
        guests, append = self._guests, self._queue.append
        for place, (seq, epoch, start, count, sample, generated, steps) in enumerate(
            zip(go.seqs, go.epochs, go.starts, go.counts, go.sample, go.generated, go.steps, strict=True)
        ):
            tokens = go.tokens[at : at + count]
            at += count
            guest = guests.get(seq)
            if guest is not None and guest.epoch == epoch:
                hop = guest.path[0]
                self._returns.comes(guest.keys[hop.lo], now)
                stage = f"{guest.request.model}[{hop.lo}:{hop.hi}]"
                name = guest.keys[hop.lo]
                append(Waiting(guest, epoch, 0, name, stage, start, count, tokens, None, sample, generated, steps, now, start > 0))
                if go.turns and go.turns[place]:
                    self._numbered(go.turns[place], go.ahead[place])

    def _take(self, rows: Pass, arrays: Sequence[Array], now: int) -> None:
        if len(arrays) != len(rows.seqs):
            return  # not one for each row: nobody could say whose is whose
        for at, seq in enumerate(rows.seqs):
            guest, index = self._guests.get(seq), rows.hops[at]
            if guest is None or guest.epoch < rows.epochs[at]:
                self._early.keep(rows, at, arrays[at], now)
                continue
            if guest.epoch != rows.epochs[at] or not 0 < index < len(guest.path):
                continue
            hop, count = guest.path[index], rows.counts[at]
            if hop.device != self.device or arrays[at].shape[:1] != (count,):
                continue
            stage = Stage(guest.request.model, hop.lo, hop.hi).id
            self._returns.comes(guest.keys[hop.lo], now)
            self._queue.append(
                Waiting(
                    guest,
                    guest.epoch,
                    index,
                    guest.keys[hop.lo],
                    stage,
                    rows.starts[at],
                    count,
                    None,
                    arrays[at],
                    rows.sample[at],
                    rows.generated[at],
                    1,
                    now,
                    rows.starts[at] > 0,
                )
            )
            if rows.turns and rows.turns[at]:
                self._numbered(rows.turns[at], rows.ahead[at])

    def _numbered(self, turn: int, ahead: bool) -> None:
        """The row that has just joined the queue has a turn: what it supersedes will not run, and perhaps it is predicted."""
        row = self._queue[-1]
        row.turn, row.ahead = turn, ahead
        row.guest.comes(turn, row.start)
        self._ahead.comes(row)

    def _choose(self, now: int, lane: Lane) -> list[Waiting]:
        """The rows of the next step; the others stay. Rows of what has gone meanwhile are dropped. What predicts comes first."""
        if self._ahead.queue and lane != "real":
            chosen = self._pick(self._ahead.due(self._undone(), self._stands), now)
            self._ahead.taken(chosen)
            if chosen:
                return chosen
        if lane == "ahead":
            return []
        waiting = [each for each in self._queue if self._stands(each)]
        chosen = self._pick(waiting, now)
        taken = set(map(id, chosen))
        self._queue = [each for each in waiting if id(each) not in taken]
        return chosen

    def _undone(self) -> list[Waiting]:
        """Rows that run next or now, in their order."""
        return [*(each for _, rows in self._under_way.values() for each in rows if not each.shadow), *self._queue]

    def _onward(self, row: Waiting, output: Array, judged: Judged) -> Waiting | None:
        """What goes on to the next hop when a row of a predicted sequence is through, if anything does."""
        if row.shadow:
            return self._ahead.predicted(row, output, self._undone())
        return None if judged.judge(row, output) else row

    def _pick(self, waiting: Sequence[Waiting], now: int) -> list[Waiting]:
        """Those of these rows that run now, with pages for what they write."""
        if not waiting:
            return []
        limits = HopLimits(self._config.token_budget, self._config.max_rows, self._config.patience_ms * 1_000_000)
        decision = decide(waiting, self._returns.expected(), Blocks(self._blocks, self._limits), limits, now)
        rows = [waiting[place] for place in decision.rows]
        for each in rows:
            if each.turn:
                self._tables.rewind(each.name, each.start)
        chosen = [each for each in rows if self._tables.grow(each.name, each.work)]
        for each in chosen:
            self._tables.write(each.name)
        return chosen

    def _stands(self, each: Waiting) -> bool:
        """Whether a row's sequence, or its move, is as it was when the row came."""
        if each.move:
            return self._tables.has(each.name)
        guest = each.guest
        if self._guests.get(guest.seq) is not guest or guest.epoch != each.epoch:
            return False
        return not each.turn or not guest.superseded(each.turn, each.start)

    def _row(self, each: Waiting, opened: list[Opened]) -> Row:
        if self._tables.introduce(each.name):
            opened.append(Opened(replace(each.guest.request, seq=each.name, model=each.stage), each.guest.output))
        groups = self._tables.tell(each.name, each.start + each.work)
        tokens = (0,) * each.tokens if each.ids is None else each.ids
        last = each.move == 0 and each.hop + 1 == len(each.guest.path)
        return Row(each.name, each.stage, tokens, each.start, groups, each.sample and last, each.generated)

    def _lost(self, rows: Iterable[Waiting], reason: str, *, retry: bool) -> list[RelayCommand]:
        gone = [each for each in rows if self._stands(each)]
        if not gone:
            return []
        seqs, epochs = tuple(each.guest.seq for each in gone), tuple(each.epoch for each in gone)
        return [Send(SCHEDULER, Lost(self.device, seqs, epochs, reason, retry))]

    # -- inside: stages and moves ---------------------------------------------------------------------------------------

    def _provide(self, event: Load | Drop | StageLoaded | StageFailed) -> list[RelayCommand]:
        match event:
            case Load():
                for stage, blocks in zip(event.stages, event.blocks, strict=True):
                    self._blocks[stage.id] = blocks
                    for block in blocks:
                        self._limits.setdefault(block, self._config.max_rows)
                self._limits.update(event.limits)
                self._returns.matter = any(limit < self._config.max_rows for limit in self._limits.values())
                self._parting.keep(event.stages)
                return [LoadStage(stage) for stage in event.stages]
            case Drop():
                for stage in event.stages:
                    self._stages.pop(stage.id, None)
                    self._blocks.pop(stage.id, None)
                self._parting.drop(event.stages)
                return self._parted()
            case StageLoaded():
                self._stages[event.stage.id] = event.spec
                return [Send(SCHEDULER, Loaded(self.device, event.stage, event.spec, event.nbytes))]
            case StageFailed():
                self._blocks.pop(event.stage.id, None)
                return [Send(SCHEDULER, Refused(self.device, event.stage, event.reason))]

    def _move(self, event: Receive | Settle | Want | Pages | PagesWritten | Gone, arrays: Sequence[Array], now: int) -> list[RelayCommand]:
        match event:
            case Receive():
                out = self._moves.receive(event, self._stages.get(event.stage.id), now)
            case Settle():
                out = self._moves.settle(event)
            case Want():
                out = [self._moves.give(event, self._guests.get(event.seq))]
            case Pages():
                out = self._moves.arrived(event, arrays, now)
            case PagesWritten():
                out = self._moves.written(event, now)
            case Gone():
                out = self._moves.unreachable(event.device, now)
        self._queue.extend(self._moves.take_rows())
        return out

    def _parted(self) -> list[RelayCommand]:
        """Stages that go now: an engine lets go of nothing while it runs a step, of whichever lane."""
        return [] if self._under_way else [*self._parting.due()]

    def _step_of(self, lane: Lane) -> tuple[StepPlan, list[Waiting]]:
        if lane not in self._under_way:
            raise RuntimeError("no step is under way")
        return self._under_way[lane]

    def _done(self, rows: Sequence[Waiting], sampled: Mapping[str, Sampled], prompts: Mapping[str, list[PromptLogprobs]]) -> Done:
        scores = tuple(replace(part, seq=each.guest.seq) for each in rows if each.name in prompts for part in prompts[each.name])
        return Done(
            self.device,
            tuple(each.guest.seq for each in rows),
            tuple(each.epoch for each in rows),
            tuple(each.work for each in rows),
            tuple(_own(sampled.get(each.name), each.guest.seq) for each in rows),
            scores,
            turns=_turns(rows),
        )


def _own(sampled: Sampled | None, seq: str) -> Sampled | None:
    """A token under its sequence's name."""
    return None if sampled is None else Sampled(seq, sampled.token, sampled.logprob, sampled.top)


def _here(guest: Guest, device: str) -> tuple[Hop, ...]:
    return tuple(hop for hop in guest.path if hop.device == device)


def _pieces(hop: Hop, had: Sequence[tuple[tuple[int, int], str]]) -> list[Piece] | None:
    """The layers of a hop out of tables by their layers, in order; None where some are missing."""
    pieces: list[Piece] = []
    at = hop.layers[0]
    for (first, last), key in sorted(had):
        if first <= at < min(last, hop.layers[1]):
            end = min(last, hop.layers[1])
            pieces.append(Piece(key, at - first, end - first))
            at = end
    return pieces if at == hop.layers[1] else None


def _pass_of(rows: Sequence[Waiting]) -> Pass:
    return Pass(
        tuple(each.guest.seq for each in rows),
        tuple(each.epoch for each in rows),
        tuple(each.hop + 1 for each in rows),
        tuple(each.start for each in rows),
        tuple(each.tokens for each in rows),
        tuple(each.sample for each in rows),
        tuple(each.generated for each in rows),
        _turns(rows),
        tuple(each.ahead for each in rows) if _turns(rows) else (),
    )


def _turns(rows: Sequence[Waiting]) -> tuple[int, ...]:
    turns = tuple(each.turn for each in rows)
    return turns if any(turns) else ()
