"""Units: components without their adapters, each loaded once per device for all models that use it.

    model chain:  (component = unit + adapter?) …      unit: module + its tensors, with a count of users

`ComponentPool` loads units and drops those without users; `models.load` calls it. Independent of steps.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.config import QuantizedWeights, Weights
from runtime.engine.adapters.bottleneck import BottleneckRows
from runtime.engine.attention.away import AwayLayers, Creditors
from runtime.engine.attention.varlen import device_attention
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.linear_groups import Added
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.kernels.program_cache import Programs
from runtime.engine.layers.activations import Uniform, make_uniform_
from runtime.engine.layers.experts import share_experts_
from runtime.engine.layers.fused import added_of, can_fuse, fuse
from runtime.engine.layers.linear import SharedEmbedding, SharedLinear, share_linears_
from runtime.engine.layers.matmul import native_linear
from runtime.engine.layers.mixed_precision import Widened, widen_parameters_
from runtime.engine.layers.operations import NativeOperations, Operations, StockOperations
from runtime.engine.layers.packed_weights import PackedWeights
from runtime.engine.layers.rotary import looked_up
from runtime.engine.models.adapters_ahead import AdaptersAhead
from runtime.engine.models.coded_layers import coded_here, pack_coded_, private_bytes
from runtime.engine.models.idle_units import KEPT, IdleUnits
from runtime.engine.models.load_tiers import LoadTiers
from runtime.engine.step.context import AttentionBackend, PagedMaker, PagedMetadata
from surgery.chains.plan import ChainLink
from surgery.families.quantized import coded_parts
from surgery.families.table import FAMILIES
from surgery.modules.build import build, build_stitch
from surgery.modules.components import LmHead, ResidualHalf, Stitch
from surgery.modules.skeleton import Skeleton
from surgery.modules.skeleton_pool import Skeletons
from surgery.tensors.pool import TensorPool
from zoo.manifest import Component, ComponentKind

#: Suffix in the key of a packed weight that is stored transposed (transformers' Conv1D).
_TURNED = "/turned"


@dataclass(slots=True)
class SharedComponent:
    """A unit: a component loaded onto the device, shared by all models that contain it.

    Fields:
        digest: The component's digest without its adapter.
        kind: Embedding, attention, FFN, whole layer, stitch or head.
        module: The module that runs; its weights are the device's pooled tensors.
        rotary: Key of its rotary module in `ComponentPool.rotaries`; None if it uses none.
        targets: Shared layer by adapter module path.
        tensors: Digests of the plain weights that it holds in the device's tensor pool.
        packs: Keys of the packed weights that it holds.
        private_bytes: Memory beyond the pooled tensors.
        masked: Whether its layer attends by itself with an explicit mask, and so needs its rows as a batch.
        users: Number of uses by loaded models.
        prefixes: K and V [virtual tokens, kv width] of this layer by adapter (prefix tuning).
        side: The bottleneck adapters attached to it; None for components that cannot have any.
        added: Its low-rank adapters as the native kernels pack them.
    """

    digest: str
    kind: ComponentKind
    module: nn.Module
    rotary: str | None
    targets: dict[str, SharedLinear | SharedEmbedding]
    tensors: tuple[str, ...]
    packs: tuple[str, ...]
    private_bytes: int
    masked: bool = False
    users: int = 0
    prefixes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    side: BottleneckRows | None = None
    added: tuple[Added, ...] = ()

    @property
    def attends(self) -> bool:
        return self.kind in ("attention", "layer")

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all adapters attached to it."""
        prefixes = sum(half.numel() * half.element_size() for both in self.prefixes.values() for half in both)
        side = 0 if self.side is None else self.side.nbytes
        packed = sum(added.nbytes for added in self.added)
        return prefixes + side + packed + sum(target.adapter_bytes for target in self.targets.values())


