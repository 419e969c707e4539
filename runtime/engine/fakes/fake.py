"""An engine without tensors, whose every token and nanosecond can be worked out by hand. It trusts nobody.

The next token of a sequence that has run `tokens` (virtual ones among them, as zeros) of a model called `name` is

    (sum(tokens) + len(tokens) + sum(name.encode())) mod vocab_size                        see `next_token`

and one more (mod vocab_size), as often as needed, while `min_tokens` still forbids it as an end. Every log-probability
is -1, the k-th alternative -1-k, and the k-th alternative to token t is (t + k) mod vocab_size. All other sampling
values are ignored. A step over n tokens takes `alpha + beta * n` nanoseconds; `pace` may spend them for real. A
launched step is run at once.

Contract: it keeps what a real engine would keep (tokens, tables, owners of pages) and raises PlanViolation, changing
nothing, unless a plan is in every point what `runtime.types` promises. It knows no torch and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runtime.types import (
    EngineMemory,
    Finished,
    Launched,
    Logprob,
    ModelSpec,
    Opened,
    PromptLogprobs,
    Row,
    Sampled,
    SamplingParams,
    SegmentRun,
    StepPlan,
    StepResult,
)
from zoo.errors import NotFound


class PlanViolation(Exception):
    """A plan contradicts what went before, or itself: a defect of whoever made the plan."""


class FakeFault(Exception):
    """The fault that was asked for."""


def next_token(spec: ModelSpec, tokens: Iterable[int]) -> int:
    """The token that follows `tokens`, prompt and output together, when nothing is forbidden."""
    seen = list(tokens)
    return _token(spec, sum(seen), spec.virtual_tokens + len(seen))


def answer(spec: ModelSpec, prompt: Iterable[int], sampling: SamplingParams) -> list[int]:
    """All tokens a sequence gets, its end included: the oracle for tests of whatever schedules this engine."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < sampling.max_tokens and len(tokens) < spec.max_model_len:
        token = allowed(spec, sampling, len(output), next_token(spec, tokens))
        tokens.append(token)
        output.append(token)
        if len(output) >= sampling.min_tokens and token in ends_of(spec, sampling):
            break
    return output


def _token(spec: ModelSpec, total: int, length: int) -> int:
    return (total + length + sum(spec.name.encode())) % spec.vocab_size


def ends_of(spec: ModelSpec, sampling: SamplingParams) -> frozenset[int]:
    """Tokens that end a sequence."""
    return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))


def allowed(spec: ModelSpec, sampling: SamplingParams, produced: int, token: int) -> int:
    """A token, or the next one that may come: `min_tokens` forbids those that would end the sequence."""
    ends = ends_of(spec, sampling) if produced + 1 < sampling.min_tokens else frozenset()
    for offset in range(spec.vocab_size):
        if (token + offset) % spec.vocab_size not in ends:
            return (token + offset) % spec.vocab_size
    return token  # every token is an end: there is nothing else to give


@dataclass(slots=True)
class _Held:
    """What the engine holds of a sequence. `tokens`: virtual ones, prompt, output; `computed`: how many have run, their
    sum in `total`;
    `sampled_at`: the step that gave the last one.
    """

    opened: Opened
    spec: ModelSpec
    tokens: list[int]
    groups: list[tuple[int, ...]] = field(default_factory=list)
    computed: int = 0
    total: int = 0
    sampled_at: int = 0

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.opened.request.prompt) - self.spec.virtual_tokens


