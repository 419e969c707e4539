"""Bottleneck adapters as the `adapters` library (1.3) saves and computes them.

The library pins another version of transformers, so its code is reimplemented here. `make_bottleneck(base, folder)`
saves an adapter in the library's format; `with_bottleneck(model, folder)` adds one to a stock model by giving its
layers the library's own forward, and shares no code with the project.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

#: The library's defaults and its named configs.
DEFAULTS: dict[str, Any] = dict(
    original_ln_before=False,
    original_ln_after=True,
    ln_before=False,
    ln_after=False,
    init_weights="bert",
    init_weights_seed=None,
    is_parallel=False,
    scaling=1.0,
    use_gating=False,
    residual_before_ln=True,
    adapter_residual_before_ln=False,
    inv_adapter=None,
    inv_adapter_reduction_factor=None,
    cross_adapter=False,
    leave_out=[],
    dropout=0.0,
    phm_layer=False,
    phm_dim=4,
    stochastic_depth=0.0,
)
SEQ_BN = dict(original_ln_before=True, mh_adapter=False, output_adapter=True, non_linearity="relu", reduction_factor=16)
DOUBLE_SEQ_BN = dict(mh_adapter=True, output_adapter=True, non_linearity="swish", reduction_factor=16)
PAR_BN = dict(
    is_parallel=True, mh_adapter=False, output_adapter=True, non_linearity="relu", reduction_factor=2, scaling=4.0
)
ADAPTER_PLUS = dict(
    original_ln_before=True,
    original_ln_after=False,
    residual_before_ln=False,
    mh_adapter=False,
    output_adapter=True,
    non_linearity="gelu",
    reduction_factor=8,
    scaling="channel",
    stochastic_depth=0.1,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "seq_bn": SEQ_BN,
    "double_seq_bn": DOUBLE_SEQ_BN,
    "par_bn": PAR_BN,
    "adapter_plus": ADAPTER_PLUS,
    "norms": {**DOUBLE_SEQ_BN, "ln_before": True, "ln_after": True, "non_linearity": "gelu_new", "reduction_factor": 4},
    "norm around the residual": {
        **SEQ_BN,
        "ln_after": True,
        "adapter_residual_before_ln": True,
        "non_linearity": "leakyrelu",
    },
    "some layers": {
        **DOUBLE_SEQ_BN,
        "leave_out": [1],
        "reduction_factor": {"0": 2, "default": 8},
        "scaling": "learned",
    },
    "attention alone": {
        **SEQ_BN,
        "mh_adapter": True,
        "output_adapter": False,
        "residual_before_ln": False,
        "non_linearity": "tanh",
    },
    "parallel with a norm": {**PAR_BN, "mh_adapter": True, "ln_after": True, "non_linearity": "gelu"},
}
_NAME = "tuned"
_SITES = (("attention_adapters", "mh_adapter"), ("output_adapters", "output_adapter"))


def make_bottleneck(base: Path, folder: Path, *, seed: int = 1, pickled: bool = False, **options: Any) -> Path:
    """Save a random bottleneck adapter on the checkpoint in `base`. `options`: Fields of the library's `BnConfig`."""
    from safetensors.torch import save_file

    model = json.loads((base / "config.json").read_text())
    hidden, layers = model.get("hidden_size", model.get("n_embd")), model.get("num_hidden_layers", model.get("n_layer"))
    config = {**DEFAULTS, **(options or SEQ_BN)}
    torch.manual_seed(seed)
    stem = "transformer.h" if model["model_type"] == "gpt2" else "model.layers"
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for site, flag in _SITES:
            if config[flag] and layer not in config["leave_out"]:
                parts = _random(config, hidden, layer)
                tensors.update(
                    {f"{stem}.{layer}.{site}.adapters.{_NAME}.{name}": tensor for name, tensor in parts.items()}
                )
    folder.mkdir(parents=True)
    document = {
        "config": config,
        "hidden_size": hidden,
        "model_class": "LlamaForCausalLM",
        "model_name": str(base),
        "name": _NAME,
        "model_type": model["model_type"],
        "version": "adapters.1.3.0",
    }
    (folder / "adapter_config.json").write_text(json.dumps(document, indent=2, sort_keys=True))
    if pickled:
        torch.save(tensors, folder / "pytorch_adapter.bin")
    else:
        save_file(tensors, folder / "adapter.safetensors")
    return folder


