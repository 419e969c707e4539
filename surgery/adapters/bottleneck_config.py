"""Read the `adapters` library's `adapter_config.json` of a bottleneck adapter, and refuse unsupported variants.

Follows adapters 1.3 (`BnConfig`, `Adapter.pre_forward`, `.forward`, `.post_forward`) for sub-layers without a norm
after them. With y a sub-layer's output and r the input of its half, a half gives r + out, and out is

    up(act(down(norm_before(x)))) * scaling, then norm_after, then + skip            or + skip before norm_after

where x is y, y + r or r, and skip is y or y + r. This module reads the config alone: no keys, shapes or base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgery.adapters.fields import number
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter

#: The library's names of activations -> transformers' names.
_ACTIVATIONS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "gelu",
            "gelu_new",
            "gelu_pytorch_tanh",
            "linear",
            "quick_gelu",
            "relu",
            "relu6",
            "sigmoid",
            "silu",
            "tanh",
        )
    },
    "swish": "silu",
    "leakyrelu": "leaky_relu",
    "leaky_relu": "leaky_relu",
}
#: Meaning of `gelu` and `gelu_orig` in files without a version, written by older versions of the library.
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
_REFUSED_FIELDS = ("cross_adapter", "inv_adapter", "invertible_adapter", "phm_layer", "use_gating")
_LAYERS = 100_000
_DIGITS = 6
_Read = Literal["output", "sum", "residual"]
_Skip = Literal["output", "sum"]


@dataclass(frozen=True, slots=True)
class BottleneckSettings:
    """How a bottleneck computes; see the module's docstring.

    Fields:
        reads: The input x: the sub-layer's output y, the sum y + r, or the residual r.
        skips: The skip connection: y or y + r.
        skips_before_norm: The skip is added before `norm_after`.
        scaling: A fixed factor, or the shape of a trained one: "learned" for [1], "channel" for [width].
    """

    activation: str
    reads: _Read
    skips: _Skip
    skips_before_norm: bool
    norm_before: bool
    norm_after: bool
    scaling: float | Literal["learned", "channel"]

    def document(self) -> dict[str, Any]:
        """Return the settings as the config of an `Adapter`."""
        trained = not isinstance(self.scaling, float)
        return {
            "activation": self.activation,
            "reads": self.reads,
            "skips": self.skips,
            "skips_before_norm": self.skips_before_norm,
            "norm_before": self.norm_before,
            "norm_after": self.norm_after,
            "scaling": None if trained else self.scaling,
        }

    @property
    def parts(self) -> Mapping[str, str]:
        """Name of a tensor below `adapters.<name>` -> name of the part. `norm_before` may have either of two names."""
        down = 1 if self.norm_before else 0
        names = {f"adapter_down.{down}": "down", "adapter_up": "up"}
        if self.norm_before:
            names.update({"adapter_down.0": "norm_before", "adapter_norm_before": "norm_before"})
        if self.norm_after:
            names["adapter_norm_after"] = "norm_after"
        found = {f"{name}.{leaf}": f"{part}.{leaf}" for name, part in names.items() for leaf in ("weight", "bias")}
        return found if isinstance(self.scaling, float) else {**found, "scaling": "scaling"}


@dataclass(frozen=True)
class BottleneckConfig:
    """The part of the config that inference depends on.

    Fields:
        factors: Reduction factor by layer; the key None holds the default.
    """

    name: str
    family: str
    hidden: int | None
    settings: BottleneckSettings
    behind_attention: bool
    behind_ffn: bool
    leave_out: frozenset[int]
    factors: Mapping[int | None, float]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> BottleneckConfig:
        """Read an `adapter_config.json` of the library.

        Raises:
            UnsupportedAdapter: Another architecture, or a variant that cannot be run exactly; names the field.
            MalformedCheckpoint: Values of the wrong type.
        """
        config = document.get("config")
        if not isinstance(config, dict):
            raise UnsupportedAdapter(
                f"adapter_config.json gives config as {str(config)[:40]!r} instead of spelling it out"
            )
        if config.get("architecture") is not None:
            raise UnsupportedAdapter(
                f"adapters of architecture {str(config['architecture'])[:40]!r} are not supported; bottlenecks are"
            )
        for field in _REFUSED_FIELDS:
            if config.get(field):
                raise UnsupportedAdapter(f"this bottleneck adapter uses {field}, which is not supported")
        name, family, hidden = document.get("name"), document.get("model_type"), document.get("hidden_size")
        if not isinstance(name, str) or not isinstance(family, str) or not isinstance(hidden, int | None):
            raise MalformedCheckpoint(
                "adapter_config.json does not say name, model_type and hidden_size as the adapters library does"
            )
        return cls(
            name=name,
            family=family,
            hidden=hidden,
            settings=_settings(config, old="version" not in document),
            behind_attention=_flag(config, "mh_adapter"),
            behind_ffn=_flag(config, "output_adapter"),
            leave_out=_layers(config.get("leave_out") or []),
            factors=_factors(config.get("reduction_factor")),
        )

    def rank(self, hidden: int, layer: int) -> int:
        """Return the width of the bottleneck in a layer. Raises MalformedCheckpoint if the config gives none."""
        factor = self.factors.get(layer, self.factors.get(None))
        if factor is None:
            raise MalformedCheckpoint(f"adapter_config.json gives no reduction_factor for layer {layer}")
        return max(1, int(hidden // factor))


def _settings(config: Mapping[str, Any], old: bool) -> BottleneckSettings:
    reads, skips, inside = _parallel(config) if _flag(config, "is_parallel") else _sequential(config)
    return BottleneckSettings(
        activation=_activation(config.get("non_linearity"), old),
        reads=reads,
        skips=skips,
        skips_before_norm=inside,
        norm_before=_flag(config, "ln_before"),
        norm_after=_flag(config, "ln_after"),
        scaling=_scaling(config),
    )


def _parallel(config: Mapping[str, Any]) -> tuple[_Read, _Skip, bool]:
    if not _flag(config, "original_ln_after", default=True):
        raise _residual_lost()
    return "residual", "output", False


def _sequential(config: Mapping[str, Any]) -> tuple[_Read, _Skip, bool]:
    """Return what the bottleneck reads, what it skips, and whether the skip comes before the norm."""
    summed, inside = _flag(config, "original_ln_before"), _flag(config, "adapter_residual_before_ln")
    outer = config.get("residual_before_ln", True)
    if not isinstance(outer, bool):
        raise UnsupportedAdapter(
            f"this bottleneck adapter's residual_before_ln is {str(outer)[:40]!r}, which is not supported"
        )
    skips_sum = summed and not outer
    reads: _Read = "sum" if summed else "output"
    if _flag(config, "original_ln_after", default=True):
        return reads, "sum" if skips_sum else "output", inside
    # r is not added after the adapter: the r in the skipped sum takes its place.
    if not skips_sum or (inside and _flag(config, "ln_after")):
        raise _residual_lost()
    return reads, "output", inside


def _residual_lost() -> UnsupportedAdapter:
    return UnsupportedAdapter(
        "this bottleneck adapter's original_ln_after is false, which takes the residual connection out of the layer"
    )


def _activation(name: Any, old: bool) -> str:
    known = (
        _ACTIVATIONS.get((_OLD_ACTIVATIONS.get(name, name) if old else name).lower()) if isinstance(name, str) else None
    )
    if known is None:
        raise UnsupportedAdapter(
            f"this bottleneck adapter's non_linearity is {str(name)[:40]!r}; known: {', '.join(_ACTIVATIONS)}"
        )
    return known


def _scaling(config: Mapping[str, Any]) -> float | Literal["learned", "channel"]:
    value = config.get("scaling", 1.0)
    if value == "learned":
        return "learned"
    if value == "channel":
        return "channel"
    return number(value, "scaling")


def _flag(config: Mapping[str, Any], field: str, default: bool = False) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise MalformedCheckpoint(
            f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is neither true nor false"
        )
    return value


def _layers(value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(isinstance(layer, int) and 0 <= layer < _LAYERS for layer in value):
        raise MalformedCheckpoint("adapter_config.json: leave_out is not a list of layers")
    return frozenset(value)


def _factors(value: Any) -> Mapping[int | None, float]:
    table = value if isinstance(value, dict) else {"default": value}
    if any(key != "default" and not (key.isdecimal() and len(key) <= _DIGITS) for key in table):
        raise MalformedCheckpoint("adapter_config.json: reduction_factor is not by layer")
    factors = {
        None if key == "default" else int(key): number(factor, "reduction_factor") for key, factor in table.items()
    }
    if not all(1e-3 <= factor <= 1e6 for factor in factors.values()):
        raise MalformedCheckpoint("adapter_config.json: reduction_factor holds a factor that is too small or too large")
    return factors
