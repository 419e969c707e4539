"""Score how similar two models are, part by part (BL-05).

The same text runs through both, and each model's own final norm and head read its states. A score of early layers is
weak evidence, since their states decode poorly: each score has a control, the same score against a randomly initialised
twin of b.

Scores are stored with the digest of the ids they were measured on. They are symmetric and never chained through a third
model (BL-06). `surgery.scoring.equate` cuts chains by them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from surgery.families.settings import config_of, context_length
from surgery.modules.stack import Stack, open_stack
from surgery.scoring.comparison import Comparison, ProbeInfo, Score, ScoreMatrix
from surgery.scoring.measuring import Positions, batches_in, check_readable, measure, positions_of
from surgery.scoring.partials import Partials, Sums
from surgery.scoring.runs import Granularity, Pairing, pairing
from surgery.scoring.twins import random_twin
from surgery.text.text import Probe, read_text
from surgery.text.tokenizers import Tokenized, has_tokenizer, require_same, tokenizer_digest, vocabulary_size
from zoo.errors import Incomparable, InputError
from zoo.manifest import PARTS, canonical_json, digest_of
from zoo.records import Document, Equivalence, ScoredRun
from zoo.store import Store

#: Called with (batches done, batches in all).
Progress = Callable[[int, int], None]

#: Default tokens of a probe, and of one of its windows.
TOKENS = 4096
LENGTH = 128
_SHORTEST = 2


@dataclass(frozen=True)
class CompareSettings:
    """How to compare.

    Fields:
        source: Text, as in `surgery.text.text.read_text`.
        tokens: Maximum tokens of the probe.
        length: Tokens per window.
    """

    source: str | None = None
    tokens: int = TOKENS
    length: int = LENGTH
    granularity: Granularity | None = None
    groups: int | None = None
    matrix: bool = False
    control: bool = True
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None


def compare(
    store: Store, a: Tokenized, b: Tokenized, settings: CompareSettings | None = None, progress: Progress | None = None
) -> Comparison:
    """Score two models and store the scores. After an interruption, a new call resumes.

    Raises:
        Incomparable: Their tokenizers differ, or a model's states cannot be read by its head.
        InputError: The probe cannot be used, the parts cannot be paired, or a model gives numbers that are not finite.
        NotServable: A family that cannot be cut.
    """
    found = score(store, a, b, settings or CompareSettings(), progress)
    if a.name != b.name:
        keep(store, found)
    return found


def keep(store: Store, found: Comparison) -> None:
    """Store a comparison: every pair by its runs and probe, and the whole as a document of a."""
    with store.catalog.writing() as writer:
        writer.put_equivalences(records_of(found))
        key = digest_of([found.b, found.granularity, len(found.pairs), found.probe.digest])
        writer.put_document(Document("compare", found.a, key, found.document()))


def records_of(found: Comparison) -> list[Equivalence]:
    """Return the pairs in the catalogue's form."""
    return [_record(found, pair) for pair in found.pairs]


def _record(found: Comparison, pair: Score) -> Equivalence:
    a = ScoredRun(found.a, pair.a.components.lo, pair.a.components.hi)
    b = ScoredRun(found.b, pair.b.components.lo, pair.b.components.hi)
    return Equivalence("equivalent", a, b, found.probe.digest, pair.similarity, pair.control, pair.metrics)


def score(
    store: Store, a: Tokenized, b: Tokenized, settings: CompareSettings, progress: Progress | None = None
) -> Comparison:
    """Score two models as `compare` does, without storing anything."""
    started = time.monotonic()
    plan = check(a, b, settings)
    probe = probe_of(store, a, b, settings)
    session = _Session(store, a, b, settings, plan, probe, progress)
    scores, controls = session.run()
    return Comparison(
        a=a.name,
        b=b.name,
        probe=ProbeInfo(probe.digest, probe.text, settings.source or "library", probe.count, probe.windows.shape[1]),
        granularity=plan.granularity,
        pairs=_scores(plan, scores, controls),
        matrix=_matrix(plan, scores, controls) if settings.matrix else None,
        seconds=time.monotonic() - started,
    )


def check(a: Tokenized, b: Tokenized, settings: CompareSettings) -> Pairing:
    """Check what can be checked before anything is loaded. Raises as `compare`."""
    for model in (a, b):
        if model.manifest.kind in ("prefix", "prompt", *PARTS):
            raise Incomparable(
                f"{model.name} is of kind {model.manifest.kind}: what it adds lies in no block that could be compared"
            )
    require_same(a, b)
    _check_device(settings.device)
    return pairing(a.manifest.components, b.manifest.components, settings.granularity, settings.groups)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"there is no device {name[:40]!r} here: {str(error).splitlines()[0][:200]}") from None


