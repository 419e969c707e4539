"""A stored model as components that run one by one, over any batch and any part of the chain.

    stack = open_stack(store, manifest)
    course = stack.course(ids)                      # positions, masks and rotary tables of this batch
    hidden = stack.run(ids, course, 0, k)           # components [0, k): the embedding first
    hidden = stack.run(hidden, course, k, stack.end)
    logits = stack.head(hidden)                     # the model's own final norm and head, on any of its hidden states
                                                    (BL-05)

Scoring and training of blocks use it. A checkpoint's stack is cut out of the transformers model that
`surgery.models.load` returns, including adapters injected by peft; a composed chain is built from its sources. Running
all components gives the model's logits. Gradients flow; the caller chooses the trained parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.adapters.lowrank import adapt_
from surgery.chains.files import part_key
from surgery.chains.plan import ChainLink, ChainPlan, is_chain, plan_of
from surgery.families.settings import config_of
from surgery.modules.build import build, build_stitch, parameters_of
from surgery.modules.components import Where
from surgery.modules.skeleton import Skeleton
from surgery.modules.skeleton_pool import Skeletons
from surgery.tensors.pool import StoredTensors
from zoo.errors import NotServable
from zoo.manifest import Component, ModelManifest, Placed
from zoo.store import Store

#: Families in which every layer has a sliding window if the config gives a window.
_ALL_SLIDE = frozenset({"mistral", "mixtral", "phi3"})


@dataclass(frozen=True, slots=True)
class StackOrigin:
    """What a component's pass needs beside its weights.

    Fields:
        source: Index of its config.
        slides: Its attention has a window.
    """

    source: int | None
    slides: bool = False


class Stack(nn.Module):
    """A stored model's components (`placed`) with their modules (`parts`), in the same order."""

    def __init__(
        self,
        placed: Sequence[Placed],
        parts: Sequence[nn.Module],
        origins: Sequence[StackOrigin],
        configs: Sequence[Any],
        rotaries: Sequence[Any],
        named: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        """Use `open_stack`, `stack_of` or `build_stack`.

        Args:
            configs: One per source.
            rotaries: One per source; may be None.
            named: Each part's weights under their names within the component, if the stack was assembled.
        """
        super().__init__()
        self.placed = tuple(placed)
        self.parts = nn.ModuleList(parts)
        self.rotaries = nn.ModuleList([nn.Identity() if each is None else each for each in rotaries])
        self.configs = tuple(configs)
        self._origins = tuple(origins)
        self._named = tuple(named)

    @property
    def origins(self) -> tuple[StackOrigin, ...]:
        """One per component."""
        return self._origins

    @property
    def end(self) -> int:
        """Index of the head: the components before it are [0, end)."""
        return len(self.parts) - 1

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding's table."""
        return next(self.parts[0].parameters()).dtype

    def course(
        self, ids: Tensor, mask: Tensor | None = None, cache: Any = None, positions: Tensor | None = None
    ) -> Course:
        """Return what a pass over a batch needs. Create it before the pass: its masks fit the cache's current length.

        Args:
            ids: [B, T]; only the shape is used.
            mask: [B, past + T], 1 for tokens and 0 for padding; None: no padding.
            cache: A `transformers.Cache`, which the pass will extend.
            positions: [B, T]; None to count them from the mask (padding has no position).
        """
        if positions is None:
            positions = _positions(ids, mask, 0 if cache is None else int(cache.get_seq_length()))
        return Course(self, positions, _masks(self, ids, mask, cache, positions), cache)

    def run(self, x: Tensor, course: Course, lo: int, hi: int) -> Tensor:
        """Run components [lo, hi) on `x`: ids [B, T] if lo is 0, else hidden states [B, T, width]."""
        for index in range(lo, hi):
            x = self.parts[index](x) if index == self.end else self.parts[index](x, course.where(index, x))
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head, with soft cap and scale: hidden states [.., width] -> logits [.., vocabulary]."""
        logits: Tensor = self.parts[self.end](hidden)
        return logits

    def weights(self, index: int) -> Mapping[str, Tensor]:
        """Return one component's weights under their names within it, if the stack was assembled.

        Weights held in another form are left out.
        """
        return self._named[index] if self._named else {}

    def named_tensors(self) -> dict[str, Tensor]:
        """Return key -> weight, as in the files of a chain (`surgery.chains.files`).

        Raises:
            NotServable: A checkpoint's own stack, or a component that keeps its weights in another form than its file
                (stacked experts).
        """
        found: dict[str, Tensor] = {}
        for index, placed in enumerate(self.placed):
            named = self.weights(index)
            for name, _ in placed.component.tensors:
                if name not in named:
                    raise NotServable(
                        f"the {placed.component.kind} at place {index} does not hold {name!r} as its file does"
                    )
                found[part_key(index, name)] = named[name]
        return found

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute ids [B, T] -> logits [B, T, vocabulary]."""
        return self.run(ids, self.course(ids, mask), 0, len(self.parts))


class Course:
    """One pass over one batch: positions, masks, cache, and rotary tables computed on demand."""

    def __init__(self, stack: Stack, positions: Tensor, masks: Mapping[StackOrigin, Tensor | None], cache: Any) -> None:
        self.positions = positions
        self.cache = cache
        self._stack = stack
        self._masks = masks
        self._tables: dict[int, tuple[Tensor, Tensor] | None] = {}

    def where(self, index: int, like: Tensor) -> Where:
        """Return the positions and masks for component `index`.

        Args:
            like: A tensor with the hidden states' dtype and device.
        """
        origin = self._stack._origins[index]
        if origin.source is None:
            return Where(self.positions)
        return Where(self.positions, self._rotary(origin.source, like), self._masks.get(origin), self.cache)

    def _rotary(self, source: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        module = self._stack.rotaries[source]
        if isinstance(module, nn.Identity) or not like.is_floating_point():
            return None
        if source not in self._tables:
            self._tables[source] = module(like, self.positions)
        return self._tables[source]


def _positions(ids: Tensor, mask: Tensor | None, past: int) -> Tensor:
    if mask is None:
        return torch.arange(past, past + ids.shape[1], device=ids.device).expand(ids.shape)
    counted = (mask.long().cumsum(-1) - 1).clamp_min(0)
    return counted[:, -ids.shape[1] :]


def _masks(
    stack: Stack, ids: Tensor, mask: Tensor | None, cache: Any, positions: Tensor
) -> dict[StackOrigin, Tensor | None]:
    """Return one mask per kind of attention in the chain, as transformers makes it for the source's config."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    like = torch.empty((*ids.shape, 1), dtype=stack.dtype, device=ids.device)
    masks: dict[StackOrigin, Tensor | None] = {}
    for origin in dict.fromkeys(stack._origins):
        if origin.source is not None:
            make = create_sliding_window_causal_mask if origin.slides else create_causal_mask
            made = make(stack.configs[origin.source], like, mask, past_key_values=cache, position_ids=positions)
            masks[origin] = made
    return masks


def open_stack(
    store: Store, manifest: ModelManifest, device: str = "cpu", dtype: str | torch.dtype | None = None
) -> Stack:
    """Return the stack of a stored model, in eval mode, with weights mapped where possible.

    Raises:
        DamagedObject: A stored tensor does not match its digest.
        NotServable: One of its components cannot be represented as a module.
    """
    from surgery.models.load import load_model

    model = load_model(store, manifest, device=device, dtype=dtype)
    return model.stack if isinstance(getattr(model, "stack", None), Stack) else stack_of(model, manifest.components)


def stack_of(model: Any, components: Sequence[Placed]) -> Stack:
    """Return the stack of a loaded transformers model; the two share their modules.

    Raises NotServable for a family that cannot be cut.
    """
    skeleton = Skeleton.around(model)
    parts = [skeleton.part(placed.component.kind, placed.layer) for placed in components]
    origins = [_origin(placed, 0, skeleton.config) for placed in components]
    return Stack(components, parts, origins, [skeleton.config], [skeleton.rotary]).eval()


def build_stack(store: Store, manifest: ModelManifest, dtype: torch.dtype | None = None) -> Stack:
    """Return the stack of a composed chain, built from its sources, on the CPU. Raises as `open_stack`."""
    config = config_of(store, manifest)
    if not is_chain(config):
        raise NotServable(f"{manifest.name} is no chain of its own kind: it loads as {manifest.family}")
    return assemble(plan_of(config, manifest.components), manifest.components, StoredTensors(store, manifest, dtype))


def assemble(plan: ChainPlan, components: Sequence[Placed], tensors: Mapping[str, Tensor]) -> Stack:
    """Build a stack from a plan and its tensors (by digest), each looked up once per place.

    A layer that occurs twice gets two caches.
    """
    sources = _Sources(plan)
    built: list[Built] = []
    origins: list[StackOrigin] = []
    attention = 0
    for link, placed in zip(plan.links, components, strict=True):
        component = placed.component
        if link.source is None:
            built.append(_stitch(component, tensors))
            origins.append(StackOrigin(None))
            continue
        built.append(sources.part(link, component, tensors))
        if component.kind in ("attention", "layer"):
            _number_(built[-1].module, attention)
            attention += 1
        origins.append(_origin(Placed(link.layer, component), link.source, sources.configs[link.source]))
    parts, named = [each.module for each in built], [each.named for each in built]
    return Stack(components, parts, origins, sources.configs, sources.rotaries, named).eval()


@dataclass(frozen=True, slots=True)
class Built:
    """A component's module, and its weights under their names within the component."""

    module: nn.Module
    named: Mapping[str, Tensor]


class _Sources:
    """The configs, rotary modules and skeletons of a plan's sources."""

    def __init__(self, plan: ChainPlan) -> None:
        self._skeletons = Skeletons(plan.sources, _attention)
        firsts = [self._skeletons.first(at) for at in range(len(plan.sources))]
        self.configs = [first.config for first in firsts]
        self.rotaries = [first.rotary for first in firsts]

    def part(self, link: ChainLink, component: Component, tensors: Mapping[str, Tensor]) -> Built:
        """Return a component's module with its weights and its adapter."""
        skeleton = self._skeletons.fresh(link)
        owner, head = skeleton.owner(component.kind, link.layer), skeleton.model.lm_head
        module = build(skeleton, component, link.layer, {name: tensors[digest] for name, digest in component.tensors})
        named = parameters_of(skeleton, component, link.layer)
        if component.adapter is not None:
            adapt_(module, owner, head, component.adapter, tensors)
        return Built(module, named)


def _attention(config: Mapping[str, Any]) -> str:
    """Return the attention function; fused kernels do not support a soft cap on the logits."""
    softcap = config.get("attn_logit_softcapping", 50.0 if config.get("model_type") == "gemma2" else None)
    return "sdpa" if softcap is None else "eager"


def _number_(part: nn.Module, index: int) -> None:
    """Give the attention inside its own index in caches.

    Reused layers would otherwise share a cache and compute wrong results without an error.
    """
    for module in part.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = index  # type: ignore[assignment]


def _stitch(component: Component, tensors: Mapping[str, Tensor]) -> Built:
    stitch = build_stitch(component, {name: tensors[digest] for name, digest in component.tensors})
    return Built(stitch, dict(stitch.named_parameters()))


def _origin(placed: Placed, source: int, config: Any) -> StackOrigin:
    if placed.component.kind not in ("attention", "layer") or placed.layer is None:
        return StackOrigin(source)
    types = getattr(config, "layer_types", None)
    if types is not None and placed.component.family not in _ALL_SLIDE:
        return StackOrigin(source, types[placed.layer] == "sliding_attention")
    return StackOrigin(
        source, placed.component.family in _ALL_SLIDE and getattr(config, "sliding_window", None) is not None
    )
