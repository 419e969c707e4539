"""Apply an adapter to its base's components (BL-03): find the place of each tensor and build the resulting components.

Works on names, shapes and digests; the meaning of an adapter's parts, files, bytes and the catalogue play no part.

The reference is what peft 0.21 does with the same folder: `modules_to_save` gives a module its own copy and leaves a
tied partner unchanged, while a tensor trained in place (`bias`, embedding layers below a LoRA) changes every module
that shares it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgery.adapters.fields import SavedModules
from surgery.families.quantized import coded_modules, coded_shapes, is_coded
from surgery.families.table import FAMILIES, Family
from surgery.ingest.cut import ComponentSpot, spot_of
from zoo.errors import MalformedCheckpoint, WrongBase
from zoo.manifest import Adapter, Component, ComponentKind, Placed, canonical_json

Shape = tuple[int, ...]
_At = tuple[ComponentKind, int | None]


@dataclass(frozen=True, slots=True)
class OfferedTensor:
    """A tensor of the adapter's file. `digest` may be any identifier; only equality counts here."""

    shape: Shape
    digest: str


@dataclass(frozen=True)
class AdapterBase:
    """The base of an adapter.

    Fields:
        config: Its `config.json`.
        shapes: tensor digest -> shape.
        tied: Head and embedding are one parameter.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    components: tuple[Placed, ...]
    shapes: Mapping[str, Shape]
    tied: bool


@dataclass
class _Touched:
    """Changes to one component, while they are collected."""

    whole: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


class Overlay:
    """A base's components, in which whole tensors are replaced and adapter parts added, one call at a time.

    Every method raises WrongBase for a module, tensor or shape that the base does not have, and names it.
    """

    def __init__(self, base: AdapterBase, saved: SavedModules | None = None) -> None:
        self.base = base
        self.family: Family = FAMILIES[base.family]
        self._saved = saved or SavedModules()
        self._components: dict[_At, Component] = {(p.component.kind, p.layer): p.component for p in base.components}
        self._touched: dict[_At, _Touched] = {}

    def transposed(self, spot: ComponentSpot) -> bool:
        """Return whether a linear layer's matrix is stored as [in, out] (transformers' Conv1D)."""
        return self.family.name == "gpt2" and spot.layer is not None

    def spot(self, module: str, leaf: str = "weight") -> ComponentSpot:
        """Return the spot of a module's tensor."""
        spot = spot_of(self.family, f"{module}.{leaf}")
        if spot is None or (spot.kind, spot.layer) not in self._components:
            raise WrongBase(f"the adapter changes {module}, which {self.base.name} ({self.family.name}) does not have")
        return spot

    def shape(self, spot: ComponentSpot, path: str) -> Shape:
        """Return the shape of the base's tensor at a spot; `path` names it in the error."""
        component = self._components[spot.kind, spot.layer]
        digest = dict(component.tensors).get(spot.name)
        shape = coded_shapes(component, self.base.shapes).get(spot.name) if digest is None else self.base.shapes[digest]
        if shape is None:
            raise WrongBase(f"the adapter changes {path}, which {self.base.name} ({self.family.name}) does not have")
        return shape

    def matrix(self, module: str) -> tuple[int, int]:
        """Return (outer, inner) size of a linear layer."""
        spot = self.spot(module)
        shape = self.shape(spot, f"{module}.weight")
        if len(shape) != 2:
            raise WrongBase(f"{module} of {self.base.name} is no matrix, this adapter cannot lie on it")
        return (shape[1], shape[0]) if self.transposed(spot) else (shape[0], shape[1])

    def add(self, at: _At, tensors: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """Add part of an adapter to one component: tensors by name, and settings; entries of `modules` are merged."""
        touched = self._touched.setdefault(at, _Touched())
        touched.parts.update(tensors)
        modules = {**touched.settings.get("modules", {}), **settings.get("modules", {})}
        touched.settings.update({**settings, **({"modules": modules} if modules else {})})

    def replace(self, key: str, module: str, leaf: str, tensor: OfferedTensor, *, in_place: bool) -> None:
        """Replace a whole tensor of the base. `in_place`: every module that shares the parameter changes with it."""
        spot = self.spot(module, leaf)
        expected = self.shape(spot, f"{module}.{leaf}")
        if is_coded(spot.name, coded_modules(name for name, _ in self._components[spot.kind, spot.layer].tensors)):
            raise WrongBase(
                f"{key!r} replaces a weight that is quantized in {self.base.name}: only added parts lie there"
            )
        if tensor.shape != expected:
            raise WrongBase(f"{key!r} has shape {list(tensor.shape)}, but {self.base.name} has {list(expected)} there")
        for each in (spot, *self._partners(spot, in_place)):
            whole = self._touched.setdefault((each.kind, each.layer), _Touched()).whole
            if whole.setdefault(each.name, tensor.digest) != tensor.digest:
                raise MalformedCheckpoint(f"two different tensors stand for {module}.{leaf}")

    def copied(self, module: str) -> bool:
        """Return whether `modules_to_save` gives this module a copy of its own."""
        return any(self._saved.covers(each) for each in self.tied_together(module))

    def tied_together(self, module: str) -> tuple[str, ...]:
        """Return the modules that count as one in peft's lists.

        With `ensure_weight_tying`, these are head and embedding of a tied base; else the module alone.
        """
        pair = ("lm_head", self.family.prefix + self.family.embedding[0])
        return pair if self._saved.keeps_ties and self.base.tied and module in pair else (module,)

    def check_saved(self, modules: Iterable[str]) -> None:
        """Raise MalformedCheckpoint if a module of `modules_to_save` is not among the modules with whole tensors."""
        present = list(modules)
        for name in self._saved.names:
            if not any(module.endswith(name) or f"{name}." in module for module in present):
                raise MalformedCheckpoint(
                    f"adapter_config.json says that {name!r} is saved as a whole, but the file does not hold it"
                )

    def finished(self, kind: str) -> tuple[Placed, ...]:
        """Return the base's components in order with the changes applied; `kind` is the kind of the adapter parts."""
        return tuple(self._finished(placed, kind) for placed in self.base.components)

    def _finished(self, placed: Placed, kind: str) -> Placed:
        touched = self._touched.get((placed.component.kind, placed.layer))
        if touched is None:
            return placed
        base = placed.component
        tensors = tuple(sorted({**dict(base.tensors), **touched.whole}.items()))
        adapter = None
        if touched.parts:
            adapter = Adapter(kind, canonical_json(touched.settings), tuple(sorted(touched.parts.items())))
        return Placed(placed.layer, Component(base.kind, base.family, base.spec, tensors, adapter))

    def _partners(self, spot: ComponentSpot, in_place: bool) -> tuple[ComponentSpot, ...]:
        """Return the other side of a tied pair if the shared tensor is changed in place."""
        table = f"{self.family.embedding[0]}.weight"
        if not (in_place and self.base.tied):
            return ()
        if spot.kind == "embedding" and spot.name == table:
            return (ComponentSpot("lm_head", None, "lm_head.weight"),)
        if spot.kind == "lm_head" and spot.name == "lm_head.weight":
            return (ComponentSpot("embedding", None, table),)
        return ()
