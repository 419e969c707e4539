"""Bytes that the engine holds of a model's components, computed from the manifest before anything is loaded.

They differ from the stored bytes:

    stored tensor                           held
    weight of a linear layer                packed for the kernels: its outputs rounded up to whole panels
    norm or bias of a fused bfloat16 half   float32, one copy for each component (`engine.layers.mixed_precision`)
    any other, cast by `--dtype`            in that dtype
    low-rank adapter                        float32; packed once per group of layers, both ranks and outputs rounded up

Budgets of weights count these bytes (`runtime.chains.Block`), so that what is loaded never exceeds them. Tensors that
the engine may hold in two forms count in the larger one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.config import EngineConfig
from runtime.engine.kernels.operands import SCALE_ROWS
from runtime.engine.layers.fused import fuses, grouped_layers
from runtime.engine.models.coded_layers import key_of, packs_alone, takes_form
from runtime.engine.models.registry import dtype_named, kernels_for
from runtime.engine.models.servable import Executor
from surgery.families.quantized import coded_modules, coded_shapes, exact_digests, is_coded
from surgery.families.quantized import form_of as form_of_spec
from surgery.tensors.pool import TORCH_DTYPES
from zoo.manifest import Adapter, Component, ModelManifest, TensorMeta

_FLOAT = torch.float32.itemsize

#: Component kinds that may share a tensor, in a model with a tied head.
_ENDS = frozenset(["embedding", "lm_head"])

#: Families that store weights transposed (transformers' Conv1D).
_TURNED = frozenset(["gpt2"])


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How an engine holds weights.

    Fields:
        dtype: What floating-point tensors are cast to; None: they stay as stored.
        panel: Outputs in a panel of the native kernels; 1 without kernels.
        packs: Whether linear layers' weights are packed for the kernels.
        narrow: Whether those of bfloat16 models are too, beside float32 norms and biases.
        fused: Whether layers are fused, with their adapters in groups.
        coded_panel: Outputs in a panel of int8 weights; 0 where these are decompressed.
    """

    dtype: torch.dtype | None = None
    panel: int = 1
    packs: bool = False
    narrow: bool = False
    fused: bool = True
    coded_panel: int = 0


def form_of(config: EngineConfig, executor: Executor = "paged") -> WeightForm:
    """Return how an engine with this configuration holds weights on this machine. Raises InputError (`kernels_for`)."""
    kernels = kernels_for(config)
    packs, fused = kernels is not None and config.weights != "plain", config.layers == "fused"
    dtype = None if config.dtype is None else dtype_named(config.dtype)
    panel = 1 if kernels is None else kernels.panel
    coded = kernels.coded_panel if kernels is not None and packs and config.quantized == "native" else 0
    return WeightForm(dtype, panel, packs, packs and fused and executor == "paged", fused, coded)


