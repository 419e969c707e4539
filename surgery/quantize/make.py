"""Make quantised models (`zoo quantize`): each linear weight becomes tensors that follow from its digest and a scheme.

    smollm2 -> smollm2-int8, a model of its own, in compressed-tensors' layout

Tensors that were derived before, for whichever model, are referenced and not computed again
(`surgery.quantize.derived`). Norms, biases and embeddings stay as they are, and are shared with the exact model. The
result is a checkpoint of its family with a `quantization_config`: it is listed, exported, served and collected like any
other model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.chains.plan import ChainLink, ChainPlan, is_chain
from surgery.families.quantized import quantization_of
from surgery.families.settings import config_of
from surgery.families.specs import spec_of
from surgery.families.table import FAMILIES, Family
from surgery.ingest.cut import disk_key
from surgery.models.load import ADAPTERS
from surgery.models.put import MadeModel, plain_config, put_made
from surgery.quantize.derived import RECORD, DerivedIndex, DerivedTensors
from surgery.quantize.schemes import SCHEMES, QuantizationScheme
from surgery.tensors.pool import stored_tensor
from surgery.tensors.store import keep_tensors
from zoo.errors import InputError
from zoo.manifest import PARTS, Component, ModelManifest, Placed, TensorMeta, canonical_json
from zoo.store import Store

#: Called with (tensors done, tensors in all).
TensorProgress = Callable[[int, int], None]

#: Side files of the exact model that are not the result's.
_OWN = frozenset({"model.safetensors.index.json", RECORD})
#: Families with linear layers that are stored transposed, which the layout has no form for.
_TURNED = frozenset({"gpt2"})
#: Layers that choose experts: small, and a wrong choice costs more than its bytes.
_ROUTERS = ("block_sparse_moe.gate",)


@dataclass(frozen=True, slots=True)
class QuantizedReport:
    """Result of quantising a model.

    Fields:
        tensors: Weights that are quantised.
        reused: Those of them that had been derived before.
        bytes: Bytes of all its tensors.
        bytes_new: Bytes that the store's models did not have.
    """

    model: str
    base: str
    scheme: str
    tensors: int
    reused: int
    bytes: int
    bytes_new: int


def quantize(
    store: Store,
    name: str,
    scheme: str,
    called: str | None = None,
    head: bool = True,
    progress: TensorProgress | None = None,
) -> QuantizedReport:
    """Quantise a stored model and add the result to the zoo.

    Args:
        name: The model, or a unique ending of its name.
        called: What to call the result; by default NAME-SCHEME.
        head: Whether the head is quantised, too. The table of embeddings never is.

    Raises:
        InputError: A model or scheme that cannot be quantised.
        NotFound, AmbiguousName: No such model, or several.
        NameTaken: Another model has the name.
    """
    if scheme not in SCHEMES:
        raise InputError(f"{scheme[:40]!r} is no scheme; there are {', '.join(SCHEMES)}")
    with store.ingesting():
        with store.catalog.reading() as reader:
            model = reader.model(reader.resolve(name))
            index = DerivedIndex.read(store, reader, scheme)
        config = _checked_config(store, model)
        work = _Quantizing(store, model, config, SCHEMES[scheme], head, index)
        made, reused = work.run(progress)
        planned = work.made_model(called or f"{model.name}-{scheme}", made)
        if plain_config(planned.plan, planned.components) is None:
            raise InputError(f"{model.name} is not as its config describes it: it cannot be quantized")
        report = put_made(store, planned)
    held = {meta.digest: meta.nbytes for meta in work.metas.values()}
    referenced = {digest for placed in made for _, digest in placed.component.tensors}
    total = sum(held[digest] for digest in referenced)
    return QuantizedReport(report.model, model.name, scheme, len(work.sources), reused, total, report.bytes_new)


def _checked_config(store: Store, model: ModelManifest) -> dict[str, Any]:
    """Return the config of a model that can be quantised. Raises InputError."""
    if model.kind in PARTS or model.kind in ADAPTERS:
        raise InputError(
            f"{model.name} is of kind {model.kind}: quantize its base, then ingest the adapter with --base"
            if model.kind in ADAPTERS
            else f"{model.name} is of kind {model.kind}: it has no layers to quantize"
        )
    config = config_of(store, model)
    if is_chain(config):
        raise InputError(f"{model.name} is a chain of several models: quantize these, then compose their layers")
    if quantization_of(config) is not None:
        raise InputError(f"{model.name} is quantized already: quantize the exact model")
    if model.family in _TURNED:
        raise InputError(f"{model.name}: {model.family} stores its matrices transposed, which no format here has")
    if any(placed.component.adapter is not None for placed in model.components):
        raise InputError(f"{model.name} has layers with adapters: merge them first")
    return config


class _Quantizing:
    """The work on one model.

    Fields:
        metas: Digest -> every tensor that the result may reference.
        sources: Digests of the weights that are quantised, in order.
    """

    def __init__(
        self,
        store: Store,
        model: ModelManifest,
        config: Mapping[str, Any],
        scheme: QuantizationScheme,
        head: bool,
        index: DerivedIndex,
    ) -> None:
        self._store, self._model, self._scheme, self._index = store, model, scheme, index
        self._family: Family = FAMILIES[model.family]
        self._kinds = {"attention", "ffn", "layer", *(("lm_head",) if head else ())}
        self.metas: dict[str, TensorMeta] = {meta.digest: meta for meta in model.tensors}
        exact = [] if head else [self._family.head]
        exact += [key.removesuffix(".weight") for key in self._routers()]
        tied = {"tie_word_embeddings": False} if head else {}
        self._config = {**config, **tied, "quantization_config": scheme.config(exact)}
        self.sources: dict[str, None] = dict.fromkeys(self._weights())

    def run(self, progress: TensorProgress | None) -> tuple[tuple[Placed, ...], int]:
        """Derive what is missing; return the components of the result, and how many weights had been derived before."""
        reused = 0
        for at, digest in enumerate(self.sources):
            found = self._index.find(digest)
            reused += found is not None
            made = found or self._derive(digest)
            self.metas.update((meta.digest, meta) for meta in made.values())
            if progress is not None:
                progress(at + 1, len(self.sources))
        return tuple(self._component(placed) for placed in self._model.components), reused

    def made_model(self, name: str, components: Sequence[Placed]) -> MadeModel:
        """Return the model to add. Call within `store.ingesting()`, after `run`."""
        links = tuple(ChainLink(placed.component.kind, 0, placed.layer) for placed in components)
        record = self._index.record_of(self.sources).put(self._store)
        sides = [side for side in self._model.side_files if side.path not in _OWN]
        return MadeModel(
            name=name,
            kind="quantized",
            base=self._model.name,
            source=f"{self._model.name}, quantized by {self._scheme.name}",
            plan=ChainPlan((self._config,), links),
            components=tuple(components),
            tensors=self.metas,
            sides=tuple(sides),
            hidden=(record,),
        )

    def _derive(self, digest: str) -> DerivedTensors:
        made = keep_tensors(self._store, self._scheme.quantize(stored_tensor(self._store, digest)))
        self._index.record(digest, made)
        return made

    def _weights(self) -> Iterator[str]:
        """Yield the digest of every weight that is quantised."""
        for placed in self._model.components:
            for name, digest in placed.component.tensors:
                if self._takes(placed.component, name, digest):
                    yield digest

    def _routers(self) -> Iterator[str]:
        for placed in self._model.components:
            for name, _ in placed.component.tensors:
                if name.removesuffix(".weight") in _ROUTERS:
                    yield disk_key(self._family, placed.layer, name)

    def _takes(self, component: Component, name: str, digest: str) -> bool:
        if name.removesuffix(".weight") in _ROUTERS or (component.kind == "lm_head" and name != "lm_head.weight"):
            return False
        return component.kind in self._kinds and name.endswith(".weight") and len(self.metas[digest].shape) == 2

    def _component(self, placed: Placed) -> Placed:
        """Return a component with its weights replaced, and with the spec that says so."""
        component = placed.component
        tensors: dict[str, str] = {}
        for name, digest in component.tensors:
            made = self._index.find(digest) if self._takes(component, name, digest) else None
            if made is None:
                tensors[name] = digest
                continue
            tensors.update((f"{name.removesuffix('weight')}{end}", meta.digest) for end, meta in made.items())
        spec = canonical_json(spec_of(self._config, self._family, component.kind, placed.layer))
        new = Component(component.kind, component.family, spec, tuple(sorted(tensors.items())))
        return Placed(placed.layer, new)
