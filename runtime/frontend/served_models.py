"""A served model as the frontend sees it: its spec, its tokenizer, its defaults; and the table of them by name.

Knows nothing of HTTP or of how models are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.frontend.errors import unknown_model
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import ModelSpec
from zoo.views.exits import exit_name


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets. OpenAI's defaults, unless the model's own say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name that requests may ask for.

    `asked`: the model that this one is an exit of. `chain`: which components it runs; `exits`: by number of layers,
    those of an exit behind them (`zoo.views.exits`).
    """

    spec: ModelSpec
    tokenizer: Tokenizer
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = 0
    asked: str | None = None
    chain: str = ""
    exits: tuple[frozenset[str], ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name


def defaults_from(generation_config: Mapping[str, Any] | None) -> SamplingDefaults:
    """The sampling values of a model's generation_config.json: exactly those five that vLLM takes from it too.

    `do_sample` is ignored there and here: a request is greedy when its temperature is 0. Values that are missing, null
    or no sensible number count as not given. `max_new_tokens` is not taken: an answer's length is the client's affair.
    """
    given = generation_config or {}
    standard = SamplingDefaults()
    return SamplingDefaults(
        temperature=_number(given.get("temperature"), standard.temperature, 0.0, 2.0),
        top_p=_number(given.get("top_p"), standard.top_p, 1e-6, 1.0),
        top_k=int(_number(given.get("top_k"), standard.top_k, 0, 2**31 - 1)),
        min_p=_number(given.get("min_p"), standard.min_p, 0.0, 1.0),
        repetition_penalty=_number(given.get("repetition_penalty"), standard.repetition_penalty, 1e-6, 100.0),
    )


def _number(value: Any, default: float, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return value if low <= value <= high else default


class ServedModels:
    """The served models by name. Changed only from the thread of the event loop; lookups from any thread see one
    state.
    """

    def __init__(self, models: Iterable[ServedModel] = ()) -> None:
        self._by_name: Mapping[str, ServedModel] = {model.name: model for model in models}

    def all(self) -> list[ServedModel]:
        """By name, in order."""
        return sorted(self._by_name.values(), key=lambda model: model.name)

    def add(self, model: ServedModel) -> None:
        self._by_name = {**self._by_name, model.name: model}

    def remove(self, name: str) -> None:
        self._by_name = {known: model for known, model in self._by_name.items() if known != name}

    def exit_of(self, model: ServedModel, layers: int) -> ServedModel | None:
        """The model left behind so many of its layers (BL-30), where that is served: what is called so, and is that."""
        found = self._by_name.get(exit_name(model.name, layers))
        if found is None or layers >= len(model.exits) or found.chain not in model.exits[layers]:
            return None
        return replace(found, asked=model.name)

    def exits_of(self, model: ServedModel) -> tuple[int, ...]:
        """Behind how many layers it may be left here."""
        return tuple(layers for layers in range(len(model.exits)) if self.exit_of(model, layers) is not None)

    def find(self, name: str) -> ServedModel:
        """By its name, else by a unique ending of it, as in the catalogue. Raises RequestError 404."""
        models = self._by_name
        if name in models:
            return models[name]
        ending = sorted(known for known in models if name and known.lower().endswith(name.lower()))
        if len(ending) == 1:
            return models[ending[0]]
        shown = name if len(name) <= 200 else name[:200] + "…"
        if ending:
            raise unknown_model(f"The model `{shown}` is ambiguous: {', '.join(ending)}")
        raise unknown_model(f"The model `{shown}` does not exist or is not served here.")
