"""Linear layers and embeddings shared by many models: the base product over all rows, plus a low-rank part per adapter.

Each replaces a module of transformers in place, with the same weights. The current forward context states which rows
use which adapter. The A's and B's of the active adapters are stacked, so that any number of adapters costs two products
and one mask instead of a loop over rows (the grouped products of S-LoRA and Punica, with stock matrix products).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.engine.adapters.scales import Scales
from runtime.engine.adapters.stack_cache import StackCache
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.layers.matmul import Multiply, Product, StoredProduct, plain_product, takes_stored
from runtime.engine.layers.packed_weights import Packed
from runtime.engine.step.context import ForwardContext, current


class LowRank(Protocol):
    """One adapter on one linear layer: a [rank, in], b [out, rank] (scaling included), bias [out] or None.

    Always float32, as peft computes it; the sum is rounded to the base's dtype once.
    """

    @property
    def a(self) -> Tensor: ...

    @property
    def b(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def nbytes(self) -> int:
        """Bytes that are not counted elsewhere."""
        ...


class LowRanks(Protocol):
    """The low-rank adapters of a layer in the form of the kernels (`engine.kernels.linear_groups.Added`)."""

    def add_(self, out: Tensor, x: Tensor, frame: ForwardContext) -> None:
        """Add each adapter's part for its rows of x [1, tokens, in] to `out` [1, tokens, out], both float32."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLowRank:
    """`LowRank` with plain tensors."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.a, self.b, self.bias) if x is not None)


@dataclass(frozen=True, slots=True)
class _Stack:
    """The active adapters of a layer, joined: a [in, ranks], b [ranks, out]."""

    ranks: tuple[tuple[str, int], ...]
    a: Tensor
    b: Tensor


class SharedLinear(nn.Module):
    """A linear layer with any number of adapters: low-rank parts, and vectors that scale its input or output.

    Args:
        weight: [out, in], or [in, out] if `transposed` (transformers' Conv1D).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adapters: dict[str, LowRank] = {}
        self.inputs, self.outputs = Scales(), Scales()
        self.width_in = weight.shape[0 if transposed else 1]
        #: Its low-rank adapters as the kernels add them, row by row; None where torch adds the stacked ones.
        self.low_ranks: LowRanks | None = None
        self._plain = True
        #: Key of its packed weight; None while it is plain.
        self.packed_as: str | None = None
        self._stacks: StackCache[_Stack] = StackCache()
        self._bind(transposed)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all adapters on this layer."""
        return sum(part.nbytes for part in self.adapters.values()) + self.inputs.nbytes + self.outputs.nbytes

    def _bind(self, transposed: bool) -> None:
        """Set `product` to one on the plain weight.

        The product holds plain references, because looking up a module's parameters by name costs as much as a small
        product.
        """
        weight = self.weight.data.t() if transposed else self.weight.data
        self.product: Product = plain_product(weight, None if self.bias is None else self.bias.data)

    def pack(self, packed: Packed, key: str) -> None:
        """Use this packed form of the weight [out, in] from now on and drop the plain one.

        `key`: the key of the packed weight.
        """
        self.packed_as = key
        self.weight = nn.Parameter(packed.data, requires_grad=False)
        self.product = packed.layout.product(packed.data, self.product.outputs, self.product.bias)

    def use_bias(self, bias: Tensor) -> None:
        """Add this bias [out] from now on."""
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.product = self.product.with_bias(bias)

    def stay(self, kernels: Kernels) -> None:
        """Keep the weight as it is stored, and use the kernels for it where they can."""
        if takes_stored(self.product):
            bias = self.product.bias
            self.product = StoredProduct(
                kernels, self.product if bias is None else self.product.with_bias(bias.float())
            )

    def unpack(self, weight: Tensor) -> None:
        """Use the plain weight [out, in] from now on and drop the packed form."""
        self.packed_as = None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._bind(False)

    def forward(self, x: Tensor) -> Tensor:
        if self._plain:
            return self.product.multiply(x)
        frame = current()
        if not frame.adapters:
            return self.product.multiply(x)
        out = self.scaled_product(x, frame)
        if self.adapters:
            out = self._add(out, x, frame)
        return out.to(x.dtype)

    def scaled_product(self, x: Tensor, frame: ForwardContext) -> Tensor:
        """Return the product with its bias, scaled on the rows of adapters that scale, without low-rank parts."""
        if self.inputs:
            x = self.inputs.scale_tokens(x, frame).to(x.dtype)
        out = self.product.multiply(x)
        return self.outputs.scale_tokens(out, frame) if self.outputs else out

    def attach(self, adapter: str, part: LowRank) -> None:
        """Attach a low-rank part."""
        self.adapters[adapter] = part
        self._changed()

    def scale(self, adapter: str, vector: Tensor, inputs: bool) -> None:
        """Scale the input [in] or the output [out] for an adapter's tokens, in float32.

        The output is scaled with its bias, but without low-rank parts.
        """
        (self.inputs if inputs else self.outputs).attach(adapter, vector)
        self._changed()

    def detach(self, adapter: str) -> None:
        """Detach all parts of an adapter."""
        self.adapters.pop(adapter, None)
        self.inputs.detach(adapter)
        self.outputs.detach(adapter)
        self._changed()

    @property
    def adapted(self) -> bool:
        """Whether any adapter is attached."""
        return not self._plain

    @property
    def adapter_names(self) -> set[str]:
        """The adapters on this layer."""
        return set(self.adapters) | self.inputs.names | self.outputs.names

    @property
    def added_only(self) -> bool:
        """Whether adapters add to the output and do nothing else."""
        return not (self.inputs or self.outputs)

    def _changed(self) -> None:
        self._stacks.clear()
        self._plain = not (self.adapters or self.inputs or self.outputs)

    def _add(self, out: Tensor, x: Tensor, frame: ForwardContext) -> Tensor:
        active = tuple(dict.fromkeys(s.adapter for s in frame.adapters if s.adapter in self.adapters))
        if not active:
            return out
        if self.low_ranks is not None:
            out = out.float().contiguous()  # `scaled_product` has made a new tensor
            self.low_ranks.add_(out, x.float(), frame)
            return out
        stack = self._stacks.get_or_make(active, frame, self._stacked)
        low = x.to(stack.a.dtype) @ stack.a
        if len(active) > 1 or not frame.covered_by_one:
            low = low.masked_fill(frame.foreign(stack.ranks), 0)
        added = low @ stack.b
        if frame.mix is not None:
            return out + self._biased(added, active, frame)
        for span in frame.adapters:
            bias = self.adapters[span.adapter].bias if span.adapter in self.adapters else None
            if bias is not None:
                added[..., span.lo : span.hi, :] += bias
        return out + added

    def _biased(self, added: Tensor, active: tuple[str, ...], frame: ForwardContext) -> Tensor:
        """Add the adapters' biases, where any has one, to tokens that only a tensor assigns to adapters."""
        biases = [self.adapters[name].bias for name in active]
        like = next((bias for bias in biases if bias is not None), None)
        if like is None:
            return added
        nothing = torch.zeros_like(like)
        table = torch.stack([*(nothing if bias is None else bias for bias in biases), nothing])
        return added + table[frame.adapter_index(active)]

    def _stacked(self, active: tuple[str, ...]) -> _Stack:
        parts = [self.adapters[name] for name in active]
        ranks = tuple((name, part.a.shape[0]) for name, part in zip(active, parts, strict=True))
        a = torch.cat([part.a for part in parts]).t().contiguous()
        b = torch.cat([part.b for part in parts], dim=1).t().contiguous()
        return _Stack(ranks, a, b)


class SharedEmbedding(nn.Module):
    """An embedding table with adapters.

    Low-rank adapters add `b @ a[:, ids]` on their tokens, times the table's own scale if it has one. Prompts (prompt
    tuning) [virtual tokens, width] replace the table's output at virtual tokens, unscaled.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.adapters: dict[str, LowRank] = {}
        self.prompts: dict[str, Tensor] = {}
        self.multiply: Multiply = F.linear

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all adapters on this table."""
        prompts = sum(prompt.numel() * prompt.element_size() for prompt in self.prompts.values())
        return prompts + sum(part.nbytes for part in self.adapters.values())

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        if not (self.adapters or self.prompts):
            return out
        frame = current()
        for virtual in frame.virtual:
            if virtual.adapter in self.prompts:
                out[:, virtual.lo : virtual.hi] = self.prompts[virtual.adapter][virtual.source]
        if not self.adapters:
            return out
        scale = getattr(self.table, "embed_scale", None)
        for span in frame.adapters:
            part = self.adapters.get(span.adapter)
            if part is not None:
                low = self.multiply(F.embedding(ids[:, span.lo : span.hi], part.a.t()), part.b)
                low = low if scale is None else low * scale.to(low.dtype)
                out[:, span.lo : span.hi] = (out[:, span.lo : span.hi] + low).to(out.dtype)
        return out

    def attach(self, adapter: str, part: LowRank) -> None:
        self.adapters[adapter] = part

    def detach(self, adapter: str) -> None:
        self.adapters.pop(adapter, None)
        self.prompts.pop(adapter, None)


@dataclass(frozen=True, slots=True)
class Replaced:
    """A module of transformers and the shared layer that replaces it."""

    old: nn.Module
    new: SharedLinear | SharedEmbedding


def share_linears_(module: nn.Module) -> list[Replaced]:
    """Replace every linear layer, Conv1D and token table below `module` by its shared form, in place.

    The weights are not copied.
    """
    done: list[Replaced] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            shared = _shared(name, child)
            if shared is not None:
                setattr(parent, name, shared)
                done.append(Replaced(child, shared))
    return done


def _shared(name: str, module: nn.Module) -> SharedLinear | SharedEmbedding | None:
    turned = _is_conv1d(module)
    if turned or isinstance(module, nn.Linear):
        weight: Any = module
        return SharedLinear(weight.weight.data, None if weight.bias is None else weight.bias.data, turned)
    if name == "table" and isinstance(module, nn.Embedding):
        return SharedEmbedding(module)
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, without importing transformers."""
    known = sys.modules.get("transformers.pytorch_utils")
    return known is not None and isinstance(module, known.Conv1D)
