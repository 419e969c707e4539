"""Find the model that another one was made from: by its config, or by shared weights.

Reads the catalogue and manifests, not files on disk.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.catalog import ModelEntry, Reader
from zoo.errors import AmbiguousName, NotFound, WrongBase
from zoo.manifest import ModelKind, ModelManifest, Placed, TensorMeta

#: Kinds that have all their weights themselves, so that other models can be based on them.
_WHOLE: frozenset[ModelKind] = frozenset({"foundation", "full", "bitfit"})


def adapter_base(reader: Reader, config: Mapping[str, Any], given: str | None) -> ModelManifest:
    """Return the base of an adapter: the requested one, else the one that its config names.

    A name in the config is looked up as a model's exact name, as the place that a model was ingested from (folder or
    hub id), and as the unique ending of a name, in this order.

    Raises:
        WrongBase: The config names none that the zoo has, or the base is itself an adapter.
        NotFound, AmbiguousName: `given` is no model, or several.
    """
    base = reader.model(reader.resolve(given) if given is not None else _named_base(reader, config))
    if base.kind not in (*_WHOLE, "quantized"):
        raise WrongBase(f"{base.name} is itself of kind {base.kind}: an adapter needs a base with weights of its own")
    return base


def _named_base(reader: Reader, config: Mapping[str, Any]) -> str:
    text = config.get("base_model_name_or_path", config.get("model_name"))  # PEFT's, the adapters library's
    if not isinstance(text, str) or not text:
        raise WrongBase("adapter_config.json names no base model: say which one with --base")
    if text in reader.names():
        return text
    places = _places(text)
    found = [model.name for model in reader.entries() if model.source in places or model.source.split("@")[0] in places]
    if len(found) > 1:
        raise AmbiguousName(f"{', '.join(found)} were all ingested from {text!r}: say which is the base with --base")
    try:
        return found[0] if found else reader.resolve(text)
    except NotFound:
        raise WrongBase(
            f"the adapter's base {text[:200]!r} is not in the zoo: ingest it first, or say which model it is with "
            "--base"
        ) from None
    except AmbiguousName as error:
        raise AmbiguousName(f"{error}: say which is the adapter's base with --base") from None


def _places(text: str) -> set[str]:
    """Return the text itself and, read as a folder's path, the form in which sources are recorded."""
    try:
        return {text, str(Path(text).expanduser().resolve())}
    except (OSError, ValueError, RuntimeError):
        return {text}


@dataclass(frozen=True, slots=True)
class Descent:
    """A full checkpoint's kind, and the model that it was made from."""

    kind: ModelKind
    base: str | None


def descent(reader: Reader, manifest: ModelManifest, given: str | None) -> Descent:
    """Distinguish foundations, full fine-tunes and BitFit checkpoints.

    The base is the requested one, else the model of the same family that shares the most bytes; among equals, a
    foundation and then the oldest. Only matrices count: norms and biases left at ones and zeros are equal between
    unrelated models.

    Args:
        given: The base's exact name, or None.

    Raises:
        WrongBase: The requested base is of another family, or an adapter.
    """
    base = given if given is not None else _most_shared(reader, manifest)
    if base is None:
        return Descent("foundation", None)
    parent = reader.model(base)
    if parent.family != manifest.family or parent.kind not in _WHOLE:
        raise WrongBase(
            f"{base} ({parent.family}, {parent.kind}) cannot be the base of a full {manifest.family} checkpoint"
        )
    return Descent("bitfit" if only_biases_differ(manifest.components, parent.components) else "full", base)


def _most_shared(reader: Reader, manifest: ModelManifest) -> str | None:
    matrices = _matrices(manifest)
    shared: dict[str, int] = defaultdict(int)
    for digest, names in reader.users_of(matrices).items():
        for name in names:
            shared[name] += matrices[digest].nbytes
    shared.pop(manifest.name, None)
    if not shared:
        return None
    candidates = [
        model
        for model in reader.entries()
        if model.name in shared and model.family == manifest.family and model.kind in _WHOLE
    ]

    def rank(model: ModelEntry) -> tuple[int, bool, float]:
        return (shared[model.name], model.kind == "foundation", -model.created.timestamp())

    return max(candidates, key=rank).name if candidates else None


def _matrices(manifest: ModelManifest) -> dict[str, TensorMeta]:
    named = {digest for placed in manifest.components for _, digest in placed.component.tensors}
    return {tensor.digest: tensor for tensor in manifest.tensors if tensor.digest in named and len(tensor.shape) > 1}


def only_biases_differ(mine: tuple[Placed, ...], others: tuple[Placed, ...]) -> bool:
    """Return whether two models have the same components and weights except for biases, and at least one bias differs.

    A model without any biases may be the base of the other (Llama's BitFit has `attention_bias` and `mlp_bias` switched
    on).
    """
    if [(p.component.kind, p.layer) for p in mine] != [(p.component.kind, p.layer) for p in others]:
        return False
    pairs = list(zip(mine, others, strict=True))
    differing = {name for a, b in pairs for name in _differing(a, b)}
    same_settings = all(_settings(a) == _settings(b) for a, b in pairs)
    return bool(differing) and same_settings and all(name.rsplit(".", 1)[-1] == "bias" for name in differing)


def _settings(placed: Placed) -> dict[str, Any]:
    """Return the settings that fix a component's computation, without the bias switches, which the tensors show."""
    spec: dict[str, Any] = json.loads(placed.component.spec)
    return {key: value for key, value in spec.items() if not key.endswith("_bias")}


def _differing(a: Placed, b: Placed) -> set[str]:
    """Return the names of the tensors that only one of the two has, or that differ."""
    return {name for name, _ in set(a.component.tensors) ^ set(b.component.tensors)}
