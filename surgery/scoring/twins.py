"""A randomly initialised twin of a model: the control of a score, namely the score of an unrelated model (BL-05)."""

from __future__ import annotations

import torch
from torch import nn

from surgery.chains.plan import is_chain
from surgery.families.settings import config_of
from surgery.modules.stack import Stack, open_stack, stack_of
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Standard deviation of weights if no config gives one: transformers' own default.
_DEVIATION = 0.02


def random_twin(
    store: Store, manifest: ModelManifest, seed: int = 0, device: str = "cpu", dtype: torch.dtype | None = None
) -> Stack:
    """Return a stack of the model's architecture with weights as transformers initialises them.

    The same seed gives the same weights. An adapter's twin is a twin of its base. Raises as
    `surgery.modules.stack.open_stack`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if is_chain(config_of(store, manifest)):
            return _forgotten(open_stack(store, manifest, "cpu", dtype)).to(device)
        return _fresh(store, manifest, dtype).to(device)


def _fresh(store: Store, manifest: ModelManifest, dtype: torch.dtype | None) -> Stack:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = {
        key: value
        for key, value in config_of(store, manifest).items()
        if key not in ("auto_map", "quantization_config")
    }
    config = CONFIG_MAPPING[manifest.family].from_dict(settings)
    return stack_of(AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval(), manifest.components)


@torch.no_grad()
def _forgotten(stack: Stack) -> Stack:
    """Reinitialise a composed chain, which has no class that could do it.

    Matrices are set as in most families, norms to one, biases to zero.
    """
    for module in stack.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_DEVIATION)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return stack
