"""Linear layers of a component that the kernels multiply by int8 weights as they are.

left = coded_here(component, tensors, …)     the weights that are not decompressed when the component is built
pack_coded_(…)                               packs these into the layers that were built without them, and what was
                                             decompressed into the other layers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from runtime.engine.layers.linear import Replaced, SharedLinear
from runtime.engine.layers.packed_weights import PackedWeights
from surgery.families.quantized import CodedWeights, coded_digests, coded_modules
from surgery.quantize.decompress import CodedWeight, coded_weights_of, exact_dtype
from zoo.manifest import Component, digest_of


def takes_form(form: CodedWeights, name: str) -> bool:
    """Return whether the kernels have products with a weight of this form; experts are no layers of their own."""
    return form.bits == 8 and form.symmetric and form.group <= 0 and form.is_integer and packs_alone(name)


def coded_here(component: Component, tensors: Mapping[str, Tensor], wide: bool) -> dict[str, CodedWeight]:
    """Return the weights of a component that stay int8, by name.

    Args:
        wide: Whether bfloat16 models have float32 activations.

    Raises as `surgery.quantize.decompress.coded_weights_of`.
    """
    coded = coded_weights_of(component, tensors)
    if not coded or exact_dtype(tensors) not in ((torch.float32, torch.bfloat16) if wide else (torch.float32,)):
        return {}
    return {name: weight for name, weight in coded.items() if takes_form(weight.form, name)}


def key_of(component: Component, name: str, as_it_is: bool) -> str:
    """Return the key of a packed weight, int8 as it is or decompressed: a digest of what it is computed from."""
    return digest_of(["int8" if as_it_is else "decompressed", *coded_digests(component, name)])


def packs_alone(name: str) -> bool:
    """Return whether a weight is that of a linear layer: experts' are stacked."""
    return ".experts." not in name


def pack_coded_(
    pairs: Iterable[Replaced],
    paths: Mapping[int, str],
    component: Component,
    left: Mapping[str, CodedWeight],
    packs: PackedWeights,
) -> list[str]:
    """Pack the quantised weights of linear layers: int8 ones as they are, the rest decompressed.

    Returns the keys of the packed weights. Components with the same codes share them.
    """
    coded = {f"{module}.weight" for module in coded_modules(name for name, _ in component.tensors)}
    taken = []
    for pair in pairs if coded else ():
        name = f"{paths.get(id(pair.old))}.weight"
        if name not in coded or not isinstance(pair.new, SharedLinear):
            continue
        key, weight = key_of(component, name, name in left), pair.new.product.weight
        packed = packs.acquire_coded(key, left[name]) if name in left else packs.acquire(key, weight)
        if packed is not None:
            pair.new.pack(packed, key)
            taken.append(key)
    return taken


def private_bytes(module: nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of parameters that are neither pooled tensors nor packed (for example Mixtral's experts)."""
    known = {tensor.data_ptr() for tensor in tensors.values()}
    known |= {each.weight.data_ptr() for each in module.modules() if isinstance(each, SharedLinear) and each.packed_as}
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.data_ptr() not in known)
