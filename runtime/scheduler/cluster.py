"""The scheduler of a cluster: the state machine that knows every sequence, and says which device runs what next. Per step, not per token.

    Arrive -> waiting --path, pages--> Open, Go -> … Done -> Go -> … Done -> Emit, Close      one row of a sequence is under way at a time

Contract: a driver calls `handle` with each message and event, in the order in which they came, and carries out what it returns, in order.
A sequence's prompt and output are kept here and are the truth: whatever is lost on the way (a device, a row, pages), it runs again from
them on another path, under a new epoch, and nobody sees a token twice. Every sequence gets exactly one event with `finish`, its last.
Pages are taken here before a row is sent, on all devices of its path, so that no row waits for pages behind another; short of them,
whoever is last in rank gives way, and the first in rank always goes on.

It knows no tensors, clocks, transports or text. Where blocks are is `provision`'s, how K and V move is `handover`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from runtime.agent.admission import refusal
from runtime.agent.commands import Abort, Arrive, Down, SchedulerCommand, SchedulerEvent, Tick
from runtime.agent.events import end_event, refusal_event, token_event
from runtime.agent.narrator import Narrator
from runtime.agent.sequences import Rank, RankedQueue
from runtime.agent.state import AgentState, Tally, block_loads, model_loads
from runtime.config import ClusterConfig
from runtime.kv.pages import groups_for
from runtime.messages import PROTOCOL, Done, Gone, Loaded, Lost, Message, Moved, Ready, Refused, Report, Stuck
from runtime.scheduler.devices import Devices
from runtime.scheduler.handover import Handover, Handovers
from runtime.scheduler.members import Member
from runtime.scheduler.outbox import Outbox
from runtime.scheduler.provision import Provision
from runtime.stages import Block, Chain, Path, Stage
from runtime.trace import TraceSink
from runtime.types import FinishReason, ModelSpec, PageCounts, PromptLogprobs, Sampled, SequenceRequest


class Scheduler:
    """See the top of the file.

    Args:
        chains: the models that are served.
        blocks: all blocks of these chains.
        config: see there.
        trace: where events go.
    """

    def __init__(self, chains: Iterable[Chain], blocks: Iterable[Block], config: ClusterConfig, trace: TraceSink | None = None) -> None:
        self.config = config
        self.devices = Devices()
        self.chains = {chain.model: chain for chain in chains}
        self.provision = Provision(blocks, config, self.devices)
        self._tell = Narrator(trace, "scheduler")
        self._tally = Tally()
        self._out = Outbox()
        self._members: dict[str, Member] = {}
        self._running: dict[str, Member] = {}
        self._waiting: RankedQueue[Member] = RankedQueue()
        self._starved: dict[str, Member] = {}
        self._arrivals = 0
        self._placed = False
        self.handovers = Handovers(self)

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: Message | SchedulerEvent, now: int) -> list[SchedulerCommand]:
        """Take what happened. Raises TypeError for what is not for schedulers."""
        match event:
            case Done():
                self._done(event, now)
            case Arrive():
                self._arrive(event.request, now)
            case Abort():
                self._abort(event.seq, now)
            case Ready():
                self._up(event, now)
            case Down():
                self._down(event, now)
            case Loaded():
                self._loaded(event)
            case Refused():
                self._refused(event, now)
            case Lost():
                self._lost(event, now)
            case Moved():
                self.handovers.moved(event, now)
            case Stuck():
                self.handovers.stuck(event, now)
            case Report():
                self._report(event)
            case Tick():
                pass
            case _:
                raise TypeError(f"{type(event).__name__} is not for schedulers")
        if self._starved:
            self._feed(now)
        if len(self._waiting):
            self._admit(now)
        return self._out.flush()

    # -- looking in ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any sequence is alive."""
        return bool(self._members)

    @property
    def members(self) -> Mapping[str, Member]:
        return self._members

    @property
    def out(self) -> Outbox:
        """Where commands gather until the event is over."""
        return self._out

    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(chain.spec for chain in self.chains.values())

    def serving(self, model: str) -> bool:
        """Whether a model takes requests and its path is up."""
        chain = self.chains.get(model)
        return chain is not None and all(
            any(self.devices.alive(name) for name in self.provision.instances.get(use.block, ())) for use in chain.uses
        )

    def state(self) -> AgentState:
        """All devices together, in the shape of one device's picture."""
        models = model_loads(self.models(), (m.spec.name for m in self._running.values()), (m.spec.name for m in self._waiting))
        instances = block_loads(self.models(), models, self.config.max_running)
        alive = [device for device in self.devices if device.alive]
        capacity, used = sum(device.capacity for device in alive), sum(device.used for device in alive)
        pages = PageCounts(capacity, capacity - used, used)
        return AgentState(len(self._running), len(self._waiting), pages, models, instances, self._tally.snapshot())

    def check(self) -> None:
        """Verify that members, queues and pages agree. Raises RuntimeError. For tests, after every event."""
        self.devices.check()
        if len(self._members) != len(self._running) + len(self._waiting):
            raise RuntimeError("members are neither waiting nor running")
        held: dict[str, int] = {}
        for member in self._running.values():
            for device, pages in member.weights:
                held[device] = held.get(device, 0) + pages * member.groups
        for device, pages in self.handovers.held().items():
            held[device] = held.get(device, 0) + pages
        for each in self.devices:
            if each.alive and each.used != held.get(each.name, 0):
                raise RuntimeError(f"{each.name}: {each.used} pages are spoken for, sequences hold {held.get(each.name, 0)}")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, request: SequenceRequest, now: int) -> None:
        if request.seq in self._members:
            raise ValueError(f"sequence {request.seq} exists already")
        self._tell.arrive(now, request)
        chain = self.chains.get(request.model)
        if chain is None:
            why: str | None = f"model {request.model!r} is not loaded"
        else:
            why = refusal(request, chain.spec) or self.provision.why_not(chain)
        if chain is None or why is not None:
            self._refuse(request, why or "", now)
            return
        self._arrivals += 1
        rank = Rank(request.priority, request.arrival, self._arrivals)
        member = self._members[request.seq] = Member(request, chain.spec, rank, chain=chain)
        self._waiting.add(member)

    def _refuse(self, request: SequenceRequest, why: str, now: int) -> None:
        self._tally.finished["error"] += 1
        self._tell.ended(now, request, "error", 0)
        self._out.events.append(refusal_event(request, why))

    def _abort(self, seq: str, now: int) -> None:
        member = self._members.get(seq)
        if member is not None:
            self._end(member, "abort", now)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _done(self, done: Done, now: int) -> None:
        """Rows that are through: tokens for whoever asked, and the next row of each that goes on."""
        scores: dict[str, tuple[PromptLogprobs, ...]] = {}
        for part in done.prompts:
            scores[part.seq] = (*scores.get(part.seq, ()), part)
        on: list[Member] = []
        running = self._running
        for seq, epoch, count, sampled in zip(done.seqs, done.epochs, done.counts, done.sampled, strict=True):
            member = running.get(seq)
            if member is None or member.epoch != epoch or not member.flying:
                continue
            member.flying = False
            self._advance(member, count, sampled, scores.get(seq, ()), now)
            if seq in running:
                on.append(member)
        for member in on:
            if member.request.seq in running:
                self._go_on(member, now)

    def _advance(self, member: Member, count: int, sampled: Sampled | None, scores: tuple[PromptLogprobs, ...], now: int) -> None:
        """K and V of a row are written; its token, if one was sampled, joins the output."""
        member.computed += count
        if member.phase == "resume":
            self._tally.resumed_tokens += count
        if scores and not member.output:
            member.prompt_logprobs.extend(scores)
        if sampled is None:
            if member.computed >= member.tokens:
                self._tally.prompt_tokens += len(member.request.prompt)
                self._end(member, "length", now)
            return
        if not member.output:
            self._tally.prompt_tokens += len(member.request.prompt)
        fresh = member.computed + 1 - member.tokens  # more than one only behind a stride
        member.phase = "decode"
        member.output.extend([sampled.token] * fresh)
        self._tally.generated_tokens += fresh
        told = tuple(member.prompt_logprobs)
        if told:
            member.prompt_logprobs.clear()
        reason = member.finish()
        self._tell.token(now, member.request, len(member.output) - 1, sampled.token)
        self._out.events.append(token_event(member, sampled, told, reason))
        if reason is not None:
            self._leave(member, reason, now)

    def _go_on(self, member: Member, now: int) -> None:
        """What a sequence does whose row has come back."""
        if member.doomed:
            self._preempt(member, now)
        elif member.move and self.handovers.at_rest(member, now):
            pass
        elif member.seq in self._running and not member.flying and not self._issue(member, now):
            self._starved[member.seq] = member

    def _issue(self, member: Member, now: int) -> bool:
        """Send its next row, with pages for it on all its path; false if they cannot be had now."""
        if member.phase == "decode":
            count, steps = 1, self._stride(member)
        else:
            count, steps = min(self.config.chunk, member.tokens - member.computed), 1
        more = groups_for(member.spec, member.computed + count + steps - 1) - member.groups
        if more > 0:
            if not self._room(member, more, now):
                return False
            self.devices.take(member.weights, more)
            member.groups += more
        last = member.computed + count == member.tokens
        member.flying = True
        member.hops += len(member.path) - 1
        self._out.go(member, count, steps, last and member.samples)
        return True

    def _stride(self, member: Member) -> int:
        if self.config.stride == 1 or len(member.path) > 1:
            return 1
        return max(1, min(self.config.stride, member.request.sampling.max_tokens - len(member.output)))

    def _room(self, member: Member, groups: int, now: int) -> bool:
        """Whether its devices have these pages, perhaps because whoever is last in rank gives way."""
        for name, pages in member.weights:
            device = self.devices[name]
            while device.free < pages * groups:
                victim = self._victim(member, name)
                if victim is None:
                    return False
                if victim.flying:
                    victim.doomed = True
                    return False
                self._preempt(victim, now)
        return True

    def _victim(self, member: Member, device: str) -> Member | None:
        """The last in rank behind `member` with pages on a device, and none that is about to go already."""
        behind = [m for m in self._running.values() if m.rank > member.rank and device in m.devices and m.groups]
        if any(m.doomed for m in behind):
            return None
        return max(behind, key=lambda m: m.rank, default=None)

    def _feed(self, now: int) -> None:
        """Sequences that wait for pages, in rank order; if all that run do, the last of them gives way."""
        for member in sorted(self._starved.values(), key=lambda m: m.rank):
            if member.seq in self._starved and self._issue(member, now):
                self._starved.pop(member.seq, None)
        if self._starved and not any(m.flying or m.held for m in self._running.values()):
            last = max(self._starved.values(), key=lambda m: m.rank)
            self._preempt(last, now)
            for member in sorted(self._starved.values(), key=lambda m: m.rank):
                if member.seq in self._starved and self._issue(member, now):
                    self._starved.pop(member.seq, None)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def _admit(self, now: int) -> None:
        """Let waiting sequences in, in rank order, while their prompts fit. Nobody overtakes on the way to the same devices."""
        if not self._placed:
            return
        full: set[str] = set()
        loads = {device.name: float(device.members) for device in self.devices}
        for member in tuple(self._waiting):
            chain = member.chain
            if chain is None:
                continue
            path = self.provision.path(chain, loads)
            if path is None or any(hop.device in full for hop in path):
                continue
            if (why := self._hopeless(member, chain, path)) is not None:
                self._end(member, "error", now, why)
                continue
            if not self._ready(chain, path):
                continue
            if not self._fits(member, chain, path):
                full.update(hop.device for hop in path)
                if len(full) >= len(self.devices):
                    return
                continue
            self._seat(member, chain, path, now)
            for name in member.devices:
                loads[name] += 1.0

    def _hopeless(self, member: Member, chain: Chain, path: Path) -> str | None:
        """Why a path will never do, however long one waits: a device that refused its stage, or that is too small for the sequence."""
        for device, stage in self.provision.missing(chain, path):
            if (reason := self.devices[device].refused.get(stage.id)) is not None:
                return f"{chain.model} cannot be loaded: {reason}"
        groups = groups_for(chain.spec, member.tokens + (1 if member.samples else 0))
        for name, pages in self.provision.weights(path):
            if groups * pages > self.devices[name].capacity:
                return f"its {member.tokens} tokens need {groups * pages} pages on {name}, which has {self.devices[name].capacity}"
        return None

    def _ready(self, chain: Chain, path: Path) -> bool:
        """Whether all stages of a path are loaded; asks for those that are not on their way."""
        missing = self.provision.missing(chain, path)
        for device, stage in missing:
            self.ask_for(chain, device, stage)
        return not missing

    def _fits(self, member: Member, chain: Chain, path: Path) -> bool:
        """Whether the context it has fits now, beside the watermark; on an idle device the watermark does not count."""
        groups = groups_for(member.spec, member.tokens)
        for name, pages in self.provision.weights(path):
            device = self.devices[name]
            spare = int(device.capacity * self.config.watermark) if device.members else 0
            if device.free - pages * groups < spare or device.members >= self.config.max_running:
                return False
        return all(self.devices[hop.device].members < self.config.max_running for hop in path)

    def _seat(self, member: Member, chain: Chain, path: Path, now: int) -> None:
        self._waiting.remove(member)
        self._running[member.seq] = member
        member.seated(path, self.provision.weights(path))
        member.spec = self._capped(member, chain)
        member.groups = groups_for(member.spec, member.tokens)
        self.devices.take(member.weights, member.groups)
        for name in member.devices:
            self.devices[name].members += 1
        for name in sorted(member.devices):
            self._out.open(name, member)
        self._tell.inserted(now, member.request, member.phase, member.tokens)
        self._issue(member, now)

    def _capped(self, member: Member, chain: Chain) -> ModelSpec:
        """Its model with a context that this path can hold for one sequence alone."""
        spec = chain.spec
        fits = min((self.devices[name].capacity // pages * spec.page_tokens for name, pages in member.weights), default=spec.max_model_len)
        limit = min(spec.max_model_len, fits - spec.virtual_tokens)
        return spec if limit == spec.max_model_len else replace(spec, max_model_len=limit)

    def _preempt(self, member: Member, now: int) -> None:
        """Take a sequence off its devices; it waits, and will run again from its prompt and output."""
        self._tally.preemptions += 1
        self._tell.preempted(now, member.request, len(member.output))
        self._unseat(member)
        member.unseated()
        self._waiting.add(member)

    def _unseat(self, member: Member) -> None:
        """Off all its devices."""
        del self._running[member.seq]
        self._starved.pop(member.seq, None)
        self.handovers.cancel(member)
        self.devices.give_back(member.weights, member.groups)
        for name in sorted(member.devices):
            if self.devices.alive(name):
                self.devices[name].members -= 1
                self._out.close(name, member.seq, member.epoch)

    def _end(self, member: Member, reason: FinishReason, now: int, error: str | None = None) -> None:
        """End a sequence without a token."""
        self._out.events.append(end_event(member, reason, error))
        self._leave(member, reason, now)

    def _leave(self, member: Member, reason: FinishReason, now: int) -> None:
        self._tally.finished[reason] += 1
        del self._members[member.seq]
        if member.seq in self._running:
            self._unseat(member)
        else:
            self._waiting.remove(member)
        self._tell.ended(now, member.request, reason, len(member.output))

    def _lost(self, lost: Lost, now: int) -> None:
        """Rows that did not come through: sequences run again, or end with the error of their step."""
        for seq, epoch in zip(lost.seqs, lost.epochs, strict=True):
            member = self._running.get(seq)
            if member is None or member.epoch != epoch:
                continue
            if lost.retry:
                self._preempt(member, now)
            else:
                self._tally.failed_steps += 1
                self._end(member, "error", now, lost.reason)

    # -- devices -------------------------------------------------------------------------------------------------------

    def _up(self, ready: Ready, now: int) -> None:
        if ready.protocol != PROTOCOL:
            self._tell.fault(now, 0, f"{ready.device} speaks protocol {ready.protocol}, not {PROTOCOL}")
            return
        if self.devices.alive(ready.device):
            self._down(Down(ready.device, "it came again"), now)
        self.devices.up(ready)
        if not self._placed and len(self.devices) >= self.config.devices:
            self._placed = True
            self.provision.place(list(self.chains.values()))
            self._turn_away(now)

    def _turn_away(self, now: int) -> None:
        """End what waits for a chain that the cluster cannot hold."""
        for member in tuple(self._waiting):
            why = None if member.chain is None else self.provision.why_not(member.chain)
            if why is not None:
                self._end(member, "error", now, why)

    def _down(self, down: Down, now: int) -> None:
        """A device is gone. Sequences that pass it run again elsewhere, or wait until it is replaced."""
        device = self.devices.get(down.device)
        if device is None or not device.alive:
            return
        self._tell.fault(now, 0, f"{down.device} is gone: {down.reason}")
        self.devices.down(down.device)
        self._out.forget(down.device)
        for device in self.devices:
            if device.alive:
                self._out.say(device.name, Gone(down.device))
        lost = [m for m in self._running.values() if down.device in m.devices and not self.handovers.survives(m, down.device)]
        for member in lost:
            self._preempt(member, now)
        self.handovers.gone(down.device, now)
        self._out.replace(down.device)

    def _loaded(self, loaded: Loaded) -> None:
        device = self.devices[loaded.device]
        device.loading.discard(loaded.stage.id)
        device.loaded[loaded.stage.id] = loaded.spec
        device.weights = loaded.nbytes

    def _refused(self, refused: Refused, now: int) -> None:
        """A stage cannot be loaded: whoever waits for its model ends with the reason, if no other path is left."""
        device = self.devices[refused.device]
        device.loading.discard(refused.stage.id)
        device.refused[refused.stage.id] = refused.reason
        self._tell.fault(now, 0, f"{refused.device} refuses {refused.stage.id}: {refused.reason}")
        for member in [m for m in self._waiting if m.request.model == refused.stage.model]:
            self._end(member, "error", now, f"{refused.stage.model} cannot be loaded: {refused.reason}")

    def _report(self, report: Report) -> None:
        device = self.devices.get(report.device)
        if device is not None:
            device.queued, device.steps, device.busy, device.tokens = report.queued, report.steps, report.busy, report.tokens
            device.queues = dict(report.queues)

    # -- for handovers -------------------------------------------------------------------------------------------------

    def ask_for(self, chain: Chain, device: str, stage: Stage) -> None:
        """Have a stage loaded, unless it is on its way."""
        known = self.devices[device]
        if stage.id not in known.loading and stage.id not in known.refused:
            known.loading.add(stage.id)
            self._out.load(device, [(stage, self.provision.blocks_of(chain, stage))])

    def rest(self, member: Member) -> None:
        """It waits for its move, not for pages."""
        self._starved.pop(member.seq, None)

    def go_on(self, member: Member, now: int) -> None:
        """Its next row, if it still runs."""
        if member.seq in self._running:
            self._go_on(member, now)

    def run_again(self, member: Member, now: int) -> None:
        if member.seq in self._running:
            self._preempt(member, now)

    def resettle(self, member: Member, before: frozenset[str], epoch: int) -> None:
        """Its path has changed: all devices of the new one learn that, those it left forget it."""
        for name in sorted(member.devices - before):
            self.devices[name].members += 1
        for name in sorted(member.devices):
            self._out.open(name, member, keep=True)
        for name in sorted(before - member.devices):
            if self.devices.alive(name):
                self.devices[name].members -= 1
                self._out.close(name, member.seq, epoch)

    def tell_move(self, now: int, event: str, move: Handover, why: str | None = None) -> None:
        last = move.last if event == "kv.meet" else None
        self._tell.move(now, event, move.member.request, move.number, move.source, move.target, last, why)
