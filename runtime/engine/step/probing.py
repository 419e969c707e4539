"""Forecast lengths of answers inside a step, from the hidden states of prompts' last tokens (TI-10, ARES).

A row asks for it (`Row.probed`) with the last token of its prompt, and now and then while it decodes, for which a probe
has another map; rows of models without a probe get none. The states are those that the step computes anyway, so that
the target does not run twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor, where

from runtime.engine.step.batch import ModelBatch
from runtime.kv.transfers import put
from runtime.types import LengthMasses
from surrogates.lengths.buckets import after
from surrogates.lengths.probe import LengthProbe


@dataclass(frozen=True, slots=True)
class _ProbedRows:
    """Rows of one batch that ask for a forecast.

    Fields:
        at: Unit of the batch that their states enter; the batch's length if they are its output.
        names, tokens: Of the rows, and the place of each one's last token among the batch's tokens.
        made: Tokens of each one's answer so far.
    """

    probe: LengthProbe
    at: int
    names: tuple[str, ...]
    tokens: tuple[int, ...]
    made: tuple[int, ...]

    def masses(self, states: Tensor) -> Tensor:
        """Return the mass of each bucket [rows, buckets] for the rows' states [rows, width]."""
        if self.probe.later is None or not any(self.made):
            return self.probe.masses(states)
        left = self.probe.later.masses(states)
        if all(self.made):
            return left
        answers = put(self.made, states.device) > 0
        return where(answers[:, None], left, self.probe.masses(states))

    def length(self, at: int, mass: Sequence[float]) -> LengthMasses:
        """Return what the masses of a row's buckets say of its whole answer."""
        edges, made = self.probe.edges, self.made[at]
        return LengthMasses(*after(edges, mass, made)) if made else LengthMasses(edges, tuple(mass))


class StepProbes:
    """The forecasts of one step, by batch.

    Attributes:
        cuts: By batch: units before which its hidden states are read.
    """

    def __init__(self, batches: Mapping[str, ModelBatch]) -> None:
        self._asked = {name: asked for name, batch in batches.items() if (asked := _asked(batch)) is not None}
        self.cuts = {name: frozenset((asked.at,)) for name, asked in self._asked.items()}
        self._made: list[tuple[_ProbedRows, Tensor]] = []

    def read(self, name: str, at: int, hidden: Tensor) -> None:
        """Forecast for a batch's rows if these hidden states [1, tokens, width] are those that enter their unit."""
        asked = self._asked.get(name)
        if asked is not None and asked.at == at:
            states = hidden[0, put(list(asked.tokens), hidden.device)]
            self._made.append((asked, asked.masses(states)))

    def lengths(self) -> Mapping[str, LengthMasses]:
        """Wait for the forecasts; return them by row name, without those of hidden states that are no numbers."""
        return {
            asked.names[at]: asked.length(at, mass)
            for asked, masses in self._made
            for at, mass in enumerate(masses.tolist())
            if all(map(isfinite, mass))
        }


def _asked(batch: ModelBatch) -> _ProbedRows | None:
    """Return what a batch's rows ask for; None for nothing, or if they enter behind the probe's state."""
    probe = batch.model.probe
    if probe is None:
        return None
    found = [
        (row, span.hi - 1)
        for row, span in zip(batch.rows, batch.spans, strict=False)
        if row.probed and (not row.generated or probe.later is not None)
    ]
    if not found or found[0][0].enters >= probe.at:
        return None
    return _ProbedRows(
        probe, probe.at - found[0][0].enters, tuple(row.seq for row, _ in found), tuple(token for _, token in found),
        tuple(row.generated for row, _ in found),
    )  # fmt: skip
