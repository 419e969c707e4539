"""`train_stitch`: train a stitch between two models of a zoo, score it and store it (BL-09).

    text -> windows -> least squares -> training (and the control) -> scores on held-out text -> the zoo

Costly intermediate results are kept under `<store>/work/` until the stitch is stored, so an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stitch.document import Facts, describe
from stitch.learning import Progress, TrainingClock, learn, measure
from stitch.pair import ModelPair
from stitch.points import choose_points
from stitch.saved import StitchTask
from stitch.settings import StitchSettings
from stitch.storing import put_stitch, stored_document
from surgery.families.settings import context_length
from surgery.modules.stack import open_stack
from surgery.tensors.half_products import fast_products
from surgery.text.text import Probe, read_text
from surgery.text.tokenizers import has_tokenizer, require_same, tokenizer_digest, vocabulary_size
from zoo.api import ModelHandle, Zoo
from zoo.catalog.names import check_name
from zoo.errors import InputError, NameTaken
from zoo.manifest import digest_of

#: Incremented when the same settings no longer give the same stitch.
_VERSION = 1
#: Seed of the held-out windows; the training windows use the seed of the settings.
_HELD_OUT_SEED = 1


@dataclass(frozen=True)
class StitchReport:
    """A stitch in the zoo.

    Fields:
        document: `stitch.json`, the fields of `zoo stitch --json`.
        reused: It existed already.
    """

    name: str
    document: Mapping[str, Any]
    reused: bool


@fast_products()
def train_stitch(
    zoo: Zoo,
    a: str,
    b: str,
    settings: StitchSettings | None = None,
    *,
    name: str | None = None,
    device: str = "cpu",
    restart: bool = False,
    progress: Progress | None = None,
) -> StitchReport:
    """Train a stitch from A's hidden states to B's, and add it to the zoo.

    Args:
        a, b: The models that give the head and the tail of the chain; the order matters.
        name: Name of the stitch; `A-to-B-stitch` when None.
        device: Device of both models.
        restart: Discard the state of an interrupted run.

    Raises:
        NotFound, AmbiguousName: A model does not exist, or several match.
        Incomparable: Their tokenizers differ.
        InputError: The same model twice, a place outside the models, too little text, or an invalid name.
        NameTaken: Another model has the name, or a stitch of another training.
        TrainingFailed: The loss was not finite; the last good state is kept.
        KeyboardInterrupt: The state is kept.
    """
    settings = settings or StitchSettings()
    settings.check()
    models = _parents(zoo, a, b)
    called = check_name(name if name is not None else _default_name(models[0].name, models[1].name))
    work = _Work.prepare(zoo, models, settings, called)
    known = stored_document(zoo.store, work.name)
    if known is not None:
        if known.get("run") != work.run or restart:
            raise NameTaken(
                f"the zoo has a stitch {work.name!r} of another training: remove it first, or choose another with "
                "--name"
            )
        return StitchReport(work.name, known, reused=True)
    with work.task.held():
        if restart:
            work.task.restart()
        document = _train(zoo, work, device, progress or _silent)
        work.task.remove_folder()
    return StitchReport(work.name, document, reused=False)


def _default_name(a: str, b: str) -> str:
    """Return `a-to-b-stitch` for `org/a` and `org/b`.

    It ends in neither name, so both models can still be found by their endings.
    """
    return f"{a.rsplit('/', 1)[-1]}-to-{b.rsplit('/', 1)[-1]}-stitch"


def _silent(what: str, done: int, total: int, remark: str) -> None:
    pass


def _parents(zoo: Zoo, a: str, b: str) -> tuple[ModelHandle, ModelHandle]:
    models = zoo.model(a), zoo.model(b)
    for model in models:
        if model.kind == "stitch":
            raise InputError(f"{model.name} is a stitch itself: it has no layers to be joined")
    if models[0].name == models[1].name:
        raise InputError(f"{models[0].name} needs no stitch to itself: name two models")
    require_same(*models)
    return models


@dataclass(frozen=True)
class _Work:
    """A prepared run, before the models are loaded.

    Fields:
        train: Training windows.
        probe: Windows to measure on.
        task: Everything that decides the weights; holds the saved states.
        run: Digest of the task and of what is measured.
    """

    name: str
    models: tuple[ModelHandle, ModelHandle]
    settings: StitchSettings
    train: Tensor
    probe: Probe
    task: StitchTask
    run: str

    @classmethod
    def prepare(cls, zoo: Zoo, models: tuple[ModelHandle, ModelHandle], settings: StitchSettings, name: str) -> _Work:
        text = read_text(settings.text)
        reader = models[0] if has_tokenizer(models[0]) else models[1]
        tokenizer = reader.tokenizer() if has_tokenizer(reader) else None
        _check_length(models, settings.length)
        learned = text.tokens(tokenizer, settings.length, settings.windows, "train", settings.seed)
        held_out = text.tokens(tokenizer, settings.length, settings.measured, "held_out", _HELD_OUT_SEED)
        _check_ids(models, learned, held_out)
        probe = Probe(text.digest, tokenizer_digest(reader), held_out)
        # The text counts by the windows drawn from it, not by its name; scores and controls do not change the stitch.
        decisive = {**settings.document(), "text": None, "controls": False, "measured": 0}
        described = {
            "version": _VERSION,
            "a": models[0].manifest.fingerprint,
            "b": models[1].manifest.fingerprint,
            "settings": decisive,
            "windows": Probe(text.digest, probe.tokenizer, learned).digest,
        }
        task = StitchTask(zoo.store.root, described)
        run = digest_of([task.digest, probe.digest, settings.controls])
        return cls(name, models, settings, learned, probe, task, run)


def _check_length(models: Iterable[ModelHandle], length: int) -> None:
    for model in models:
        context = context_length(model.config)
        if length > context:
            raise InputError(f"windows of {length} tokens do not fit {model.name}, whose context is {context}")


def _check_ids(models: Iterable[ModelHandle], *windows: Tensor) -> None:
    """Raise InputError for ids beyond a model's vocabulary, which a file of ids may contain."""
    highest = max(int(each.max()) for each in windows)
    for model in models:
        if highest >= vocabulary_size(model.manifest):
            raise InputError(f"the text has token {highest}, which {model.name} does not know")


def _train(zoo: Zoo, work: _Work, device: str, progress: Progress) -> Mapping[str, Any]:
    """Run all parts and return the stored document."""
    clock = TrainingClock(work.task)
    with zoo.store.keeping():
        pair = ModelPair(*(open_stack(zoo.store, model.manifest, device) for model in work.models))
    points = choose_points(work.settings.points, *pair.layers)
    stitches = learn(pair, work.train, points, work.settings, work.task, clock, progress)
    stored = {name: stitch.to(dtype=pair.b.dtype) for name, stitch in stitches.items()}
    scores = measure(pair, work.probe.windows, points, stored, progress)
    facts = Facts(work.name, work.models[0].name, work.models[1].name, work.probe, work.run, clock.seconds)
    document = describe(facts, work.settings, points, stored["trained"], scores)
    put_stitch(zoo.store, work.name, stored["trained"].to("cpu"), document)
    return document
