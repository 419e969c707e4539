"""Predict lengths of answers with the predictors in a store, for `zoo serve --lengths` (TI-10).

Those of the models that are named at the start are loaded then; that of a model that is loaded on demand with its first
request. A predictor that is made, replaced or removed meanwhile is noticed with a later request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.policy.lengths.forecast import LengthForecast
from runtime.types import SequenceRequest
from surrogates.lengths.storing import ENDING, LengthPredictor, stored_predictor
from zoo.errors import InputError, NotFound, ZooError
from zoo.store import Store

_log = logging.getLogger(__name__)


#: Time between two looks at the catalogue, in seconds.
_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class _PredictorInUse:
    """What a model's answers are predicted with.

    Fields:
        contents: Fingerprints of model and predictor when it was loaded; None where there was none.
    """

    contents: tuple[str | None, str | None]
    predictor: LengthPredictor | None


class StoredPredictors:
    """Forecasts by the predictors of a store, each loaded once for each content. Used by one thread at a time.

    Args:
        clock: Time in seconds.

    Raises InputError if models are named and none of them has a predictor; the errors of loading.
    """

    def __init__(self, store: Store, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._known: dict[str, _PredictorInUse] = {}
        self._looked, self._contents = clock(), self._read_contents()
        for name in names:
            self._known[name] = _PredictorInUse(self._contents_of(name), self._load(name))
        if names and not any(each.predictor for each in self._known.values()):
            raise InputError(f"--lengths: no served model has a length predictor: `zoo lengths {names[0]}` makes one")

    def forecasts(self, requests: Sequence[SequenceRequest]) -> list[LengthForecast | None]:
        """Return what is predicted of each answer; None where there is no predictor, or the length is given."""
        self._look()
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

    def _look(self) -> None:
        """Read from time to time which models and predictors the store has now."""
        now = self._clock()
        if now < self._looked + _LOOK:
            return
        self._looked = now
        try:
            self._contents = self._read_contents()
        except ZooError as error:
            _log.warning("length predictors stay as they are, for the catalogue cannot be read: %s", error)

    def _predictor(self, model: str) -> LengthPredictor | None:
        """Return a model's predictor, loaded anew if it has changed; the older one if the new one cannot be loaded."""
        contents, known = self._contents_of(model), self._known.get(model)
        if known is not None and known.contents == contents:
            return known.predictor
        try:
            predictor = self._load(model)
            if known is not None:
                _log.info("lengths of %s's answers are predicted %s", model, "anew" if predictor else "no more")
        except ZooError as error:
            predictor = None if known is None else known.predictor
            what = "as before" if predictor else "not predicted"
            _log.warning("lengths of %s's answers are %s: %s", model, what, error)
        self._known[model] = _PredictorInUse(contents, predictor)
        return predictor

    def _contents_of(self, model: str) -> tuple[str | None, str | None]:
        return self._contents.get(model), self._contents.get(model + ENDING)

    def _read_contents(self) -> Mapping[str, str]:
        with self._store.catalog.reading() as reader:
            return reader.fingerprints()

    def _load(self, model: str) -> LengthPredictor | None:
        with self._store.catalog.reading() as reader:
            manifest = reader.model(model)
        try:
            return stored_predictor(self._store, manifest)
        except NotFound:
            return None
