"""The papers' models by their published shapes: weights of each component, and K and V of a token.

Layer counts and widths are those of the models' own configuration files; weights have 16 bits. A layer's norms are
below a thousandth of it and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.errors import InputError

#: Bytes of a weight and of a number in K, V and hidden states: 16-bit floating point.
ITEM = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of `layers` equal layers.

    Components: the embedding, then attention and ffn of each layer, then the head: 2 + 2 * layers of them.

    Fields:
        kv_heads: 0: as many as `heads`.
        gated: Three matrices in the ffn, else two.
        tied: The head is the embedding's matrix.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    kv_heads: int = 0
    gated: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.ffn, self.heads, self.vocab) < 1 or self.hidden % self.heads:
            raise InputError(f"{self.name}: sizes are positive, and heads divide the hidden width")

    @property
    def components(self) -> int:
        return 2 + 2 * self.layers

    @property
    def embedding(self) -> int:
        """Bytes of the embedding."""
        return self.vocab * self.hidden * ITEM

    @property
    def attention(self) -> int:
        """Bytes of one layer's four projections."""
        return (2 * self.hidden + 2 * self._kv_width) * self.hidden * ITEM

    @property
    def feedforward(self) -> int:
        """Bytes of one layer's ffn."""
        return (3 if self.gated else 2) * self.hidden * self.ffn * ITEM

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self._kv_width * ITEM

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden state, as it travels between devices."""
        return self.hidden * ITEM

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, each once."""
        return self.bytes_of(0, self.components) - (self.embedding if self.tied else 0)

    @property
    def _kv_width(self) -> int:
        return (self.kv_heads or self.heads) * (self.hidden // self.heads)

    def attentions(self, lo: int, hi: int) -> int:
        """Return the number of attention layers among components [lo, hi): those with odd numbers, without the head."""
        last = self.components - 1
        return min(hi, last) // 2 - min(max(lo, 1), last) // 2 if lo < hi else 0

    def feedforwards(self, lo: int, hi: int) -> int:
        inside = max(0, min(hi, self.components - 1) - max(lo, 1))
        return inside - self.attentions(lo, hi)

    def bytes_of(self, lo: int, hi: int) -> int:
        """Return the bytes of components [lo, hi); a tied matrix counts at both ends."""
        if not 0 <= lo < hi <= self.components:
            raise InputError(f"{self.name} has components 0 to {self.components}, not [{lo}, {hi})")
        ends = (self.embedding if lo == 0 else 0) + (self.embedding if hi == self.components else 0)
        return ends + self.attentions(lo, hi) * self.attention + self.feedforwards(lo, hi) * self.feedforward

    def read_bytes(self, lo: int, hi: int) -> int:
        """Return the bytes of weights that a step reads: all but the embedding, of which it reads a few rows."""
        return self.bytes_of(lo, hi) - (self.embedding if lo == 0 else 0)


SHAPES: Mapping[str, ModelShape] = {
    each.name: each
    for each in (
        ModelShape("llama-1.1b", 22, 2048, 5632, 32, 32000, kv_heads=4),
        ModelShape("chatglm-6b", 28, 4096, 16384, 32, 130528, gated=False, tied=True),
        ModelShape("llama-7b", 32, 4096, 11008, 32, 32000),
        ModelShape("vicuna-7b", 32, 4096, 11008, 32, 32000),
        ModelShape("opt-13b", 40, 5120, 20480, 40, 50272, gated=False, tied=True),
        ModelShape("llama-13b", 40, 5120, 13824, 40, 32000),
        ModelShape("gpt-neox-20b", 44, 6144, 24576, 64, 50432, gated=False),
        ModelShape("llama-30b", 60, 6656, 17920, 52, 32000),
        ModelShape("llama-65b", 80, 8192, 22016, 64, 32000),
        ModelShape("llama2-70b", 80, 8192, 28672, 64, 32000, kv_heads=8),
    )
}


def shape_named(name: str) -> ModelShape:
    """Return the shape of a foundation. Raises InputError for an unknown name."""
    if name not in SHAPES:
        raise InputError(f"no foundation is called {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]
