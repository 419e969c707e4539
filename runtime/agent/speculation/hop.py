"""Predict a hop with a cheaper stand-in and compare the prediction with the hop's own output (BL-25).

D is the device of the predicted hop. The stand-in's output goes on at once, as if it were the hop's own:

    D   row p arrives ── stand-in runs ──ForwardRows, tentative──> later hops … RowsDone, tentative ──> scheduler
          └─ then the hop itself runs ── compared ──SpeculationResult────────────────────────────────> scheduler
                same: nothing more      differs: ──ForwardRows──> later hops again … RowsDone ───────> scheduler

Messages: `attempts` number the rows of a sequence; even numbers are real rows, the odd number before each is its
prediction. Only the scheduler waits: it counts a row as done when its RowsDone has arrived, or when a tentative
RowsDone and a SpeculationResult that confirms it have. One hop of a path is predicted, never the last one, so
predictions are never based on predictions.

Roll-back: behind D a real row writes the same positions of the same pages again. Tentative rows always lie behind what
the scheduler counts as computed, and only that is shared or migrated (UN-13).

Order: D predicts row p + 1 only after row p itself has run, so later hops receive p tentative, p real (unless the
prediction stands), p + 1 tentative, and so on. The stand-in attends, so it has its own page table here, which every row
of the sequence fills, predicted or not.

Exact mode: a prediction stands if its bits are the same. The token sampled from a tentative row is only a guess: the
scheduler sends row p + 1 with it (`scheduler.speculation.in_flight`), so that the hops up to D need not wait for those
behind. If the token turns out to differ, row p + 1 is sent again under a new attempt, and supersedes on every hop what
began at its start.

Close, death and preemption end an epoch as usual; tentative rows leave nothing to clean up. A migrated sequence
continues without speculation.

This module handles rows, tables and attempts of one device. The scheduler chooses which sequences are predicted; the
engine compares arrays. Shadow rows (those of the stand-in) run in steps of their own: in a second lane if there is one,
else in the only lane before the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Array, Likeness
from runtime.control.agent_io import Send
from runtime.messages import SCHEDULER, SpeculationResult
from runtime.policy.speculation.choice import stands
from runtime.types import ModelSpec

#: `StageEngine.alike`.
Alike = Callable[[Array, Array], Likeness]


def same_bits(a: Array, b: Array) -> Likeness:
    """Compare two arrays without an engine's measure: cosine 1 for the same bits, else 0."""
    same = memoryview(a.data).cast("B") == memoryview(b.data).cast("B")
    return Likeness(same, 1.0 if same else 0.0)


class SpeculativeHop:
    """The predicted hops on one device: page tables of stand-ins and the queue of shadow rows."""

    def __init__(self, device: str, tables: SequencePageTables) -> None:
        self._device = device
        self._tables = tables
        self.queue: list[QueuedRow] = []

    # -- sequences -----------------------------------------------------------------------------------------------------

    def opened(self, sequence: AgentSequence, stages: Mapping[str, ModelSpec]) -> None:
        """Open the stand-in's table if a hop of the sequence here is predicted and the stand-in's stage is loaded."""
        if sequence.ahead is None or sequence.path[sequence.ahead.hop].device != self._device:
            return
        spec = stages.get(sequence.ahead.stage.id)
        if spec is not None:
            sequence.shadow = self._tables.open(sequence.seq, sequence.ahead.stage.lo, spec)

    def closed(self, sequence: AgentSequence) -> None:
        """Stop predicting for a sequence and release its stand-in's table."""
        if sequence.shadow is not None:
            self._tables.release(sequence.shadow)
            sequence.shadow = None
            sequence.prediction = None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def comes(self, row: QueuedRow) -> None:
        """Queue a shadow row for a row that has arrived, if its hop is predicted."""
        ahead = row.sequence.ahead
        if row.sequence.shadow is not None and ahead is not None and ahead.hop == row.hop:
            self.queue.append(replace(row, name=row.sequence.shadow, stage=ahead.stage.id, sample=False, shadow=True))

    def due(self, waiting: Sequence[QueuedRow], valid: Callable[[QueuedRow], bool]) -> list[QueuedRow]:
        """Return the shadow rows that may run now: those of sequences without an earlier row waiting or running."""
        self.queue = [each for each in self.queue if each.sequence.shadow == each.name and valid(each)]
        if not self.queue:
            return []
        first: dict[int, int] = {}
        for each in waiting:
            if (
                each.sequence.shadow is not None
                and each.sequence.ahead is not None
                and each.sequence.ahead.hop == each.hop
                and valid(each)
            ):
                first.setdefault(id(each.sequence), each.attempt)
        return [each for each in self.queue if first.get(id(each.sequence), each.attempt) >= each.attempt]

    def mark_running(self, rows: Sequence[QueuedRow]) -> None:
        """Remove shadow rows from the queue: they run in a step."""
        gone = set(map(id, rows))
        self.queue = [each for each in self.queue if id(each) not in gone]

    def predicted(self, row: QueuedRow, output: Array, waiting: Sequence[QueuedRow]) -> QueuedRow | None:
        """Record the output of a shadow row and return the tentative row to forward.

        Returns None if the row must not run ahead, or if the real row has already run.
        """
        sequence = row.sequence
        late = all(each.sequence is not sequence or each.attempt != row.attempt for each in waiting)
        if late or not row.ahead or sequence.shadow != row.name:
            return None
        sequence.prediction = row.attempt, output
        real = next(each for each in waiting if each.sequence is sequence and each.attempt == row.attempt)
        return replace(real, attempt=row.attempt - 1)

    def failed(self, rows: Sequence[QueuedRow]) -> None:
        """Stop predicting for the sequences of a failed step of shadow rows."""
        for row in rows:
            if row.sequence.shadow == row.name:
                self.closed(row.sequence)


class SpeculationResults:
    """Compare real outputs with their predictions and collect the results of one step for the scheduler."""

    def __init__(self, device: str, alike: Alike) -> None:
        self._device = device
        self._alike = alike
        self._rows: list[tuple[str, int, int, bool, float]] = []

    def judge(self, row: QueuedRow, output: Array) -> bool:
        """Return whether the row was predicted and its prediction stands; then its own output is not forwarded."""
        sequence = row.sequence
        if (
            sequence.prediction is None
            or sequence.ahead is None
            or row.hop != sequence.ahead.hop
            or sequence.prediction[0] != row.attempt
        ):
            return False
        prediction, sequence.prediction = sequence.prediction[1], None
        comparable = (prediction.dtype, prediction.shape) == (output.dtype, output.shape)
        found = self._alike(prediction, output) if comparable else Likeness(False, -1.0)
        good = stands(found.same, found.cosine, sequence.ahead.threshold)
        self._rows.append((sequence.seq, row.epoch, row.attempt, good, found.cosine))
        return good

    def drain_messages(self) -> list[Send]:
        if not self._rows:
            return []
        seqs, epochs, attempts, good, cosines = zip(*self._rows, strict=True)
        return [Send(SCHEDULER, SpeculationResult(self._device, seqs, epochs, attempts, good, cosines))]
