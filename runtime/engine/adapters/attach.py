"""Attach adapters to units and detach them: for each adapter kind, which tensors go where.

The base's tensors are not changed. What an adapter needs is copied (it is small) into the form that its rows use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runtime.engine.layers.linear import PlainLowRank, SharedEmbedding, SharedLinear
from runtime.engine.models.components import SharedComponent
from surgery.adapters.bottleneck_module import BottleneckModule
from surgery.tensors.pool import TensorPool
from zoo.errors import NotServable
from zoo.manifest import Adapter


def attach(unit: SharedComponent, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """Attach an adapter's part to a unit under `key`.

    Raises:
        NotServable: an adapter kind or variant that cannot run exactly beside other ones, or a module that is not a
            shared layer.
    """
    put = _KINDS.get(adapter.kind)
    if put is None:
        raise NotServable(f"{key}: adapters of kind {adapter.kind} are not served")
    put(unit, adapter, key, pool)
    for added in unit.added:
        added.attach(key)


def detach(unit: SharedComponent, key: str) -> None:
    """Detach an adapter from a unit."""
    for target in unit.targets.values():
        target.detach(key)
    for added in unit.added:
        added.detach(key)
    unit.prefixes.pop(key, None)
    if unit.side is not None:
        unit.side.detach(key)


def _target(unit: SharedComponent, path: str, key: str) -> SharedLinear | SharedEmbedding:
    target = unit.targets.get(path)
    if target is None:
        raise NotServable(f"{key}: {path} is no linear layer or embedding that rows can share")
    return target


def _modules(adapter: Adapter) -> Mapping[str, Any]:
    """Return the settings by module path in the component."""
    return json.loads(adapter.config)["modules"]  # type: ignore[no-any-return]


@contextmanager
def _borrowed(pool: TensorPool, digests: Iterable[str]) -> Iterator[list[Tensor]]:
    """Yield stored tensors and release them afterwards; the body must copy what it keeps."""
    held: list[str] = []
    try:
        tensors = []
        for digest in digests:
            tensors.append(pool.acquire(digest))
            held.append(digest)
        yield tensors
    finally:
        pool.release(held)


def _check_finite(tensors: Iterable[Tensor | None], key: str) -> None:
    """Raise NotServable for values that are not finite.

    Matrices of several adapters are multiplied as one, and zero times infinity in another adapter's rows is not zero.
    """
    if not all(tensor is None or bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise NotServable(f"{key}: its adapter holds values that are not finite")


def _attach_lora(unit: SharedComponent, adapter: Adapter, key: str, pool: TensorPool) -> None:
    tensors = dict(adapter.tensors)
    for path, how in _modules(adapter).items():
        target = _target(unit, path, key)
        suffix = "lora_embedding_{}" if how.get("embedding") else "lora_{}.weight"
        part = _low_rank(tensors, path, suffix, float(how["scaling"]), pool)
        if how.get("dora"):
            part = _rescaled(target, part, tensors[f"{path}.lora_magnitude_vector"], key, pool)
        _check_finite((part.a, part.b, part.bias), key)
        target.attach(key, part)


def _low_rank(tensors: Mapping[str, str], path: str, suffix: str, scaling: float, pool: TensorPool) -> PlainLowRank:
    """Return a low-rank part with the scaling multiplied into B."""
    digests = [tensors[f"{path}.{suffix.format(part)}"] for part in "AB"]
    bias = tensors.get(f"{path}.lora_B.bias")
    with _borrowed(pool, digests if bias is None else [*digests, bias]) as (a, b, *rest):
        return PlainLowRank(a.float().clone(), b.float() * scaling, rest[0].float() * scaling if rest else None)


def _rescaled(
    target: SharedLinear | SharedEmbedding, part: PlainLowRank, magnitude: str, key: str, pool: TensorPool
) -> PlainLowRank:
    """DoRA: with W' = W + BA, scale each row of W' to the length given by its magnitude; the base's bias is not scaled.

    `y = m / |W'| * (W x + B A x) + bias` (arXiv 2402.09353, eq. 5): one vector scales the base's output and is
    multiplied into B. A bias of the low-rank part cancels the vector's effect on the base's bias.
    """
    if isinstance(target, SharedEmbedding):
        raise NotServable(f"{key}: DoRA on an embedding is not served")
    weight, bias = target.product.weight, target.product.bias
    lengths = torch.linalg.norm(weight.float() + part.b @ part.a, dim=1)
    with _borrowed(pool, [magnitude]) as (wanted,):
        vector = wanted.float() / lengths
    _check_finite((vector,), key)
    target.scale(key, vector, inputs=False)
    return PlainLowRank(part.a, part.b * vector[:, None], None if bias is None else bias.float() * (1 - vector))


def _attach_ia3(unit: SharedComponent, adapter: Adapter, key: str, pool: TensorPool) -> None:
    tensors = dict(adapter.tensors)
    for path, how in _modules(adapter).items():
        target = _target(unit, path, key)
        if isinstance(target, SharedEmbedding):
            raise NotServable(f"{key}: {path} is an embedding, which IA3 does not scale")
        with _borrowed(pool, [tensors[f"{path}.ia3_l"]]) as (vector,):
            target.scale(key, vector.float().flatten().clone(), bool(how["input"]))


def _attach_prompt(unit: SharedComponent, adapter: Adapter, key: str, pool: TensorPool) -> None:
    table = next((target for target in unit.targets.values() if isinstance(target, SharedEmbedding)), None)
    if table is None:
        raise NotServable(f"{key}: the base has no embedding table that rows can share")
    with _borrowed(pool, [dict(adapter.tensors)["prompt_embeddings"]]) as (prompt,):
        table.prompts[key] = prompt.clone()


def _attach_prefix(unit: SharedComponent, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """Attach a prefix: of the tensor's width, part 2 i is the K of layer i and part 2 i + 1 its V."""
    how = json.loads(adapter.config)
    layer = int(how["layer"])
    with _borrowed(pool, [dict(adapter.tensors)["prompt_embeddings"]]) as (prefix,):
        parts = prefix.chunk(2 * int(how["layers"]), dim=1)
        unit.prefixes[key] = (parts[2 * layer].clone(), parts[2 * layer + 1].clone())


def _attach_bottleneck(unit: SharedComponent, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """Attach a bottleneck adapter in the dtype in which the base runs, as a model loaded in that dtype has it."""
    if unit.side is None:
        raise NotServable(f"{key}: its base has no sub-layer that a bottleneck adapter can stand behind")
    dtype = next(parameter.dtype for parameter in unit.module.parameters() if parameter.dim() > 1)
    names, digests = zip(*adapter.tensors, strict=True)
    with _borrowed(pool, digests) as tensors:
        copies = [tensor.to(dtype, copy=True) for tensor in tensors]
    _check_finite(copies, key)
    unit.side.attach(key, BottleneckModule(adapter, dict(zip(names, copies, strict=True))))


_KINDS: Mapping[str, Callable[[SharedComponent, Adapter, str, TensorPool], None]] = {
    "lora": _attach_lora,
    "ia3": _attach_ia3,
    "prompt": _attach_prompt,
    "prefix": _attach_prefix,
    "adapter": _attach_bottleneck,
}
