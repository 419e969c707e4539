"""Record the outcomes of predictions by block instance, and stop instances with too few right ones for a while (BL-25).

`policy.speculation.payoff` judges the outcomes. The end of an instance's predictions is traced (`spec.end`).

Contract: data, and one judgement per outcome. Times are estimates: a device's mean time per token, and a stand-in's
share of it by its bytes. It chooses no instances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from runtime.chains import Hop, Surrogate
from runtime.policy.speculation.payoff import Times, judge
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

Instance = tuple[str, str]


class SpeculationHistory:
    """Outcomes by (block, device), and instances that rest. `surrogates`: by model."""

    def __init__(self, state: ClusterState, surrogates: Mapping[str, Sequence[Surrogate]]) -> None:
        self._state, self._config = state, state.config.speculation
        self._made = {each.model: each for some in surrogates.values() for each in some}
        self._outcomes: dict[Instance, deque[bool]] = {}
        self._resting: dict[Instance, int] = {}

    def is_resting(self, block: str, device: str) -> bool:
        """Return whether an instance is not predicted for now."""
        return (block, device) in self._resting

    def review(self) -> None:
        """Count down the rests; drop the outcomes of instances that are gone. Called once per review."""
        there = self._state.block_map.instances
        self._outcomes = {
            (block, name): seen for (block, name), seen in self._outcomes.items() if name in there.get(block, ())
        }
        self._resting = {instance: left - 1 for instance, left in self._resting.items() if left > 1}

    def add(self, now: int, sequence: ScheduledSequence, instance: Instance, hit: bool) -> bool:
        """Record an outcome; return whether it ends the instance's predictions."""
        window = self._config.window
        if not window or instance in self._resting:
            return False
        seen = self._outcomes.setdefault(instance, deque(maxlen=window))
        seen.append(hit)
        found = judge(tuple(seen), self._needed(sequence), window)
        if found.ends:
            del self._outcomes[instance]
            self._resting[instance] = self._config.rest
            block, device = instance
            self._state.tell.control(
                now, "spec.end", "BL-25", device, block, rate=found.rate, needed=found.needed, of=found.count
            )
        return found.ends

    def _needed(self, sequence: ScheduledSequence) -> float:
        """Return the share of right predictions from which a sequence's predicted hop gains; checks count as free."""
        if sequence.ahead is None:
            return 0.0
        times = [self._seconds(hop) for hop in sequence.path]
        at = sequence.ahead.hop
        cheap = times[at] * self._share(sequence, sequence.path[at], self._made.get(sequence.ahead.stage.model))
        return (
            Times(times[at], cheap, 0.0, sum(times[at + 1 :]), self._config.lane == "shared").needed
            if times[at]
            else 0.0
        )

    def _seconds(self, hop: Hop) -> float:
        """Return the mean time per token of a hop's device, in seconds."""
        device = self._state.devices[hop.device]
        return device.work.busy / max(device.work.tokens, 1) / 1e9

    def _share(self, sequence: ScheduledSequence, hop: Hop, made: Surrogate | None) -> float:
        """Return the bytes a hop reads with a stand-in as a share of its own; layers of a block are taken as equal."""
        if made is None:
            return 0.0
        block, whole, saved = self._state.block_map.block, 0.0, 0.0
        for use in sequence.chain.uses:
            if hop.lo <= use.lo and use.hi <= hop.hi:
                whole += block(use.block).nbytes
                replaced = max(0, min(use.hi, made.hi) - max(use.lo, made.lo))
                saved += block(use.block).nbytes * replaced / (use.hi - use.lo)
        return min(1.0, max(0.0, (whole - saved + made.nbytes) / whole)) if whole else 0.0
