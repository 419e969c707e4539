"""Conversion between the manifest's classes and rows of the tables. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from zoo.manifest import Adapter, Component, ComponentKind, TensorMeta

#: (component digest, whether of its adapter) -> (name, tensor digest) in order.
Parts = Mapping[tuple[str, bool], Sequence[tuple[str, str]]]


def tensor_row(tensor: TensorMeta) -> dict[str, Any]:
    return {
        "digest": tensor.digest,
        "dtype": tensor.dtype,
        "shape": json.dumps(list(tensor.shape)),
        "elements": tensor.elements,
        "nbytes": tensor.nbytes,
    }


def tensor_of(row: Any) -> TensorMeta:
    """Return the tensor of a row with digest, dtype and shape."""
    return TensorMeta(row.digest, row.dtype, tuple(json.loads(row.shape)))


def component_row(component: Component) -> dict[str, Any]:
    adapter = component.adapter
    return {
        "digest": component.digest,
        "base_digest": component.base_digest,
        "kind": component.kind,
        "family": component.family,
        "spec": component.spec,
        "adapter_kind": adapter.kind if adapter else None,
        "adapter_config": adapter.config if adapter else None,
    }


def component_tensor_rows(component: Component) -> list[dict[str, Any]]:
    """Return the rows of a component's own tensors and its adapter's."""
    adapter = component.adapter
    return [
        {"component": component.digest, "adapter": part, "position": position, "name": name, "tensor": digest}
        for part, tensors in ((False, component.tensors), (True, adapter.tensors if adapter else ()))
        for position, (name, digest) in enumerate(tensors)
    ]


def component_of(row: Any, parts: Parts) -> Component:
    """Return the component of a row of the components' table; `parts` holds the tensors of at least this component."""
    adapter = None
    if row.adapter_kind is not None:
        adapter = Adapter(row.adapter_kind, row.adapter_config, tuple(parts.get((row.digest, True), ())))
    tensors = tuple(parts.get((row.digest, False), ()))
    return Component(cast(ComponentKind, row.kind), row.family, row.spec, tensors, adapter)
