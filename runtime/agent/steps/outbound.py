"""Put the results of rows into messages to the next hop or to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runtime.agent.sequences.sequence import QueuedRow
from runtime.chains import Array, Stacked
from runtime.control.agent_io import Send
from runtime.messages import SCHEDULER, ForwardRows, LengthsProbed, RowsDone, RowsLost
from runtime.types import LengthMasses, PromptLogprobs, Sampled


class StepMessages:
    """Collect the results of one step: one message for each device that rows go on to, and one for the scheduler."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ended: list[QueuedRow] = []
        self._scores: list[PromptLogprobs] = []
        self._onward: dict[str, tuple[list[QueuedRow], list[Array]]] = {}

    def goes_on(self, row: QueuedRow, output: Array) -> None:
        device = row.sequence.path[row.hop + 1].device
        known = self._onward.get(device)
        if known is None:
            known = self._onward[device] = [], []
        known[0].append(row)
        known[1].append(output)

    def ends(self, row: QueuedRow) -> None:
        self._ended.append(row)
        if row.sequence.scores:
            self._scores += row.sequence.scores
            row.sequence.scores.clear()

    def part(self, row: QueuedRow, scores: Sequence[PromptLogprobs]) -> None:
        """Keep the prompt log-probabilities of a row's part; they are sent with the row's last part."""
        row.sequence.scores += [each for each in scores if each.seq == row.name]

    def commands(
        self, sampled: Mapping[str, Sampled], scores: Sequence[PromptLogprobs], batch: int = 0, now: int = 0
    ) -> list[Send]:
        """Return the messages of the step: one for each device, one for the scheduler.

        Args:
            sampled: Sampled tokens by table name.
            scores: Prompt log-probabilities, under table names.
            batch: The number of the step's persistent batch.
            now: Time at which the rows leave, in ns.
        """
        out = [
            Send(device, pass_of(rows, batch, now), tuple(arrays)) for device, (rows, arrays) in self._onward.items()
        ]
        if self._ended:
            prompts: dict[str, list[PromptLogprobs]] = {}
            for part in (*self._scores, *scores):
                prompts.setdefault(part.seq, []).append(part)
            out.append(Send(SCHEDULER, done_of(self._device, self._ended, sampled, prompts, batch)))
        return out


def onward(rows: Sequence[QueuedRow], outputs: Mapping[str, Array], batch: int = 0, now: int = 0) -> Send | None:
    """Return one message with all rows of a step, or None.

    None unless all rows go on to one device and their outputs are one array.
    """
    if (
        not rows
        or not isinstance(outputs, Stacked)
        or not outputs.matches_rows([each.name for each in rows], [each.tokens for each in rows])
    ):
        return None
    device = next_device(rows)
    return None if device is None else Send(device, pass_of(rows, batch, now), (outputs.whole,))


def report_lengths(device: str, rows: Sequence[QueuedRow], lengths: Mapping[str, LengthMasses]) -> list[Send]:
    """Return the report of what was forecast of these rows' answers, without sequences that have gone.

    It is sent before the rows' own results, so that these find it at the scheduler.
    """
    told = [(each.sequence.seq, lengths[each.name]) for each in rows if each.name in lengths and each.sequence.here]
    if not told:
        return []
    seqs, masses = zip(*told, strict=True)
    return [Send(SCHEDULER, LengthsProbed(device, seqs, masses))]


def next_device(rows: Sequence[QueuedRow]) -> str | None:
    """Return the device that all rows (at least one) go on to, or None.

    None also if a row is of a migration, speculated or only a part, if its sequence is closed or ends here, or if its
    next hop is on offer.
    """
    path, after = rows[0].sequence.path, rows[0].hop + 1
    device = path[after].device if after < len(path) else None
    for each in rows:
        path, after = each.sequence.path, each.hop + 1
        if each.move or each.attempt or not each.sequence.here or after == len(path) or path[after].device != device:
            return None
        if each.part or after in each.sequence.offers:  # more of it follows, or its next device is not known
            return None
    return device


def pass_of(rows: Sequence[QueuedRow], batch: int = 0, now: int = 0) -> ForwardRows:
    """Return the message that forwards these rows, each to its next hop."""
    columns = [
        (each.sequence.seq, each.epoch, each.hop + 1, each.start, each.tokens, each.sample, each.generated)
        for each in rows
    ]
    seqs, epochs, hops, starts, counts, sample, generated = zip(*columns, strict=True)
    attempts = _attempts(rows)
    return ForwardRows(
        seqs,
        epochs,
        hops,
        starts,
        counts,
        sample,
        generated,
        attempts,
        tuple(each.ahead for each in rows) if attempts else (),
        batch,
        now,
    )


def done_of(
    device: str,
    rows: Sequence[QueuedRow],
    sampled: Mapping[str, Sampled],
    prompts: Mapping[str, Sequence[PromptLogprobs]],
    batch: int = 0,
) -> RowsDone:
    """Return the message that reports rows at the end of their paths.

    Args:
        sampled: Sampled tokens by table name.
        prompts: Prompt log-probabilities by table name.
    """
    scores: tuple[PromptLogprobs, ...] = ()
    if prompts:
        scores = tuple(
            replace(part, seq=each.sequence.seq) for each in rows if each.name in prompts for part in prompts[each.name]
        )
    columns = [
        (
            each.sequence.seq,
            each.epoch,
            _count(each),
            None if (one := sampled.get(each.name)) is None else own_token(one, each.sequence.seq),
        )
        for each in rows
    ]
    seqs, epochs, counts, own = zip(*columns, strict=True)
    return RowsDone(
        device, seqs, epochs, counts, own, scores, attempts=_attempts(rows), earlier=_earlier(rows), batch=batch
    )


def lost_of(device: str, rows: Sequence[QueuedRow], reason: str, *, retry: bool, intact: bool = False) -> RowsLost:
    seqs, epochs = tuple(each.sequence.seq for each in rows), tuple(each.epoch for each in rows)
    return RowsLost(device, seqs, epochs, reason, retry, intact)


def _count(row: QueuedRow) -> int:
    """Return the tokens with K and V written for the order of the scheduler that this row belongs to."""
    return row.before + row.tokens + row.steps - 1 if row.credit is None else len(row.credit.told)


def _earlier(rows: Sequence[QueuedRow]) -> tuple[tuple[Sampled, ...], ...]:
    """Return the tokens that rows decoded on credit before their last ones; empty if no row has a credit."""
    if all([each.credit is None for each in rows]):  # noqa: C419
        return ()
    told = [() if each.credit is None else each.credit.told[:-1] for each in rows]
    return tuple(
        tuple([Sampled(each.sequence.seq, one.token, one.logprob, one.top) for one in some])
        for each, some in zip(rows, told, strict=True)
    )


def own_token(sampled: Sampled, seq: str) -> Sampled:
    """Return a token under the name of its sequence; the engine returns it under that of a table."""
    return Sampled(seq, sampled.token, sampled.logprob, sampled.top)


def _attempts(rows: Sequence[QueuedRow]) -> tuple[int, ...]:
    attempts = [each.attempt for each in rows]
    return tuple(attempts) if any(attempts) else ()
