"""BlockLLM's Figure 7 from the table of hardware: how one new token's latency splits when a model is cut across
servers.

The paper says: LLaMA-7B, a batch of 32 requests of length 512, "without any optimization" of communication: 62.9 %
computing and 36.4 % between servers. It does not say how often a batch goes between servers, or with what. Of the
readings that its own numbers allow, one fits all:

    With every hop a request takes its whole context's activations along (batch x length x hidden, 134 MB), not only the
    new token's.

One hop between servers is then 10.7 ms of 100 Gbps at line rate, of the size of the computing. Were only the new
token's hidden states sent (256 kB), one hop would take some 50 us, and it would take over a hundred of them; were K and
V sent (8.6 GB), one would take 0.7 s. And the rest of the paper's split, 100 - 62.9 - 36.4 = 0.7 %, is what as many
hops inside a server cost over NVLink with the same bytes: the ratio 52 of the two is that of 100 Gbps to NVLink's 600
GB/s (48), not that of two latencies. So: three parts, one hop of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.sim.cost.blocks import BlockWork, table_cost
from runtime.sim.cost.hardware import GPUS, LINKS, Gpu, LinkSpec
from runtime.sim.models.shapes import SHAPES, ModelShape

#: What the paper reports, in shares of one token's latency.
PAPER_COMPUTE, PAPER_BETWEEN = 0.629, 0.364


@dataclass(frozen=True, slots=True)
class Figure7Setting:
    """`between` and `inside`: hops of a token between servers and inside one. `whole`: hops carry the whole context,
    not the new token.
    """

    shape: ModelShape = SHAPES["llama-7b"]
    gpu: Gpu = GPUS["A100-80GB"]
    net: LinkSpec = LINKS["100gbps"]
    nvlink: LinkSpec = LINKS["nvlink3"]
    batch: int = 32
    length: int = 512
    between: int = 1
    inside: int = 1
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Split:
    """Nanoseconds of one new token, and what share each part has."""

    compute: float
    between: float
    inside: float

    @property
    def total(self) -> float:
        return self.compute + self.between + self.inside

    @property
    def compute_share(self) -> float:
        return self.compute / self.total

    @property
    def between_share(self) -> float:
        return self.between / self.total


def split(setting: Figure7Setting) -> Split:
    """The latency of one new token of the batch."""
    work = BlockWork(rows=setting.batch, context=setting.batch * setting.length)
    parts = 1 + setting.between + setting.inside
    compute = table_cost(setting.shape, 0, setting.shape.components, setting.gpu).ns(work) + parts * setting.gpu.part_ns
    nbytes = setting.batch * (setting.length if setting.whole else 1) * setting.shape.hidden_bytes
    return Split(
        compute,
        setting.between * (setting.net.busy_ns(nbytes) + setting.net.latency),
        setting.inside * (setting.nvlink.busy_ns(nbytes) + setting.nvlink.latency),
    )
