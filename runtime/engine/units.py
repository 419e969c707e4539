"""Units: components without their adapters, each loaded once per device however many models use it.

    model chain:  (component = unit + adapter?) …      unit: module + its tensors, counted by users

Knows how to load and to drop; nothing of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.engine.fused import fuse
from runtime.engine.linear import LowRank, SharedEmbedding, SharedLinear, share_linears_
from surgery.build import build
from surgery.skeleton import Skeleton
from surgery.tensors import TensorPool
from zoo.errors import NotServable
from zoo.manifest import Adapter, Component, ComponentKind, Placed


@dataclass(slots=True)
class Unit:
    """A loaded component. `targets`: adapter module path -> shared layer. `private_bytes`: memory beyond the pooled tensors."""

    digest: str
    kind: ComponentKind
    module: nn.Module
    rotary: str | None
    targets: dict[str, SharedLinear | SharedEmbedding]
    tensors: tuple[str, ...]
    private_bytes: int
    users: int = 0

    @property
    def attends(self) -> bool:
        return self.kind in ("attention", "layer")


@dataclass(slots=True)
class UnitStore:
    """All units of a device, by digest, and the rotary modules that they share."""

    pool: TensorPool
    device: torch.device
    fused: bool = True
    units: dict[str, Unit] = field(default_factory=dict)
    rotaries: dict[str, nn.Module] = field(default_factory=dict)

    def acquire(self, placed: Placed, skeleton: Callable[[], Skeleton]) -> Unit:
        """The unit of a component, loaded on first use and counted. `skeleton` is only called when it must be built."""
        component = placed.component
        unit = self.units.get(component.base_digest)
        if unit is None:
            unit = self.units[component.base_digest] = self._load(component, placed.layer, skeleton())
        unit.users += 1
        return unit

    def release(self, unit: Unit) -> None:
        """Count down; a unit without users gives its tensors back."""
        unit.users -= 1
        if unit.users == 0:
            del self.units[unit.digest]
            self.pool.release(unit.tensors)

    @property
    def nbytes(self) -> int:
        """Resident bytes of all weights, each distinct tensor once, adapters included."""
        adapters = sum(part.nbytes for unit in self.units.values() for t in unit.targets.values() for part in t.adapters.values())
        return self.pool.nbytes + sum(unit.private_bytes for unit in self.units.values()) + adapters

    def _load(self, component: Component, layer: int | None, skeleton: Skeleton) -> Unit:
        held: list[str] = []
        try:
            tensors: dict[str, Tensor] = {}
            for name, digest in component.tensors:
                tensors[name] = self.pool.acquire(digest)
                held.append(digest)
            paths = {id(module): path for path, module in skeleton.owner(component.kind, layer).named_modules()}
            paths[id(skeleton.model.lm_head)] = "lm_head"
            module = build(skeleton, component, layer, tensors)
        except BaseException:
            self.pool.release(held)
            raise
        replaced = share_linears_(module)
        targets = {paths[id(pair.old)]: pair.new for pair in replaced if id(pair.old) in paths}
        private = _private_bytes(module, tensors)
        if private:  # the pooled originals of converted tensors are not read again
            shared = {tensor.data_ptr() for tensor in module.parameters()}
            kept = [digest for name, digest in component.tensors if tensors[name].data_ptr() in shared]
            self.pool.release([digest for name, digest in component.tensors if tensors[name].data_ptr() not in shared])
            held = kept
        rotary = self._rotary(component, skeleton) if component.kind in ("attention", "layer") else None
        if self.fused:
            module = fuse(component, module)
        return Unit(component.base_digest, component.kind, module.to(self.device), rotary, targets, tuple(held), private)

    def _rotary(self, component: Component, skeleton: Skeleton) -> str | None:
        """One rotary module for all components with the same rotary settings."""
        if skeleton.rotary is None:
            return None
        spec = json.loads(component.spec)
        key = json.dumps(
            [component.family, *(spec.get(k) for k in ("rope", "head_dim", "hidden_size", "num_attention_heads"))], sort_keys=True
        )
        if key not in self.rotaries:
            self.rotaries[key] = skeleton.rotary.to(self.device)
        return key


def _private_bytes(module: nn.Module, tensors: dict[str, Tensor]) -> int:
    """Bytes of parameters that are not the pooled tensors themselves (Mixtral's stacked experts)."""
    pooled = {tensor.data_ptr() for tensor in tensors.values()}
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.data_ptr() not in pooled)


def attach(unit: Unit, adapter: Adapter, key: str, pool: TensorPool) -> None:
    """Put an adapter's part on a unit under `key`. The tensors are copied (they are small, and B takes the scaling in).

    Raises:
        NotServable: an adapter kind or variant that cannot be run exactly beside others, or a module that is not a shared layer.
    """
    if adapter.kind != "lora":
        raise NotServable(f"{key}: adapters of kind {adapter.kind} are not served yet")
    tensors = dict(adapter.tensors)
    for path, how in json.loads(adapter.config)["modules"].items():
        if how.get("dora"):
            raise NotServable(f"{key}: DoRA rescales the base weight of {path}, so its rows cannot share the base product; merge it first")
        target = unit.targets.get(path)
        if target is None:
            raise NotServable(f"{key}: {path} is no linear layer or embedding that rows can share")
        suffix = "lora_embedding_{}" if how.get("embedding") else "lora_{}.weight"
        target.attach(key, _low_rank(tensors, path, suffix, float(how["scaling"]), pool))


def _low_rank(tensors: dict[str, str], path: str, suffix: str, scaling: float, pool: TensorPool) -> LowRank:
    digests = [tensors[f"{path}.{suffix.format(part)}"] for part in "AB"]
    a, b = (pool.acquire(digest) for digest in digests)
    bias_digest = tensors.get(f"{path}.lora_B.bias")
    bias = None if bias_digest is None else pool.acquire(bias_digest).float() * scaling
    part = LowRank(a.float().clone(), b.float() * scaling, bias)
    pool.release(digests if bias_digest is None else [*digests, bias_digest])
    return part


def detach(unit: Unit, key: str) -> None:
    """Take an adapter off a unit."""
    for target in unit.targets.values():
        target.detach(key)
