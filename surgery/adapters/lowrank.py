"""Low-rank adapters on the modules of a built component, computed as peft does, for chains that peft cannot handle.

peft injects adapters into whole models, which does not work for a chain of blocks from several models. This module
works on one component; the engine does not use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import NotServable
from zoo.manifest import Adapter


class LowRankLinear(nn.Module):
    """`base(x) + scaling * B A x (+ bias)`; the low-rank part in float32, the sum in the base's dtype.

    Args:
        a: [rank, in].
        b: [out, rank].
        bias: [out] or None.
    """

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, bias: Tensor | None, scaling: float) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (nn.Parameter(each.float(), requires_grad=False) for each in (a, b))
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        added = F.linear(F.linear(x.to(self.a.dtype), self.a), self.b, self.bias)
        return (out + added * self.scaling).to(out.dtype)


def adapt_(
    module: nn.Module, owner: nn.Module, head: nn.Module, adapter: Adapter, tensors: Mapping[str, Tensor]
) -> None:
    """Insert an adapter into a component's modules, in place.

    Args:
        module: The component; `owner` and `head` are the roots of the adapter's module paths.
        tensors: digest -> tensor, including the adapter's.

    Raises:
        NotServable: The adapter is not a plain LoRA on linear layers.
    """
    if adapter.kind != "lora":
        raise NotServable(f"an adapter of kind {adapter.kind} cannot be part of a chain of several models")
    named = {name: tensors[digest] for name, digest in adapter.tensors}
    for path, how in json.loads(adapter.config)["modules"].items():
        if how.get("dora") or how.get("embedding"):
            raise NotServable(
                f"the adapter on {path} cannot be part of a chain of several models: only plain LoRA on linear layers "
                "can"
            )
        old = head if path == "lm_head" else owner.get_submodule(path)
        a, b = (named[f"{path}.lora_{side}.weight"] for side in "AB")
        _replace_(module, old, LowRankLinear(old, a, b, named.get(f"{path}.lora_B.bias"), float(how["scaling"])))


def _replace_(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child is old and parent is not new:
                setattr(parent, name, new)


def is_low_rank(adapter: Adapter | None) -> bool:
    """Return whether a component with this adapter can be part of a chain of several models."""
    if adapter is None:
        return True
    modules = json.loads(adapter.config).get("modules", {}).values() if adapter.kind == "lora" else ()
    return adapter.kind == "lora" and not any(how.get("dora") or how.get("embedding") for how in modules)
