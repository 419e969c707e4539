"""Run an experiment: measure what the ledger lacks, and assemble and store the document."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.evaluation.harness import EvalOptions, check_installed, evaluate, versions
from surgery.evaluation.tasks import WantedTask, want
from surgery.experiments.bench import MixtureBench, mixed_model, open_bench
from surgery.experiments.ledger import MeasurementLedger
from surgery.experiments.points import FIRST, SECOND, Experiment, Mixture, MixturePoint, whole
from surgery.experiments.questions import Question, Questions, questions
from surgery.experiments.scores import ScoreTally, difference, mean, tally
from surgery.text.text import Text
from surgery.text.tokenizers import has_tokenizer, require_same
from zoo.manifest import digest_of
from zoo.records import Document

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo

#: Kind of the documents.
EXPERIMENT = "experiment"
_VERSION = 1
_UNBOUNDED = 1 << 20

#: Called with (mixtures times batches done, in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """What to measure.

    Fields:
        plan: Gives the points for the models' number of layers and their replaceable ones.
        tasks: lm-eval tasks to run for every point as well.
        allow_code: Their files may run Python that they name.
    """

    experiment: Experiment
    a: str
    b: str
    plan: Callable[[int, str], list[MixturePoint]]
    text: Text
    ask: Question = field(default_factory=Question)
    surrogates: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    options: EvalOptions = field(default_factory=EvalOptions)
    device: str = "cpu"
    dtype: str | None = None
    allow_code: bool = False


def run_experiment(
    zoo: Zoo, request: Request, state: Path, keep: bool = True, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure what is missing and return the document, stored in the catalogue under b unless `keep` is off.

    Args:
        state: File of the measurements so far; a later run of the same models and questions resumes from it.

    Raises:
        InputError: Models of different shapes, impossible points, too little text, or a task that does not exist.
        Incomparable: The tokenizers differ.
        NotFound, AmbiguousName, DamagedObject, NotServable: As for naming and opening models.
    """
    a, b = zoo.model(request.a), zoo.model(request.b)
    surrogates = [zoo.model(name) for name in request.surrogates]
    wanted = _wanted(request.tasks, request.allow_code)
    for other in (a, *surrogates):
        require_same(other, b)
    manifests = [each.manifest for each in surrogates]
    bench = open_bench(zoo.store, a.manifest, b.manifest, manifests, request.device, request.dtype)
    tokenizer = b.tokenizer() if has_tokenizer(b) else None
    points = request.plan(bench.layers, bench.replaceable)
    asked = questions(request.text, tokenizer, request.ask, _context(b))
    key = _key(request, (a, b, *surrogates), asked)
    ledger = MeasurementLedger(state, key)
    mixtures = list(
        dict.fromkeys([whole(bench.layers, FIRST), whole(bench.layers, SECOND), *(point.mixture for point in points)])
    )
    measure(bench, mixtures, asked, ledger, request.device, progress)
    if wanted is not None:
        measure_tasks(bench, mixtures, tokenizer, wanted, request, ledger)
    document = _document(request, (a, b, *surrogates), bench, points, asked, ledger, key)
    if keep:
        with zoo.store.catalog.writing() as writer:
            writer.put_document(
                Document(EXPERIMENT, b.name, digest_of([request.experiment, key, document["tasks"]]), document)
            )
    return document


