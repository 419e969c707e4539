"""Build one component as a runnable module: take its modules out of a skeleton and set its tensors.

Uses names and shapes; it does not depend on the store or on how components run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from surgery.chains.plan import stitch_spec
from surgery.modules.components import Stitch
from surgery.modules.skeleton import Skeleton
from surgery.quantize.decompress import decompressed
from zoo.errors import MalformedCheckpoint
from zoo.manifest import Component


def build(
    skeleton: Skeleton,
    component: Component,
    layer: int | None,
    tensors: Mapping[str, Tensor],
    left: Collection[str] = (),
) -> nn.Module:
    """Return one component as a runnable module.

    Args:
        skeleton: Of a model with this component at `layer`; the modules are taken out of it permanently.
        tensors: name within the component -> tensor, all that the component lists.
        left: Names of quantised weights that the caller will replace; see `surgery.quantize.decompress`.

    Raises:
        MalformedCheckpoint: A tensor without a parameter or of another shape, or a parameter without a tensor.
    """
    module = skeleton.part(component.kind, layer)
    owner = skeleton.owner(component.kind, layer)
    for name, tensor in module_tensors(component.family, decompressed(component, tensors, left)).items():
        target = skeleton.model.lm_head if name.startswith("lm_head.") else owner
        _assign(target, name.removeprefix("lm_head."), tensor)
    left = [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
    if left:
        raise MalformedCheckpoint(f"{component.kind} of layer {layer} has no tensor for {', '.join(sorted(left))}")
    return module.requires_grad_(False)


def build_stitch(component: Component, tensors: Mapping[str, Tensor]) -> Stitch:
    """Return a stitching block.

    Args:
        tensors: Weight and bias.

    Raises:
        MalformedCheckpoint: The tensors do not have the stitch's widths.
    """
    spec = stitch_spec(component)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or bias is None:
        raise MalformedCheckpoint("a stitch has a weight and a bias")
    if tuple(weight.shape) != (spec.width_out, spec.width_in + 1) or tuple(bias.shape) != (spec.width_out,):
        shapes = f"{list(weight.shape)} and {list(bias.shape)}"
        raise MalformedCheckpoint(
            f"a stitch from {spec.width_in} to {spec.width_out} values a token cannot have tensors of shapes {shapes}"
        )
    return Stitch(weight, bias, spec.position)


def _assign(owner: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        module = owner.get_submodule(path)
        old = getattr(module, leaf)
    except AttributeError:
        raise MalformedCheckpoint(f"the architecture has no parameter {name!r}") from None
    if tuple(old.shape) != tuple(tensor.shape):
        raise MalformedCheckpoint(f"{name!r} has shape {list(tensor.shape)}, the config wants {list(old.shape)}")
    if isinstance(old, nn.Parameter):
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)


def parameters_of(skeleton: Skeleton, component: Component, layer: int | None) -> dict[str, Tensor]:
    """Return name within the component -> the parameter or buffer that holds it, after `build`.

    Tensors held in another form are left out.
    """
    found: dict[str, Tensor] = {}
    for name, _ in component.tensors:
        owner = skeleton.model.lm_head if name.startswith("lm_head.") else skeleton.owner(component.kind, layer)
        path, _, leaf = name.removeprefix("lm_head.").rpartition(".")
        try:
            value = getattr(owner.get_submodule(path), leaf)
        except AttributeError:
            continue
        if isinstance(value, Tensor):
            found[name] = value
    return found


def module_tensors(family: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert disk names to module names.

    Only Mixtral's differ: its experts are single matrices on disk and stacked in memory.
    """
    if family != "mixtral" or not any(".experts." in name for name in tensors):
        return dict(tensors)
    out: dict[str, Tensor] = {}
    experts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            index, which, _ = name.split(".experts.")[1].split(".")
            experts.setdefault(int(index), {})[which] = tensor
        else:
            out[name.replace("block_sparse_moe.", "mlp.")] = tensor
    order = [experts[index] for index in sorted(experts)]
    out["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((e["w1"], e["w3"])) for e in order])
    out["mlp.experts.down_proj"] = torch.stack([e["w2"] for e in order])
    return out
