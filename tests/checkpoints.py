"""Tiny random checkpoints of every family, on disk as transformers and peft write them. No network, no GPU.

`make(family, folder)` saves one; `make_lora(base, folder)` saves a PEFT LoRA on it; `tokenizer_files(folder)` adds a
byte-level BPE.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

VOCAB = 320

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_GQA = {**_COMMON, "num_key_value_heads": 2}

#: Config of each family's tiny checkpoint. Together: GQA and MHA, tied and untied, biases, windows, odd heads.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_GQA},
    "mistral": {**_GQA, "sliding_window": 16, "head_dim": 16},
    "qwen2": {
        **_GQA,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
    "qwen3": {**_GQA, "head_dim": 24},
    "gemma2": {
        **_GQA,
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "phi3": {**_GQA, "sliding_window": 20},
    "glm4": {**_GQA, "head_dim": 16},
    "olmo2": {**_GQA},
    "gpt2": dict(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "opt": dict(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt_neox": {**_COMMON},
    "phi": {**_GQA},
    "mixtral": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "bloom": dict(
        vocab_size=VOCAB, hidden_size=64, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
    "falcon": {**_COMMON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": False},
    "gptj": dict(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        rotary_dim=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "mpt": dict(
        vocab_size=VOCAB,
        d_model=64,
        n_layers=3,
        n_heads=4,
        max_seq_len=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}

#: Variants of a family that take another code path: (family, config overrides).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "opt-prenorm": ("opt", {"do_layer_norm_before": True, "word_embed_proj_dim": 64}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}

#: Variants of families with attention layers of their own.
MASKED_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom-post-norm": ("bloom", {"apply_residual_connection_post_layernorm": True, "n_head": 2}),
    "falcon-alibi": (
        "falcon",
        {"new_decoder_architecture": False, "alibi": True, "multi_query": False, "num_kv_heads": 4, "bias": True},
    ),
    "falcon-multi-query": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}),
    "mpt-clipped": ("mpt", {"n_heads": 2, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
}

#: Families with attention layers of their own and an explicit mask: only the dense executor runs them.
MASKED = ("bloom", "falcon", "gptj", "mpt")
SERVED = tuple(name for name in CONFIGS if name not in MASKED)

#: Linear layers for a LoRA, by family.
LORA_TARGETS: dict[str, list[str]] = {
    "phi3": ["qkv_proj", "o_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "opt": ["q_proj", "v_proj", "fc1"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "bloom": ["query_key_value"],
    "falcon": ["query_key_value"],
    "gptj": ["q_proj", "v_proj", "fc_in"],
    "mpt": ["Wqkv", "up_proj"],
    "phi": ["q_proj", "v_proj", "fc2"],
}
DEFAULT_TARGETS = ["q_proj", "v_proj", "o_proj"]


def config_for(name: str, **overrides: Any) -> Any:
    """Return the transformers config of a family or a variant."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, extra = {**VARIANTS, **MASKED_VARIANTS}.get(name, (name, {}))
    return CONFIG_MAPPING[family](**{**CONFIGS[family], **extra, **overrides})


def build(name: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """Return a random PreTrainedModel in eval mode.

    Weights are scaled up, so that greedy tokens vary and ties are rare.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_for(name, **overrides))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
            elif "norm" not in key and "ln_" not in key:
                parameter.normal_(0.0, 0.1)
    return model.to(getattr(torch, dtype)).eval()


def make(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Save a tiny checkpoint of a family or variant.

    `shards`: transformers' max_shard_size (`60KB` gives several files).
    """
    model = build(name, seed=seed, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size=shards)
    if tokenizer:
        tokenizer_files(folder)
    return folder


def make_lora(base: Path, folder: Path, *, seed: int = 1, base_name: str | None = None, **options: Any) -> Path:
    """Save a PEFT LoRA with random A and B on the checkpoint in `base`. `options` go to `LoraConfig`."""
    from peft import LoraConfig
    from transformers import AutoConfig

    family = AutoConfig.from_pretrained(base).model_type
    options.setdefault("r", 4)
    options.setdefault("lora_alpha", 16)
    options.setdefault("target_modules", LORA_TARGETS.get(family, DEFAULT_TARGETS))
    config = LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2", **options)
    return make_peft(base, folder, config, seed=seed, base_name=base_name)


def make_peft(base: Path, folder: Path, config: Any, *, seed: int = 1, base_name: str | None = None) -> Path:
    """Save a PEFT adapter of any kind with random weights on the checkpoint in `base`."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in peft_model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0.0, 0.2)
            elif "ia3_" in key or "ln_tuning" in key:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif "prompt_encoder" in key:
                parameter.normal_(0.0, 1.0)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    peft_model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    settings["base_model_name_or_path"] = base_name or str(base)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True))
    return folder


def make_bitfit(base: Path, folder: Path, *, seed: int = 1) -> Path:
    """Save the checkpoint in `base` with other biases; a Llama without biases gets them everywhere."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    if config.model_type == "llama":
        config.attention_bias = config.mlp_bias = True
    model = AutoModelForCausalLM.from_pretrained(base, config=config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


@functools.lru_cache(maxsize=1)
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(functools.__file__).read_text()], trainer)
    return str(tokenizer.to_str())


def tokenizer_files(folder: Path) -> None:
    """Write a byte-level BPE of VOCAB tokens with pad 0, bos 1, eos 2 and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] "
        "}}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
