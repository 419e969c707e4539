"""Hops that are predicted: a cheaper stand-in of a hop runs before it, and what it gives goes on as if it were the
hop's own (BL-25).

    D is the device of the predicted hop; behind it the path goes on to others, and ends at the scheduler.

    D     row p comes ── stand-in runs ──Pass, tentative──> behind D … Done, tentative ──> scheduler
             └─ then the hop itself runs ── compared ──SpeculationResult──────────────────────────> scheduler
                       stands: nothing more    else: ──Pass──> behind D again … Done ───> scheduler

Messages: `attempts` number a sequence's rows; even ones are real, the odd one before is its prediction. Nobody waits for
anybody but the scheduler, which takes a row for done when its Done is there, or when a tentative one and a
SpeculationResult that it stands are. On a path one hop is predicted, never the last one; so no two that follow each
other are, and nothing is predicted from predictions. Roll-back: behind D a real row writes the same positions of the
same pages over again; tentative ones are always behind all that the scheduler counts as computed, and only what it
counts is shared, lent or moved (UN-13). D predicts row p + 1 only when row p itself is through, so that behind D rows
come in order: p tentative, p real (unless it stood), p + 1 tentative … The stand-in attends, so it has a table of its
own here, which every row of the sequence fills, predicted or not.
Exact: a prediction stands if it has the same bits. The token that came of another is only a guess: by it the scheduler
sends row p + 1 on its way (`scheduler.speculation.in_flight`), so that the hops before D and D itself need not wait for
those behind. If the token proves to be another, row p + 1 is sent again under a new turn, and supersedes what began at
its start wherever it comes. Close, death and preemption end an
epoch as ever: tentative rows have nothing of their own that could be left. A moved sequence goes on without.

Contract: knows rows, tables and turns of one device; which sequences are predicted says the scheduler. How alike two
arrays are says the engine. Shadow rows run in steps of their own: on a stream of their own (`agent.Lane`), or on the
only one before the others.
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
    """Alike where nobody can say how much: 1 for the same bits, else 0."""
    same = memoryview(a.data).cast("B") == memoryview(b.data).cast("B")
    return Likeness(same, 1.0 if same else 0.0)


class SpeculativeHop:
    def __init__(self, device: str, tables: SequencePageTables) -> None:
        self._device = device
        self._tables = tables
        self.queue: list[QueuedRow] = []

    # -- sequences -----------------------------------------------------------------------------------------------------

    def opened(self, sequence: AgentSequence, stages: Mapping[str, ModelSpec]) -> None:
        """A sequence is here. If a hop of it here is predicted, its stand-in gets a table; where the stage is missing
        nothing is.
        """
        if sequence.ahead is None or sequence.path[sequence.ahead.hop].device != self._device:
            return
        spec = stages.get(sequence.ahead.stage.id)
        if spec is not None:
            sequence.shadow = self._tables.open(sequence.seq, sequence.ahead.stage.lo, spec)

    def closed(self, sequence: AgentSequence) -> None:
        """Nothing of it is predicted any more."""
        if sequence.shadow is not None:
            self._tables.release(sequence.shadow)
            sequence.shadow = None
            sequence.prediction = None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def comes(self, row: QueuedRow) -> None:
        """A row is in its queue: if its hop is predicted, the stand-in runs it, too."""
        ahead = row.sequence.ahead
        if row.sequence.shadow is not None and ahead is not None and ahead.hop == row.hop:
            self.queue.append(replace(row, name=row.sequence.shadow, stage=ahead.stage.id, sample=False, shadow=True))

    def due(self, waiting: Sequence[QueuedRow], valid: Callable[[QueuedRow], bool]) -> list[QueuedRow]:
        """Shadow rows that may run now: none while an earlier row of its sequence has not run itself."""
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
        """They are in a step."""
        gone = set(map(id, rows))
        self.queue = [each for each in self.queue if id(each) not in gone]

    def predicted(self, row: QueuedRow, output: Array, waiting: Sequence[QueuedRow]) -> QueuedRow | None:
        """A shadow row is through: the tentative row that goes on, if it may, and if the real one has not been
        faster.
        """
        sequence = row.sequence
        late = all(each.sequence is not sequence or each.attempt != row.attempt for each in waiting)
        if late or not row.ahead or sequence.shadow != row.name:
            return None
        sequence.prediction = row.attempt, output
        real = next(each for each in waiting if each.sequence is sequence and each.attempt == row.attempt)
        return replace(real, attempt=row.attempt - 1)

    def failed(self, rows: Sequence[QueuedRow]) -> None:
        """The step of shadow rows failed: these sequences go on without."""
        for row in rows:
            if row.sequence.shadow == row.name:
                self.closed(row.sequence)


class SpeculationResults:
    """Verdicts of one step, gathered."""

    def __init__(self, device: str, alike: Alike) -> None:
        self._device = device
        self._alike = alike
        self._rows: list[tuple[str, int, int, bool, float]] = []

    def judge(self, row: QueuedRow, output: Array) -> bool:
        """Whether what was predicted of a row that has now run stands, and nothing more need go on. It may not have
        been predicted.
        """
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
