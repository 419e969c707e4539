"""Evaluate a stored model and store the document in the catalogue, where reports and model cards find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surgery.evaluation.answers import Answers
from surgery.evaluation.builtin import Texts
from surgery.evaluation.harness import EvalOptions, check_installed, check_tokenizer, evaluate, versions
from surgery.evaluation.tasks import want
from zoo.manifest import digest_of
from zoo.records import Document

if TYPE_CHECKING:
    from zoo.api import Zoo

#: Kind of the documents.
EVAL = "eval"


def evaluate_stored(
    zoo: Zoo,
    name: str,
    specs: Sequence[str],
    options: EvalOptions | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    keep: bool = True,
    texts: Texts | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Evaluate one model of the zoo and return the document.

    Unless `keep` is off, it is stored, replacing that of an equal run. After an interruption, a new call asks the model
    only the questions without an answer.

    Args:
        allow_code: Task files may run Python that they name.

    Raises:
        InputError: A task that does not exist or that would run code, and as `harness.evaluate`.
        NotFound, AmbiguousName, DamagedObject, NotServable: As for naming and loading a model.
    """
    check_installed()
    options = options or EvalOptions()
    handle = zoo.model(name)
    tokenizer = handle.tokenizer()
    check_tokenizer(tokenizer)
    wanted = want(specs, allow_code)
    where = {
        "dtype": dtype,
        "device": device.partition(":")[0],
        "batch_size": options.batch_size,
        "versions": versions(),
    }
    answers = Answers(zoo.store.root, {"fingerprint": handle.manifest.fingerprint, **where})
    done = evaluate(handle.load(device=device, dtype=dtype), tokenizer, wanted, options, texts, answers)
    run = {"limit": options.limit, "num_fewshot": options.num_fewshot, "seed": options.seed, "dtype": dtype}
    document = {
        "model": handle.name,
        "fingerprint": handle.manifest.fingerprint,
        "tasks": sorted(done.texts),
        "texts": done.texts,
        "run": {**run, "batch_size": options.batch_size, "device": device},
        "versions": done.versions,
        "seconds": done.seconds,
        "results": done.results,
    }
    if keep:
        with zoo.store.catalog.writing() as writer:
            writer.put_document(Document(EVAL, handle.name, digest_of([run, done.texts]), document))
    answers.remove_file()
    return document
