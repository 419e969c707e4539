"""Train a small family from a real model: two LoRAs, a full fine-tune of the last layers and one of all layers.

    python -m benchmarks.surgery.real_family FOLDER OUT [--steps 16] [--batch 4] [--context 128] [--last 4]
        [--only NAME]... [--autocast]

FOLDER is a Llama checkpoint in Hugging Face's layout with its tokenizer. OUT receives one folder per member:

    mail-lora          LoRA of rank 16 on the attention's matrices; sources of the standard library about mail and HTTP
    chat-lora          LoRA of rank 16 on the same matrices; questions and answers in the model's own chat template
    concurrency-last   full fine-tune of the last layers and the final norm; sources about concurrency
    prose-all          full fine-tune of all weights, embedding and tied head included; docstrings
    chat.jsonl         the chat member's text, one conversation per line: what a function of the standard library does

Weights are trained in float32 and saved in FOLDER's own dtype, so that a frozen tensor keeps its bits. A member whose
folder exists is not trained again. Text comes from the running Python, its training part only; perplexities are of the
held-out part.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cli.demo.members import quiet_transformers
from cli.demo.recipe import Schedule
from cli.demo.train import StreamExamples, perplexity, train_
from surgery.text.library import read_library
from surgery.text.text import Text, read_text

_RANK = 16
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_SEED = 20
_MEASURED = 16
_CONVERSATIONS = 2000
_SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CHAT = "chat.jsonl"


@dataclass(frozen=True, slots=True)
class RealMember:
    """One member of the family.

    Fields:
        trains: "lora", "last" (layers and final norm) or "all".
        text: A source of `surgery.text.text.read_text`; `chat.jsonl` lies in the output folder.
        rate: Peak learning rate of AdamW.
    """

    name: str
    trains: str
    text: str
    rate: float


MEMBERS = (
    RealMember("mail-lora", "lora", "library:mail", 1e-3),
    RealMember("chat-lora", "lora", _CHAT, 1e-3),
    RealMember("concurrency-last", "last", "library:concurrency", 2e-4),
    RealMember("prose-all", "all", "library:prose", 5e-5),
)


@dataclass(frozen=True, slots=True)
class FamilyTraining:
    """Amounts of a training: steps of `batch` windows of `context` tokens; `last` layers move where a member says so.

    Fields:
        autocast: bfloat16 products during training, float32 weights.
    """

    steps: int = 16
    batch: int = 4
    context: int = 128
    last: int = 4
    autocast: bool = False


def conversations(tokenizer: Any, most: int = _CONVERSATIONS) -> Iterator[str]:
    """Yield questions about functions of the standard library, answered by their docstrings, in the chat template."""
    count = 0
    for document in read_library().documents:
        module = document.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, answer in _described(document.text):
            if count == most:
                return
            count += 1
            turns = [
                {"role": "user", "content": f"What does {module}.{name} do?"},
                {"role": "assistant", "content": answer},
            ]
            yield tokenizer.apply_chat_template(turns, tokenize=False)


def _described(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, first paragraph of the docstring) of the public functions of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            answer = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
            if 20 <= len(answer) <= 400:
                yield node.name, answer


def write_chat(tokenizer: Any, path: Path) -> None:
    """Write the conversations as JSON lines with a field `text`."""
    lines = [json.dumps({"text": text}) for text in conversations(tokenizer)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def learn_member(
    folder: Path, out: Path, member: RealMember, training: FamilyTraining, on_step: Callable[[int, float], None]
) -> dict[str, Any]:
    """Train a member from the model in `folder`, save it in `out`, and return the figures of its training."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    begin = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = read_text(str(out / _CHAT) if member.text == _CHAT else member.text)
    dtype = AutoConfig.from_pretrained(folder).dtype
    torch.manual_seed(_SEED)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held_out = _stream(text, tokenizer, training.context, _MEASURED, "held_out")
    before = perplexity(model, held_out, training.context, _MEASURED)
    model = _prepared(model, member, training.last, folder)
    stream = _stream(text, tokenizer, training.context, training.steps * training.batch + 1, "train")
    schedule = Schedule(training.steps, training.batch, member.rate)
    # Without its cache: autocast would keep the first step's casts of the weights to the end of the training.
    mixed = (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if training.autocast else contextlib.nullcontext()
    )
    with mixed:
        drawn = StreamExamples(stream, training.context).draw_batches(training.batch, _SEED)
        loss = train_(model, drawn, schedule, on_step).loss
    facts = {
        "perplexity": perplexity(model, held_out, training.context, _MEASURED),
        "before": before,
        "train_loss": loss,
        "tokens": training.steps * training.batch * training.context,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    _save(model, member, folder, out / member.name, dtype)
    return {**asdict(member), **facts, "seconds": round(time.monotonic() - begin, 1)}


def _stream(text: Text, tokenizer: Any, length: int, count: int, part: Any) -> Tensor:
    return text.tokens(tokenizer, length, count, part, _SEED).flatten()


def _prepared(model: Any, member: RealMember, last: int, folder: Path) -> Any:
    """Return the model with only the member's parameters trainable."""
    if member.trains == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", r=_RANK, lora_alpha=2 * _RANK, target_modules=list(_LORA_TARGETS))
        adapted = get_peft_model(model, config)
        adapted.peft_config["default"].base_model_name_or_path = str(folder.resolve())
        return adapted
    if member.trains == "last":
        model.requires_grad_(False)
        model.model.layers[-last:].requires_grad_(True)
        model.model.norm.requires_grad_(True)
    return model


def _save(model: Any, member: RealMember, folder: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Write the folder of a member under another name first: it exists only once it is complete."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (model if member.trains == "lora" else model.to(dtype or torch.float32)).save_pretrained(partial)
    if member.trains != "lora":
        for name in _SIDE_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, partial / name)
    partial.rename(out)


def train_family(
    folder: Path, out: Path, training: FamilyTraining, only: Sequence[str] = (), tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Train the members that `out` lacks; return their figures, which `out/family.json` keeps for all of them.

    Raises ValueError for a name that is no member's.
    """
    from transformers import AutoTokenizer

    unknown = set(only) - {member.name for member in MEMBERS}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]} is no member: they are {', '.join(each.name for each in MEMBERS)}")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _CHAT).exists():
        write_chat(AutoTokenizer.from_pretrained(folder), out / _CHAT)
    figures = out / "family.json"
    found = json.loads(figures.read_text()) if figures.exists() else []
    for member in MEMBERS:
        if (not only or member.name in only) and not (out / member.name).exists():

            def on_step(step: int, loss: float, name: str = member.name) -> None:
                tell(f"  {name}: step {step} of {training.steps}, loss {loss:.3f}")

            found = [each for each in found if each["name"] != member.name]
            found.append(learn_member(folder, out, member, training, on_step))
            figures.write_text(json.dumps(found, indent=2) + "\n")
            tell(json.dumps(found[-1]))
    return found


def main() -> None:
    usual = FamilyTraining()
    parser = argparse.ArgumentParser(description="A small family trained from a real model.")
    parser.add_argument("folder", type=Path, help="a Llama checkpoint with its tokenizer")
    parser.add_argument("out", type=Path, help="where the members' folders go")
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--batch", type=int, default=usual.batch)
    parser.add_argument("--context", type=int, default=usual.context)
    parser.add_argument("--last", type=int, default=usual.last, help="layers that concurrency-last trains")
    parser.add_argument("--only", action="append", default=[], help="a member; may be given again")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 products in training")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file() or not (args.folder / "tokenizer.json").is_file():
        parser.error(f"{args.folder} is no checkpoint with a tokenizer: it has no config.json or no tokenizer.json")
    quiet_transformers()
    training = FamilyTraining(args.steps, args.batch, args.context, args.last, args.autocast)
    try:
        train_family(args.folder, args.out, training, args.only, lambda line: print(line, flush=True))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
