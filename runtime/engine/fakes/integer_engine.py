"""A stage engine without tensors for tests: hidden states, K and V are integers, and it checks every plan.

Every token depends on every bit of state. `engine.fakes.integer_model` defines the models. A component that attends
writes its input value into the K half of its layer's page and the square into the V half, and reads the pages of all
tokens so far. So a wrong, missing, stale or foreign page changes every later token, unless all differences happen to
cancel.

Every log-probability is -1, the k-th alternative's -1-k (`fakes.tokens`). A step over n tokens takes `alpha + beta * n`
nanoseconds; `pace` may spend them in real time.

Contract: `runtime.chains.StageEngine`. Raises PlanViolation, before a row has run, unless rows and inputs follow from
the earlier plans. What a new table's pages hold already (shared pages, or pages written by `write_pages`) is not
checked. Needs neither torch nor a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul

from runtime.chains import Array, Lack, Likeness, Stacked, Stage, StageResult, StepRunner
from runtime.engine.fakes.faults import FakeFault, require
from runtime.engine.fakes.integer_checks import WORD, HeldTable, here, verify_input, verify_row, written_pages
from runtime.engine.fakes.integer_lanes import IntegerLanes
from runtime.engine.fakes.integer_loans import IntegerLoans
from runtime.engine.fakes.integer_model import (
    PRIME,
    IntegerModel,
    IntegerPart,
    kept,
    prompt_logprobs_of,
    sampled_of,
)
from runtime.lending_config import LoanShipping
from runtime.loans import LoanLink, LoanQuery
from runtime.types import (
    AWAY,
    EngineMemory,
    LoanLost,
    ModelSpec,
    Opened,
    PlaceChange,
    PromptLogprobs,
    Row,
    Sampled,
    StepPlan,
    StepResult,
)
from zoo.errors import NotFound, NotServable


class IntegerEngine:
    """`runtime.chains.StageEngine` with integers as hidden states.

    Args:
        models: the models that it can load stages of.
        page_capacity, page_bytes: pages of the device, and bytes of K and V together in a page, a multiple of 16.
        alpha, beta: nanoseconds of a step and of each token in it.
        fail_at: steps that raise FakeFault, after opening the plan's sequences.
        rewrites: rows may write tokens again that were speculated (BL-25).
        pace: called with the nanoseconds of each step.
        lacks: what the engine pretends to lack.
    """

    def __init__(
        self,
        models: Iterable[IntegerModel],
        page_capacity: int,
        *,
        page_bytes: int = 64,
        device: str = "counting",
        alpha: int = 1_000_000,
        beta: int = 10_000,
        fail_at: Iterable[int] = (),
        rewrites: bool = False,
        pace: Callable[[int], None] | None = None,
        lacks: Iterable[Lack] = (),
    ) -> None:
        self._models = {model.spec.name: model for model in models}
        self._device, self._capacity, self._page_bytes = device, page_capacity, page_bytes
        self._alpha, self._beta, self._fail_at = alpha, beta, frozenset(fail_at)
        self._rewrites, self._lacks = rewrites, frozenset(lacks)
        self._pool = bytearray(page_capacity * page_bytes)
        self._words = memoryview(self._pool).cast("q")
        self._stages: dict[str, Stage] = {}
        self._held: dict[str, HeldTable] = {}
        self._tables: dict[int, set[str]] = {}  # page -> sequences with the page in their tables
        self._lanes = IntegerLanes(self, pace)
        self._loans = IntegerLoans(self._sums)
        self._brought: set[int] = set()  # pages not written since `write_pages`
        self.touched: set[int] = set()  # pages with memory: written since they were returned last
        self._failed: set[str] = set()  # sequences of failed steps; these may be released without being open

    @property
    def device(self) -> str:
        return self._device

    @property
    def lacks(self) -> frozenset[Lack]:
        return self._lacks

    @property
    def page_capacity(self) -> int:
        return self._capacity

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def sequences(self) -> int:
        """Number of open sequences."""
        return len(self._held)

    def load(self, stage: Stage) -> ModelSpec:
        model = self._models.get(stage.model)
        if model is None:
            raise NotFound(f"no model named {stage.model!r}")
        if not 0 <= stage.lo < stage.hi <= len(model.parts):
            raise NotServable(f"{stage.id}: {stage.model} has {len(model.parts)} components")
        if model.spec.page_tokens * 2 * WORD > self._page_bytes:
            raise NotServable(
                f"{stage.id}: {model.spec.page_tokens} tokens do not fit a page of {self._page_bytes} bytes"
            )
        self._stages[stage.id] = stage
        return self._spec(stage)

    def unload(self, stage: Stage) -> None:
        require(stage.id in self._stages, f"stage {stage.id} is not loaded")
        require(all(held.stage != stage for held in self._held.values()), f"stage {stage.id} still has sequences")
        del self._stages[stage.id]

    def memory(self) -> EngineMemory:
        """Return memory sizes: each component counts its `nbytes`, once per device."""
        parts = [part for stage in self._stages.values() for part in self._parts(stage)]
        return EngineMemory(
            sum(part.nbytes for part in set(parts)), sum(part.nbytes for part in parts), len(self._pool)
        )

    def alike(self, a: Array, b: Array) -> Likeness:
        """Compare bit by bit: the cosine is 1 for equal arrays, else 0."""
        same = memoryview(a.data).cast("B") == memoryview(b.data).cast("B")
        return Likeness(same, 1.0 if same else 0.0)

    def return_pages(self, pages: Sequence[int]) -> None:
        size = self._page_bytes
        for page in self._in_range(pages):
            self._pool[page * size : (page + 1) * size] = bytes(size)
            self.touched.discard(page)

    def read_pages(self, pages: Sequence[int]) -> Array:
        size = self._page_bytes
        return Array(
            "uint8",
            (len(pages), size),
            b"".join(self._pool[page * size : (page + 1) * size] for page in self._in_range(pages)),
        )

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        size, held = self._page_bytes, memoryview(data.data).cast("B")
        if data.dtype != "uint8" or data.shape != (len(pages), size) or held.nbytes != len(pages) * size:
            raise ValueError(
                f"{len(pages)} pages of {size} bytes are not {data.dtype} {data.shape} of {held.nbytes} bytes"
            )
        for at, page in enumerate(self._in_range(pages)):
            self._pool[page * size : (page + 1) * size] = held[at * size : (at + 1) * size]
        self._brought.update(pages)
        self.touched.update(pages)

    def borrow(self, link: LoanLink, shipping: LoanShipping = "query") -> None:
        self._loans.link = link

    def hold_loan(self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first: int = 0) -> None:
        require(tokens * 2 * WORD == len(groups) * self._page_bytes, f"loan {loan}: {len(groups)} groups, {tokens}")
        self._loans.hold_loan(loan, groups, tokens, debtor, first)

    def drop_loan(self, loan: int) -> None:
        self._loans.drop_loan(loan)

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        return self._loans.attend(query, debtor)

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run a step. Raises PlanViolation, or FakeFault where a test requested it."""
        try:
            return self._lanes.run(plan, inputs)
        except LoanLost:
            self._failed.update([row.seq for row in plan.rows], [one.request.seq for one in plan.opened], plan.released)
            for row in plan.rows:  # they may run again: what they had begun to write counts for nothing
                self._held[row.seq].computed = row.start
            raise

    def second_lane(self) -> StepRunner:
        self._lanes.several = True
        return self._lanes

    def begin(self, plan: StepPlan, inputs: Mapping[str, Array]) -> int:
        """Release, open and check the plan; return the nanoseconds that the step takes. Raises as `run`."""
        self._release(plan.released)
        self._open(plan.opened)
        for one in plan.place_changes:
            self._change_place(one)
        if plan.step in self._fail_at:
            self._failed.update([row.seq for row in plan.rows], [one.request.seq for one in plan.opened], plan.released)
            raise FakeFault(f"step {plan.step} was to fail")
        self._verify(plan.rows, inputs)
        return self._alpha + self._beta * plan.tokens

    def end(self, plan: StepPlan, inputs: Mapping[str, Array], busy: int) -> StageResult:
        """Run the rows of a step that has begun."""
        sampled: list[Sampled] = []
        prompts: list[PromptLogprobs] = []
        behind: dict[str, array[int]] = {}
        saved: dict[str, dict[int, Array]] = {}
        for row in plan.rows:
            self._store_row(row)
        for row in plan.rows:
            values = self._values(row, inputs.get(row.seq), saved)
            held = self._held[row.seq]
            if held.stage.hi < len(self._models[held.stage.model].parts):
                behind[row.seq] = array("q", values)
                continue
            prompts += prompt_logprobs_of(held.spec, held.opened.request, row)
            if row.sample:
                sampled.append(sampled_of(held.spec, held.opened.request, row, values[-1]))
        counts = [len(values) for values in behind.values()]
        whole = Array("int64", (sum(counts), 1), b"".join(behind.values()))
        outputs = Stacked([*behind], whole, counts) if behind else {}
        return StageResult(StepResult(plan.step, tuple(sampled), tuple(prompts), (), busy), outputs, saved)

    # -- checking a plan -----------------------------------------------------------------------------------------------

    def _release(self, released: Iterable[str]) -> None:
        for seq in released:
            held = self._held.pop(seq, None)
            self._loans.forget_sequence(seq)
            require(held is not None or seq in self._failed, f"released sequence {seq} is unknown")
            for page in {page for group in held.groups for page in here(group)} if held is not None else ():
                self._tables[page].discard(seq)

    def _change_place(self, one: PlaceChange) -> None:
        held = self._held.get(one.seq)
        if held is not None:  # else it has been closed since
            self._loans.change_place(one)
        if held is None or not held.groups:  # they come with its row
            return
        width = held.spec.page_tokens
        first = one.first // width
        last = one.last // width
        require(one.first < last * width <= held.computed, f"{one.seq}: tokens from {one.first} on change their place")
        for page in (page for group in held.groups[first:last] for page in here(group)):
            self._tables[page].discard(one.seq)
        held.change_groups(one, first, last)
        for page in (page for group in held.groups[first:last] for page in here(group)):
            self._tables.setdefault(page, set()).add(one.seq)

    def _open(self, opened: Iterable[Opened]) -> None:
        for one in opened:
            request = one.request
            require(request.seq not in self._held, f"sequence {request.seq} is opened twice")
            require(request.model in self._stages, f"stage {request.model} is not loaded")
            stage = self._stages[request.model]
            require(
                request.seq.rpartition("@")[2].partition("#")[0] == str(stage.lo),
                f"sequence {request.seq} is not named for {stage.id}",
            )
            spec = self._spec(stage)
            self._held[request.seq] = HeldTable(
                one, stage, spec, (*[0] * spec.virtual_tokens, *request.prompt, *one.output)
            )

    def _verify(self, rows: tuple[Row, ...], inputs: Mapping[str, Array]) -> None:
        require(len({row.seq for row in rows}) == len(rows), "a sequence has two rows")
        require(inputs.keys() <= {row.seq for row in rows}, "inputs for no row")
        new: dict[int, set[str]] = {}
        for row in rows:
            require(row.seq in self._held, f"sequence {row.seq} is unknown")
            for page in self._in_range([page for group in row.new_pages for page in here(group)]):
                require(row.seq not in self._tables.get(page, ()), f"{row.seq}: has page {page} already")
                require(row.seq not in new.setdefault(page, set()), f"{row.seq}: page {page} is given twice")
                new[page].add(row.seq)
        for row in rows:
            held = self._held[row.seq]
            verify_row(row, held, self._is_last(held.stage), partial(self._loans.is_away, row.seq))
            require(self._follows(row, held), f"{row.seq}: starts at {row.start}, {held.computed} tokens have run")
            verify_input(row, held, self._parts(held.stage), inputs.get(row.seq))
            for page in written_pages(row, held, self._parts(held.stage)):
                others = (self._tables.get(page, set()) | new.get(page, set())) - {row.seq}
                require(not others, f"{row.seq}: writes page {page}, which is {', '.join(sorted(others))}'s, too")

    def _follows(self, row: Row, held: HeldTable) -> bool:
        """Return whether a row continues its sequence.

        It must start after the tokens that have run, or after those that `write_pages` has written since.
        """
        if self._rewrites and row.start < held.computed:
            return True
        if row.start <= held.computed or not held.spec.kv_layers:
            return row.start == held.computed or not held.spec.kv_layers
        first = held.computed // held.spec.page_tokens
        return all(page in self._brought for group in held.groups[first:] for page in group)

    # -- running a step ------------------------------------------------------------------------------------------------

    def _store_row(self, row: Row) -> None:
        held = self._held[row.seq]
        self._brought -= written_pages(row, held, self._parts(held.stage))
        held.groups.extend(row.new_pages)
        held.computed = row.start + len(row.tokens)
        for page in (page for group in row.new_pages for page in here(group)):
            self._tables.setdefault(page, set()).add(row.seq)
            self.touched.add(page)

    def _values(self, row: Row, given: Array | None, saved: dict[str, dict[int, Array]]) -> list[int]:
        """Return the values of a row's tokens after its stage; add those that it asks for to `saved`."""
        held = self._held[row.seq]
        values = list(row.tokens) if given is None else memoryview(given.data).cast("B").cast("q").tolist()
        parts = self._parts(held.stage)
        layer = sum(part.attends for part in parts[: row.enters])
        for place, part in enumerate(parts[row.enters :], row.enters):
            if row.layers and layer == row.layers:
                break
            if place in row.saves:
                saved.setdefault(row.seq, {})[place] = Array("int64", (len(values), 1), array("q", values).tobytes())
            attended: Iterable[int] = [0] * len(values)
            if part.attends:
                attended = self._attend(held, layer, row.start, values)
                layer += 1
            values = [
                part.maps(x, row.start + at, total) for at, (x, total) in enumerate(zip(values, attended, strict=True))
            ]
        return values

    def _attend(self, held: HeldTable, layer: int, start: int, values: Sequence[int]) -> Sequence[int]:
        """Write values at positions `start, start + 1, …` into their pages.

        Returns for each one the sum over all tokens up to it.
        """
        for position, x in enumerate(values, start):
            index, offset = divmod(position, held.spec.page_tokens)
            k, v = self._at(held.groups[index][layer])
            self._words[k + offset], self._words[v + offset] = x, x * x % PRIME
        before = self._past(held, layer, start)
        return list(accumulate(((at + 1) * kept(x) for at, x in enumerate(values, start)), initial=before))[1:]

    def _past(self, held: HeldTable, layer: int, upto: int) -> int:
        """Return the sum over positions below `upto`, read from the pages here and on other devices."""
        seq, width = held.opened.request.seq, held.spec.page_tokens
        total = self._loans.past(seq, layer)
        for at, group in enumerate(held.groups[: -(-upto // width)]):
            weights = range(at * width + 1, min((at + 1) * width, upto) + 1)
            for words in self._at(group[layer]) if group[layer] != AWAY else ():
                total += sum(map(mul, weights, self._words[words : words + len(weights)]))
        return total

    def _sums(self, pages: Sequence[int]) -> tuple[int, int]:
        """Return the sums of `fakes.integer_loans` over all tokens of these pages."""
        values = [
            self._words[k + at] + self._words[v + at]
            for k, v in map(self._at, self._in_range(pages))
            for at in range(self._page_bytes // WORD // 2)
        ]
        return sum((at + 1) * value for at, value in enumerate(values)), sum(values)

    def _at(self, page: int) -> tuple[int, int]:
        """Return the first words of a page's K and V."""
        k = page * self._page_bytes // WORD
        return k, k + self._page_bytes // WORD // 2

    def _in_range(self, pages: Sequence[int]) -> Sequence[int]:
        for page in pages:
            require(0 <= page < self._capacity, f"page {page} is out of range")
        return pages

    def _parts(self, stage: Stage) -> tuple[IntegerPart, ...]:
        return self._models[stage.model].parts[stage.lo : stage.hi]

    def _is_last(self, stage: Stage) -> bool:
        return stage.hi == len(self._models[stage.model].parts)

    def _spec(self, stage: Stage) -> ModelSpec:
        layers = sum(part.attends for part in self._parts(stage))
        return replace(self._models[stage.model].spec, name=stage.id, kv_layers=layers)
