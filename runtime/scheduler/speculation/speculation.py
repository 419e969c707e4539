"""Choose which hops of which sequences are predicted, and count the outcomes (BL-25).

    Tick -> review     choose the top part of block instances by the time that their queues take, among those that have
                       a surrogate
    seat -> plan       a sequence placed on a path over one of them gets that hop predicted, if its stand-in is loaded
                       and has room

The mechanism is in `agent.speculation.hop`, the choice in `policy.speculation`.

Contract:
- A sequence keeps its plan until it leaves its devices or migrates; then it runs without (UN-13), until it is placed
  again.
- Pages of the stand-in are taken with its own, and only where it can run to its end with them.
- Lossy prediction is for requests that allow other blocks (`adaptive`), if the cluster allows it; all other ones are
  predicted exactly.
- It sends only loads and unloads of stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from runtime.chains import Hop, Path, RunAhead, Stage, Surrogate
from runtime.kv.pages import groups_for
from runtime.messages import AgentStats
from runtime.policy.speculation.choice import PassedBy, SlowHop, choose
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.history import SpeculationHistory
from runtime.scheduler.speculation.in_flight import InFlightRow
from runtime.scheduler.state import ClusterState

#: Weight of earlier queues in the next review.
_KEPT = 0.8
#: Weight of earlier sequence counts: high, since a stand-in gains nothing for sequences placed before it was chosen.
_PASSED = 0.98
_LEAST = 0.1

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Totals of speculation since the start.

    Fields:
        started: Rows that might be predicted.
        hits: Rows among these that were predicted right (in exact mode: the same bits, or the same token).
        misses: Rows among these that were predicted wrong; the rest was not predicted in time.
        guesses: Rows sent from a guessed token.
        redone: Rows among these that started from a wrong token.
        ended: Instances with too few right predictions, which were stopped.
    """

    started: int = 0
    hits: int = 0
    misses: int = 0
    guesses: int = 0
    redone: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """Speculation planned for a sequence.

    Fields:
        ahead: The predicted hop.
        device: Device of that hop.
        pages: Pages per page set that the stand-in takes there.
    """

    ahead: RunAhead
    device: str
    pages: int


