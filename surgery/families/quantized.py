"""Quantised checkpoints: what `quantization_config` says about linear layers, and which tensors each of them has.

    compressed-tensors   pack-quantized       weight_packed (int32), weight_scale, weight_shape, weight_zero_point
                         int-quantized        weight (int8), weight_scale, weight_zero_point
                         float-quantized      weight (float8), weight_scale
    gptq, awq            stored and exported, not served

A pure function of configs, names and shapes: no torch, no bytes. `surgery.quantize` computes with the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from surgery.families.table import family_of, is_tied
from zoo.errors import MalformedCheckpoint, NotServable, UnknownFamily
from zoo.manifest import Component

Shape = tuple[int, ...]

#: Values of `quant_method` that are stored; the first is served.
METHODS = ("compressed-tensors", "gptq", "awq")
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
#: Formats of compressed-tensors that are served. In a checkpoint of the naive one, the type says which it is.
_FORMATS = {PACKED: PACKED, INTEGERS: INTEGERS, FLOATS: FLOATS, "naive-quantized": ""}
#: Strategy -> whether there is a scale for each row, and for each group of a row.
_STRATEGIES = ("tensor", "channel", "group")
_GROUP_LIMIT = 1 << 20

#: Ends of the names of what belongs to a quantised weight.
SCALE, CODES, SHAPE, ZERO = ".weight_scale", ".weight_packed", ".weight_shape", ".weight_zero_point"
#: Of activations, which stay exact here.
_UNUSED = (".input_scale", ".input_zero_point")
#: Ends of the names of what GPTQ and AWQ have in place of a weight.
_WHOLE = (".qweight", ".scales", ".qzeros", ".g_idx")


#: Names of a head's matrix [vocabulary, …].
HEADS = ("lm_head.weight", f"lm_head{CODES}")


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """The form of a model's quantised weights.

    Fields:
        layout: `pack-quantized`, `int-quantized` or `float-quantized`.
        bits: Bits of a value.
        group: Inputs that have one scale; 0: all of a row, -1: the whole weight.
        symmetric: There are no zero points.
    """

    layout: str
    bits: int
    group: int
    symmetric: bool

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers."""
        return self.layout != FLOATS

    def scale_shapes(self, outputs: int, inputs: int) -> tuple[Shape, ...]:
        """Return the shapes that the scale of a weight [outputs, inputs] may have."""
        if self.group < 0:
            return (1,), (), (1, 1)
        groups = -(-inputs // self.group) if self.group else 1
        return ((outputs, groups), (outputs,)) if groups == 1 else ((outputs, groups),)

    def packed_width(self, count: int) -> int:
        """Return how many int32 hold a number of values."""
        return -(-count * self.bits // 32)

    def zero_shapes(self, outputs: int, inputs: int) -> tuple[Shape, ...]:
        """Return the shapes that the zero points of a weight may have; they are packed along the outputs."""
        scales = self.scale_shapes(outputs, inputs)
        if self.layout != PACKED or self.group < 0:
            return scales
        return tuple((self.packed_width(shape[0]), *shape[1:]) for shape in scales)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a config's `quantization_config`, None if it has none.

    Raises:
        UnknownFamily: A method that cannot be stored.
        MalformedCheckpoint: It is no object.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise MalformedCheckpoint("config.json: quantization_config is no object")
    method = found.get("quant_method")
    if method not in METHODS:
        raise UnknownFamily(
            f"a quantized {family_of(config).name} model ({str(method)[:40]}) is not of a known family: ingest the "
            f"unquantized checkpoint, or one of {', '.join(METHODS)}"
        )
    return found


def settings_of_kind(config: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return what a component's spec says about quantisation, None where its weights are exact.

    A head counts as exact if it is tied, or if the list of exact modules mentions it.
    """
    found = quantization_of(config)
    if found is None or kind in ("embedding", "stitch"):
        return None
    if kind == "lm_head" and (is_tied(config, family_of(config)) or _spares_head(found)):
        return None
    try:
        return asdict(coded_weights(found))
    except NotServable:
        return dict(found)


def is_quantized(component: Component) -> bool:
    """Return whether a component has quantised weights, of any format."""
    return json.loads(component.spec).get("quantization") is not None


def why_not_computed(config: Mapping[str, Any]) -> str | None:
    """Return why a model's quantised weights cannot be computed with, None if they can or if there are none."""
    found = quantization_of(config)
    try:
        if found is not None:
            coded_weights(found)
    except NotServable as error:
        return str(error)
    return None


def form_of(spec: Mapping[str, Any]) -> CodedWeights | None:
    """Return the form of the quantised weights of a component's spec, None for exact ones.

    Raises NotServable for a form that is not computed here.
    """
    settings = spec.get("quantization")
    if settings is None:
        return None
    return coded_weights(settings) if "quant_method" in settings else CodedWeights(**settings)


def _spares_head(found: Mapping[str, Any]) -> bool:
    exact = found.get("ignore") or found.get("modules_to_not_convert")
    if found.get("quant_method") != METHODS[0] and not found.get("lm_head"):
        return True
    return isinstance(exact, list) and any(isinstance(name, str) and "lm_head" in name for name in exact)


def coded_weights(settings: Mapping[str, Any]) -> CodedWeights:
    """Return the form of the quantised weights of a `quantization_config`.

    Raises:
        NotServable: One that is not computed here; the message names it.
        MalformedCheckpoint: A value of another kind than belongs there.
    """
    method, layout = settings.get("quant_method"), settings.get("format")
    if method != METHODS[0]:
        raise NotServable(f"{str(method)[:40]} weights are stored and exported, not served")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        raise MalformedCheckpoint("config.json: quantization_config has no config_groups")
    forms = {_form_of(str(each.get("format") or layout), each.get("weights")) for each in groups.values()}
    if len(forms) > 1:
        raise NotServable("compressed-tensors weights of several schemes in one model are stored, not served")
    if settings.get("kv_cache_scheme"):
        raise NotServable("compressed-tensors checkpoints with a quantized KV cache are stored, not served")
    return forms.pop()


def _form_of(layout: str, weights: Any) -> CodedWeights:
    if not isinstance(weights, Mapping):
        raise MalformedCheckpoint("config.json: a group of quantization_config describes no weights")
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    group, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if type(bits) is not int or not isinstance(symmetric, bool) or (group is not None and type(group) is not int):
        raise MalformedCheckpoint("config.json: quantization_config has bits, sizes of groups or symmetry of no kind")
    if strategy == "group" and not (group is not None and 0 < group <= _GROUP_LIMIT):
        raise MalformedCheckpoint(f"config.json: quantization_config has groups of {str(group)[:20]} inputs")
    named = _FORMATS.get(layout)
    if named == "":
        named = FLOATS if kind == "float" else INTEGERS
    served = (
        (named == PACKED and kind == "int" and bits in (4, 8))
        or (named == INTEGERS and kind == "int" and bits == 8)
        or (named == FLOATS and kind == "float" and bits == 8 and symmetric)
    )
    if not served or strategy not in _STRATEGIES or weights.get("actorder") in ("group", "dynamic", True):
        order = f", actorder {weights['actorder']}" if weights.get("actorder") else ""
        raise NotServable(
            f"compressed-tensors weights of format {layout[:40]} ({str(kind)[:20]} of {bits} bits by "
            f"{str(strategy)[:20]}{order}) are stored and exported, not served"
        )
    return CodedWeights(str(named), bits, {"tensor": -1, "channel": 0}.get(strategy, group or 0), symmetric)


# -- names of a component's tensors ------------------------------------------------------------------------------------


def coded_modules(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules with a quantised weight, by the names of a component's tensors."""
    return frozenset(name.removesuffix(end) for name in names for end in (SCALE, CODES) if name.endswith(end))


def is_coded(name: str, modules: frozenset[str]) -> bool:
    """Return whether a tensor belongs to a quantised weight, given a component's `coded_modules`."""
    module, _, leaf = name.rpartition(".")
    return (leaf.startswith("weight") and module in modules) or name.endswith(_UNUSED)


def coded_parts(component: Component) -> list[str]:
    """Return the digests of a component's tensors that belong to quantised weights."""
    modules = coded_modules(name for name, _ in component.tensors)
    return [digest for name, digest in component.tensors if is_coded(name, modules)]


def exact_digests(component: Component) -> list[str]:
    """Return the digests of a component's tensors that are not quantised; of all, if all are."""
    modules = coded_modules(name for name, _ in component.tensors)
    exact = [digest for name, digest in component.tensors if not is_coded(name, modules)]
    return exact or [digest for name, digest in component.tensors if name.endswith(SCALE)]


def coded_digests(component: Component, name: str) -> list[str]:
    """Return the digests of what the quantised weight `name` is computed from: codes, scale, zero points."""
    tensors, module = dict(component.tensors), name.removesuffix(".weight")
    return [tensors[each] for each in (module + CODES, name, module + SCALE, module + ZERO) if each in tensors]


def coded_shapes(component: Component, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a component's quantised weights, by the names of the weights that codes stand for.

    Inputs that fill no whole int32 count as if they did.

    Args:
        shapes: Tensor digest -> shape.

    Raises NotServable for a form that is not computed here.
    """
    tensors = dict(component.tensors)
    modules = coded_modules(tensors)
    form = form_of(json.loads(component.spec)) if modules else None
    if form is None:
        return {}
    found: dict[str, Shape] = {}
    for module in sorted(modules):
        if form.layout == PACKED and module + CODES in tensors:
            outputs, words = shapes[tensors[module + CODES]]
            found[f"{module}.weight"] = outputs, words * 32 // form.bits
        elif f"{module}.weight" in tensors:
            found[f"{module}.weight"] = shapes[tensors[f"{module}.weight"]]
    return found


def has_head(names: Iterable[str]) -> bool:
    """Return whether the tensors of a head include its matrix, quantised or not."""
    return not {*HEADS, "lm_head.qweight"}.isdisjoint(names)


# -- shapes ------------------------------------------------------------------------------------------------------------


def check_quantized(config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Check that a checkpoint has quantised weights, by its keys, exactly if its config says so.

    Raises MalformedCheckpoint.
    """
    said = quantization_of(config) is not None
    found = next((key for key in keys if key.endswith((SCALE, CODES, _WHOLE[0]))), None)
    if said and found is None:
        raise MalformedCheckpoint("config.json has a quantization_config, but the files hold no quantized weight")
    if found is not None and not said:
        raise MalformedCheckpoint(
            f"{found!r} is part of a quantized weight, but config.json has no quantization_config"
        )


def plain_shapes(
    config: Mapping[str, Any], found: Mapping[str, Shape], wanted: Mapping[str, Shape], where: str
) -> Mapping[str, Shape]:
    """Return the shapes of some tensors, with those of the weights that their quantised forms stand for.

    Args:
        found: Name -> shape.
        wanted: Name -> shape, of the weights as they would be without quantisation.

    Raises:
        MalformedCheckpoint: Codes, scales or zero points that do not fit a wanted weight.
    """
    settings = quantization_of(config)
    if settings is None:
        return found
    try:
        form = coded_weights(settings)
    except NotServable:
        return {**_stood_for(found, wanted), **found}
    plain = dict(found)
    for name, shape in wanted.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or not ({module + SCALE, module + CODES} & found.keys()):
            continue
        _check_coded(form, found, module, shape, where)
        plain.setdefault(name, shape)
    return plain


def _stood_for(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the wanted weights with codes of a layout that is not looked into."""
    ends = (CODES, *_WHOLE[:1])
    return {name: shape for name, shape in wanted.items() if any(name[:-7] + end in found for end in ends)}


def _check_coded(form: CodedWeights, found: Mapping[str, Shape], module: str, shape: Shape, where: str) -> None:
    if len(shape) != 2:
        raise MalformedCheckpoint(f"{module!r} of {where} is quantized, but it is no matrix")
    outputs, inputs = shape
    packed = form.layout == PACKED
    allowed: dict[str, tuple[Shape, ...]] = {SCALE: form.scale_shapes(outputs, inputs)}
    allowed[CODES if packed else ".weight"] = ((outputs, form.packed_width(inputs)) if packed else shape,)
    if packed:
        allowed[SHAPE] = ((2,),)
    if not form.symmetric:
        allowed[ZERO] = form.zero_shapes(outputs, inputs)
    for end, shapes in allowed.items():
        name = module + end
        if name not in found:
            raise MalformedCheckpoint(f"{where} has no {name!r}")
        if found[name] not in shapes:
            raise MalformedCheckpoint(
                f"{name!r} of {where} has shape {list(found[name])}, but config.json makes it {list(shapes[0])}"
            )
