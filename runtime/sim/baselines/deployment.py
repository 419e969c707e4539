"""Simulate per-model provisioning (PM) and parameter sharing (PS) in virtual time, over the simulator's devices.

    request -> the engine of its group with the fewest requests -> steps of its own -> tokens

- PM: an engine per model. PS: an engine for a foundation and its parameter-efficient fine-tunes, whose adapters run
  model by model (branching); full fine-tunes have engines of their own.
- An engine reserves memory for its weights and for K and V. It starts by loading its weights from the server's disk or
  memory, and then takes `start_s`.
- Engines of a device take turns step by step, as processes on one GPU do.
- A group gets another engine if all of its engines are full, or if it has none. Where there is no room, idle engines
  stop; if none is idle, engines are drained for a group that has waited longer than a start takes.
- Requests stay on their engine: nothing migrates, and nothing runs in one step with another engine's requests.

The same requests give the same run: there is nothing random in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from runtime.chains import Stage
from runtime.sim.baselines.engine import EngineRequest, EngineSettings, ModelEngine
from runtime.sim.baselines.provisioning import engine_for, plan_start, to_drain
from runtime.sim.cost.steps import Pricing
from runtime.sim.models.family import SimulatedFamily
from runtime.sim.results.played import COUNTED
from runtime.sim.results.recorder import RunRecorder, Sample
from runtime.sim.run.clock import EventClass, VirtualClock
from runtime.sim.run.loading import Host
from runtime.sim.run.playback import Playback
from runtime.types import SequenceRequest, TokenEvent
from zoo.errors import InputError

#: An engine of a group that has others stops for a further one only if it was idle for this long, in ns.
_IDLE = 60_000_000_000


@dataclass(slots=True)
class EngineDevice:
    """A device. `turn`: engines of it in the order of their next turn; `busy`, `launching`: ns of its steps."""

    host: Host
    pricing: Pricing
    memory: int
    turn: deque[ModelEngine] = field(default_factory=deque)
    stepping: bool = False
    busy: int = 0
    launching: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """Models that one engine serves. `weights`: bytes of all of them; `token`: bytes of K and V of a token."""

    name: str
    stages: tuple[Stage, ...]
    weights: int
    token: int


class EngineDeployment:
    """One run of a baseline.

    Args:
        devices: By name.
        tick: Time between two samples, in ns.
    """

    def __init__(
        self, family: SimulatedFamily, devices: dict[str, EngineDevice], settings: EngineSettings, tick: int
    ) -> None:
        self.clock, self.ledger, self.devices = VirtualClock(), RunRecorder(), devices
        self.engines: list[ModelEngine] = []
        self.starts = self.stops = self.preemptions = 0
        self._settings, self._tick_ns = settings, max(tick, 1)
        self._groups = groups_of(family, next(iter(devices.values())).pricing)
        self._group_of = {stage.model: group for group in self._groups.values() for stage in group.stages}
        self._ids = {stage.model: stage.id for group in self._groups.values() for stage in group.stages}
        self._longest = max(chain.spec.max_model_len for chain in family.chains.values())
        self._pending: dict[str, deque[EngineRequest]] = {name: deque() for name in self._groups}
        self._waits: dict[str, int] = {}
        self._playback = Playback(self.clock, self.ledger, self._arrive)

    def run(
        self, requests: Iterable[SequenceRequest], progress: Callable[[int], None] | None = None, clients: int = 0
    ) -> RunRecorder:
        """Run until every request has ended. Raises InputError if an engine fits no device.

        `clients`: most requests at a time (`Demand.clients`).
        """
        for group in self._groups.values():
            need = self._need(group)
            if need > max(self._memory.values()):
                raise InputError(f"an engine of {group.name} needs {need:,} bytes, and no device has so many")
            if plan_start(self.engines, self._memory, need, 0, 0) is not None:
                self._start(group)
        self._playback.begin(requests, clients)
        self.clock.at(self._tick_ns, EventClass.TICK, (self._tick,))
        self._playback.play(progress)
        return self.ledger

    def counts(self) -> dict[str, int]:
        """Return the counters of a run, those that engines cannot have among them."""
        preempted = self.preemptions + sum(each.preemptions for each in self.engines)
        return {**dict.fromkeys(COUNTED, 0), "preemptions": preempted, "starts": self.starts, "stops": self.stops}

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, request: SequenceRequest) -> None:
        self._enqueue(EngineRequest(request, made=len(request.output)))

    def _enqueue(self, request: EngineRequest) -> None:
        group = self._group_of[request.request.model]
        engine = engine_for(self.engines, group.name)
        if engine is None:
            self._pending[group.name].append(request)
        else:
            engine.waiting.append(request)
            self._wake(engine.device)
        self._scale(group)

    # -- engines -------------------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> Mapping[str, int]:
        return {name: device.memory for name, device in self.devices.items()}

    def _need(self, group: ModelGroup) -> int:
        return group.weights + self._settings.reserve_seqs * self._longest * group.token

    def _scale(self, group: ModelGroup) -> None:
        """Start another engine of a group if it has none, or if all of them are full."""
        own = [each for each in self.engines if each.group == group.name and not each.draining]
        if any(not each.up or not each.full for each in own):
            self._waits.pop(group.name, None)
            return
        if own or self._pending[group.name]:
            self._start(group, 0 if not own else _IDLE)

    def _start(self, group: ModelGroup, idle_ns: int = 0) -> None:
        """Start an engine now, or note that the group waits for room."""
        now, need = self.clock.now, self._need(group)
        found = plan_start(self.engines, self._memory, need, now, idle_ns)
        if found is None:
            since = self._waits.setdefault(group.name, now)
            own = any(each.group == group.name for each in self.engines)
            if not own and now - since > self._settings.start_s * 1e9:
                self._drain(need)
            return
        self._waits.pop(group.name, None)
        for each in found.stops:
            self._stop(each)
        device, settings = self.devices[found.device], self._settings
        engine = ModelEngine(group.name, found.device, settings.reserve_seqs * self._longest, need, settings)
        self.engines.append(engine)
        device.turn.append(engine)
        self.starts += 1
        there = now
        pieces = {piece.name: piece for stage in group.stages for piece in device.pricing.pieces(stage)}
        for piece in pieces.values():
            there = device.host.copied(piece, device.host.read(piece, there))
        self.ledger.loaded(group.weights, there - now)
        self.clock.at(there + round(settings.start_s * 1e9), EventClass.LOADED, (self._serve, engine))

    def _serve(self, engine: ModelEngine) -> None:
        engine.up, engine.since = True, self.clock.now
        pending = self._pending[engine.group]
        while pending:
            engine.waiting.append(pending.popleft())
        self._wake(engine.device)

    def _stop(self, engine: ModelEngine) -> None:
        self.engines.remove(engine)
        self.devices[engine.device].turn.remove(engine)
        self.preemptions += engine.preemptions
        self.stops += 1

    def _drain(self, need: int) -> None:
        """Let the engines of one device take no more requests; those that have not begun go elsewhere."""
        chosen = to_drain(self.engines, self._memory, need)
        for engine in chosen:
            engine.draining = True
        for engine in chosen:
            waiting, engine.waiting = engine.waiting, deque()
            for each in waiting:
                self._enqueue(each)
            if engine.idle:
                self._stop(engine)

    def _tick(self) -> None:
        now = self.clock.now
        kv = sum(each.used * self._groups[each.group].token for each in self.engines)
        weights = sum(self._groups[each.group].weights for each in self.engines)
        busy = sum(device.busy for device in self.devices.values())
        self.ledger.samples.append(Sample(now, busy, self.ledger.alive, weights, kv, self.ledger.made))
        for name in list(self._waits):
            self._scale(self._groups[name])
        self.clock.at(now + self._tick_ns, EventClass.TICK, (self._tick,))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _wake(self, name: str) -> None:
        device = self.devices[name]
        if not device.stepping:
            device.stepping = True
            self.clock.at(self.clock.now, EventClass.BEGIN, (self._begin, name, device))

    def _begin(self, name: str, device: EngineDevice) -> None:
        """Run a step of the next engine that has something to do."""
        for _ in range(len(device.turn)):
            engine = device.turn[0]
            device.turn.rotate(-1)
            if engine.next_step():
                busy = device.pricing.price({self._ids[model]: work for model, work in engine.work().items()})
                device.busy += busy
                device.launching += device.pricing.launching
                device.steps += 1
                self.clock.at(self.clock.now + busy, EventClass.DONE, (self._finish, name, device, engine))
                return
        device.stepping = False

    def _finish(self, name: str, device: EngineDevice, engine: ModelEngine) -> None:
        now = self.clock.now
        self.ledger.add_events([_event(each) for each in engine.finish_step()], now)
        if not engine.load:
            engine.since = now
            if engine.draining:
                self._stop(engine)
        group = self._groups[engine.group]
        if engine.full:
            self._scale(group)
        if engine.idle or engine.draining:
            for waiting in list(self._waits):
                self._scale(self._groups[waiting])
        device.stepping = False
        self._wake(name)


def groups_of(family: SimulatedFamily, pricing: Pricing) -> dict[str, ModelGroup]:
    """Return the groups of models that share a block: one model each for PM, a foundation's fine-tunes for PS."""
    members: dict[str, list[str]] = {}
    for model, chain in family.chains.items():
        members.setdefault(chain.uses[0].block, []).append(model)
    found = {}
    for block, models in members.items():
        stages = tuple(Stage(model, 0, family.chain(model).length) for model in models)
        pieces = {piece.name: piece.nbytes for stage in stages for piece in pricing.pieces(stage)}
        shape = family.shape(models[0])
        found[block] = ModelGroup(block, stages, sum(pieces.values()), shape.layers * shape.kv_bytes)
    return found


def _event(each: EngineRequest) -> TokenEvent:
    request = each.request
    return TokenEvent(request.seq, request.request, each.made - 1, 0, finish="length" if each.complete else None)
