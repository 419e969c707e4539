"""Measure the size of prompt chunks that saturates a device, and read the measurement for serving (TI-09).

`zoo profile --chunks` measures, and stores the result with the profile of the model on this kind of device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from runtime.policy.prefill.knee import LEAST_SIZES, knee_of
from zoo.errors import InputError

if TYPE_CHECKING:
    from cli.serving.models import Chosen
    from cli.serving.options import ServeOptions
    from runtime.cluster.driver.driver import ClusterDriver
    from runtime.config import EngineConfig
    from zoo.api import Zoo

#: Kind of stored profiles, `runtime.engine.profiling.document.KIND`, without importing torch.
_PROFILE = "profile"
#: Timed runs of each size, after one that is not timed.
_ROUNDS = 5


def measure_chunks(zoo: Zoo, name: str, config: EngineConfig, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure the rate of prompts that run as one chunk, through the scheduler and the engine that serve.

    Sizes take turns, so that a busy moment of the machine is not one size's alone.

    Returns:
        {"seconds": {tokens: median}, "rates": {tokens: tokens per second}, "chosen": tokens, or None where the rate
        still grows at the largest size}.

    Raises:
        InputError: Fewer than three sizes fit the model's context.
        NotServable, and the errors of loading.
    """
    from cli.serving.models import Chosen
    from cli.serving.one_device import start_one_device

    name, asked = zoo.model(name).name, sorted(set(sizes))
    driver = start_one_device(
        zoo, config, Chosen((name,), (), "paged"), max_num_batched_tokens=asked[-1], prefix_caching="off",
        shared_prompt_bytes=0,
    )  # fmt: skip
    with driver:
        longest = driver.models()[0].max_model_len - 1  # one token is the answer
        fitting = [size for size in asked if size <= longest]
        if len(fitting) < LEAST_SIZES:
            raise InputError(
                f"{len(fitting)} of the chunk sizes {', '.join(map(str, asked))} fit a prompt of {name}, which has at "
                f"most {longest} tokens; for its knee give at least {LEAST_SIZES} that do"
            )
        rounds = [[_seconds(driver, name, size) for size in fitting] for _ in range(_ROUNDS + 1)]
    seconds = {size: statistics.median(each[at] for each in rounds[1:]) for at, size in enumerate(fitting)}
    rates = {size: size / taken for size, taken in seconds.items()}
    knee = knee_of(rates)
    return {
        "seconds": {str(size): taken for size, taken in seconds.items()},
        "rates": {str(size): rate for size, rate in rates.items()},
        "chosen": knee.tokens if knee.saturated else None,
    }


def with_measured_chunk(zoo: Zoo, options: ServeOptions, chosen: Chosen) -> ServeOptions:
    """Return options in which chunks of prompts have the measured size, unless one was given or none was measured."""
    if options.long_prefill_token_threshold or chosen.executor == "dense":
        return options
    tokens = measured_chunk(zoo, chosen.names or chosen.measured, options.device)
    if options.max_num_batched_tokens is not None:
        tokens = min(tokens, options.max_num_batched_tokens)
    return replace(options, long_prefill_token_threshold=tokens)


def measured_chunk(zoo: Zoo, names: Sequence[str], device: str) -> int:
    """Return the largest chunk that one of these models was measured to need on a device like this one, 0 for none.

    A step may have chunks of several models, so the largest one saturates the device whichever runs.
    """
    with zoo.store.catalog.reading() as reader:
        documents = [document for name in names for document in reader.documents(_PROFILE, name)]
    measured = [document for document in documents if isinstance(document.value.get("chunks"), dict)]
    if not measured:
        return 0
    from runtime.engine.profiling.document import device_key, hardware_of

    key = device_key(device, hardware_of(device))
    found = [document.value["chunks"].get("chosen") for document in measured if document.key == key]
    return max((tokens for tokens in found if isinstance(tokens, int) and tokens > 0), default=0)


_numbers = count()


def _seconds(driver: ClusterDriver, name: str, tokens: int) -> float:
    """Return the seconds until the first token behind a prompt of so many tokens."""
    from runtime.types import SamplingParams, SequenceRequest

    number, vocabulary = next(_numbers), driver.models()[0].vocab_size
    prompt = tuple((number + 7 * at) % vocabulary for at in range(tokens))
    request = SequenceRequest(f"c{number}", "c", name, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    begin = time.perf_counter()
    for event in driver.run([request]):
        if event.error is not None:
            raise InputError(f"a prompt of {tokens} tokens failed: {event.error}")
    return time.perf_counter() - begin
