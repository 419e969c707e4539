"""Compute what blocks cost in a step on a device, from the table of hardware or from measured profiles (BL-11).

From the table, a run of layers takes

    max(weights / bandwidth, 2 * weights * (tokens + half) / flops)           its matrix products
  + max(K and V read / bandwidth, 4 * width * pairs / flops)                  its attention
  + layers * layer_ns                                                         launches that no computing hides
  + 2 * layers * (sum_ns + bytes of hidden states / sum_bandwidth)            sums, where devices split each layer

`half` is 0 for most kinds of devices: a roofline with a sharp knee. Otherwise products of that many tokens reach half
of the rate of large ones, so that the rate grows smoothly with the tokens of a step (TI-09).

`k` decode steps in a row are summed in closed form, with contexts growing by one token each. Profiles give the same
from measured tables. Pure: numbers in, nanoseconds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.policy.profiles import BlockProfile
from runtime.sim.cost.hardware import Gpu
from runtime.sim.models.shapes import ITEM, ModelShape


@dataclass(slots=True)
class BlockWork:
    """The work of a block in a step, added up row by row.

    Fields:
        rows: Rows that decode one token each.
        context: Tokens that those attend to, together.
        chunks: Rows with chunks of prompts.
        chunk: Tokens of those chunks.
        chunk_context: Tokens that the chunks attend to.
        pairs: Pairs of a chunk's token with a token that it attends to.
    """

    rows: int = 0
    context: int = 0
    chunks: int = 0
    chunk: int = 0
    chunk_context: int = 0
    pairs: int = 0

    def add_row(self, start: int, count: int) -> None:
        """Add a row of `count` tokens at position `start`."""
        if count == 1:
            self.rows += 1
            self.context += start + 1
            return
        self.chunks += 1
        self.chunk += count
        self.chunk_context += start + count
        self.pairs += count * start + count * (count + 1) // 2

    def add(self, other: BlockWork) -> None:
        self.rows += other.rows
        self.context += other.context
        self.chunks += other.chunks
        self.chunk += other.chunk
        self.chunk_context += other.chunk_context
        self.pairs += other.pairs

    @property
    def tokens(self) -> int:
        return self.rows + self.chunk


class BlockCost(Protocol):
    """The time of a block for some work, from the table (`TableCost`) or from profiles (`ProfileCost`).

    `fixed`: ns of each step in which no kernel runs; 0 if that was not measured.
    """

    @property
    def fixed(self) -> float: ...

    def ns(self, work: BlockWork, steps: int = 1) -> float:
        """Return the ns of one step, or of `steps` steps in which every decoding row advances by one token each.

        Chunks belong to the first step.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableCost:
    """The cost of a block by its sizes, made by `table_cost`.

    Fields:
        weights: ns to read the weights.
        token: ns of matrix products per token.
        kv: ns to read K and V, per token of context.
        pair: ns of attention per pair of tokens.
        fixed: ns per step that no computing hides.
        begin: ns of matrix products in any step beside those per token, where few tokens are slow.
        sums: ns of sums over devices per token.
    """

    weights: float
    token: float
    kv: float
    pair: float
    fixed: float
    begin: float = 0.0
    sums: float = 0.0

    def ns(self, work: BlockWork, steps: int = 1) -> float:
        first = self._products(work.rows + work.chunk)
        if self.kv or self.pair:
            first += max(self.kv * (work.context + work.chunk_context), self.pair * (work.context + work.pairs))
        if steps == 1:
            return first + self.fixed
        later = steps - 1
        read = later * work.context + work.rows * later * (later + 1) // 2
        return first + later * self._products(work.rows) + max(self.kv, self.pair) * read + steps * self.fixed

    def attention(self, work: BlockWork) -> float:
        """Return the ns of one step's attention."""
        return max(self.kv * (work.context + work.chunk_context), self.pair * (work.context + work.pairs))

    def _products(self, tokens: int) -> float:
        products = self.token * tokens + self.begin
        return (products if products > self.weights else self.weights) + self.sums * tokens

    def faster(self, times: float) -> TableCost:
        """Return the cost of a block that is so many times as fast."""
        return TableCost(
            self.weights / times, self.token / times, self.kv / times, self.pair / times, self.fixed / times,
            self.begin / times, self.sums / times,
        )  # fmt: skip

    def plus(self, other: TableCost) -> TableCost:
        """Return the cost of both, one after the other, for the same work.

        Exact for parts of one model on one device, because their times have the same proportions.
        """
        return TableCost(
            self.weights + other.weights,
            self.token + other.token,
            self.kv + other.kv,
            self.pair + other.pair,
            self.fixed + other.fixed,
            self.begin + other.begin,
            self.sums + other.sums,
        )