def measure(
    bench: MixtureBench,
    mixtures: Sequence[Mixture],
    asked: Questions,
    ledger: MeasurementLedger,
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Add the missing tallies to the ledger, batch by batch."""
    import torch

    from surgery.tensors.half_products import fast_products

    done, total = 0, len(asked.batches) * len(mixtures)
    for batch in asked.batches:
        missing = [mixture for mixture in mixtures if not ledger.has(batch.key, mixture.code)]
        done += len(mixtures) - len(missing)
        found: dict[str, ScoreTally] = {}
        with torch.inference_mode(), fast_products():
            for alike, hidden in bench.run(missing, batch.ids.to(device)):
                counted = tally(batch, hidden, functools.partial(bench.head, alike[0]))
                found |= {mixture.code: counted for mixture in alike}
                done += len(alike)
                if progress is not None:
                    progress(done, total)
        if found:
            ledger.put(batch.key, found)


def _wanted(tasks: Sequence[str], allow_code: bool) -> WantedTask | None:
    """Resolve the tasks before anything is measured. Raises InputError."""
    if not tasks:
        return None
    check_installed()
    return want(tasks, allow_code)


def measure_tasks(
    bench: MixtureBench,
    mixtures: Sequence[Mixture],
    tokenizer: Any,
    wanted: WantedTask,
    request: Request,
    ledger: MeasurementLedger,
) -> None:
    """Run lm-eval's tasks, once per mixture that the ledger lacks."""
    name = _tasks_key(request)
    for mixture in mixtures:
        if not ledger.has(name, mixture.code):
            done = evaluate(mixed_model(bench, mixture), tokenizer, wanted, request.options)
            ledger.put_document(name, mixture.code, {"results": done.results["results"], "texts": done.texts})


def _tasks_key(request: Request) -> str:
    return "tasks:" + digest_of([list(request.tasks), asdict(request.options)])


def _context(model: ModelHandle) -> int:
    limit = model.config.get("max_position_embeddings", model.config.get("n_positions"))
    return int(limit) if limit else _UNBOUNDED


def _key(request: Request, models: Sequence[ModelHandle], asked: Questions) -> str:
    """Return the digest of everything that decides a tally and nothing else, so that points can be added later."""
    prints = [model.manifest.fingerprint for model in models]
    packages = {name: version for name, version in versions().items() if name in ("torch", "transformers", "peft")}
    return digest_of([_VERSION, prints, asked.digest, request.dtype, request.device.split(":")[0], packages])


def _document(
    request: Request,
    models: Sequence[ModelHandle],
    bench: MixtureBench,
    points: Sequence[MixturePoint],
    asked: Questions,
    ledger: MeasurementLedger,
    key: str,
) -> dict[str, Any]:
    score = _Scores(bench, asked, ledger, _tasks_key(request) if request.tasks else None)
    a, b, *surrogates = models
    return {
        "experiment": request.experiment,
        "a": a.name,
        "b": b.name,
        "surrogates": [model.name for model in surrogates],
        "fingerprints": {model.name: model.manifest.fingerprint for model in models},
        "layers": bench.layers,
        "replaceable": bench.replaceable,
        "probe": {
            "source": request.text.origin,
            "text": request.text.digest,
            "sha": asked.digest,
            "tokens": asked.tokens,
            "lines": asked.lines,
        },
        "seed": request.ask.seed,
        "key": key,
        "tasks": list(request.tasks),
        "versions": versions(),
        "baselines": {letter: score.score_mixture(whole(bench.layers, letter)) for letter in (FIRST, SECOND)},
        "points": [_entry(point, score) for point in points],
    }


def _entry(point: MixturePoint, score: _Scores) -> dict[str, Any]:
    return {
        "line": point.line,
        "size": point.size,
        "at": point.at,
        "mixture": point.mixture.layers,
        **score.score_mixture(point.mixture),
    }


@dataclass(frozen=True)
class _Scores:
    """Converts tallies of a mixture to the numbers of the document."""

    bench: MixtureBench
    asked: Questions
    ledger: MeasurementLedger
    tasks: str | None

    def score_mixture(self, mixture: Mixture) -> dict[str, Any]:
        """Return accuracy of the next token, loss in nats, and accuracy of lines, each with its difference to b."""
        base = whole(self.bench.layers, SECOND)
        found = {
            "accuracy": self._measured(mixture, base, "text", "hits"),
            "loss": self._measured(mixture, base, "text", "loss"),
        }
        if self.asked.lines:
            found["lines"] = self._measured(mixture, base, "lines", "hits")
        if self.tasks is not None:
            found["tasks"] = self.ledger.document(self.tasks, mixture.code)["results"]
        return found

    def _measured(self, mixture: Mixture, base: Mixture, kind: str, what: str) -> dict[str, float | None]:
        own, its = (self._tallies(each, kind) for each in (mixture, base))
        value, apart = mean(own, what), difference(own, its, what)
        return {"value": value.value, "error": value.error, "difference": apart.value, "difference_error": apart.error}

    def _tallies(self, mixture: Mixture, kind: str) -> list[ScoreTally]:
        keys: Iterable[str] = (batch.key for batch in self.asked.batches if batch.key.startswith(f"{kind}:"))
        return [self.ledger.tally(key, mixture.code) for key in keys]
