"""Make twenty models of the demo's small family: two foundations of different width, full fine-tunes and LoRAs of them.

The fine-tunes share most layers with their base. Weights are random, with noise added where a fine-tune changes them:
speed does not depend on their values. If a folder with the demo's trained models is given, those replace the models of
the same names.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cli.demo.recipe import SMALL, MemberKind
from zoo.api import Zoo

#: Rank of every LoRA made here; LoRAs are on the attention, as in the demo.
RANK = 8
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_BASE, _WIDE = "small-base", "small-wide"
#: How many first layers a full fine-tune shares with its base, in addition to the embedding.
_FROZEN = {_BASE: 5, _WIDE: 4}


@dataclass(frozen=True, slots=True)
class Kin:
    """A model of the family.

    Fields:
        base: None for a foundation.
    """

    name: str
    kind: MemberKind
    base: str | None = None


def members(fulls: int = 6, loras: int = 8, wide: int = 2) -> tuple[Kin, ...]:
    """Return the family: foundations first, then the demo's models, then numbered ones.

    `fulls` and `loras` are counts for the narrow foundation, `wide` is the count of each kind for the wide one.
    """
    demo = [Kin(one.name, one.kind, one.base) for one in SMALL.members]
    more: list[Kin] = []
    for base, kind, count in (
        (_BASE, "full", fulls),
        (_BASE, "lora", loras),
        (_WIDE, "full", wide),
        (_WIDE, "lora", wide),
    ):
        there = sum((one.base, one.kind) == (base, kind) for one in demo)
        more += [_numbered(base, kind, number) for number in range(there, count)]  # type: ignore[arg-type]
    return (*demo, *more)


def _numbered(base: str, kind: Literal["full", "lora"], number: int) -> Kin:
    return Kin(f"{base}-{kind}{number}", kind, base)


def by_popularity(family: Sequence[Kin], seed: int) -> list[str]:
    """Return all names in an order independent of their kind; a skewed workload requests the first most often."""
    names = [one.name for one in family]
    return random.Random(seed).sample(names, len(names))


def make(folder: Path, family: Iterable[Kin], trained: Path | None = None) -> dict[str, Path]:
    """Write checkpoints and PEFT folders below `folder` and return them by name.

    `trained` is the demo's `models` folder; models with the same name are copied from it.
    """
    made: dict[str, Path] = {}
    for number, one in enumerate(family):
        made[one.name] = folder / one.name
        if trained is not None and (trained / one.name).is_dir():
            shutil.copytree(trained / one.name, made[one.name])
            continue
        torch.manual_seed(number)
        model = _foundation(one.name) if one.base is None else _tuned(one, made[one.base])
        model.save_pretrained(made[one.name])
    for one in family:
        if one.kind == "lora":
            _point(made[one.name], made[one.base or ""])
    return made


def fill(store: Path, family: Iterable[Kin], folders: dict[str, Path]) -> None:
    """Ingest the family into a new store."""
    with Zoo(store) as zoo:
        for one in family:
            zoo.ingest(folders[one.name], one.name, one.base)


def _foundation(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SMALL.member(name).shape
    if shape is None:
        raise ValueError(f"{name} is no foundation of the demo's")
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SMALL.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=SMALL.context,
            tie_word_embeddings=False,
        )
    )


def _tuned(one: Kin, base: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if one.kind == "lora":
        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(_TARGETS), task_type="CAUSAL_LM")
        )
        moved = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    else:
        parts = (*model.model.layers[_FROZEN[one.base or ""] :], model.model.norm, model.lm_head)
        moved = [parameter for part in parts for parameter in part.parameters()]
    with torch.no_grad():
        for parameter in moved:
            parameter.add_(torch.randn_like(parameter) * 1e-2)
    return model


def _point(adapter: Path, base: Path) -> None:
    """Set the folder of an adapter's base."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base.resolve())}))
