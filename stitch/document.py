"""The JSON document of a stitch. Pure.

It is written as `stitch.json`, printed by `zoo stitch --json`, and stored in the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stitch.block import Folded
from stitch.learning import START, TRAINED, UNSTITCHED, WITHOUT_POSITION
from stitch.objective import Objective
from stitch.points import StitchPoint
from stitch.scoring import PointScore, Prediction, StitchScores
from stitch.settings import StitchSettings
from surgery.text.text import Probe

#: Variants beside the trained stitch itself, in the order of the document.
OTHERS = (START, WITHOUT_POSITION, UNSTITCHED)


@dataclass(frozen=True)
class Facts:
    """Facts about a training.

    Fields:
        run: Digest of everything that the stitch and its scores depend on.
    """

    name: str
    a: str
    b: str
    probe: Probe
    run: str
    seconds: float


def describe(
    facts: Facts, settings: StitchSettings, points: Sequence[StitchPoint], stitch: Folded, scores: StitchScores
) -> dict[str, Any]:
    """Return the document. Similarities are cosines at B's head against B, means over held-out tokens (BL-05)."""
    trained = scores.variants[TRAINED]
    others = {name: scores.variants[name] for name in OTHERS if name in scores.variants}
    seen = [point for point in points if point.seen]
    return {
        "stitch": facts.name,
        "a": facts.a,
        "b": facts.b,
        "dims": [stitch.weight.shape[1] - 1, stitch.weight.shape[0]],
        "points": [
            _point(point, trained[point], {name: by_point[point] for name, by_point in others.items()})
            for point in points
        ],
        "similarity_mean": _mean(trained, points),
        **_parted(trained, points),
        # Both losses are over all trained places on held-out text, so that they are comparable: a step's own loss
        # covers only its places.
        "loss_first": _loss(settings, scores.variants[START], seen),
        "loss_last": _loss(settings, trained, seen),
        "seconds": round(facts.seconds, 3),
        "compared": {
            name: {"similarity_mean": _mean(by, points), **_parted(by, points)} for name, by in others.items()
        },
        "parents": {
            "a": {"similarity": scores.a.similarity, **_prediction(scores.a.prediction)},
            "b": _prediction(scores.b),
        },
        "probe": {"sha": facts.probe.digest, "text": facts.probe.text, "tokens": facts.probe.count},
        "settings": settings.document(),
        "run": facts.run,
    }


def _point(point: StitchPoint, own: PointScore, others: Mapping[str, PointScore]) -> dict[str, Any]:
    return {
        "a_layer": point.a_layer,
        "b_layer": point.b_layer,
        "position": point.position,
        "similarity": own.similarity,
        "seen": point.seen,
        "kl": own.kl,
        **_prediction(own.prediction),
        **{name: score.similarity for name, score in others.items()},
    }


def _prediction(prediction: Prediction) -> dict[str, float]:
    return {"accuracy": prediction.accuracy, "perplexity": prediction.perplexity}


def _parted(by_point: Mapping[StitchPoint, PointScore], points: Sequence[StitchPoint]) -> dict[str, float | None]:
    return {
        "similarity_seen": _mean(by_point, [point for point in points if point.seen]),
        "similarity_unseen": _mean(by_point, [point for point in points if not point.seen]),
    }


def _mean(by_point: Mapping[StitchPoint, PointScore], points: Iterable[StitchPoint]) -> float | None:
    values = [by_point[point].similarity for point in points]
    return fmean(values) if values else None


def _loss(settings: StitchSettings, by_point: Mapping[StitchPoint, PointScore], points: Iterable[StitchPoint]) -> float:
    objective = Objective(settings.kl, settings.cosine, settings.labels)
    scores = [by_point[point] for point in points]
    return fmean(objective.value(score.kl, score.similarity, score.prediction.nll) for score in scores)
