"""Rows that are through, as the messages that tell of them: to the next hop, or to the scheduler. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runtime.agent.commands import SCHEDULER, Send
from runtime.agent.guests import Waiting
from runtime.messages import Done, Lost, Pass
from runtime.stages import Array
from runtime.types import PromptLogprobs, Sampled


class Told:
    """What one step has to tell, gathered: one message for each device that rows go on to, and one for the scheduler."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ended: list[Waiting] = []
        self._onward: dict[str, tuple[list[Waiting], list[Array]]] = {}

    def goes_on(self, row: Waiting, output: Array) -> None:
        rows, arrays = self._onward.setdefault(row.guest.path[row.hop + 1].device, ([], []))
        rows.append(row)
        arrays.append(output)

    def ends(self, row: Waiting) -> None:
        self._ended.append(row)

    def commands(self, sampled: Mapping[str, Sampled], scores: Sequence[PromptLogprobs]) -> list[Send]:
        """`sampled`, `scores`: under the names of tables, as the engine knows them."""
        out = [Send(device, pass_of(rows), tuple(arrays)) for device, (rows, arrays) in self._onward.items()]
        if self._ended:
            prompts: dict[str, list[PromptLogprobs]] = {}
            for part in scores:
                prompts.setdefault(part.seq, []).append(part)
            out.append(Send(SCHEDULER, done_of(self._device, self._ended, sampled, prompts)))
        return out


def pass_of(rows: Sequence[Waiting]) -> Pass:
    """These rows at the next hop of each."""
    turns = _turns(rows)
    return Pass(
        tuple(each.guest.seq for each in rows),
        tuple(each.epoch for each in rows),
        tuple(each.hop + 1 for each in rows),
        tuple(each.start for each in rows),
        tuple(each.tokens for each in rows),
        tuple(each.sample for each in rows),
        tuple(each.generated for each in rows),
        turns,
        tuple(each.ahead for each in rows) if turns else (),
    )


def done_of(device: str, rows: Sequence[Waiting], sampled: Mapping[str, Sampled], prompts: Mapping[str, Sequence[PromptLogprobs]]) -> Done:
    """These rows at the end of their path. `sampled`, `prompts`: by the names of tables, as the engine knows them."""
    scores = tuple(replace(part, seq=each.guest.seq) for each in rows if each.name in prompts for part in prompts[each.name])
    return Done(
        device,
        tuple(each.guest.seq for each in rows),
        tuple(each.epoch for each in rows),
        tuple(each.work for each in rows),
        tuple(_own(sampled.get(each.name), each.guest.seq) for each in rows),
        scores,
        turns=_turns(rows),
    )


def lost_of(device: str, rows: Sequence[Waiting], reason: str, *, retry: bool) -> Lost:
    return Lost(device, tuple(each.guest.seq for each in rows), tuple(each.epoch for each in rows), reason, retry)


def _own(sampled: Sampled | None, seq: str) -> Sampled | None:
    """A token under its sequence's name."""
    return None if sampled is None else Sampled(seq, sampled.token, sampled.logprob, sampled.top)


def _turns(rows: Sequence[Waiting]) -> tuple[int, ...]:
    turns = tuple(each.turn for each in rows)
    return turns if any(turns) else ()
