"""What devices report of their decodes, every so often, for the choice of where a sequence decodes (TI-03).

    report: heavy and light decodes, free pages -> used until the next one, with what was sent there since

Contract: with a period of 0 the scheduler's own record is read instead, which has no age. The paper's monitor
broadcasts reports of instances; here they are taken from the record at the same period, so that choices can be compared
with what old loads make of them. Pages that hand-offs under way have taken are not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.policy.lengths.forecast import LengthForecast
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


@dataclass(slots=True)
class DecodeLoad:
    """Decodes of one device, and its pages that are free."""

    heavy: int = 0
    light: int = 0
    free: int = 0
    capacity: int = 0

    def add(self, heavy: bool, pages: int = 0) -> None:
        """Count one more, which takes so many of the free pages."""
        self.heavy, self.light, self.free = self.heavy + heavy, self.light + (not heavy), self.free - pages


class LoadReports:
    """Reports of all devices."""

    def __init__(self, state: ClusterState, moves: Moves) -> None:
        self._state, self._moves = state, moves
        self._period = state.config.decode.load_reports_ms * 1_000_000
        self._limit = state.config.decode.heavy_tokens
        self._loads: dict[str, DecodeLoad] = {}
        self._taken = 0
        #: Of sequences that decode, or are about to: as they counted when that was first asked, and by which forecast.
        self._heavy: dict[str, tuple[bool, LengthForecast | None]] = {}

    def is_heavy(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence is a heavy decode, by the expected length of its answer."""
        known = self._heavy.get(sequence.seq)
        if known is None or known[1] is not sequence.forecast:
            lengths = self._state.lengths
            heavy = lengths is not None and lengths.whole(sequence) > self._limit
            known = self._heavy[sequence.seq] = heavy, sequence.forecast
        return known[0]

    def read(self, now: int) -> tuple[Mapping[str, DecodeLoad], int]:
        """Return the latest reports by device, and their age in ns."""
        if not self._loads or now - self._taken >= self._period:
            self._read_record()
            self._taken = now - now % self._period if self._period else now
        return self._loads, now - self._taken

    def assign(self, sequence: ScheduledSequence, devices: Iterable[str], pages: Mapping[str, int]) -> None:
        """Count a sequence that is sent to devices, until their next report has it."""
        if self._period:
            for name in devices:
                self._loads.setdefault(name, DecodeLoad()).add(self.is_heavy(sequence), pages.get(name, 0))

    def _read_record(self) -> None:
        devices, known = self._state.devices, self._state.sequences
        self._heavy = {seq: heavy for seq, heavy in self._heavy.items() if seq in known}
        self._loads = {each.name: DecodeLoad(0, 0, each.pages.free + each.pages.idle, each.pages.capacity)
                       for each in devices if each.alive}  # fmt: skip
        for name, load in self._loads.items():
            for sequence in devices[name].passing.here.values():
                if sequence.phase == "decode" and not sequence.waits.handoff:
                    load.add(self.is_heavy(sequence))
        for move in self._moves:
            if move.purpose == "handoff":
                for name in {part.target for part in move.parts} & self._loads.keys():
                    self._loads[name].add(self.is_heavy(move.sequence))
