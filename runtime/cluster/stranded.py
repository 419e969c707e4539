"""Which models cannot run any more, because devices will not come back, and what becomes of their sequences. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs

from runtime.agent.commands import Emit, SchedulerCommand
from runtime.stages import Chain


class Hopeless(Exception):
    """No model can run any more."""


class Strandings:
    """Models that were found stranded so far, and why."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def reason(self, model: str) -> str | None:
        return self._reasons.get(model)

    def reasons(self) -> dict[str, str]:
        return dict(self._reasons)

    def found(
        self, chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str], reasons: Mapping[str, str]
    ) -> dict[str, str]:
        """Those that are stranded now and were not before: model -> why. `reasons`: by device, why it does not come back."""
        new = {
            model: f"{model} cannot run any more: the agent of {device} does not come back ({reasons[device]})"
            for model, device in stranded(chains, instances, failed).items()
            if model not in self._reasons
        }
        self._reasons |= new
        return new

    def require_hope(self, chains: Iterable[Chain]) -> None:
        """Raises Hopeless if there are models, and all are stranded."""
        models = {chain.model for chain in chains}
        if models and self._reasons.keys() >= models:
            raise Hopeless(next(iter(self._reasons.values())))


def stranded(chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str]) -> dict[str, str]:
    """Model -> a device with the last instance of one of its blocks. `instances`: devices by block; `failed`: those without a future."""
    out: dict[str, str] = {}
    for chain in chains:
        last = [where[0] for use in chain.uses if (where := instances.get(use.block, ())) and set(where) <= set(failed)]
        if last:
            out[chain.model] = last[0]
    return out


def ending(commands: Iterable[SchedulerCommand], seq: str, why: str) -> list[SchedulerCommand]:
    """What a scheduler says to the end of a sequence that nobody asked to end: its last event is an error, with the reason."""
    return [_told(command, seq, why) if isinstance(command, Emit) else command for command in commands]


def _told(emit: Emit, seq: str, why: str) -> Emit:
    return Emit(tuple(structs.replace(event, finish="error", error=why) if event.seq == seq else event for event in emit.events))
