"""Measure which executor is faster on a device, and read the measurement for `--executor auto`.

`zoo profile --executors` measures and stores the result in the catalogue.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

from zoo.errors import NotServable

if TYPE_CHECKING:
    from runtime.cluster.driver.driver import ClusterDriver
    from runtime.config import EngineConfig
    from runtime.engine.models.servable import Executor
    from zoo.api import Zoo

KIND = "executors"
#: Rows of the timed steps, tokens of a prompt, tokens of an answer, and timed rounds per executor.
ROWS, _PROMPT, _ANSWER, _ROUNDS = (1, 4, 16), 16, 24, 3
_EXECUTORS: tuple[Executor, ...] = ("paged", "dense")


def measure_executors(zoo: Zoo, name: str, config: EngineConfig) -> dict[str, Any]:
    """Measure the seconds of a decode step by executor and rows, and store them for devices like this one.

    Returns:
        {"model", "key", "seconds": {executor: {rows: seconds}}, "dense_over_paged": geometric mean of the ratios}.

    Raises:
        NotServable: Not both executors can run the model, so there is nothing to choose.
    """
    from runtime.engine.profiling.document import device_key, hardware_of
    from zoo.records import Document

    name = zoo.model(name).name
    seconds: dict[Executor, dict[str, float]] = {executor: {str(rows): 0.0 for rows in ROWS} for executor in _EXECUTORS}
    with ExitStack() as stack:
        drivers = {executor: stack.enter_context(_driver(zoo, name, config, executor)) for executor in _EXECUTORS}
        for executor, driver in drivers.items():
            if driver.models()[0].max_model_len < _PROMPT + _ANSWER:
                raise NotServable(f"{name} has no room for {_PROMPT + _ANSWER} tokens with the {executor} executor")
        for rows in ROWS:
            found: dict[Executor, list[float]] = {executor: [] for executor in drivers}
            for _ in range(_ROUNDS + 1):
                for executor, driver in drivers.items():
                    found[executor].append(_step_seconds(driver, name, rows))
            for executor, times in found.items():
                seconds[executor][str(rows)] = statistics.median(times[1:])  # the first run is a warm-up
    ratios = [seconds["dense"][str(rows)] / seconds["paged"][str(rows)] for rows in ROWS]
    key = device_key(config.device, hardware_of(config.device))
    document = {
        "model": name,
        "key": key,
        "seconds": seconds,
        "dense_over_paged": math.exp(statistics.mean(map(math.log, ratios))),
    }
    with zoo.store.catalog.writing() as writer:
        writer.put_document(Document(KIND, name, key, document))
    return document


def dense_is_faster(zoo: Zoo, names: Sequence[str], device: str) -> bool:
    """Return whether all stored measurements of these models on a device like this one favour dense.

    False without any measurement.
    """
    from runtime.engine.profiling.document import device_key, hardware_of

    with zoo.store.catalog.reading() as reader:
        documents = [document for name in names for document in reader.documents(KIND, name)]
    if not documents:
        return False
    key = device_key(device, hardware_of(device))
    ratios = [document.value.get("dense_over_paged") for document in documents if document.key == key]
    return bool(ratios) and all(isinstance(ratio, float) and ratio < 1.0 for ratio in ratios)


_numbers = count()


def _driver(zoo: Zoo, name: str, config: EngineConfig, executor: Executor) -> ClusterDriver:
    """Return a driver for one model, without prefix sharing between the timed sequences."""
    from cli.serving.models import Chosen
    from cli.serving.one_device import start_one_device

    return start_one_device(zoo, config, Chosen((name,), (), executor), prefix_caching="off")


def _step_seconds(driver: ClusterDriver, name: str, rows: int) -> float:
    """Return the seconds per step: the time of a run less that of a run for one token."""
    first = _run(driver, name, rows, 1)
    return max(_run(driver, name, rows, _ANSWER) - first, 1e-9) / (_ANSWER - 1)


def _run(driver: ClusterDriver, name: str, rows: int, tokens: int) -> float:
    from runtime.types import SamplingParams, SequenceRequest

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    vocabulary = driver.models()[0].vocab_size
    requests = [
        SequenceRequest(
            f"x{next(_numbers)}", "x", name, tuple((7 * row + at) % vocabulary for at in range(_PROMPT)), params
        )
        for row in range(rows)
    ]
    begin = time.perf_counter()
    for _ in driver.run(requests):
        pass
    return time.perf_counter() - begin