def _random(config: dict[str, Any], hidden: int, layer: int) -> dict[str, torch.Tensor]:
    """Return a random state dict of one of the library's `Adapter` modules."""
    factor = config["reduction_factor"]
    if isinstance(factor, dict):
        factor = factor.get(str(layer), factor["default"])
    rank, down = int(hidden // factor), 1 if config["ln_before"] else 0
    parts = {
        f"adapter_down.{down}.weight": torch.randn(rank, hidden) * 0.3,
        f"adapter_down.{down}.bias": torch.randn(rank) * 0.3,
        "adapter_up.weight": torch.randn(hidden, rank) * 0.2,
        "adapter_up.bias": torch.randn(hidden) * 0.1,
    }
    if config["ln_before"]:
        weight, bias = 1 + torch.randn(hidden) * 0.1, torch.randn(hidden) * 0.1
        for name in ("adapter_norm_before", "adapter_down.0"):
            parts.update({f"{name}.weight": weight.clone(), f"{name}.bias": bias.clone()})
    if config["ln_after"]:
        parts.update(
            {
                "adapter_norm_after.weight": 1 + torch.randn(hidden) * 0.1,
                "adapter_norm_after.bias": torch.randn(hidden) * 0.1,
            }
        )
    if isinstance(config["scaling"], str):
        parts["scaling"] = 1 + torch.randn(1 if config["scaling"] == "learned" else hidden) * 0.2
    return parts


class _Adapter:
    """The library's `Adapter` and `ParallelAdapter`, with what `BottleneckLayer` does where no layer norm follows."""

    def __init__(self, config: dict[str, Any], parts: dict[str, torch.Tensor]) -> None:
        self.config, self.parts = config, parts

    def __call__(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        config, input_hidden_states = self.config, hidden_states
        if config["is_parallel"]:
            hidden_states = self.bottleneck(input_tensor)
            if config["ln_after"]:
                hidden_states = self.norm(hidden_states, "adapter_norm_after")
            hidden_states = hidden_states + input_hidden_states
        else:
            if config["residual_before_ln"] is True:
                residual = hidden_states
            if config["original_ln_before"]:
                hidden_states = hidden_states + input_tensor
            if not config["residual_before_ln"]:
                residual = hidden_states
            hidden_states = self.bottleneck(hidden_states)
            if config["adapter_residual_before_ln"]:
                hidden_states = hidden_states + residual
            if config["ln_after"]:
                hidden_states = self.norm(hidden_states, "adapter_norm_after")
            if not config["adapter_residual_before_ln"]:
                hidden_states = hidden_states + residual
        return hidden_states + input_tensor if config["original_ln_after"] else hidden_states

    def bottleneck(self, x: torch.Tensor) -> torch.Tensor:
        down = 0
        if self.config["ln_before"]:
            x, down = self.norm(x, "adapter_down.0"), 1
        x = F.linear(x, self.parts[f"adapter_down.{down}.weight"], self.parts[f"adapter_down.{down}.bias"])
        x = F.linear(self.activation(x), self.parts["adapter_up.weight"], self.parts["adapter_up.bias"])
        return x * self.parts.get("scaling", self.config["scaling"])

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        name = self.config["non_linearity"].lower()
        known = {"relu": F.relu, "swish": F.silu, "gelu": F.gelu, "tanh": torch.tanh, "leakyrelu": F.leaky_relu}
        return F.gelu(x, approximate="tanh") if name == "gelu_new" else known[name](x)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.parts[f"{name}.weight"], self.parts[f"{name}.bias"])


def _plain(hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    return hidden_states + input_tensor


def with_bottleneck(model: Any, folder: Path) -> Any:
    """Add the adapter to the model; layers run as in `LlamaDecoderLayerWithAdapters` and `GPT2BlockWithAdapters`."""
    from safetensors.torch import load_file

    document = json.loads((folder / "adapter_config.json").read_text())
    tensors = {key: tensor.to(model.dtype) for key, tensor in load_file(folder / "adapter.safetensors").items()}
    gpt2 = document["model_type"] == "gpt2"
    for index, layer in enumerate(model.transformer.h if gpt2 else model.model.layers):
        sites = []
        for site, _ in _SITES:
            mark = f".{index}.{site}.adapters.{document['name']}."
            parts = {key.split(mark)[1]: tensor for key, tensor in tensors.items() if mark in key}
            sites.append(_Adapter(document["config"], parts) if parts else _plain)
        layer.forward = types.MethodType(_gpt2_block(*sites) if gpt2 else _llama_layer(*sites), layer)
    return model


def _llama_layer(attention_adapters: Any, output_adapters: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        hidden_states = attention_adapters(hidden_states, residual)
        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return output_adapters(hidden_states, residual)

    return forward


def _gpt2_block(attention_adapters: Any, output_adapters: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = ("past_key_values", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "use_cache")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if not name.startswith("encoder_")}
        residual = hidden_states
        hidden_states = self.attn(self.ln_1(hidden_states), **given)[0]
        hidden_states = attention_adapters(hidden_states, residual)
        residual = hidden_states
        hidden_states = self.mlp(self.ln_2(hidden_states))
        return output_adapters(hidden_states, residual)

    return forward