class Speculation:
    """Plan speculation for sequences and count its outcomes.

    `surrogates`: by model, for the version served at the start; other versions are not predicted.
    """

    def __init__(self, state: ClusterState, surrogates: Mapping[str, Sequence[Surrogate]]) -> None:
        self._state = state
        self._surrogates = surrogates
        self._versions = {model: chain.version for model, chain in state.chains.items()}
        self._chosen: tuple[tuple[str, str], ...] = ()
        self._queued: dict[tuple[str, str], float] = {}
        self._reports: dict[str, float] = {}
        self._loaded: dict[tuple[str, Stage], str] = {}
        self._pinned = False
        self._passing: dict[tuple[str, str], float] = {}
        self._reviews = 0
        #: (block, device) -> number of the latest review that chose it, kept for the length of a rest.
        self._chosen_at: dict[tuple[str, str], int] = {}
        self.passed_by: tuple[PassedBy, ...] = ()
        #: Rows sent from a guess, and those from a wrong one; all other counts are in `ClusterState.counters`.
        self._guesses = self._redone = 0
        self.history = SpeculationHistory(state, surrogates)

    @property
    def chosen(self) -> tuple[tuple[str, str], ...]:
        """Chosen (block, device) instances, the longest queue first."""
        return self._chosen

    def counts(self) -> SpeculationCounts:
        """Return the totals."""
        counters = self._state.counters
        hits, misses = counters.speculation_hits, counters.speculation_misses
        return SpeculationCounts(
            counters.speculations, hits, misses, self._guesses, self._redone, counters.speculations_ended
        )

    # -- choice of instances -------------------------------------------------------------------------------------------

    def review(self) -> None:
        """Choose instances anew, by the devices' latest reports."""
        config, state = self._state.config.speculation, self._state
        if config.mode == "off" or not self._surrogates or self._pinned:
            return
        self.history.review()
        self._passing = self._passing_now()
        self._reviews += 1
        instances = [
            SlowHop(block, name, self._drain(block, name))
            for block, where in state.block_map.instances.items()
            for name in where
            if state.devices.alive(name) and not self.history.is_resting(block, name)
        ]
        chains = [[use.block for use in chain.uses] for chain in state.chains.values()]
        choice = choose(instances, chains, self._blocks_with_surrogates(), config.top)
        self.passed_by = choice.passed_by
        self._chosen = tuple((each.block, each.device) for each in choice.chosen)
        self._queued = _faded(self._queued)
        self._reports = _faded(self._reports)
        self._chosen_at = {each: at for each, at in self._chosen_at.items() if self._reviews - at < config.rest}
        self._chosen_at.update(dict.fromkeys(self._chosen, self._reviews))
        self._sweep()

    def pin(self, instances: Iterable[tuple[str, str]] | None) -> None:
        """Predict these (block, device) instances for new sequences, whatever the queues; None: by the queues again."""
        self._pinned = instances is not None
        self._chosen = tuple(instances or ()) if self._state.config.speculation.mode != "off" else ()

    def observe(self, report: AgentStats) -> None:
        """Add a device's report to the mean of its queues.

        Queues change within a step, so their mean over reports counts, older ones with less weight.
        """
        if self._state.config.speculation.mode == "off":
            return  # without reviews the sums would grow for ever
        self._reports[report.device] = self._reports.get(report.device, 0.0) + 1.0
        for block, rows in report.queues:
            self._queued[block, report.device] = self._queued.get((block, report.device), 0.0) + rows

    def _drain(self, block: str, name: str) -> float:
        """Estimate the seconds that an instance's queue takes.

        Counts rows that wait for it and running sequences that return to it token by token, at the device's mean time
        per token. By waiting rows alone, no instance would be a bottleneck until it is full.
        """
        device = self._state.devices[name]
        rows = sum(self._queued.get((each, name), 0.0) for each in self._entries(block, name)) / self._reports.get(
            name, 1.0
        )
        return (rows + self._passing.get((block, name), 0.0)) * device.work.busy / max(device.work.tokens, 1) / 1e9

    def _passing_now(self) -> dict[tuple[str, str], float]:
        """Return the running sequences by block instance on their paths, averaged over about fifty reviews."""
        found = {key: kept for key, value in self._passing.items() if (kept := value * _PASSED) > _LEAST / 10}
        for sequence in self._state.running.values():
            for use, (device, _) in zip(sequence.chain.uses, sequence.place.path_usage.places, strict=True):
                found[use.block, device] = found.get((use.block, device), 0.0) + 1 - _PASSED
        return found

    def _entries(self, block: str, name: str) -> set[str]:
        """Return the blocks at which rows wait that then pass this block without a hop (BL-15).

        These are the block itself and those directly before it on the device.
        """
        found, where = {block}, self._state.block_map.instances
        for chain in self._state.chains.values():
            for at, use in enumerate(chain.uses):
                while use.block == block and at and name in where.get(chain.uses[at - 1].block, ()):
                    at -= 1
                    found.add(chain.uses[at].block)
        return found

    def _blocks_with_surrogates(self) -> set[str]:
        chains = self._state.chains
        return {
            use.block
            for model, some in self._surrogates.items()
            if model in chains
            for use in chains[model].uses
            if any(each.lo < use.hi and use.lo < each.hi for each in some)
        }

    # -- choice of sequences -------------------------------------------------------------------------------------------

    def plan(self, sequence: ScheduledSequence, path: Path) -> Planned | None:
        """Return the speculation of a sequence that is about to be placed on a path, or None.

        A stand-in that is not loaded is requested, for later sequences.
        """
        sampling = sequence.request.sampling
        if not self._chosen or len(path) < 2 or sampling.prompt_logprobs is not None or not sequence.samples:
            return None
        for block, device in self._chosen:
            for at, hop in enumerate(path[:-1]):
                if hop.device == device and (planned := self._planned(sequence, path, at, block)) is not None:
                    return planned
        return None

    def _planned(self, sequence: ScheduledSequence, path: Path, at: int, block: str) -> Planned | None:
        hop, config, device = path[at], self._state.config.speculation, self._state.devices[path[at].device]
        if not any(use.block == block and hop.lo <= use.lo and use.hi <= hop.hi for use in sequence.chain.uses):
            return None
        surrogate, stage = self._stand_in(sequence, hop, block)
        if surrogate is None or stage is None:
            return None
        spec = device.stages.loaded.get(stage)
        if spec is None:
            if (
                stage in device.stages.loading
                or not device.plan.limit
                or device.stages.nbytes + surrogate.nbytes <= device.plan.limit
            ):
                self._ask_for(hop.device, stage, block)
            return None
        if spec.page_tokens < sequence.spec.page_tokens or not self._room(sequence, path, hop.device, spec.kv_layers):
            return None
        lossy = config.mode == "similarity" and sequence.request.adaptive
        return Planned(RunAhead(at, stage, config.threshold if lossy else None), hop.device, spec.kv_layers)

    def _stand_in(self, sequence: ScheduledSequence, hop: Hop, block: str) -> tuple[Surrogate | None, Stage | None]:
        """Return a surrogate for part of a block within a hop, and its stage; (None, None) if there is none."""
        if sequence.chain.version != self._versions.get(sequence.chain.model):
            return None, None  # another version or a variant: surrogates fit the version served at the start
        uses = [use for use in sequence.chain.uses if use.block == block]
        for each in self._surrogates.get(sequence.chain.model, ()):
            stage = each.stage(hop)
            if stage is not None and any(each.lo < use.hi and use.lo < each.hi for use in uses):
                return each, stage
        return None, None

    def _ask_for(self, name: str, stage: Stage, block: str) -> None:
        device = self._state.devices[name]
        if stage not in device.stages.loading and stage not in device.stages.refused:
            device.stages.loading.add(stage)
            self._loaded[name, stage] = block
            self._state.load(name, [(stage, (stage.id,))])

    def _sweep(self) -> None:
        """Unload stand-ins without users of instances that were not chosen for long."""
        state = self._state
        used = {(m.path[m.ahead.hop].device, m.ahead.stage) for m in state.running.values() if m.ahead is not None}
        for (name, stage), block in tuple(self._loaded.items()):
            device = state.devices[name]
            if (block, name) in self._chosen_at or (name, stage) in used or stage in device.stages.loading:
                continue
            del self._loaded[name, stage]
            if device.stages.loaded.pop(stage, None) is not None:
                state.unload(name, [stage])

    def _room(self, sequence: ScheduledSequence, path: Path, name: str, pages: int) -> bool:
        """Return whether the pages of a sequence and its stand-in fit now, and at full length on an idle device.

        On a device with sequences the watermark stays free.
        """
        device, spec = self._state.devices[name], sequence.spec
        each = pages + dict(self._state.router.along(sequence.chain, path).weights).get(name, 0)
        longest = len(sequence.request.prompt) + min(sequence.request.sampling.max_tokens, spec.max_model_len)
        if groups_for(spec, spec.virtual_tokens + longest) * each > device.pages.assured:
            return False
        spare = int(device.pages.capacity * self._state.config.watermark) if device.passing.count else 0
        return device.pages.free - groups_for(spec, sequence.tokens) * each >= spare

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def goes_on(self, sequence: ScheduledSequence) -> bool:
        """Return whether more rows of a sequence may be predicted: its instance does not rest."""
        instance = self._instance(sequence)
        return self._pinned or instance is None or not self.history.is_resting(*instance)

    def _instance(self, sequence: ScheduledSequence) -> tuple[str, str] | None:
        """Return the (block, device) instance that is predicted for a sequence."""
        if sequence.ahead is None:
            return None
        device = sequence.path[sequence.ahead.hop].device
        block = self._loaded.get((device, sequence.ahead.stage))
        return None if block is None else (block, device)

    def started(self, now: int, sequence: ScheduledSequence, one: InFlightRow) -> None:
        """Count a row that is sent and may be predicted, or starts from a guess."""
        self._guesses += one.guess is not None
        if one.started:
            self._state.counters.speculations += 1
            self._trace_row(now, "spec.start", sequence, one)

    def verified(self, now: int, sequence: ScheduledSequence, one: InFlightRow, cosine: float) -> None:
        """Trace the check of a prediction."""
        self._trace_row(now, "spec.verify", sequence, one, cosine=cosine, stands=one.stands)

    def decided(self, now: int, sequence: ScheduledSequence, one: InFlightRow) -> None:
        """Count the outcome of a row with a final result."""
        hit = one.hit(sequence.ahead is not None and sequence.ahead.threshold is None)
        if one.started and hit is not None:
            self._state.counters.speculation_hits += hit
            self._state.counters.speculation_misses += not hit
            self._trace_row(now, "spec.hit" if hit else "spec.miss", sequence, one)
            instance = self._instance(sequence)
            if instance is not None and not self._pinned and self.history.add(now, sequence, instance, hit):
                self._state.counters.speculations_ended += 1
                self._chosen = tuple(each for each in self._chosen if each != instance)

    def redone(self) -> None:
        """Count a row from a wrong guess that is sent again."""
        self._redone += 1

    def _trace_row(self, now: int, event: str, sequence: ScheduledSequence, one: InFlightRow, **extra: object) -> None:
        if sequence.ahead is not None:
            hop = sequence.path[sequence.ahead.hop]
            where = {
                "hop": sequence.ahead.hop,
                "of": len(sequence.path),
                "stage": sequence.ahead.stage.id,
                "attempt": one.attempt,
            }
            self._state.tell.speculation(now, event, sequence.request, hop.device, one.count, where | extra)


def _faded(sums: dict[Key, float]) -> dict[Key, float]:
    """Return sums with less weight than before, without negligible ones."""
    return {key: value * _KEPT for key, value in sums.items() if value > _LEAST}
