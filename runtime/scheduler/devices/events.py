"""Handle the events of devices: arrival, loaded and refused stages, reports, death.

Contract:
- What a dead device held is lost. The sequences on it run again on another path, or wait until it is replaced.
- A sequence that had a row in flight on `config.max_crashes` devices that died in a row, with no token between, ends
  with the reason. Devices that were told to stop do not count.
- Blocks are placed once `config.devices` devices have arrived.
- Devices with another protocol version are not taken.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.control.scheduler_io import AgentDown
from runtime.messages import PROTOCOL, AgentHello, AgentStats, PeerDown, StageLoadFailed, StageReady
from runtime.scheduler.admission.admission import Admission
from runtime.scheduler.broadcast.dispatch import BroadcastDispatch
from runtime.scheduler.decode.stall_detector import MOVES, StallDetector
from runtime.scheduler.devices.devices import Device, Work
from runtime.scheduler.lending.lending import Lending
from runtime.scheduler.migration.migrations import Migrations
from runtime.scheduler.models.updates import ModelUpdates
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class DeviceEvents:
    """Handlers of the events of devices."""

    def __init__(
        self,
        state: ClusterState,
        seating: SequenceLifecycle,
        admission: Admission,
        migrations: Migrations,
        lending: Lending,
        updates: ModelUpdates,
        offers: BroadcastDispatch,
    ) -> None:
        self._state = state
        self._seating = seating
        self._admission = admission
        self._migrations = migrations
        self._lending = lending
        self._updates = updates
        self._offers = offers
        self._overdue = StallDetector(int(state.config.row_timeout_s * 1e9))

    def up(self, ready: AgentHello, now: int) -> None:
        """Take a device that has started; a known one is empty again."""
        state = self._state
        if ready.protocol != PROTOCOL:
            state.tell.fault(now, 0, f"{ready.device} speaks protocol {ready.protocol}, not {PROTOCOL}")
            return
        if state.devices.alive(ready.device):
            self.down(AgentDown(ready.device, "it came again"), now)
        device = state.devices.up(ready)
        state.changed = True
        if device.stages.wanted:  # it replaces a device that died
            device.stages.loading.update(device.stages.wanted)
            state.load(device.name, list(device.stages.wanted.items()))
        if not state.placed and len(state.devices) >= state.config.devices:
            state.placed = True
            state.block_map.place(list(state.chains.values()))
            self._updates.first()
            self._admission.turn_away(now)
            self._load_first_paths()

    def down(self, down: AgentDown, now: int) -> None:
        """Handle the death of a device.

        Sequences that a migration saves continue with it; all other sequences on the device run again.
        """
        state = self._state
        device = state.devices.get(down.device)
        if device is not None and down.final:
            device.final = state.changed = True
        if device is None or not device.alive:
            return
        state.tell.fault(now, 0, f"{down.device} is gone: {down.reason}")
        state.devices.down(down.device)
        self._overdue.remove_device(down.device)
        state.times.loads.remove_device(down.device)
        state.swapping.remove_device(down.device)
        state.out.remove_device(down.device)
        for other in state.devices:
            if other.alive:
                state.out.add_message(other.name, PeerDown(down.device))
        for sequence in [m for m in state.running.values() if down.device in m.place.devices]:
            self._bereave(sequence, down, now)
        for sequence in [each for each in state.running.values() if down.device in each.lenders]:
            if not self._lending.lose(sequence, down.device, now):
                self._seating.preempt(sequence, now, "a device that held K and V of it is gone", intact=False)
        self._offers.remove_device(down.device)
        self._migrations.remove_device(down.device, now)
        self._seating.prefix_cache.remove_device(down.device)
        state.out.replace(down.device)
        state.changed = True

    def _bereave(self, sequence: ScheduledSequence, down: AgentDown, now: int) -> None:
        """Handle the death of a device on a sequence's path.

        The sequence continues with its migration or runs again; after too many deaths in a row it ends.
        """
        if sequence.flying and not down.planned:
            sequence.failures = replace(sequence.failures, deaths=sequence.failures.deaths + 1)
        if sequence.failures.deaths >= self._state.config.max_crashes:
            why = (
                f"{sequence.failures.deaths} devices in a row died while they ran it, the last of them {down.device}: "
                f"{down.reason}"
            )
            self._seating.end(sequence, "error", now, why)
        elif not self._migrations.survives(sequence, down.device):
            self._seating.preempt(sequence, now, intact=False)

    def overdue(self, now: int) -> None:
        """Handle lost rows and migrations (`decode.stall_detector`).

        A sequence with a lost row runs again, or ends after too many in a row; a lost migration is given up.
        """
        state = self._state
        for sequence in self._overdue.look(lambda name: state.devices[name].passing.here.values(), self._targets, now):
            if not sequence.flying and sequence.scattered:
                self._lending.give_up(sequence, "its creditor does not answer", now)
                continue
            if not sequence.flying:
                self._migrations.give_up(
                    sequence, now, f"nothing has come of it for {MOVES * state.config.row_timeout_s:g} s"
                )
                continue
            sequence.failures = replace(sequence.failures, strays=sequence.failures.strays + 1)
            sequence.shared.alone = True
            why = f"no device has its row, after {state.config.row_timeout_s:g} s"
            state.tell.fault(now, 0, f"{sequence.seq}: {why}")
            if sequence.failures.strays >= state.config.max_crashes:
                self._seating.end(sequence, "error", now, f"{why}; the {sequence.failures.strays}th in a row")
            else:
                self._seating.preempt(sequence, now, intact=False)

    def _targets(self, sequence: ScheduledSequence) -> tuple[str, ...]:
        """Return the devices to which K and V of a sequence are on their way."""
        return (*self._migrations.moves.targets(sequence), *self._lending.targets(sequence))

    def _record_hops(self, device: Device, report: AgentStats, now: int) -> None:
        """Record the hops that a device has measured; clocks of different servers cannot be compared."""
        for source, nbytes, taken, in_full in report.hops:
            sender = self._state.devices.get(source)
            if sender is not None and sender.facts.server == device.facts.server:
                self._state.times.add_hop(now, True, nbytes, taken / 1e9, in_full)

    def loaded(self, loaded: StageReady, now: int) -> None:
        """Record that a stage is loaded."""
        self._state.times.end_load(now, loaded.device, loaded.stage, loaded.took / 1e9, loaded.disk, loaded.host)
        device = self._state.devices[loaded.device]
        device.stages.gained(loaded.stage, loaded.spec)
        device.stages.nbytes = loaded.nbytes
        self._state.changed = True

    def _load_first_paths(self) -> None:
        """Load the stages of one path per chain, so that first requests do not wait for weights.

        Variants that only have blocks of served chains wait for nothing but a stage: it is loaded when one is needed.
        """
        state = self._state
        if state.config.residency == "swap" and any(device.plan.room < 0 for device in state.devices):
            return  # not all of them fit: requests decide
        chains = {chain.version for chain in state.chains.values()}
        served = {use.block for chain in state.chains.values() for use in chain.uses}
        for chain in state.in_use():
            if chain.version not in chains and all(use.block in served for use in chain.uses):
                continue
            for path in state.router.first_paths(chain, state.devices.loads):
                for device, stage in state.router.missing(chain, path or ()):
                    state.ask_for(chain, device, stage)

    def refused(self, refused: StageLoadFailed, now: int) -> None:
        """Record that a device cannot load a stage now, and plan its blocks elsewhere if they have other instances.

        Admission ends sequences that have no other path.
        """
        device = self._state.devices[refused.device]
        device.stages.refuses(refused.stage, refused.reason, now)
        self._state.times.end_load(now, refused.device, refused.stage, None)
        self._state.tell.fault(now, 0, f"{refused.device} refuses {refused.stage.id}: {refused.reason}")
        if refused.stage in device.stages.wanted:
            self._state.block_map.shun(device.name, device.stages.wanted[refused.stage])
            if self._state.config.residency == "swap":  # a device that is replaced loads what was there
                del device.stages.wanted[refused.stage]
        self._state.load_failed(device.name)
        self._state.changed = True

    def relent(self, now: int) -> None:
        """Allow refused stages to be requested again after their pause."""
        for device in self._state.devices:
            if device.stages.refused and device.stages.relents(now):
                self._state.changed = True

    def report(self, report: AgentStats, now: int) -> None:
        """Record a device's report."""
        device = self._state.devices.get(report.device)
        if device is not None:
            if device.alive:
                self._overdue.report(device.name, report.queued == 0 and report.steps == device.work.steps, now)
            queues = dict(report.queues)
            device.work = Work(
                report.queued, queues, report.steps, report.busy, report.tokens, report.links, report.prompt_tokens
            )
            self._record_hops(device, report, now)
            device.host = report.host_kv, report.host_weights
            if device.facts.host_memory:
                self._state.swapping.report(device, report, self._state.in_use(), now)
