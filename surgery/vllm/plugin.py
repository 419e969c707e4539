"""The plugin that vLLM loads at its start (entry point group `vllm.general_plugins`).

It lets vLLM's default loader read folders with a `blockzoo.json` from their store, and adds the architecture of chains.
Folders without one are loaded as before. Registering twice is harmless; vLLM does so in each of its processes.

Written against vLLM 0.32.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

_log = logging.getLogger("blockzoo.vllm")

#: The module of the model class; vLLM imports it where it makes one.
_CHAINS = "surgery.vllm.chain_model"
#: What vLLM calls the way weights are loaded without `--load-format`.
_DEFAULT = "auto"


def register() -> None:
    """Register the loader and the architecture with vLLM."""
    from surgery.chains.hf_model import register as register_config
    from surgery.vllm.loader import FORMAT, stored_loader

    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    registry: Any = importlib.import_module("vllm.model_executor.models").ModelRegistry
    register_config()
    registry.register_model("BlockZooChainForCausalLM", f"{_CHAINS}:VllmChain")
    known: dict[str, type] | None = getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", None)
    if known is not None and FORMAT in known:
        return
    default = importlib.import_module("vllm.model_executor.model_loader.default_loader").DefaultModelLoader
    loaders.register_model_loader(FORMAT)(stored_loader(default))
    if known is None or known.get(_DEFAULT) is not default:
        _log.warning("vLLM's default loader is not the one that is known: give --load-format %s", FORMAT)
        return
    known[_DEFAULT] = known[FORMAT]
