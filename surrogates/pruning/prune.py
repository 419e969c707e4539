"""Carry out a plan: shapes of a family's layers, the pruned config, and smaller tensors and components.

shape = shape_of(config)
smaller = slice_tensors(axes, shape, kept, tensors)          # name -> tensor, those without a slice unchanged
config = pruned_config(config, part, plan.after)             # one that transformers accepts, or an InputError
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surgery.families.specs import spec_of
from surgery.families.table import Family, family_of
from surrogates.pruning.groups import Axis, Part, TensorSegment, axes_of, prunable
from surrogates.pruning.plan import BlockShape, Cost, KeptSlices
from zoo.errors import InputError, MalformedCheckpoint
from zoo.manifest import Component, canonical_json


def shape_of(config: Mapping[str, Any]) -> BlockShape:
    """Return the shape of a model's layers, with family defaults filled in.

    Raises UnknownFamily, MalformedCheckpoint, InputError.
    """
    settings = _accepted(config, "config.json")
    heads = int(settings.num_attention_heads)
    hidden = int(settings.hidden_size)
    channels_name = prunable(family_of(config)).settings[2]
    channels = getattr(settings, channels_name, None)
    return BlockShape(
        hidden=hidden,
        heads=heads,
        kv=int(getattr(settings, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(settings, "head_dim", None) or hidden // heads),
        channels=4 * hidden if channels is None else int(channels),
    )


def pruned_config(config: Mapping[str, Any], part: Part, after: BlockShape) -> dict[str, Any]:
    """Return the config of a model in which all layers have the pruned shape.

    Raises:
        InputError: transformers does not accept it.
    """
    heads, kv, channels = prunable(family_of(config)).settings
    made = dict(config)
    if part != "ffn":
        made.update({heads: after.heads, kv: after.kv, "head_dim": after.head_dim})
    if part != "attention":
        made[channels] = after.channels
    _accepted(made, "the pruned shape")
    return made


def _accepted(config: Mapping[str, Any], what: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        cleaned = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
        return CONFIG_MAPPING[family_of(config).name].from_dict(cleaned)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"transformers refuses {what}: {' '.join(str(error).split())[:300]}") from None
    except Exception as error:  # huggingface_hub's strict dataclasses raise their own classes
        if type(error).__module__.startswith("huggingface_hub"):
            raise InputError(f"transformers refuses {what}: {' '.join(str(error).split())[:300]}") from None
        raise


def respecced(component: Component, config: Mapping[str, Any], family: Family, layer: int | None) -> Component:
    """Return the component with the same tensors and the spec of another config."""
    spec = canonical_json(spec_of(config, family, component.kind, layer))
    return Component(component.kind, component.family, spec, component.tensors, component.adapter)


# -- counting ----------------------------------------------------------------------------------------------------------


def cost_of(family: Family, components: Sequence[Component], shapes: Mapping[str, tuple[int, ...]], part: Part) -> Cost:
    """Return the function from a shape to the parameters of a part of these components. `shapes`: by tensor digest.

    If a family has both halves in one component, only the modules of the pruned half count.
    """
    entries: list[tuple[int, Axis | None, int]] = []
    for component in components:
        axes = {axis.name: axis for axis in axes_of(family, component, part)}
        roots = {name.split(".")[0] for name in axes}
        for name, digest in component.tensors:
            if component.kind != "layer" or part == "layer" or name.split(".")[0] in roots:
                axis = axes.get(name)
                extent = 1 if axis is None else shapes[digest][axis.dim]
                entries.append((math.prod(shapes[digest]) // max(extent, 1), axis, extent))

    def cost(shape: BlockShape) -> int:
        return sum(rest * (extent if axis is None else axis_length(axis, shape)) for rest, axis, extent in entries)

    return cost


def axis_length(axis: Axis, shape: BlockShape) -> int:
    """Return the number of entries along a sliced dimension."""
    return sum(shape.units(segment.unit) * _width(segment, shape) for segment in axis.segments)


def _width(segment: TensorSegment, shape: BlockShape) -> int:
    return segment.width or shape.head_dim


# -- slicing -----------------------------------------------------------------------------------------------------------


def kept_entries(axis: Axis, shape: BlockShape, kept: KeptSlices) -> Tensor:
    """Return the indices to keep, int64 [entries left], along a sliced dimension of a tensor of `shape`."""
    begin = 0
    found: list[int] = []
    for segment in axis.segments:
        width = _width(segment, shape)
        for unit in kept.units(segment.unit):
            found.extend(range(begin + unit * width, begin + (unit + 1) * width))
        begin += shape.units(segment.unit) * width
    return torch.tensor(found, dtype=torch.int64)


def slice_tensors(
    axes: Iterable[Axis], shape: BlockShape, kept: KeptSlices, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a component's tensors with only the kept units, as new tensors; unchanged ones stay the same objects.

    Raises:
        MalformedCheckpoint: A tensor does not have the length that the config gives.
    """
    out = dict(tensors)
    for axis in axes:
        tensor = tensors[axis.name]
        if tensor.shape[axis.dim] != axis_length(axis, shape):
            raise MalformedCheckpoint(
                f"{axis.name} has shape {list(tensor.shape)}; the config wants {axis_length(axis, shape)} entries"
            )
        entries = kept_entries(axis, shape, kept)
        if len(entries) < tensor.shape[axis.dim]:
            out[axis.name] = tensor.index_select(axis.dim, entries.to(tensor.device)).contiguous()
    return out


def unit_sums(axis: Axis, shape: BlockShape, values: Tensor) -> dict[str, Tensor]:
    """Sum a tensor's values per unit: kind of unit -> float64 [units]. `values` has the shape of the axis's tensor."""
    along = values.double().movedim(axis.dim, 0).reshape(values.shape[axis.dim], -1).sum(1)
    sums: dict[str, Tensor] = {}
    begin = 0
    for segment in axis.segments:
        units, width = shape.units(segment.unit), _width(segment, shape)
        added = along[begin : begin + units * width].view(units, width).sum(1)
        sums[segment.unit] = sums[segment.unit] + added if segment.unit in sums else added
        begin += units * width
    return sums