def table_cost(shape: ModelShape, lo: int, hi: int, gpu: Gpu) -> TableCost:
    """Return the cost of components [lo, hi) of a model on a device."""
    layers = shape.attentions(lo, hi)
    nbytes = shape.read_bytes(lo, hi)
    flops, summed = gpu.flops * gpu.compute_share, layers + shape.feedforwards(lo, hi)
    token = 2 * (nbytes / ITEM) * 1e9 / flops
    return TableCost(
        weights=nbytes * 1e9 / (gpu.bandwidth * gpu.weights_share),
        token=token,
        kv=layers * shape.kv_bytes * 1e9 / (gpu.bandwidth * gpu.attention_share),
        pair=layers * 4 * shape.hidden * 1e9 / (gpu.flops * gpu.pairs_share),
        fixed=(hi - lo) / 2 * gpu.layer_ns + summed * gpu.sum_ns,
        begin=token * gpu.half_tokens,
        sums=summed * shape.hidden_bytes * 1e9 / gpu.sum_bandwidth if gpu.sum_bandwidth else 0.0,
    )


def adapter_cost(nbytes: int, gpu: Gpu) -> TableCost:
    """Return the cost of one model's adapters in a block, without launches.

    Their weights are read once and multiplied with the model's own rows.
    """
    flops = gpu.flops * gpu.compute_share
    token = nbytes / ITEM * 2e9 / flops
    weights = nbytes * 1e9 / (gpu.bandwidth * gpu.weights_share)
    return TableCost(weights, token, 0.0, 0.0, 0.0, token * gpu.half_tokens)


def prefix_cost(nbytes: int, gpu: Gpu) -> TableCost:
    """Return the cost of one model's prefix in a block: K and V that its rows attend to beside their context.

    Attention reads them, without launches of their own.
    """
    return TableCost(0.0, nbytes * 1e9 / (gpu.bandwidth * gpu.attention_share), 0.0, 0.0, 0.0)


def launch_cost(layers: int, gpu: Gpu) -> TableCost:
    """Return the launch cost of a block's products for adapters of one kind, however many models have one.

    They are joined into two products for all models (S-LoRA, Punica, `runtime.engine.layers.linear`,
    `runtime.engine.adapters.bottleneck`). `layer_ns` stands for about ten launches per layer; adapters at two places of
    a layer take two products each, so two fifths of it.
    """
    return TableCost(0.0, 0.0, 0.0, 0.0, layers * gpu.layer_ns * 0.4)


@dataclass(frozen=True, slots=True)
class ProfileCost:
    """The cost of a measured block.

    Rows of one step count with their mean context, chunks with their tokens.
    """

    profile: BlockProfile
    fixed: float = 0.0

    def ns(self, work: BlockWork, steps: int = 1) -> float:
        seconds = self.profile.prefill.at(work.chunk) if work.chunk else 0.0
        if work.rows:
            seconds += steps * self.profile.decode.at(work.rows, work.context / work.rows + (steps - 1) / 2)
        return seconds * 1e9
