"""Adapters on units: what each kind puts where, and how it is taken off again.

The base's tensors stay as they are; whatever an adapter needs is copied beside them (it is small) in the form that its rows use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from runtime.engine.linear import LowRank, SharedEmbedding, SharedLinear
from runtime.engine.units import Unit
from surgery.adapters.bottleneck_module import Bottleneck
from surgery.tensors import TensorPool
from zoo.errors import NotServable
from zoo.manifest import Adapter


def attach(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """Put an adapter's part on a unit under `key`.

    Raises:
        NotServable: an adapter kind or variant that cannot be run exactly beside others, or a module that is not a shared layer.
    """
    put = _KINDS.get(adapter.kind)
    if put is None:
        raise NotServable(f"{key}: adapters of kind {adapter.kind} are not served")
    put(unit, adapter, key, pool)


def detach(unit: Unit, key: str) -> None:
    """Take an adapter off a unit."""
    for target in unit.targets.values():
        target.detach(key)
    unit.prefixes.pop(key, None)
    if unit.side is not None:
        unit.side.detach(key)


def _target(unit: Unit, path: str, key: str) -> SharedLinear | SharedEmbedding:
    target = unit.targets.get(path)
    if target is None:
        raise NotServable(f"{key}: {path} is no linear layer or embedding that rows can share")
    return target


def _modules(adapter: Adapter) -> Mapping[str, Any]:
    """Path in the component -> settings."""
    return json.loads(adapter.config)["modules"]  # type: ignore[no-any-return]


def _attach_lora(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """The scaling goes into B."""
    tensors = dict(adapter.tensors)
    for path, how in _modules(adapter).items():
        if how.get("dora"):
            raise NotServable(f"{key}: DoRA rescales the base weight of {path}, so its rows cannot share the base product; merge it first")
        suffix = "lora_embedding_{}" if how.get("embedding") else "lora_{}.weight"
        _target(unit, path, key).attach(key, _low_rank(tensors, path, suffix, float(how["scaling"]), pool))


def _low_rank(tensors: dict[str, str], path: str, suffix: str, scaling: float, pool: TensorPool) -> LowRank:
    digests = [tensors[f"{path}.{suffix.format(part)}"] for part in "AB"]
    a, b = (pool.acquire(digest) for digest in digests)
    bias_digest = tensors.get(f"{path}.lora_B.bias")
    bias = None if bias_digest is None else pool.acquire(bias_digest).float() * scaling
    part = LowRank(a.float().clone(), b.float() * scaling, bias)
    pool.release(digests if bias_digest is None else [*digests, bias_digest])
    return part


def _attach_ia3(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    tensors = dict(adapter.tensors)
    for path, how in _modules(adapter).items():
        target = _target(unit, path, key)
        if isinstance(target, SharedEmbedding):
            raise NotServable(f"{key}: {path} is an embedding, which IA3 does not scale")
        digest = tensors[f"{path}.ia3_l"]
        target.scale(key, pool.acquire(digest).float().flatten().clone(), bool(how["input"]))
        pool.release([digest])


def _attach_prompt(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    digest = dict(adapter.tensors)["prompt_embeddings"]
    for target in unit.targets.values():
        if isinstance(target, SharedEmbedding):
            target.prompts[key] = pool.acquire(digest).clone()
            pool.release([digest])
            return
    raise NotServable(f"{key}: the base has no embedding table that rows can share")


def _attach_prefix(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """Layer i's K is part 2 i of the tensor's width, its V part 2 i + 1."""
    digest = dict(adapter.tensors)["prompt_embeddings"]
    how = json.loads(adapter.config)
    parts = pool.acquire(digest).chunk(2 * int(how["layers"]), dim=1)
    layer = int(how["layer"])
    unit.prefixes[key] = (parts[2 * layer].clone(), parts[2 * layer + 1].clone())
    pool.release([digest])


def _attach_bottleneck(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """In the dtype in which the base runs, as a model that is loaded in it has them."""
    if unit.side is None:
        raise NotServable(f"{key}: its base has no sub-layer that a bottleneck adapter can stand behind")
    dtype = next(parameter.dtype for parameter in unit.module.parameters() if parameter.dim() > 1)
    digests = [digest for _, digest in adapter.tensors]
    tensors = {name: pool.acquire(digest).to(dtype, copy=True) for name, digest in adapter.tensors}
    unit.side.attach(key, Bottleneck(adapter, tensors))
    pool.release(digests)


_KINDS: Mapping[str, Callable[[Unit, Adapter, str, TensorPool], None]] = {
    "lora": _attach_lora,
    "ia3": _attach_ia3,
    "prompt": _attach_prompt,
    "prefix": _attach_prefix,
    "adapter": _attach_bottleneck,
}
