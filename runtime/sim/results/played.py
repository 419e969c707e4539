"""The results of one simulated run, of this project's scheduler or of a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.sim.results.recorder import RunRecorder
from runtime.sim.run.network import Network
from runtime.sim.run.node import Cost

#: Counters of the scheduler that a run reports.
COUNTED = (
    "preemptions", "evictions", "resumed_tokens", "swapped_tokens", "speculations", "speculation_hits",
    "speculation_misses", "speculations_ended", "moves", "moves_aborted", "copied", "recomputed", "moved_bytes",
    "handoffs", "handoff_transfers", "handoff_bytes", "handoff_present_tokens", "local_prefills", "role_changes",
    "loans", "loans_refused", "loan_pages", "loan_bytes", "loan_recalls", "recalled_pages", "circles",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Played:
    """The results of a run.

    Fields:
        busy: By device, ns in steps.
        launching: ns of all devices' steps in which no kernel ran.
        counts: The scheduler's counters.
        disk_bytes: Read from the disks of all servers.
        steps: Steps of all devices.
        end: Virtual time at the end, in ns.
        events: Events of the clock.
        seconds: Real time.
        used: Processor time, in seconds.
        cost: Real time of the scheduler.
    """

    ledger: RunRecorder
    network: Network
    busy: dict[str, int]
    launching: int
    counts: Mapping[str, int]
    disk_bytes: int
    steps: int
    end: int
    events: int
    seconds: float
    used: float
    cost: Cost
