"""Dispatch an adapter's `adapter_config.json` to the module that reads its kind (BL-03); refuse other kinds by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.adapters.bottleneck import place_bottleneck
from surgery.adapters.bottleneck_config import BottleneckConfig
from surgery.adapters.lora import place_lora
from surgery.adapters.lora_config import LoraConfig
from surgery.adapters.modules import ModuleConfig, place_ia3, place_ln
from surgery.adapters.overlay import AdapterBase, OfferedTensor
from surgery.adapters.prompts import PromptConfig, place_prefix, place_prompt
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter
from zoo.manifest import ModelKind, Placed

_Place = Callable[[Mapping[str, OfferedTensor], AdapterBase], tuple[Placed, ...]]


@dataclass(frozen=True)
class AdapterPlan:
    """A parsed config of an adapter.

    Fields:
        lay: Places the adapter's tensors on a base; raises InputErrors that name what does not fit.
    """

    kind: ModelKind
    lay: _Place

    def place(self, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> tuple[Placed, ...]:
        """Return the base's components with the adapter on them.

        Raises MalformedCheckpoint if there are no tensors, and what the kind's own function raises.
        """
        if not offered:
            raise MalformedCheckpoint("the adapter holds no tensors")
        return self.lay(offered, base)


def _lora(config: Mapping[str, Any]) -> AdapterPlan:
    return AdapterPlan("lora", functools.partial(place_lora, LoraConfig.parse(config)))


def _ia3(config: Mapping[str, Any]) -> AdapterPlan:
    return AdapterPlan("ia3", functools.partial(place_ia3, ModuleConfig.parse(config)))


def _ln(config: Mapping[str, Any]) -> AdapterPlan:
    return AdapterPlan("ln", functools.partial(place_ln, ModuleConfig.parse(config)))


def _prompt(config: Mapping[str, Any]) -> AdapterPlan:
    return AdapterPlan("prompt", functools.partial(place_prompt, PromptConfig.parse(config)))


def _prefix(config: Mapping[str, Any]) -> AdapterPlan:
    return AdapterPlan("prefix", functools.partial(place_prefix, PromptConfig.parse(config)))


def _bottleneck(config: Mapping[str, Any]) -> AdapterPlan:
    return AdapterPlan("adapter", functools.partial(place_bottleneck, BottleneckConfig.parse(config)))


#: PEFT's name of a kind -> the reader of its config.
_PEFT: Mapping[str, Callable[[Mapping[str, Any]], AdapterPlan]] = {
    "LORA": _lora,
    "IA3": _ia3,
    "LN_TUNING": _ln,
    "PROMPT_TUNING": _prompt,
    "P_TUNING": _prompt,
    "PREFIX_TUNING": _prefix,
}


def plan_adapter(config: Mapping[str, Any]) -> AdapterPlan:
    """Parse an `adapter_config.json`.

    Raises:
        UnsupportedAdapter: Another kind of adapter, or a variant that cannot be run exactly; names it, or the field.
        MalformedCheckpoint: Values of the wrong type.
    """
    kind = config.get("peft_type")
    if kind is None and "config" in config and "model_type" in config:
        return _bottleneck(config)
    if kind is None:
        raise UnsupportedAdapter(
            "adapter_config.json is neither PEFT's, which names a peft_type, nor the adapters library's"
        )
    if not isinstance(kind, str) or kind not in _PEFT:
        raise UnsupportedAdapter(f"adapters of kind {str(kind)[:40]!r} are not supported; {', '.join(_PEFT)} are")
    return _PEFT[kind](config)
