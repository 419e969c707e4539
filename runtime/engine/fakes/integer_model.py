"""Models of integer functions, run by the integer engine (`engine.fakes.integer_engine`), and their expected tokens.

A component with seed s maps the value x of the token at position p (the first component's is the token itself) to

    (2s + 3) x + 5s + 7 + (11s + 13) p + sum over q <= p of (q + 1) (k_q + v_q)          mod 2**31 - 1

with the sum only if it attends, where k_q = x_q, the component's input at q, and v_q = x_q² mod 2**31 - 1. The sampled
token is the last component's value mod vocab_size; where `min_tokens` forbids an end token, it is the next allowed one
(`fakes.tokens.allowed`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from runtime.chains import Block, BlockUse, Boundary, Chain
from runtime.engine.fakes.tokens import allowed, alternatives, ends_of
from runtime.types import Logprob, ModelSpec, PromptLogprobs, Row, Sampled, SamplingParams, SequenceRequest

#: Values are below it.
PRIME = 2**31 - 1


@dataclass(frozen=True, slots=True)
class IntegerPart:
    """A component. Equal components are shared between models.

    `misses`: for a cheaper stand-in, which is wrong by one wherever its value is a multiple of this; 0 for all other
    ones.
    """

    seed: int
    attends: bool = False
    nbytes: int = 1000
    misses: int = 0

    def maps(self, x: int, position: int, attended: int) -> int:
        """Return its value for a token. `attended`: the sum over all tokens up to it, 0 where it does not attend."""
        s = self.seed
        value = ((2 * s + 3) * x + 5 * s + 7 + (11 * s + 13) * position + attended) % PRIME
        return value + 1 if self.misses and value % self.misses == 0 else value


@dataclass(frozen=True, slots=True)
class IntegerModel:
    """A model as data. `spec` is that of the whole model; its `kv_layers` is the number of parts that attend."""

    spec: ModelSpec
    parts: tuple[IntegerPart, ...]

    def chain(self, *cuts: int) -> Chain:
        """Return the model as blocks, cut before the parts with these numbers. Equal blocks have equal ids."""
        bounds = [0, *cuts, len(self.parts)]
        uses = tuple(self._use(lo, hi) for lo, hi in pairwise(bounds))
        return Chain(self.spec, _name(self.parts), uses, boundaries=tuple(self._boundaries()))

    def blocks(self, *cuts: int) -> tuple[Block, ...]:
        """Return the blocks of `chain` in order."""
        return tuple(
            Block(
                use.block,
                sum(part.nbytes for part in self.parts[use.lo : use.hi]),
                use.kv_layers,
                components=use.hi - use.lo,
            )
            for use in self.chain(*cuts).uses
        )

    def _boundaries(self) -> Iterator[Boundary]:
        layers = 0
        for at, part in enumerate(self.parts, 1):
            layers += part.attends
            if 0 < layers < self.spec.kv_layers and not self.spec.virtual_tokens:
                domain = repr([(part.seed, part.attends, part.misses) for part in self.parts[:at]])
                yield Boundary(at, layers, domain, 8)

    def _use(self, lo: int, hi: int) -> BlockUse:
        layers = sum(part.attends for part in self.parts[lo:hi])
        return BlockUse(
            _name(self.parts[lo:hi]),
            lo,
            hi,
            layers,
            f"{_name(self.parts[:lo])}|{_name(self.parts[lo:hi])}",
            0,
            8 if lo else 0,
        )


def counting_model(
    name: str, parts: str, *, page_tokens: int = 4, vocab_size: int = 97, **others: object
) -> IntegerModel:
    """Return a model from words: `parts` are seeds, with a star after one that attends, as in "1 2* 3* 4".

    Further keyword arguments are fields of its ModelSpec.
    """
    made = tuple(IntegerPart(int(word.rstrip("*")), word.endswith("*")) for word in parts.split())
    values: dict[str, object] = dict(max_model_len=64, page_tokens=page_tokens, vocab_size=vocab_size)
    spec = ModelSpec(name, kv_layers=sum(part.attends for part in made), **(values | others))  # type: ignore[arg-type]
    return IntegerModel(spec, made)


def surrogate_of(model: IntegerModel, name: str, part: int, misses: int) -> IntegerModel:
    """Return the model with a cheaper stand-in in place of one part."""
    parts = list(model.parts)
    parts[part] = replace(parts[part], misses=misses)
    return IntegerModel(replace(model.spec, name=name), tuple(parts))


def expected(model: IntegerModel, prompt: Iterable[int], sampling: SamplingParams) -> list[int]:
    """Return all tokens that a sequence gets, its end token included: the oracle for tests of schedulers."""
    spec = model.spec
    sums = [0] * len(model.parts)
    tokens = [0] * spec.virtual_tokens + list(prompt)
    prompted = len(tokens)
    for position in range(prompted + sampling.max_tokens):
        x = tokens[position]
        for at, part in enumerate(model.parts):
            sums[at] += (position + 1) * kept(x) if part.attends else 0
            x = part.maps(x, position, sums[at])
        if position + 1 < prompted:
            continue
        produced = len(tokens) - prompted
        if produced == sampling.max_tokens or len(tokens) - spec.virtual_tokens >= spec.max_model_len:
            break
        tokens.append(allowed(spec, sampling, produced, x % spec.vocab_size))
        if produced + 1 >= sampling.min_tokens and tokens[-1] in ends_of(spec, sampling):
            break
    return tokens[prompted:]


def kept(x: int) -> int:
    """Return the sum of a token's K and V."""
    return x + x * x % PRIME