@dataclass(slots=True)
class ComponentPool:
    """All units of a device by digest, the rotary modules that they share, and the kernels that run them.

    `prepare` may be called on another thread while steps run. A lock keeps the other methods out meanwhile, for the
    time of one unit at most.

    Fields:
        lock: Is held by all that changes the pools.
        creditors: Reaches the devices that hold page sets for this one; None where none does.
        keeps_codes: Whether int8 weights are multiplied by as they are, where the kernels can.
        idle_bytes: Bytes of units without users that are kept, and of K and V in host memory.
    """

    pool: TensorPool
    device: torch.device
    fused: bool = True
    weights: Weights = "auto"
    kernels: Kernels | None = None
    mixed: bool = False
    quantized: QuantizedWeights = "native"
    idle_bytes: int = 0
    creditors: Creditors | None = None
    units: dict[str, SharedComponent] = field(default_factory=dict)
    rotaries: dict[str, nn.Module] = field(default_factory=dict)
    keeps_codes: bool = field(init=False)
    packs: PackedWeights = field(init=False)
    operations: Operations = field(init=False)
    attention: PagedMaker = field(init=False)
    programs: Programs = field(init=False)
    idle: IdleUnits = field(init=False)
    adapters: AdaptersAhead = field(init=False)
    tiers: LoadTiers = field(default_factory=LoadTiers)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.mixed = self.mixed and self.fused and self.kernels is not None and self.weights != "plain"
        self.keeps_codes = self.quantized == "native" and self.kernels is not None and self.weights != "plain"
        self.packs = PackedWeights(self.weights, self.device, self.kernels, self.mixed)
        self.programs = Programs(self.kernels is not None)
        self.idle = IdleUnits(self.pool, self.packs, self.idle_bytes)
        self.adapters = AdaptersAhead(self.pool)
        if self.kernels is None:
            self.operations, self.attention = StockOperations(), device_attention(self.device)
        else:
            self.operations, self.attention = NativeOperations(self.kernels), native_attention(self.kernels)

    def attend(self, paging: PagedMetadata) -> AttentionBackend:
        """Return the attention over a paging, of which other devices may hold page sets."""
        plain, merge = self.attention, self.operations.merge
        return AwayLayers(plain, paging, self.creditors, merge) if paging.away else plain(paging)

    def widens(self, dtype: torch.dtype) -> bool:
        """Return whether models of this dtype have float32 activations (`engine.layers.mixed_precision`)."""
        return self.mixed and dtype == torch.bfloat16

    def acquire(self, component: Component, link: ChainLink, skeletons: Skeletons, stage: str = "") -> SharedComponent:
        """Return the unit of a component and count one more user; build it on first use.

        `link` is the place of the component's modules in `skeletons`, in case it must be built. `stage`: the one that
        is being loaded.
        """
        digest = component.base_digest
        with self.lock:
            unit = self.units.get(digest)
            if unit is None:
                kept = self.idle.take_unit(digest)
                unit = self.units[digest] = kept or self._load(component, link, skeletons)
                self.tiers.record_use(stage, digest, self.idle.size(unit), built=kept is None)
                self.programs.clear()
            unit.users += 1
            return unit

    def prepare(self, stage: str, component: Component, link: ChainLink, skeletons: Skeletons) -> None:
        """Build the unit of a component ahead, for a stage that is about to be loaded, if it can be idle.

        It stays until `end_preparation` of the stage, as do the tensors of its adapter. Raises as `acquire`.
        """
        digest = component.base_digest
        if component.adapter is not None:
            with self.lock:
                self.adapters.read(stage, [each for _, each in component.adapter.tensors])
        if component.kind not in KEPT:
            return
        with self.lock:
            self.idle.pin(stage, digest)
            if digest not in self.units and digest not in self.idle:
                self._free(self.idle.add(self._load(component, link, skeletons)))
                self.tiers.record_build(stage, digest)

    def prefer(self, digests: Sequence[str]) -> None:
        """Keep these units longer than others while they are idle, the first ones longest."""
        with self.lock:
            self.idle.prefer(digests)

    def read_ahead(self, component: Component, link: ChainLink, skeletons: Skeletons) -> bool:
        """Build the unit of a component that will be needed, if it can be idle; return False if there is no room.

        Raises as `acquire`.
        """
        digest = component.base_digest
        if component.kind not in KEPT:
            return True
        with self.lock:
            if digest not in self.units and digest not in self.idle:
                self._free(self.idle.add(self._load(component, link, skeletons)))
            return digest in self.units or digest in self.idle

    def expect(self, stage: str, digests: Iterable[str]) -> None:
        """Keep idle units of a stage that is about to be loaded, whatever the limit; see `IdleUnits.expect`."""
        with self.lock:
            self._free(self.idle.expect(stage, digests))

    def end_preparation(self, stage: str) -> None:
        """Free what was prepared for a stage and is not in use, but for what is kept anyway."""
        with self.lock:
            self._free(self.idle.unpin(stage))
            self.adapters.end(stage)
            self.tiers.end_load(stage)

    def host_changes(self) -> dict[str, int]:
        """Return the bytes of units that came to host memory or left it since the last call, by digest; 0: left."""
        with self.lock:
            return self.idle.drain_changes()

    def release(self, unit: SharedComponent) -> None:
        """Count one user less; drop a unit without users and release its tensors."""
        with self.lock:
            unit.users -= 1
            if unit.users == 0:
                del self.units[unit.digest]
                self.programs.clear()
                self._free(self.idle.add(unit))

    @property
    def nbytes(self) -> int:
        """Resident bytes of all weights in use, each distinct tensor once, adapters included."""
        with self.lock:  # `prepare` adds to the pools on its thread
            own = sum(unit.private_bytes + unit.adapter_bytes for unit in self.units.values())
            return self.pool.nbytes - self.adapters.nbytes + self.packs.nbytes - self.idle.nbytes + own

    def share_idle(self, kv: int) -> None:
        """Keep no more units without users than fit beside `kv` bytes of K and V."""
        with self.lock:
            self._free(self.idle.limit_units(max(self.idle_bytes - kv, 0)))

    def _free(self, units: Iterable[SharedComponent]) -> None:
        for unit in units:
            self.pool.release(unit.tensors)
            self.packs.release(unit.packs)

    def _load(self, component: Component, link: ChainLink, skeletons: Skeletons) -> SharedComponent:
        held = [digest for _, digest in component.tensors]
        loaded = self.pool.acquire_all(held)
        try:
            tensors = {name: tensor for (name, _), tensor in zip(component.tensors, loaded, strict=True)}
            left = coded_here(component, tensors, self.mixed) if self.keeps_codes else {}
            made = (
                _stitch(component, tensors)
                if link.source is None
                else _cut(component, link, skeletons.fresh(link), tensors, left)
            )
        except BaseException:
            self.pool.release(held)
            raise
        module = made.module
        pairs = share_linears_(module)
        if self.kernels is not None:
            _use_kernels_(module, self.kernels)
        targets = {made.paths[id(pair.old)]: pair.new for pair in pairs if id(pair.old) in made.paths}
        packs = pack_coded_(pairs, made.paths, component, left, self.packs)
        private = private_bytes(module, tensors)
        if private:  # release the pooled originals of converted tensors: nothing reads them again
            shared = {tensor.data_ptr() for tensor in module.parameters()}
            kept = [digest for name, digest in component.tensors if tensors[name].data_ptr() in shared]
            self.pool.release([digest for name, digest in component.tensors if tensors[name].data_ptr() not in shared])
            held = kept
        widened = any(self.widens(tensor.dtype) for tensor in tensors.values())
        inside = widened and not can_fuse(component, module)  # computes in bfloat16
        linears = [pair.new for pair in pairs if isinstance(pair.new, SharedLinear)]
        packs += self._pack_([each for each in linears if each.packed_as is None], component, tensors)
        copied = {key.partition(_TURNED)[0] for key in packs}
        copied.update(coded_parts(component))  # packed or decompressed: nothing reads them again
        if widened and not inside:
            private += widen_parameters_(module)
            read = {parameter.data_ptr() for parameter in module.parameters()}
            copied.update(digest for name, digest in component.tensors if tensors[name].data_ptr() not in read)
        plain = []
        for digest in held:
            if digest in copied:
                self.pool.release([digest])
            else:
                plain.append(digest)
        self._unpack_(plain)
        rotary = None if made.rotary is None else self._rotary(component, made.rotary)
        side = BottleneckRows(self.kernels) if isinstance(module, ResidualHalf) else None
        if isinstance(module, ResidualHalf):
            module.side = side
        if self.fused:
            module = fuse(component, module, self.operations, widened)
        if inside:
            module = Widened(module)
        module = module.to(self.device)
        added = () if self.kernels is None else (*added_of(module), *_added_apart(self.kernels, module, linears))
        return SharedComponent(
            component.base_digest, component.kind, module, rotary, targets, tuple(plain), tuple(packs), private,
            _is_masked(component), side=side, added=added,
        )  # fmt: skip

    def _pack_(self, linears: Iterable[SharedLinear], component: Component, tensors: Mapping[str, Tensor]) -> list[str]:
        """Pack the weights of linear layers where packing is configured. Returns the keys of the packed weights."""
        digests = {tensors[name].data_ptr(): digest for name, digest in component.tensors}
        own = Counter(digest for _, digest in component.tensors)
        taken = []
        for linear in linears:
            digest = digests.get(linear.weight.data_ptr())
            # One copy of each weight: one that another unit reads plain (the table of a tied head) stays plain.
            if digest is None or self.pool.users(digest) > own[digest]:
                self._stay(linear)
                continue
            weight = linear.product.weight
            key = digest if weight.is_contiguous() else digest + _TURNED
            packed = self.packs.acquire(key, weight)
            if packed is None:
                self._stay(linear)
                continue
            linear.pack(packed, key)
            taken.append(key)
        return taken

    def _stay(self, linear: SharedLinear) -> None:
        """Keep a weight as it is stored, and multiply by it with the kernels in the dtypes that they run."""
        if self.kernels is None or self.weights == "plain":
            return
        if linear.product.weight.dtype == torch.float32 or self.widens(linear.product.weight.dtype):
            linear.stay(self.kernels)

    def _unpack_(self, digests: Sequence[str]) -> None:
        """Make heads read the plain tensor again where another unit now reads it plain.

        A tied head that was loaded before its embedding is such a case. Each weight is held once whatever the loading
        order.
        """
        for unit in self.units.values():
            for digest in set(unit.packs).intersection(digests) if unit.kind == "lm_head" else ():
                weight = self.pool.acquire(digest)
                for module in unit.module.modules():
                    if isinstance(module, SharedLinear) and module.packed_as == digest:
                        module.unpack(weight)
                        self._stay(module)
                self.packs.release([digest])
                unit.packs = tuple(key for key in unit.packs if key != digest)
                unit.tensors = (*unit.tensors, digest)

    def _rotary(self, component: Component, module: nn.Module) -> str:
        """Return the key of the one rotary module that all components with these rotary settings share."""
        spec = json.loads(component.spec)
        key = json.dumps(
            [component.family, *(spec.get(k) for k in ("rope", "head_dim", "hidden_size", "num_attention_heads"))],
            sort_keys=True,
        )
        if key not in self.rotaries:
            # Only on a CPU: the table lookup reads the largest position, which on a GPU would wait for the device.
            self.rotaries[key] = looked_up(module) if self.device.type == "cpu" else module.to(self.device)
        return key


