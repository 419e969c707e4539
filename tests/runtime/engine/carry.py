"""A minimal driver of stage engines for tests.

It opens page tables, carries hidden states from hop to hop, and moves stages between engines. Sequences run in
lockstep; each engine runs its rows of one hop in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from runtime.chains import Array, Stage, StageEngine
from runtime.kv.pages import Group, PageBook
from runtime.scheduler.decode.batch_numbers import BatchNumbers
from runtime.types import Opened, PromptLogprobs, Row, Sampled, SamplingParams, SequenceRequest, StepPlan


@dataclass
class Place:
    """An engine and its page book."""

    engine: StageEngine
    book: PageBook = field(init=False)
    step: int = 0
    released: list[str] = field(default_factory=list)
    numbers: BatchNumbers = field(default_factory=BatchNumbers)

    def __post_init__(self) -> None:
        self.book = PageBook(self.engine.page_capacity)


@dataclass
class Hopping:
    """A sequence and where its stages are.

    Fields:
        tokens: Prompt and output tokens, behind the virtual ones.
        computed: How many of `tokens` have been computed.
    """

    request: SequenceRequest
    hops: list[tuple[Place, Stage]]
    tokens: list[int]
    virtual: int
    computed: int = 0
    sampled: list[Sampled] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)  # hops that have opened the sequence in their engine
    fresh: dict[int, tuple[Group, ...]] = field(default_factory=dict)  # hop -> page groups not sent to its engine yet

    def named(self, hop: int) -> str:
        return f"{self.request.seq}@{self.hops[hop][1].lo}"

    @property
    def produced(self) -> list[int]:
        return [one.token for one in self.sampled]


class Carrier:
    """Carries sequences through the stages of several engines (see the module's docstring)."""

    def __init__(self, *engines: StageEngine) -> None:
        self.places = [Place(engine) for engine in engines]
        self.seqs: dict[str, Hopping] = {}

    def add(
        self,
        seq: str,
        model: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        hops: Sequence[tuple[int, int, int]],
    ) -> Hopping:
        """Open a sequence. `hops`: (index of the engine, lo, hi) of each stage, in order."""
        request = SequenceRequest(seq, f"r-{seq}", model, tuple(prompt), sampling)
        placed = [(self.places[engine], Stage(model, lo, hi)) for engine, lo, hi in hops]
        specs = [place.engine.load(stage) for place, stage in placed]
        virtual = specs[0].virtual_tokens
        self.seqs[seq] = Hopping(request, placed, [0] * virtual + list(prompt), virtual)
        for hop, (place, _) in enumerate(placed):
            place.book.open(self.seqs[seq].named(hop), specs[hop])
        return self.seqs[seq]

    def drop(self, seq: str) -> None:
        gone = self.seqs.pop(seq)
        for hop, (place, _) in enumerate(gone.hops):
            place.book.release(gone.named(hop))
            if hop in gone.opened:
                place.released.append(gone.named(hop))

    def run(self, chunk: int = 1000) -> None:
        """Step until every sequence has its `max_tokens`."""
        while any(len(one.sampled) < one.request.sampling.max_tokens for one in self.seqs.values()):
            self.step(chunk)

    def step(self, chunk: int = 1000) -> None:
        """Run every unfinished sequence through all its hops once, with at most `chunk` tokens of each."""
        active = {seq: one for seq, one in self.seqs.items() if len(one.sampled) < one.request.sampling.max_tokens}
        rows = {seq: one.tokens[one.computed : one.computed + chunk] for seq, one in active.items()}
        at = dict.fromkeys(active, 0)
        carried: dict[str, Array] = {}
        while at:
            for place in self.places:
                here = [seq for seq, hop in at.items() if self.seqs[seq].hops[hop][0] is place]
                if here:
                    self._run(place, here, at, rows, carried)
        for seq, tokens in rows.items():
            self.seqs[seq].computed += len(tokens)

    def move(self, seq: str, hop: int, to: int, *, copy: bool = True) -> None:
        """Move a hop of a sequence to another engine.

        `copy`: Also copy the contents of its pages; without it the pages at the destination keep what they held.
        """
        one = self.seqs[seq]
        (source, stage), target, name = one.hops[hop], self.places[to], one.named(hop)
        spec = target.engine.load(stage)
        before = source.book.groups_of(name)
        target.book.open(name, spec)
        after = target.book.extend(name, one.computed)
        target.book.fill(name, one.computed)
        if copy and spec.kv_layers:
            data = source.engine.read_pages([page for group in before for page in group])
            target.engine.write_pages(
                [page for group in after for page in group], structs.replace(data, data=bytes(data.data))
            )
        source.book.release(name)
        source.released.append(name)
        one.hops[hop] = target, stage
        one.opened.discard(hop)
        one.fresh[hop] = after

    def _run(
        self,
        place: Place,
        seqs: Sequence[str],
        at: dict[str, int],
        rows: Mapping[str, list[int]],
        carried: dict[str, Array],
    ) -> None:
        place.step += 1
        opened: list[Opened] = []
        made: list[Row] = []
        inputs: dict[str, Array] = {}
        by_name: dict[str, str] = {}
        for seq in seqs:
            one, hop = self.seqs[seq], at[seq]
            if hop not in one.opened:
                named = replace(one.request, seq=one.named(hop), model=one.hops[hop][1].id)
                opened.append(Opened(named, tuple(one.produced)))
                one.opened.add(hop)
            made.append(self._row(place, one, hop, rows[seq]))
            by_name[one.named(hop)] = seq
            if hop:
                inputs[one.named(hop)] = carried.pop(seq)
        released, place.released = tuple(place.released), []
        plan = StepPlan(place.step, tuple(made), tuple(opened), released, batch=self._number(place, made, by_name))
        result = place.engine.run(plan, inputs)
        for sampled in result.result.sampled:
            one = self.seqs[by_name[sampled.seq]]
            one.sampled.append(sampled)
            one.tokens.append(sampled.token)
        for part in result.result.prompt_logprobs:
            self.seqs[by_name[part.seq]].prompts.append(part)
        for name, seq in by_name.items():
            at[seq] += 1
            if at[seq] == len(self.seqs[seq].hops):
                assert name not in result.outputs
                del at[seq]
            else:
                carried[seq] = result.outputs[name]

    def _number(self, place: Place, rows: Sequence[Row], by_name: Mapping[str, str]) -> int:
        """Number the batch as a scheduler does; here each hop of a device has its own numbers."""
        columns = []
        for row in rows:
            one = self.seqs[by_name[row.seq]]
            samples = row.start + len(row.tokens) == len(one.tokens)  # at its last hop
            columns.append((row.seq, id(one), row.start, len(row.tokens), samples))
        seqs, epochs, starts, counts, sample = zip(*columns, strict=True)
        return place.numbers.number("", seqs, epochs, starts, counts, sample, (1,) * len(rows))

    def _row(self, place: Place, one: Hopping, hop: int, tokens: Sequence[int]) -> Row:
        name, stage = one.named(hop), one.hops[hop][1]
        pages = (*one.fresh.pop(hop, ()), *place.book.extend(name, len(tokens)))
        place.book.fill(name, len(tokens))
        place.book.check()
        end = one.computed + len(tokens)
        sample = hop == len(one.hops) - 1 and end == len(one.tokens)
        shown = tuple(tokens) if stage.lo == 0 else (0,) * len(tokens)
        return Row(name, stage.id, shown, one.computed, pages, sample, len(one.sampled))
