"""The served models as the frontend sees them: spec, tokenizer and sampling defaults, looked up by name.

Nothing here depends on HTTP or on how models are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.frontend.aliases import ServedAlias
from runtime.frontend.errors import unknown_model
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import ModelSpec
from zoo.views.exits import exit_name


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for fields that a request leaves out: OpenAI's defaults unless the model's generation config sets them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can name.

    Fields:
        created: Unix seconds.
        asked: The requested model, if this one is one of its exits.
        chain: Identity of the components it runs.
        alias: The alias that a request named, if it named one.
        exits: `exits[k]` has the `chain` values of exits behind k layers (`zoo.views.exits`).
    """

    spec: ModelSpec
    tokenizer: Tokenizer
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = 0
    asked: str | None = None
    chain: str = ""
    exits: tuple[frozenset[str], ...] = ()
    alias: str = ""

    @property
    def name(self) -> str:
        return self.spec.name


def defaults_from(generation_config: Mapping[str, Any] | None) -> SamplingDefaults:
    """Return the sampling values of a model's generation_config.json: the same five that vLLM takes from it.

    `do_sample` is ignored, as in vLLM: a request is greedy if its temperature is 0. Missing, null or invalid values
    count as not given. `max_new_tokens` is not used: the client decides how long an answer may be.
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


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the store that is served once a request names it. `created`: Unix seconds."""

    name: str
    base: str | None = None
    created: int = 0


class NotServedYet(Exception):
    """A request names a model that is served on demand, and is not served yet."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__(model.name)
        self.model = model


class ServedModels:
    """The served models by name, and the aliases that stand for them.

    Changed only on the event loop's thread. Lookups on any thread see one consistent state.

    Args:
        on_demand: Further models that requests may name.
    """

    def __init__(self, models: Iterable[ServedModel] = (), on_demand: Iterable[StoredModel] = ()) -> None:
        self._by_name: Mapping[str, ServedModel] = {model.name: model for model in models}
        self._on_demand = {model.name: model for model in on_demand}
        self._aliases: Mapping[str, ServedAlias] = {}

    def all(self) -> list[ServedModel]:
        """Return the models sorted by name."""
        return sorted(self._by_name.values(), key=lambda model: model.name)

    def has(self, name: str) -> bool:
        """Return whether a model of this full name is served."""
        return name in self._by_name

    def knows(self, name: str) -> bool:
        """Return whether requests may name a model by this full name."""
        return name in self._by_name or name in self._on_demand

    def alias(self, name: str) -> ServedAlias | None:
        """Return the alias of this name, if requests may name it."""
        return self._aliases.get(name)

    def aliases(self) -> list[ServedAlias]:
        """Return the aliases, sorted by name; without those of a name that a served model has."""
        return [alias for name, alias in sorted(self._aliases.items()) if not self.knows(name)]

    def set_aliases(self, aliases: Mapping[str, ServedAlias]) -> None:
        """Replace all aliases at one moment."""
        self._aliases = dict(aliases)

    def on_demand(self) -> list[StoredModel]:
        """Return the models that are served on demand and are not served yet, sorted by name."""
        return [model for name, model in sorted(self._on_demand.items()) if name not in self._by_name]

    def add(self, model: ServedModel) -> None:
        self._by_name = {**self._by_name, model.name: model}

    def remove(self, name: str) -> None:
        self._by_name = {known: model for known, model in self._by_name.items() if known != name}

    def exit_of(self, model: ServedModel, layers: int) -> ServedModel | None:
        """Return the model's exit behind `layers` layers (BL-30), if it is served.

        A served model qualifies if it has the exit's name and runs the exit's components.
        """
        found = self._by_name.get(exit_name(model.name, layers))
        if found is None or layers >= len(model.exits) or found.chain not in model.exits[layers]:
            return None
        return replace(found, asked=model.name)

    def exits_of(self, model: ServedModel) -> tuple[int, ...]:
        """Return the numbers of layers behind which an exit of the model is served."""
        return tuple(layers for layers in range(len(model.exits)) if self.exit_of(model, layers) is not None)

    def find(self, name: str, user: str | None = None) -> ServedModel:
        """Return a model by its name, by an alias that stands for it now, or by a unique ending, as in the catalogue.

        Args:
            user: Of the request: an alias of several models keeps to one for each user.

        Raises RequestError 404; NotServedYet for a model that is served on demand.
        """
        # The aliases first: what they point to is served before they point to it.
        aliases, models = self._aliases, self._by_name
        if name in models:
            return models[name]
        if name in self._on_demand:
            raise NotServedYet(self._on_demand[name])
        if name in aliases:
            return self._standing_for(aliases[name], user)
        known = {*models, *self._on_demand}
        ending = sorted(each for each in known if name and each.lower().endswith(name.lower()))
        if len(ending) == 1:
            if ending[0] in models:
                return models[ending[0]]
            raise NotServedYet(self._on_demand[ending[0]])
        shown = name if len(name) <= 200 else name[:200] + "…"
        if ending:
            raise unknown_model(f"The model `{shown}` is ambiguous: {', '.join(ending)}")
        raise unknown_model(f"The model `{shown}` does not exist or is not served here.")

    def _standing_for(self, alias: ServedAlias, user: str | None) -> ServedModel:
        target = alias.target_for(user)
        if target in self._on_demand and target not in self._by_name:
            raise NotServedYet(self._on_demand[target])
        if target not in self._by_name:
            raise unknown_model(f"The model `{target}`, which alias `{alias.name}` stands for, is not served here.")
        return replace(self._by_name[target], alias=alias.name)