@dataclass(frozen=True, slots=True)
class _Made:
    """A component's module before its layers are shared.

    Fields:
        paths: Adapter path by module id.
        rotary: The rotary module; None if it uses none.
    """

    module: nn.Module
    paths: Mapping[int, str]
    rotary: nn.Module | None


def _use_kernels_(module: nn.Module, kernels: Kernels) -> None:
    """Let the functions of a module that depend on the number of rows with torch run independently of it."""
    multiply = native_linear(kernels)
    share_experts_(module, multiply)
    make_uniform_(module)
    for each in module.modules():
        if isinstance(each, Stitch | SharedEmbedding):
            each.multiply = multiply
        elif isinstance(each, LmHead):
            each.tanh = Uniform(torch.tanh)


def _added_apart(kernels: Kernels, module: nn.Module, linears: Iterable[SharedLinear]) -> tuple[Added, ...]:
    """Return the low-rank adapters of layers that are in no group, each packed for its layer alone."""
    grouped = {id(layer) for added in added_of(module) for layer in added.layers}
    return tuple(Added(kernels, [layer]) for layer in linears if id(layer) not in grouped)


def _stitch(component: Component, tensors: Mapping[str, Tensor]) -> _Made:
    return _Made(build_stitch(component, tensors), {}, None)


def _cut(
    component: Component,
    link: ChainLink,
    skeleton: Skeleton,
    tensors: Mapping[str, Tensor],
    left: Collection[str],
) -> _Made:
    paths = {id(module): path for path, module in skeleton.owner(component.kind, link.layer).named_modules()}
    paths[id(skeleton.model.lm_head)] = "lm_head"
    module = build(skeleton, component, link.layer, tensors, left)
    return _Made(module, paths, skeleton.rotary if component.kind in ("attention", "layer") else None)


def _is_masked(component: Component) -> bool:
    return (
        component.kind in ("attention", "layer") and component.family in FAMILIES and FAMILIES[component.family].masked
    )