def _name(parts: Sequence[IntegerPart]) -> str:
    return ".".join(f"{part.seed}{'*' * part.attends}" for part in parts)


def sampled_of(spec: ModelSpec, request: SequenceRequest, row: Row, value: int) -> Sampled:
    """Return the sampled token of a row with the last value `value`."""
    token = allowed(spec, request.sampling, row.generated, value % spec.vocab_size)
    if request.sampling.logprobs is None:
        return Sampled(row.seq, token)
    return Sampled(row.seq, token, -1.0, alternatives(spec, token, request.sampling.logprobs))


def states_of(prompt: Sequence[int], lo: int, hi: int) -> array[float]:
    """Return the sum of the states of a prompt's tokens [lo, hi): of each its id, its place and 1."""
    return array("f", (sum(prompt[lo:hi]), sum(range(lo, hi)), hi - lo))


def pooled_of(spec: ModelSpec, request: SequenceRequest, row: Row) -> list[PromptLogprobs]:
    """Return the states of the prompt tokens that a row runs, pooled."""
    first = max(row.start - spec.virtual_tokens, len(request.prompt) - 1 if request.sampling.pooling == "last" else 0)
    end = min(row.start - spec.virtual_tokens + len(row.tokens), len(request.prompt))
    if end <= first:
        return []
    return [PromptLogprobs(row.seq, first, (), (), end - first, states_of(request.prompt, first, end).tobytes())]


def prompt_logprobs_of(spec: ModelSpec, request: SequenceRequest, row: Row) -> list[PromptLogprobs]:
    """Return log-probabilities and pooled states of the prompt tokens that a row runs; none if not requested."""
    if request.sampling.pooling is not None:
        return pooled_of(spec, request, row)
    begin, count = row.start - spec.virtual_tokens, request.sampling.prompt_logprobs
    first = max(begin, 1)
    tokens = request.prompt[first : max(0, begin + len(row.tokens))]
    if count is None or not tokens:
        return []
    chosen = tuple(Logprob(token, -1.0) for token in tokens)
    return [PromptLogprobs(row.seq, first, chosen, tuple(alternatives(spec, token, count) for token in tokens))]
