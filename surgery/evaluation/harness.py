"""Run lm-eval on a loaded model and return its result as plain JSON, reproducible except for timings.

lm-eval seeds Python's, numpy's and torch's global generators of the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.evaluation.answers import Answers
from surgery.evaluation.builtin import Texts
from surgery.evaluation.tasks import WantedTask, load_tasks
from surgery.evaluation.trust import sandboxed
from zoo.errors import InputError

#: Packages that affect results; their versions are recorded.
_PACKAGES = ("torch", "transformers", "peft", "lm_eval", "datasets", "tokenizers")
#: Fields of lm-eval's result that depend on the machine or the time.
_LEFT_OUT = frozenset(
    ("samples", "date", "pretty_env_info", "upper_git_hash", "git_hash", "transformers_version", "lm_eval_version")
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BOOTSTRAP = 1000


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """How to run.

    Fields:
        limit: Questions per task; below 1, their share.
        batch_size: A number or "auto".
        num_fewshot: None for the task's own.
    """

    limit: float | None = None
    batch_size: int | str = 8
    num_fewshot: int | None = None
    seed: int = 1234


@dataclass(frozen=True)
class Evaluated:
    """Result of `evaluate`.

    Fields:
        results: lm-eval's document.
        texts: Per task, the digest of its questions as the model received them, and their number.
    """

    results: dict[str, Any]
    texts: dict[str, dict[str, Any]]
    versions: dict[str, str]
    seconds: float


def evaluate(
    model: Any,
    tokenizer: Any,
    wanted: WantedTask,
    options: EvalOptions | None = None,
    texts: Texts | None = None,
    answers: Answers | None = None,
) -> Evaluated:
    """Evaluate a `PreTrainedModel` on the device that it is on.

    Args:
        tokenizer: A `PreTrainedTokenizerBase`.
        wanted: From `surgery.evaluation.tasks.want`.
        texts: Texts of built-in tasks, by subject; the standard library when None.
        answers: Storage for the model's answers.

    Raises:
        InputError: lm-eval is not installed, a task's data is unavailable, or the tokenizer encodes no text.
    """
    from surgery.tensors.half_products import fast_products

    check_installed()
    options = options or EvalOptions()
    check_tokenizer(tokenizer)
    started = time.monotonic()
    templates = sandboxed() if wanted.files and not wanted.code else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="zoo-eval-") as folder, _kept_apart(), templates, fast_products():
        tasks = load_tasks(wanted, Path(folder), texts)
        raw = _run(model, tokenizer, tasks, options, answers)
        asked = {name: _asked(samples) for name, samples in raw["samples"].items()}
        results = _plain({key: value for key, value in raw.items() if key not in _LEFT_OUT}, folder)
    return Evaluated(results, asked, versions(), round(time.monotonic() - started, 3))


def check_installed() -> None:
    """Raise InputError if lm-eval or `datasets` is not installed."""
    try:
        import datasets  # noqa: F401
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise InputError(f"evaluation needs the package {error.name}: pip install 'blockzoo[eval]'") from None


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a result."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@contextlib.contextmanager
def _kept_apart() -> Iterator[None]:
    """Keep lm-eval's output off standard output, which is the caller's, and hide progress bars without a terminal."""
    aside = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside):
        yield


def check_tokenizer(tokenizer: Any) -> None:
    """Raise InputError for the empty tokenizer that transformers makes for a checkpoint without one."""
    if not tokenizer.encode("def f(x): return x", add_special_tokens=False):
        raise InputError("the model brought no tokenizer that turns text into tokens")


def _run(model: Any, tokenizer: Any, tasks: list[Any], options: EvalOptions, answers: Answers | None) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from surgery.evaluation.language_model import ZooLM

    lm = ZooLM(answers, pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size)
    try:
        raw: dict[str, Any] = simple_evaluate(
            lm,
            tasks=tasks,
            num_fewshot=options.num_fewshot,
            batch_size=options.batch_size,
            limit=options.limit,
            bootstrap_iters=_BOOTSTRAP,
            task_manager=TaskManager(include_defaults=False),
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except OverflowError:  # a perplexity that no float holds
        raise InputError("the model's results are too large for a number: it has probably diverged") from None
    return raw


def _asked(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one digest over all questions as asked, few-shot examples and right answers included, and their number."""
    whole = hashlib.sha256()
    for sample in sorted(samples, key=lambda each: int(each["doc_id"])):
        whole.update(repr((sample["doc_id"], sample["doc_hash"], sample["arguments"], sample["target_hash"])).encode())
    return {"sha": whole.hexdigest(), "items": len({sample["doc_id"] for sample in samples})}


def _plain(value: Any, folder: str) -> Any:
    """Return the value as JSON: without addresses or temporary paths, and with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each, folder) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return _ADDRESS.sub("", str(value)).replace(folder, "built-in")
