"""Find the models that cannot run any more because devices will not come back, and end their sequences with the reason.

Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs

from runtime.chains import Chain
from runtime.control.scheduler_io import EmitTokens, SchedulerCommand


class UnavailableModel(Exception):
    """Raised when no served model can run any more, or no device comes back."""


class UnavailableModels:
    """The models that new sequences cannot run on, each with the reason, as of the last `look`."""

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
        """Update the set.

        Args:
            chains: The chains that new sequences get.
            instances: Devices by block.
            failed: Devices that will not be started again.
            reasons: By device, why.
        """
        self._reasons = whys(chains, instances, failed, reasons)

    def require_hope(self, chains: Iterable[Chain]) -> None:
        """Raise UnavailableModel if there are models and none of them can run."""
        models = {chain.model for chain in chains}
        if models and self._reasons.keys() >= models:
            raise UnavailableModel(next(iter(self._reasons.values())))


def whys(
    chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str], reasons: Mapping[str, str]
) -> dict[str, str]:
    """Return, for each model that cannot run any more, the reason. Arguments as `UnavailableModels.look`."""
    return {
        model: f"{model} cannot run any more: the agent of {device} does not come back ({reasons[device]})"
        for model, device in stranded(chains, instances, failed).items()
    }


def stranded(
    chains: Iterable[Chain], instances: Mapping[str, Sequence[str]], failed: Collection[str]
) -> dict[str, str]:
    """Return, for each model that cannot run any more, a failed device with the last instance of one of its blocks."""
    out: dict[str, str] = {}
    for chain in chains:
        last = [where[0] for use in chain.uses if (where := instances.get(use.block, ())) and set(where) <= set(failed)]
        if last:
            out[chain.model] = last[0]
    return out


def ending(commands: Iterable[SchedulerCommand], seq: str, why: str) -> list[SchedulerCommand]:
    """Turn the scheduler's commands for an aborted sequence into ones that end it with an error and the reason."""
    return [_told(command, seq, why) if isinstance(command, EmitTokens) else command for command in commands]


def _told(emit: EmitTokens, seq: str, why: str) -> EmitTokens:
    return EmitTokens(
        tuple(structs.replace(event, finish="error", error=why) if event.seq == seq else event for event in emit.events)
    )
