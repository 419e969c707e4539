"""Evaluate a stored model and keep the document in the catalogue, where reports and model cards find it.

Knows nothing of how tasks are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgery.evaluation.builtin import Builtin, Texts
from surgery.evaluation.harness import EvalOptions, check_installed, evaluate
from zoo.api import Zoo
from zoo.manifest import digest_of
from zoo.records import Document

#: Kind of the documents.
EVAL = "eval"


def evaluate_stored(
    zoo: Zoo,
    name: str,
    specs: Sequence[str],
    known: Mapping[str, Builtin],
    texts: Texts,
    options: EvalOptions,
    device: str = "cpu",
    dtype: str | None = None,
    keep: bool = True,
) -> dict[str, Any]:
    """Evaluate one model of the zoo; the document, kept unless `keep` is off, in place of that of an equal run.

    Raises:
        InputError: as `harness.evaluate`.
        NotFound, AmbiguousName, DamagedObject, NotServable: as naming and loading a model do.
    """
    check_installed()
    handle = zoo.model(name)
    tokenizer = handle.tokenizer()
    done = evaluate(handle.load(device=device, dtype=dtype), tokenizer, specs, known, texts, options)
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
    return document
