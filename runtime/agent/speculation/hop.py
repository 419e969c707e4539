"""Hops that are predicted: a cheaper stand-in of a hop runs before it, and what it gives goes on as if it were the
hop's own (BL-25).

    D is the device of the predicted hop; behind it the path goes on to others, and ends at the scheduler.

    D     row p comes ── stand-in runs ──Pass, tentative──> behind D … Done, tentative ──> scheduler
             └─ then the hop itself runs ── compared ──SpeculationResult──────────────────────────> scheduler
                       stands: nothing more    else: ──Pass──> behind D again … Done ───> scheduler

Messages: `turns` number a sequence's rows; even ones are real, the odd one before is its prediction. Nobody waits for
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
arrays are says the engine. Shadow rows run in steps of their own: on a stream of their own (`relay.Lane`), or on the
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

    def opened(self, guest: AgentSequence, stages: Mapping[str, ModelSpec]) -> None:
        """A sequence is here. If a hop of it here is predicted, its stand-in gets a table; where the stage is missing
        nothing is.
        """
        if guest.ahead is None or guest.path[guest.ahead.hop].device != self._device:
            return
        spec = stages.get(guest.ahead.stage.id)
        if spec is not None:
            guest.shadow = self._tables.open(guest.seq, guest.ahead.stage.lo, spec)

    def closed(self, guest: AgentSequence) -> None:
        """Nothing of it is predicted any more."""
        if guest.shadow is not None:
            self._tables.release(guest.shadow)
            guest.shadow = None
            guest.prediction = None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def comes(self, row: QueuedRow) -> None:
        """A row is in its queue: if its hop is predicted, the stand-in runs it, too."""
        ahead = row.guest.ahead
        if row.guest.shadow is not None and ahead is not None and ahead.hop == row.hop:
            self.queue.append(replace(row, name=row.guest.shadow, stage=ahead.stage.id, sample=False, shadow=True))

    def due(self, waiting: Sequence[QueuedRow], valid: Callable[[QueuedRow], bool]) -> list[QueuedRow]:
        """Shadow rows that may run now: none while an earlier row of its sequence has not run itself."""
        self.queue = [each for each in self.queue if each.guest.shadow == each.name and valid(each)]
        if not self.queue:
            return []
        first: dict[int, int] = {}
        for each in waiting:
            if (
                each.guest.shadow is not None
                and each.guest.ahead is not None
                and each.guest.ahead.hop == each.hop
                and valid(each)
            ):
                first.setdefault(id(each.guest), each.turn)
        return [each for each in self.queue if first.get(id(each.guest), each.turn) >= each.turn]

    def mark_running(self, rows: Sequence[QueuedRow]) -> None:
        """They are in a step."""
        gone = set(map(id, rows))
        self.queue = [each for each in self.queue if id(each) not in gone]

    def predicted(self, row: QueuedRow, output: Array, waiting: Sequence[QueuedRow]) -> QueuedRow | None:
        """A shadow row is through: the tentative row that goes on, if it may, and if the real one has not been
        faster.
        """
        guest = row.guest
        late = all(each.guest is not guest or each.turn != row.turn for each in waiting)
        if late or not row.ahead or guest.shadow != row.name:
            return None
        guest.prediction = row.turn, output
        real = next(each for each in waiting if each.guest is guest and each.turn == row.turn)
        return replace(real, turn=row.turn - 1)

    def failed(self, rows: Sequence[QueuedRow]) -> None:
        """The step of shadow rows failed: these sequences go on without."""
        for row in rows:
            if row.guest.shadow == row.name:
                self.closed(row.guest)


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
        guest = row.guest
        if (
            guest.prediction is None
            or guest.ahead is None
            or row.hop != guest.ahead.hop
            or guest.prediction[0] != row.turn
        ):
            return False
        prediction, guest.prediction = guest.prediction[1], None
        comparable = (prediction.dtype, prediction.shape) == (output.dtype, output.shape)
        found = self._alike(prediction, output) if comparable else Likeness(False, -1.0)
        good = stands(found.same, found.cosine, guest.ahead.threshold)
        self._rows.append((guest.seq, row.epoch, row.turn, good, found.cosine))
        return good

    def drain_messages(self) -> list[Send]:
        if not self._rows:
            return []
        seqs, epochs, turns, good, cosines = zip(*self._rows, strict=True)
        return [Send(SCHEDULER, SpeculationResult(self._device, seqs, epochs, turns, good, cosines))]
