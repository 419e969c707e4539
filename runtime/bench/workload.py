"""Build a workload: every request with its time, model, prompt and answer length. A function of settings and seed.

Without texts, prompts are random token ids: the measurement does not depend on their content, and two engines get the
same ones. Each purpose has its own random stream, so that another rate does not change the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.bench.arrivals import Arrivals, times
from runtime.bench.lengths import MOST_TOKENS, Lengths, draw
from runtime.bench.popularity import Popularity, assign
from runtime.bench.traces import MOONCAKE_BLOCK, TraceRow
from zoo.errors import InputError

#: Lower ids are control tokens in most vocabularies.
_FIRST_TOKEN = 3
#: Characters per token to estimate an answer's length without a tokenizer (English text).
CHARACTERS_PER_TOKEN = 4
_STREAMS = ("arrivals", "prompt lengths", "answer lengths", "models", "prompts")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Fields:
        at: When it is due, in seconds from the start of the run.
        prompt: Token ids, or text where no tokenizer was available.
        answer: Length of the answer in tokens.
    """

    number: int
    at: float
    model: str
    prompt: tuple[int, ...] | str
    answer: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run.

    Fields:
        clients: Number of clients of a closed loop, in which times are ignored; None for an open loop.
    """

    asks: tuple[WorkloadRequest, ...]
    clients: int | None = None


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Everything that defines a workload except the trace itself.

    Fields:
        count: Number of requests.
        clients: Number of clients of a closed loop; None for an open loop.
        zipf: Exponent of the popularity `skewed`.
        vocabulary: Random prompt ids are below it.
        speed: A trace's times are divided by it.
        longest: Maximum tokens of prompt and answer together; the prompt is cut from the front, then the answer.
    """

    count: int = 100
    seed: int = 0
    arrivals: Arrivals = field(default_factory=Arrivals)
    clients: int | None = None
    prompts: Lengths = field(default_factory=lambda: Lengths("fixed", 32))
    answers: Lengths = field(default_factory=lambda: Lengths("fixed", 32))
    popularity: Popularity = "uniform"
    zipf: float = 1.0
    vocabulary: int = 1000
    speed: float = 1.0
    longest: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 1_000_000:
            raise InputError("a workload has 1 to 1,000,000 requests")
        if self.clients is not None and not 1 <= self.clients <= 65_536:
            raise InputError("a closed loop has 1 to 65,536 clients")
        if self.clients is not None and self.arrivals.rate is not None:
            raise InputError("a rate is for an open loop, clients are for a closed one: give one of them")
        if self.vocabulary <= _FIRST_TOKEN or not 0.0 <= self.zipf < 100.0 or not 0.0 < self.speed < 1e9:
            raise InputError(f"the vocabulary must be above {_FIRST_TOKEN}, zipf from 0, the speed of a trace above 0")
        if self.longest is not None and self.longest < 2:
            raise InputError("prompt and answer together have at least 2 tokens")


def build(
    settings: WorkloadSettings, models: Sequence[str], rows: Sequence[TraceRow] = (), encode: Encode | None = None
) -> Workload:
    """Return the workload over `models`, the most popular first.

    `rows` of a trace are never repeated. They determine lengths, and times if they have some and no rate is set.
    `encode` returns the token ids of a trace's texts; without it prompts stay texts. Raises InputError without a model.
    """
    if not models:
        raise InputError("there is no model to ask")
    seeds = np.random.SeedSequence(settings.seed).spawn(len(_STREAMS))
    rng = {name: np.random.default_rng(seed) for name, seed in zip(_STREAMS, seeds, strict=True)}
    count = min(settings.count, len(rows)) if rows else settings.count
    drawn = times(settings.arrivals, count, rng["arrivals"])
    chosen = assign(settings.popularity, len(models), count, settings.zipf, rng["models"])
    if not rows:
        lengths = zip(
            draw(settings.prompts, count, rng["prompt lengths"]),
            draw(settings.answers, count, rng["answer lengths"]),
            strict=True,
        )
        rows = [TraceRow(None, prompt, answer) for prompt, answer in lengths]
    made = (_made(row, settings, rng["prompts"], encode) for row in rows[:count])
    asks = [
        WorkloadRequest(number, _due(row, drawn[number], settings), models[chosen[number]], prompt, answer)
        for number, (row, (prompt, answer)) in enumerate(zip(rows, made, strict=False))
    ]
    return Workload(tuple(asks), settings.clients)


def _due(row: TraceRow, drawn: float, settings: WorkloadSettings) -> float:
    return drawn if row.at is None or settings.arrivals.rate is not None else row.at / settings.speed


def _made(
    row: TraceRow, settings: WorkloadSettings, rng: np.random.Generator, encode: Encode | None
) -> tuple[tuple[int, ...] | str, int]:
    """Return the prompt and the length of the answer, cut to what the models can read."""
    prompt = _prompt(row, settings, rng, encode)
    answer = row.answer if row.answer is not None else _counted(row.reply or "", encode)
    if settings.longest is None or isinstance(prompt, str):
        return prompt, answer
    prompt = prompt[-(settings.longest - 1) :]
    return prompt, min(answer, settings.longest - len(prompt))


def _prompt(
    row: TraceRow, settings: WorkloadSettings, rng: np.random.Generator, encode: Encode | None
) -> tuple[int, ...] | str:
    if row.text is not None:
        return row.text if encode is None else tuple(encode(row.text))
    shared = [token for block in row.blocks for token in _block(block, settings)]
    length = row.prompt or 1
    own = rng.integers(_FIRST_TOKEN, settings.vocabulary, size=max(0, length - len(shared)))
    return (*shared[:length], *(int(token) for token in own))


def _block(number: int, settings: WorkloadSettings) -> list[int]:
    """Return the tokens of a hash id, the same wherever it occurs."""
    rng = np.random.default_rng([settings.seed, number])
    return [int(token) for token in rng.integers(_FIRST_TOKEN, settings.vocabulary, size=MOONCAKE_BLOCK)]


def _counted(text: str, encode: Encode | None) -> int:
    tokens = len(encode(text)) if encode is not None else len(text) // CHARACTERS_PER_TOKEN
    return min(max(1, tokens), MOST_TOKENS)
