"""Which models cannot run any more, because devices will not come back, and what becomes of their sequences. Pure
bookkeeping.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs

from runtime.chains import Chain
from runtime.control.scheduler_io import EmitTokens, SchedulerCommand


class UnavailableModel(Exception):
    """No model can run any more."""


class UnavailableModels:
    """Models that new sequences cannot be run on, and why: as of the last look."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def reason(self, model: str) -> str | None:
        return self._reasons.get(model)

    def reasons(self) -> dict[str, str]:
        return dict(self._reasons)

    def look(
        self,
        chains: Iterable[Chain],
        instances: Mapping[str, Sequence[str]],
        failed: Collection[str],
        reasons: Mapping[str, str],
    ) -> None:
        """`chains`: those that new sequences get. `instances`: devices by block; `reasons`: by device, why it does
        not come back.
        """
        self._reasons = whys(chains, instances, failed, reasons)

    def require_hope(self, chains: Iterable[Chain]) -> None:
        """Raises UnavailableModel if there are models, and all are stranded."""
        models = {chain.model for chain in chains}
        if models and self._reasons.keys() >= models:
            raise UnavailableModel(next(iter(self._reasons.values())))


def whys(
    chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Model -> why it cannot run any more, of those that cannot. As `stranded`."""
    return {
        model: f"{model} cannot run any more: the agent of {device} does not come back ({reasons[device]})"
        for model, device in stranded(chains, instances, failed).items()
    }


def stranded(
    chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str]
) -> dict[str, str]:
    """Model -> a device with the last instance of one of its blocks. `instances`: devices by block; `failed`: those
    without a future.
    """
    out: dict[str, str] = {}
    for chain in chains:
        last = [where[0] for use in chain.uses if (where := instances.get(use.block, ())) and set(where) <= set(failed)]
        if last:
            out[chain.model] = last[0]
    return out


def ending(commands: Iterable[SchedulerCommand], seq: str, why: str) -> list[SchedulerCommand]:
    """What a scheduler says to the end of a sequence that nobody asked to end: its last event is an error, with the
    reason.
    """
    return [_told(command, seq, why) if isinstance(command, EmitTokens) else command for command in commands]


def _told(emit: EmitTokens, seq: str, why: str) -> EmitTokens:
    return EmitTokens(
        tuple(structs.replace(event, finish="error", error=why) if event.seq == seq else event for event in emit.events)
    )
