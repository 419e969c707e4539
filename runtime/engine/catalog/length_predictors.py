"""Predict lengths of answers with the predictors in a store, for `zoo serve --lengths` (TI-10).

Those of the models that are named at the start are loaded then; that of a model that is loaded on demand with its first
request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runtime.policy.lengths.forecast import LengthForecast
from runtime.types import SequenceRequest
from surrogates.lengths.storing import LengthPredictor, stored_predictor
from zoo.errors import InputError, NotFound, ZooError
from zoo.store import Store

_log = logging.getLogger(__name__)


class StoredPredictors:
    """Forecasts by the predictors of a store, each loaded once. Used by one thread at a time.

    Raises InputError if models are named and none of them has a predictor; the errors of loading.
    """

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self._store = store
        self._known: dict[str, LengthPredictor | None] = {}
        for name in names:
            self._known[name] = self._load(name)
        if names and not any(self._known.values()):
            raise InputError(f"--lengths: no served model has a length predictor: `zoo lengths {names[0]}` makes one")

    def forecasts(self, requests: Sequence[SequenceRequest]) -> list[LengthForecast | None]:
        """Return what is predicted of each answer; None where there is no predictor, or the length is given."""
        found: list[LengthForecast | None] = [None] * len(requests)
        by_model: dict[str, list[int]] = {}
        for at, one in enumerate(requests):
            if not one.sampling.ignore_eos:
                by_model.setdefault(one.model, []).append(at)
        for model, places in by_model.items():
            if (predictor := self._predictor(model)) is not None:
                masses = predictor.masses([requests[at].prompt for at in places])
                for at, mass in zip(places, masses, strict=True):
                    found[at] = LengthForecast(predictor.edges, tuple(mass))
        return found

    def _predictor(self, model: str) -> LengthPredictor | None:
        if model not in self._known:
            try:
                self._known[model] = self._load(model)
            except ZooError as error:
                _log.warning("lengths of %s's answers are not predicted: %s", model, error)
                self._known[model] = None
        return self._known[model]

    def _load(self, model: str) -> LengthPredictor | None:
        with self._store.catalog.reading() as reader:
            manifest = reader.model(model)
        try:
            return stored_predictor(self._store, manifest)
        except NotFound:
            return None
