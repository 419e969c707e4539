"""Compute BlockLLM's Figure 7, the latency of a token by part on a model cut across servers, from the hardware table.

The paper says: LLaMA-7B, a batch of 32 requests of length 512, "without any optimization" of communication: 62.9 %
computing and 36.4 % between servers. It does not say how often a batch crosses servers, or what is sent. Of the
readings that its numbers allow, one fits all of them:

    Every hop carries the activations of a request's whole context (batch x length x hidden, 134 MB), not only those
    of the new token.

- One hop between servers is then 10.7 ms of 100 Gbps at line rate, about as long as the computing.
- If only the new token's hidden states were sent (256 kB), one hop would take about 50 us, and it would take over a
  hundred of them. If K and V were sent (8.6 GB), one hop would take 0.7 s.
- The rest of the paper's split, 100 - 62.9 - 36.4 = 0.7 %, is the cost of as many hops inside a server over NVLink with
  the same bytes: the ratio 52 of the two is that of 100 Gbps to NVLink's 600 GB/s (48), not that of two latencies.

So the model has three parts, and one hop of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.sim.cost.blocks import BlockWork, table_cost
from runtime.sim.cost.hardware import GPUS, LINKS, Gpu, LinkSpec
from runtime.sim.models.shapes import SHAPES, ModelShape

#: The paper's shares of one token's latency.
PAPER_COMPUTE, PAPER_BETWEEN = 0.629, 0.364


@dataclass(frozen=True, slots=True)
class Figure7Setting:
    """The setting of the experiment.

    Fields:
        batch: Requests.
        length: Tokens of context of each.
        between, inside: Hops of a token between servers, and inside a server.
        whole: Whether hops carry the whole context or only the new token.
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
    """The latency of one new token by part, in ns."""

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
    """Return the latency of one new token of the batch."""
    work = BlockWork(rows=setting.batch, context=setting.batch * setting.length)
    parts = 1 + setting.between + setting.inside
    compute = table_cost(setting.shape, 0, setting.shape.components, setting.gpu).ns(work) + parts * setting.gpu.part_ns
    nbytes = setting.batch * (setting.length if setting.whole else 1) * setting.shape.hidden_bytes
    return Split(
        compute,
        setting.between * (setting.net.busy_ns(nbytes) + setting.net.latency),
        setting.inside * (setting.nvlink.busy_ns(nbytes) + setting.nvlink.latency),
    )
