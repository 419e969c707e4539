"""How many parameters quantised tensors hold: several codes to an integer count each, scales and zero points do not.

Inputs that fill no whole integer count as if they did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from zoo.catalog import schema as t
from zoo.manifest import DTYPE_BYTES

#: Ends of the names of tensors with several codes to an element, and of those that codes are computed with.
_CODES = (".weight_packed", ".qweight")
_AROUND = (
    ".weight_scale", ".weight_global_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".input_scale",
    ".input_global_scale", ".input_zero_point", ".scales", ".qzeros", ".g_idx",
)  # fmt: skip
#: Names of the number of bits in the settings of compressed-tensors, of this project, of GPTQ and AWQ.
_BITS = ("num_bits", "bits", "w_bit")


def quantized_parameters(connection: Connection) -> dict[str, int]:
    """Return tensor digest -> its parameters, of the tensors of quantised components for which it is not its elements.

    A tensor of a layout with bits that are not stated keeps its elements.
    """
    query = (
        select(t.ComponentRow.spec, t.ComponentTensor.name, t.Tensor.digest, t.Tensor.elements, t.Tensor.dtype)
        .join(t.ComponentTensor, t.ComponentTensor.component == t.ComponentRow.digest)
        .join(t.Tensor, t.Tensor.digest == t.ComponentTensor.tensor)
        .where(t.ComponentRow.spec.contains('"quantization":'), t.ComponentTensor.adapter.is_(False))
    )
    bits: dict[str, int] = {}
    found: dict[str, int] = {}
    for spec, name, digest, elements, dtype in connection.execute(query).all():
        if name.endswith(_AROUND):
            found[digest] = 0
        elif name.endswith(_CODES):
            if spec not in bits:
                bits[spec] = _bits(json.loads(spec).get("quantization"))
            held = 8 * DTYPE_BYTES[dtype]
            found[digest] = elements * held // (bits[spec] or held)
    return found


def _bits(settings: Any) -> int:
    """Return the bits of a code, 0 if the settings of a component state none, or several."""
    if not isinstance(settings, Mapping):
        return 0
    groups = settings.get("config_groups")
    every = list(groups.values()) if isinstance(groups, Mapping) else [{"weights": settings}]
    weights = [each.get("weights") for each in every if isinstance(each, Mapping)]
    found = [each.get(name) for each in weights if isinstance(each, Mapping) for name in _BITS if name in each]
    stated = {bits for bits in found if type(bits) is int and 0 < bits <= 32}
    return stated.pop() if len(stated) == 1 else 0
