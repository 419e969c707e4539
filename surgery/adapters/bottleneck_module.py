"""A bottleneck adapter as a torch module, and as hooks on a transformers model; loading and serving both use it.

It computes what the settings of `surgery.adapters.bottleneck_config` say. It does not depend on files, batches or the
assignment of rows to adapters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.families.table import FAMILIES
from surgery.modules.skeleton import halves_of
from zoo.manifest import Adapter, Placed


class BottleneckModule(nn.Module):
    """Computes what a half adds to its residual instead of its sub-layer's output.

    Args:
        adapter: An adapter of kind "adapter".
        tensors: Its tensors by name, in the dtype in which the model runs.
    """

    #: Names in `tensors` that every bottleneck has.
    MATRICES = ("down_weight", "down_bias", "up_weight", "up_bias")

    def __init__(self, adapter: Adapter, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        how: dict[str, Any] = json.loads(adapter.config)
        self.activation_name: str = how["activation"]
        self.activation: Callable[[Tensor], Tensor] = ACT2FN[self.activation_name]
        self.reads, self.skips, self.skips_before_norm = how["reads"], how["skips"], how["skips_before_norm"]
        self.factor: float | None = how["scaling"]
        self.tensors = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(tensor, False) for name, tensor in tensors.items()}
        )
        self.norms = (how["norm_before"], how["norm_after"])
        #: Torch's `linear`, or another function of the same signature.
        self.multiply: Callable[..., Tensor] = F.linear

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def forward(self, output: Tensor, residual: Tensor) -> Tensor:
        """Return what is to be added to the residual.

        Args:
            output: The sub-layer's output, [.., width].
            residual: The input of the half, [.., width].
        """
        x = self._up(self.read(output, residual))
        skip = output if self.skips == "output" else output + residual
        if self.skips_before_norm:
            return self._normed(x + skip, "norm_after") if self.norms[1] else x + skip
        return (self._normed(x, "norm_after") if self.norms[1] else x) + skip

    @property
    def form(self) -> tuple[str, str] | None:
        """Key of the computation; bottlenecks with equal keys can run as one.

        None for a bottleneck with norms, or that skips more than `output`.
        """
        return None if any(self.norms) or self.skips != "output" else (self.activation_name, self.reads)

    @property
    def scaling_vector(self) -> Tensor:
        """The factor on the result of `up`, as [width]."""
        bias = self.tensors["up_bias"]
        return self.tensors["scaling"].expand_as(bias) if self.factor is None else torch.full_like(bias, self.factor)

    def read(self, output: Tensor, residual: Tensor) -> Tensor:
        """Return the input of `down`."""
        if self.reads == "residual":
            return residual
        return output if self.reads == "output" else output + residual

    def _up(self, x: Tensor) -> Tensor:
        if self.norms[0]:
            x = self._normed(x, "norm_before")
        low = self.activation(self.multiply(x, self.tensors["down_weight"], self.tensors["down_bias"]))
        return self.multiply(low, self.tensors["up_weight"], self.tensors["up_bias"]) * self._scaling

    @property
    def _scaling(self) -> Tensor | float:
        return self.tensors["scaling"] if self.factor is None else self.factor

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}_weight"], self.tensors[f"{name}_bias"])


def hook_bottlenecks(model: Any, family: str, components: Iterable[Placed], tensor: Callable[[str], Tensor]) -> None:
    """Insert the bottlenecks of an adapter's components into a transformers model of its base, after their sub-layers.

    Args:
        tensor: digest -> tensor.
    """
    stem = model.get_submodule(FAMILIES[family].prefix.rstrip("."))
    for placed in components:
        adapter = placed.component.adapter
        if adapter is None or placed.layer is None:
            continue
        layer = stem.get_submodule(f"{FAMILIES[family].stack}.{placed.layer}")
        part = BottleneckModule(adapter, {name: tensor(digest).to(model.dtype) for name, digest in adapter.tensors})
        layer.add_module(f"{placed.component.kind}_bottleneck", part)
        body, norm = halves_of(family, placed.component.kind)
        _hook(layer.get_submodule(norm), layer.get_submodule(body), part)


def _hook(norm: nn.Module, body: nn.Module, part: BottleneckModule) -> None:
    """Replace a sub-layer's output by the bottleneck's; the norm before the sub-layer provides the residual."""
    seen: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen[:] = [args[0]]

    def after(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        residual = seen.pop()
        return (part(out[0], residual), *out[1:]) if isinstance(out, tuple) else part(out, residual)

    norm.register_forward_pre_hook(before)
    body.register_forward_hook(after)