class HeldBytes:
    """Bytes held of a model's components. Without a `form`: as stored."""

    def __init__(self, manifest: ModelManifest, form: WeightForm = WeightForm()) -> None:
        self._form = form
        self._metas = {tensor.digest: tensor for tensor in manifest.tensors}
        components = [placed.component for placed in manifest.components]
        heads = (component for component in components if component.kind == "lm_head")
        self._heads = {digest for head in heads for _, digest in head.tensors}

    def weights(self, components: Sequence[Component]) -> int:
        """Return the bytes of components without their adapters; tensors that several of them have count once."""
        shared: dict[str, int] = {}
        for component in components:
            for digest, nbytes in self._shared(component):
                shared[digest] = max(nbytes, shared.get(digest, 0))
        return sum(shared.values()) + sum(self._widened(each) + self._decompressed(each) for each in components)

    def tables(self, components: Sequence[Component]) -> tuple[tuple[str, int], ...]:
        """Return the tensors of embeddings and heads, each with its bytes, by digest."""
        ends = [component for component in components if component.kind in _ENDS]
        return tuple(sorted({each for end in ends for each in self._shared(end)}))

    def adapters(self, components: Sequence[Component]) -> int:
        """Return the bytes of the components' adapters."""
        return sum(self._adapter(each, each.adapter) for each in components if each.adapter is not None)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _shared(self, component: Component) -> Iterator[tuple[str, int]]:
        """Yield the tensors of a component that all components with them share, each with its bytes."""
        for digest in self._exact(component):
            meta = self._metas[digest]
            if not self._widens(component, meta):
                packed = component.kind != "embedding" or digest in self._heads
                turned = component.family in _TURNED
                yield digest, self._packed(meta, turned) if packed else meta.elements * self._width(meta)
        for name, (outputs, inputs) in self._coded(component).items():
            if self._stays_coded(component, name):
                panels = -(-outputs // self._form.coded_panel)
                yield key_of(component, name, True), panels * self._form.coded_panel * (inputs + SCALE_ROWS)
            elif self._packs_decompressed(component, name):
                width = self._dtype_of(component).itemsize
                yield key_of(component, name, False), self._padded(outputs) * inputs * width

    def _widened(self, component: Component) -> int:
        """Return the bytes of the float32 copies that a component has for itself."""
        metas = (self._metas[digest] for digest in self._exact(component))
        return sum(_FLOAT * meta.elements for meta in metas if self._widens(component, meta))

    def _decompressed(self, component: Component) -> int:
        """Return the bytes of the weights that are decompressed on loading and not packed."""
        made = (
            shape
            for name, shape in self._coded(component).items()
            if not (self._stays_coded(component, name) or self._packs_decompressed(component, name))
        )
        return sum(self._dtype_of(component).itemsize * outputs * inputs for outputs, inputs in made)

    def _coded(self, component: Component) -> dict[str, tuple[int, ...]]:
        return coded_shapes(component, {digest: self._metas[digest].shape for _, digest in component.tensors})

    def _stays_coded(self, component: Component, name: str) -> bool:
        """Return whether the kernels multiply by a quantised weight as it is."""
        form = form_of_spec(json.loads(component.spec))
        takes = self._takes(self._dtype_of(component))
        return bool(self._form.coded_panel) and takes and form is not None and takes_form(form, name)

    def _packs_decompressed(self, component: Component, name: str) -> bool:
        """Return whether a quantised weight that does not stay so is packed for the kernels, once for all its users."""
        return self._form.packs and self._takes(self._dtype_of(component)) and packs_alone(name)

    def _takes(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels have products with weights of a dtype."""
        return dtype == torch.float32 or (self._form.narrow and dtype == torch.bfloat16)

    def _dtype_of(self, component: Component) -> torch.dtype:
        """Return the dtype that a component computes in."""
        exact = (self._metas[digest] for digest in exact_digests(component))
        return self._dtype(max(exact, key=lambda meta: meta.elements))

    def _exact(self, component: Component) -> list[str]:
        modules = coded_modules(name for name, _ in component.tensors)
        return [digest for name, digest in component.tensors if not is_coded(name, modules)]

    def _widens(self, component: Component, meta: TensorMeta) -> bool:
        narrow = self._form.narrow and self._dtype(meta) == torch.bfloat16
        return narrow and len(meta.shape) < 2 and fuses(component)

    def _packed(self, meta: TensorMeta, turned: bool) -> int:
        """Return the bytes of a weight [out, in] that the kernels may pack; `turned`: [in, out]."""
        dtype, width = self._dtype(meta), self._width(meta)
        if not (self._form.packs and self._takes(dtype) and len(meta.shape) == 2):
            return meta.elements * width
        outputs, inputs = meta.shape[::-1] if turned else meta.shape
        return self._padded(outputs) * inputs * width

    def _padded(self, outputs: int) -> int:
        return -(-outputs // self._form.panel) * self._form.panel

    def _dtype(self, meta: TensorMeta) -> torch.dtype:
        stored = TORCH_DTYPES[meta.dtype]
        return stored if self._form.dtype is None or not stored.is_floating_point else self._form.dtype

    def _width(self, meta: TensorMeta) -> int:
        return self._dtype(meta).itemsize

    # -- adapters ------------------------------------------------------------------------------------------------------

    def _adapter(self, component: Component, adapter: Adapter) -> int:
        metas = {name: self._metas[digest] for name, digest in adapter.tensors}
        config = json.loads(adapter.config)
        match adapter.kind:
            case "lora":
                return self._low_rank(component, metas, config["modules"])
            case "ia3":
                return _FLOAT * sum(meta.elements for meta in metas.values())
            case "prefix":  # one tensor with the K and V of all layers
                return sum(meta.elements * self._width(meta) for meta in metas.values()) // int(config["layers"])
            case "adapter":  # in the dtype of the base
                base = max((self._metas[digest] for _, digest in component.tensors), key=lambda meta: meta.elements)
                return self._width(base) * sum(meta.elements for meta in metas.values())
        return sum(meta.elements * self._width(meta) for meta in metas.values())

    def _low_rank(
        self, component: Component, metas: Mapping[str, TensorMeta], modules: Mapping[str, Mapping[str, Any]]
    ) -> int:
        """Return the bytes of low-rank parts: A [rank, in], B [out, rank], bias; DoRA's vectors [out]."""
        biased = {name.removesuffix(".bias") for name, _ in component.tensors if name.endswith(".bias")}
        ranks: Counter[tuple[str, int]] = Counter()
        values = 0
        for path, how in modules.items():
            if how.get("embedding"):
                values += sum(metas[f"{path}.lora_embedding_{part}"].elements for part in "AB")
                continue
            (rank, inputs), (outputs, _) = (metas[f"{path}.lora_{part}.weight"].shape for part in "AB")
            ranks[self._group(component, path), inputs] += rank
            values += self._padded(outputs) * rank
            dora = bool(how.get("dora"))
            values += outputs * (f"{path}.lora_B.bias" in metas or (dora and path in biased)) + outputs * dora
        return _FLOAT * (values + sum(self._padded(total) * inputs for (_, inputs), total in ranks.items()))

    def _group(self, component: Component, path: str) -> str:
        """Return the name of the layers that a layer is packed with: their A form one matrix."""
        together = grouped_layers(component) if self._form.packs and self._form.fused else ()
        return next((" ".join(names) for names in together if path.rpartition(".")[2] in names), path)