class FakeEngine:
    """Implements `runtime.types.Engine`. Models are specs; `available` can be loaded beside those that are."""

    def __init__(
        self,
        models: Iterable[ModelSpec],
        page_capacity: int,
        available: Iterable[ModelSpec] = (),
        *,
        alpha: int = 1_000_000,
        beta: int = 10_000,
        fail_at: Iterable[int] = (),
        segments: bool = False,
        pace: Callable[[int], None] | None = None,
        ahead: bool = False,
    ) -> None:
        """`fail_at`: steps that raise FakeFault, odd ones half-way, after learning what was opened, even ones before
        anything.
        `pace`: called with each step's nanoseconds.
        """
        self._models = {spec.name: spec for spec in models}
        self._available = self._models | {spec.name: spec for spec in available}
        self._capacity = page_capacity
        self._alpha, self._beta = alpha, beta
        self._fail_at = frozenset(fail_at)
        self._segments = segments
        self._pace = pace
        self._ahead = ahead
        self._held: dict[str, _Held] = {}
        self._owner: dict[int, str] = {}
        self._last_step = 0
        self._failed = False

    @property
    def device(self) -> str:
        return "fake"

    @property
    def ahead(self) -> bool:
        return self._ahead

    @property
    def page_capacity(self) -> int:
        return self._capacity

    @property
    def sequences(self) -> int:
        """Sequences it holds something of."""
        return len(self._held)

    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(self._models.values())

    def load(self, name: str) -> ModelSpec:
        if name not in self._available:
            raise NotFound(f"no model named {name!r}")
        return self._models.setdefault(name, self._available[name])

    def unload(self, name: str) -> None:
        require(name in self._models, f"model {name} is not loaded")
        require(all(held.spec.name != name for held in self._held.values()), f"model {name} still has sequences")
        del self._models[name]

    def memory(self) -> EngineMemory:
        """A block weighs 1000 bytes, a page 10."""
        blocks = [block for spec in self._models.values() for block in spec.blocks]
        return EngineMemory(
            weights=1000 * len(set(blocks)), weights_unshared=1000 * len(blocks), kv_pool=10 * self._capacity
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step. Raises PlanViolation, or FakeFault where that was asked for."""
        require(plan.step > self._last_step, f"step {plan.step} comes after step {self._last_step}")
        before, self._last_step = self._last_step, plan.step
        if plan.step % 2 == 0:
            self._fail_if_asked(plan.step)
        self._release(plan.released)
        self._open(plan.opened)
        self._fail_if_asked(plan.step)
        self._verify(plan.rows, before)
        busy = self.duration(plan)
        if self._pace is not None:
            self._pace(busy)
        scores = tuple(score for row in plan.rows if (score := self._prompt_logprobs(row)) is not None)
        sampled = tuple(one for row in plan.rows if (one := self._run(row)) is not None)
        return StepResult(plan.step, sampled, scores, self._segment_runs(plan.rows), busy)

    def duration(self, plan: StepPlan) -> int:
        """Nanoseconds that a step takes."""
        return self._alpha + self._beta * plan.tokens

    def launch(self, plan: StepPlan) -> Launched:
        return Finished(self.execute(plan))

    def _fail_if_asked(self, step: int) -> None:
        if step in self._fail_at:
            self._failed = True
            raise FakeFault(f"step {step} was to fail")

    # -- what a plan must be -------------------------------------------------------------------------------------------

    def _release(self, released: Iterable[str]) -> None:
        for seq in released:
            held = self._held.pop(seq, None)
            require(held is not None or self._failed, f"released sequence {seq} is unknown")
            for group in held.groups if held is not None else ():
                for page in group:
                    del self._owner[page]
        self._failed = False

    def _open(self, opened: Iterable[Opened]) -> None:
        for one in opened:
            request = one.request
            require(request.seq not in self._held, f"sequence {request.seq} is opened twice")
            require(request.model in self._models, f"model {request.model} is not loaded")
            spec = self._models[request.model]
            self._held[request.seq] = _Held(one, spec, [*[0] * spec.virtual_tokens, *request.prompt, *one.output])

    def _verify(self, rows: tuple[Row, ...], before: int) -> None:
        require(len({row.seq for row in rows}) == len(rows), "a sequence has two rows")
        given = [page for row in rows for group in row.new_pages for page in group]
        require(len(set(given)) == len(given), "a page is given twice")
        for page in given:
            require(0 <= page < self._capacity, f"page {page} is out of range")
            require(page not in self._owner, f"page {page} belongs to {self._owner.get(page)}")
        for row in rows:
            require(row.seq in self._held, f"sequence {row.seq} is unknown")
            self._verify_row(row, self._held[row.seq], before)

    def _verify_row(self, row: Row, held: _Held, before: int) -> None:
        end = row.start + len(row.tokens)
        groups = len(held.groups) + len(row.new_pages)
        whole = end == len(held.tokens)
        wanted = held.opened.request.sampling.max_tokens > 0
        require(row.model == held.spec.name, f"{row.seq} belongs to {held.spec.name}, not {row.model}")
        require(bool(row.tokens), f"{row.seq}: no tokens to run")
        require(row.start == held.computed, f"{row.seq}: starts at {row.start}, {held.computed} tokens have run")
        if row.awaits:
            require(self._ahead and row.tokens == (0,) and whole, f"{row.seq}: awaits what cannot be awaited")
            require(held.sampled_at == before, f"{row.seq}: awaits a token of step {before}, which gave it none")
        else:
            require(list(row.tokens) == held.tokens[row.start : end], f"{row.seq}: these are not its tokens")
        require(
            all(len(group) == held.spec.kv_layers for group in row.new_pages),
            f"{row.seq}: a group is not one page per layer",
        )
        require(groups == -(-end // held.spec.page_tokens), f"{row.seq}: {groups} groups for {end} tokens")
        require(row.sample == (whole and wanted), f"{row.seq}: samples exactly when its context is complete")
        require(row.generated == held.produced, f"{row.seq}: has produced {held.produced} tokens, not {row.generated}")
        require(
            end - held.spec.virtual_tokens < held.spec.max_model_len or not row.sample,
            f"{row.seq}: no room for another token",
        )

    # -- what a step does ----------------------------------------------------------------------------------------------

    def _run(self, row: Row) -> Sampled | None:
        held = self._held[row.seq]
        held.groups.extend(row.new_pages)
        self._owner.update((page, row.seq) for group in row.new_pages for page in group)
        held.computed += len(row.tokens)
        held.total += sum(held.tokens[row.start : held.computed])
        if not row.sample:
            return None
        sampling = held.opened.request.sampling
        token = allowed(held.spec, sampling, held.produced, _token(held.spec, held.total, held.computed))
        held.tokens.append(token)
        held.sampled_at = self._last_step
        if sampling.logprobs is None:
            return Sampled(row.seq, token)
        return Sampled(row.seq, token, -1.0, alternatives(held.spec, token, sampling.logprobs))

    def _prompt_logprobs(self, row: Row) -> PromptLogprobs | None:
        held = self._held[row.seq]
        count = held.opened.request.sampling.prompt_logprobs
        begin = row.start - held.spec.virtual_tokens
        first = max(begin, 1)
        tokens = held.opened.request.prompt[first : max(0, begin + len(row.tokens))]
        if count is None or not tokens:
            return None
        chosen = tuple(Logprob(token, -1.0) for token in tokens)
        return PromptLogprobs(row.seq, first, chosen, tuple(alternatives(held.spec, token, count) for token in tokens))

    def _segment_runs(self, rows: tuple[Row, ...]) -> tuple[SegmentRun, ...]:
        """Each block once, over the rows of all models that have it (BL-14), in the order in which chains name them."""
        if not self._segments:
            return ()
        by_block: dict[str, list[Row]] = {}
        for row in rows:
            for block in self._models[row.model].blocks:
                by_block.setdefault(block, []).append(row)
        return tuple(_segment(block, members) for block, members in by_block.items())


def _segment(block: str, rows: list[Row]) -> SegmentRun:
    models = tuple(dict.fromkeys(row.model for row in rows))
    return SegmentRun((block,), "block", (None,), models, len(rows), sum(len(row.tokens) for row in rows))


def alternatives(spec: ModelSpec, token: int, count: int) -> tuple[Logprob, ...]:
    """The first `count` alternatives to a token, itself among them."""
    return tuple(Logprob((token + k) % spec.vocab_size, -1.0 - k) for k in range(count))


def require(condition: bool, otherwise: str) -> None:
    """Raises PlanViolation, and says what is wrong."""
    if not condition:
        raise PlanViolation(otherwise)