def probe_of(store: Store, a: Tokenized, b: Tokenized, settings: CompareSettings) -> Probe:
    """Return the windows of ids that both models are given. Raises InputError.

    They come from a file's whole text, or the held-out part of the built-in text.
    """
    text = read_text(settings.source)
    length = min(settings.length, *(context_length(config_of(store, model.manifest)) for model in (a, b)))
    if length < _SHORTEST or settings.tokens < length:
        raise InputError(f"a probe of {settings.tokens} tokens in windows of {length} is too small")
    teller = next((model for model in (a, b) if has_tokenizer(model)), None)
    tokenizer = None if teller is None else teller.tokenizer()
    windows = text.tokens(tokenizer, length, settings.tokens // length, text.probe, settings.seed)
    known = min(vocabulary_size(model.manifest) for model in (a, b))
    if int(windows.max()) >= known:
        raise InputError(f"token {int(windows.max())} of the probe is beyond the models' vocabulary of {known:,}")
    return Probe(text.digest, "" if teller is None else tokenizer_digest(teller), windows)


class _Session:
    """One comparison while it runs: two models in memory at a time, and a file of partial sums."""

    def __init__(
        self,
        store: Store,
        a: Tokenized,
        b: Tokenized,
        settings: CompareSettings,
        plan: Pairing,
        probe: Probe,
        progress: Progress | None,
    ) -> None:
        self._store, self._a, self._b = store, a, b
        self._settings, self._plan, self._probe, self._progress = settings, plan, probe, progress
        self._partials = Partials(store.root, "compare", self._key())
        self._vocabulary = min(vocabulary_size(model.manifest) for model in (a, b))

    def run(self) -> tuple[Sums, Sums | None]:
        """Return (sums of the pairs, sums of the control). The twin replaces b in memory."""
        with self._store.keeping():
            stack_a = open_stack(self._store, self._a.manifest, self._settings.device, self._settings.dtype)
            stack_b = open_stack(self._store, self._b.manifest, self._settings.device, self._settings.dtype)
        at = positions_of(self._plan, stack_a, stack_b, self._settings.matrix)
        check_readable(self._a.name, stack_a, at.a)
        check_readable(self._b.name, stack_b, at.b)
        scores = self._phase("pairs", stack_a, stack_b, at)
        controls = None
        if self._settings.control:
            dtype = stack_b.dtype
            del stack_b
            _let_go()
            twin = random_twin(self._store, self._b.manifest, self._settings.seed, self._settings.device, dtype)
            controls = self._phase("control", stack_a, twin, at)
        self._partials.remove()
        return scores, controls

    def _phase(self, name: str, a: Stack, b: Stack, at: Positions) -> Sums:
        total = batches_in(self._probe.windows, a, b, at)
        before = total if name == "control" else 0
        phases = 2 if self._settings.control else 1

        def kept(sums: Sums) -> None:
            self._partials.save_sums(name, sums)
            self._report_progress(before + sums.done, phases * total)

        sums = self._partials.sums(name)
        self._report_progress(before + sums.done, phases * total)
        return measure(a, b, self._probe.windows, at, self._vocabulary, self._settings.matrix, sums, kept)

    def _report_progress(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)

    def _key(self) -> str:
        """Return the digest of everything that the sums depend on."""
        models = [self._a.manifest.fingerprint, self._b.manifest.fingerprint]
        pairs = [[unit.components.lo, unit.components.hi] for units in (self._plan.a, self._plan.b) for unit in units]
        return digest_of([models, self._probe.digest, pairs, canonical_json(asdict(self._settings))])


def _let_go() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _means(sums: Sums, name: str) -> list[Any]:
    means: list[Any] = (sums.values[name] / sums.values["tokens"]).tolist()
    return means


def _scores(plan: Pairing, scores: Sums, controls: Sums | None) -> tuple[Score, ...]:
    similar = _means(scores, "cosine")
    control: Sequence[float | None] = [None] * len(similar) if controls is None else _means(controls, "cosine")
    named = {name: _means(scores, name) for name in ("kl_ab", "kl_ba", "agreement", "hidden") if name in scores.values}
    return tuple(
        Score(a, b, similar[at], control[at], {name: values[at] for name, values in named.items()})
        for at, (a, b) in enumerate(plan.pairs)
    )  # fmt: skip


def _matrix(plan: Pairing, scores: Sums, controls: Sums | None) -> ScoreMatrix:
    return ScoreMatrix(plan.a, plan.b, _rows_of(scores), None if controls is None else _rows_of(controls))


def _rows_of(sums: Sums) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in _means(sums, "matrix"))
