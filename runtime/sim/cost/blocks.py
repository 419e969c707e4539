"""What a step of blocks costs on a device: from the table of hardware, or from profiles that were measured (BL-11).

From the table, a run of layers takes

    max(weights / bandwidth, 2 * weights * tokens / flops)                    its matrix products (a roofline)
  + max(K and V read / bandwidth, 4 * width * pairs / flops)                  its attention
  + layers * layer_ns                                                         what no computing hides

`k` decode steps in a row are summed in closed form, their contexts growing by one token each. Profiles give the same
from measured tables.
Pure: numbers in, nanoseconds out. Knows no sequences, plans or devices' states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.policy.profiles import BlockProfile
from runtime.sim.cost.hardware import Gpu
from runtime.sim.models.shapes import ITEM, ModelShape


@dataclass(slots=True)
class BlockWork:
    """What a block is to do in a step; added up row by row.

    `rows` decode one token each and attend to `context` tokens together; `chunk` tokens of prompts in `chunks` rows
    attend to `chunk_context` tokens, which are `pairs` of a token with one that it attends to.
    """

    rows: int = 0
    context: int = 0
    chunks: int = 0
    chunk: int = 0
    chunk_context: int = 0
    pairs: int = 0

    def add_row(self, start: int, count: int) -> None:
        """A row of `count` tokens at `start`."""
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
    """Nanoseconds of a block for some work. Two implementations: the table's and the profiles'. `fixed`: of them in
    each step, those in which no kernel runs; 0 where that was not measured."""

    @property
    def fixed(self) -> float: ...

    def ns(self, work: BlockWork, steps: int = 1) -> float:
        """One step; or `steps` of them in which every decoding row goes on by a token each time. Chunks are of the
        first one.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableCost:
    """A block by its sizes. Times are per byte, per token, per pair; `fixed`: ns for its layers. Made by
    `table_cost`.
    """

    weights: float
    token: float
    kv: float
    pair: float
    fixed: float

    def ns(self, work: BlockWork, steps: int = 1) -> float:
        first = self._products(work.rows + work.chunk)
        if self.kv or self.pair:
            first += max(self.kv * (work.context + work.chunk_context), self.pair * (work.context + work.pairs))
        if steps == 1:
            return first + self.fixed
        later = steps - 1
        read = later * work.context + work.rows * later * (later + 1) // 2
        return first + later * self._products(work.rows) + max(self.kv, self.pair) * read + steps * self.fixed

    def _products(self, tokens: int) -> float:
        products = self.token * tokens
        return products if products > self.weights else self.weights

    def faster(self, times: float) -> TableCost:
        """All of it so many times as fast."""
        return TableCost(
            self.weights / times, self.token / times, self.kv / times, self.pair / times, self.fixed / times
        )

    def plus(self, other: TableCost) -> TableCost:
        """Both, one after the other, for the same work. Exact for parts of one model on one device: their times keep
        one proportion.
        """
        return TableCost(
            self.weights + other.weights,
            self.token + other.token,
            self.kv + other.kv,
            self.pair + other.pair,
            self.fixed + other.fixed,
        )


def table_cost(shape: ModelShape, lo: int, hi: int, gpu: Gpu) -> TableCost:
    """Components [lo, hi) of a model on a device."""
    layers = shape.attentions(lo, hi)
    nbytes = shape.read_bytes(lo, hi)
    flops = gpu.flops * gpu.compute_share
    return TableCost(
        weights=nbytes * 1e9 / (gpu.bandwidth * gpu.weights_share),
        token=2 * (nbytes / ITEM) * 1e9 / flops,
        kv=layers * shape.kv_bytes * 1e9 / (gpu.bandwidth * gpu.attention_share),
        pair=layers * 4 * shape.hidden * 1e9 / flops,
        fixed=(hi - lo) / 2 * gpu.layer_ns,
    )


def adapter_cost(nbytes: int, gpu: Gpu) -> TableCost:
    """One model's adapters in a block, without launches: their weights are read once and multiplied with its own
    rows.
    """
    flops = gpu.flops * gpu.compute_share
    return TableCost(nbytes * 1e9 / (gpu.bandwidth * gpu.weights_share), nbytes / ITEM * 2e9 / flops, 0.0, 0.0, 0.0)


def prefix_cost(nbytes: int, gpu: Gpu) -> TableCost:
    """One model's prefix in a block: K and V that each of its rows attends to beside its context. Read by attention,
    launched with it.
    """
    return TableCost(0.0, nbytes * 1e9 / (gpu.bandwidth * gpu.attention_share), 0.0, 0.0, 0.0)


def launch_cost(layers: int, gpu: Gpu) -> TableCost:
    """What a block's small products for adapters of one kind cost beside the block's own, however many models have one:
    they are joined, two products for all of them (S-LoRA, Punica, `runtime.engine.layers.linear`,
    `runtime.engine.adapters.bottleneck`).

    `layer_ns` is for the ten or so launches of a layer; adapters at two places of it take two products each, so two
    fifths.
    """
    return TableCost(0.0, 0.0, 0.0, 0.0, layers * gpu.layer_ns * 0.4)


@dataclass(frozen=True, slots=True)
class ProfileCost:
    """A block as it was measured. Rows of one step count with their mean context; a prompt's chunk with its tokens."""

    profile: BlockProfile
    fixed: float = 0.0

    def ns(self, work: BlockWork, steps: int = 1) -> float:
        seconds = self.profile.prefill.at(work.chunk) if work.chunk else 0.0
        if work.rows:
            seconds += steps * self.profile.decode.at(work.rows, work.context / work.rows + (steps - 1) / 2)
        return seconds * 1e9
