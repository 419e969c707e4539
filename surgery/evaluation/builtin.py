"""The built-in tasks, written in lm-eval's format: one YAML file per task with its questions as JSON lines. No network.

    library_ppl      likelihood of held-out files: perplexity per word and byte, bits per byte
    library_cloze    which of four lines comes next
    library_recall   the name after a dot, generated and compared exactly

Each task uses all held-out text, or that of one subject: `library_cloze_concurrency`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surgery.evaluation.items import cloze_items, passages, recall_items
from surgery.text.library import EVERYTHING, SLICES, read_library

#: Name of a subject -> the held-out texts of that subject, one per file.
Texts = Callable[[str], Sequence[str]]

_VERSION = 1
_PASSAGES, _PASSAGE_CHARACTERS = 40, 12_000
_QUESTIONS = 400
#: A subject with fewer files takes wrong choices from the whole text as well.
_ENOUGH_FILES = 8
#: A generated name ends at the first of these.
_AFTER_NAME = [
    "\n",
    " ",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ".",
    ",",
    ":",
    ";",
    "=",
    "'",
    '"',
    "+",
    "-",
    "*",
    "/",
    "%",
    "<",
    ">",
    "#",
]

_METRICS: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "ppl": (("word_perplexity", False), ("byte_perplexity", False), ("bits_per_byte", False)),
    "cloze": (("acc", True), ("acc_norm", True)),
    "recall": (("exact_match", True),),
}


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in task.

    Fields:
        kind: ppl, cloze or recall.
        subject: The subject of its texts.
    """

    name: str
    kind: str
    subject: str


def builtins() -> dict[str, Builtin]:
    """Return name -> task, for the whole text and then for each subject."""
    whole = [Builtin(f"library_{kind}", kind, EVERYTHING) for kind in _METRICS]
    parts = [
        Builtin(f"library_{kind}_{subject}", kind, subject)
        for kind in _METRICS
        for subject in SLICES
        if subject != EVERYTHING
    ]
    return {task.name: task for task in (*whole, *parts)}


def library_texts() -> Texts:
    """Return the held-out files of the standard library, which no model of the demo is trained on.

    Raises InputError if there are none.
    """
    corpus = read_library()
    return lambda subject: [text for text in corpus.slice(subject).held_out if text.strip()]


def write_task(task: Builtin, texts: Texts, folder: Path) -> Path:
    """Write a task's YAML file and questions into a folder and return the path of the YAML file.

    Raises:
        ValueError: The texts give no question of this kind.
    """
    own = texts(task.subject)
    rows = _rows(task.kind, own, () if len(own) >= _ENOUGH_FILES else texts(EVERYTHING))
    if not rows:
        raise ValueError(f"no question for {task.name} can be made of these texts")
    data = folder / f"{task.name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = folder / f"{task.name}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(_settings(task, data, folder), indent=2), encoding="utf-8")
    return path


def _rows(kind: str, texts: Sequence[str], others: Sequence[str]) -> list[dict[str, Any]]:
    if kind == "ppl":
        return [{"text": text} for text in passages(texts, _PASSAGES, _PASSAGE_CHARACTERS)]
    items: Sequence[Any] = (
        cloze_items(texts, _QUESTIONS, others) if kind == "cloze" else recall_items(texts, _QUESTIONS)
    )
    return [asdict(item) for item in items]


def _settings(task: Builtin, data: Path, folder: Path) -> dict[str, Any]:
    return {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        **_questions(task.kind),
        "metric_list": [
            {"metric": metric, "aggregation": _aggregation(metric), "higher_is_better": higher}
            for metric, higher in _METRICS[task.kind]
        ],
        "metadata": {"version": _VERSION},
    }


def _questions(kind: str) -> dict[str, Any]:
    if kind == "ppl":
        return {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    if kind == "cloze":
        return {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
        }
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": _AFTER_NAME, "max_gen_toks": 12, "do_sample": False},
    }


def _aggregation(metric: str) -> str:
    if metric == "bits_per_byte":
        return "bits_per_byte"
    return "weighted_perplexity" if metric.endswith("perplexity") else "mean"
