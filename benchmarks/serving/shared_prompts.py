"""Measure one system prompt for many variants of a model, with its shared layers run once or by each variant.

    python -m benchmarks.serving.shared_prompts [--base FOLDER] [--kind lora|full] [--variants 20] [--prompt 1000]
        [--own 8] [--tokens 8] [--private 0.5] [--size 32m|206m] [--dtype float32|bfloat16] [--distinct] [--rounds 3]
        [--output FILE]

All variants have the first layers in common; the other layers have a LoRA (`lora`) or are fine-tuned (`full`), with
random changes. Each variant gets one request, all at once: the system prompt, then tokens of its own. `--distinct`:
each gets a prompt of its own instead, which shows what saving costs where nothing is shared. Without `--base` the
weights are random.

Two engines take turns, one with `--shared-prompts` at its default and one with 0. Reported are tokens times layers that
steps ran, the seconds until the last first token (`prompts`) and until the end (`whole`), processor seconds (`cpu`,
to be read where other work shares the machine), and whether all tokens and log-probabilities are the same bits.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.shared_family import SHAPES, spread
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.chains import Array, StageResult
from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest, StepPlan
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo import api
from zoo.store import Store


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """The requests of a run, and the layers of their models."""

    asked: tuple[SequenceRequest, ...]
    layers: int


@dataclass(frozen=True, slots=True)
class PromptRun:
    """The result of a run.

    Fields:
        layer_tokens: Tokens of prompts times the layers that they ran.
        prompts: Seconds until the last sequence's first token.
        whole: Seconds until the end.
        cpu: Seconds of processors until the end, of all threads.
        answers: (token, log-probability) by sequence.
    """

    layer_tokens: float
    prompts: float
    whole: float
    cpu: float
    answers: Mapping[str, list[tuple[int, float | None]]] = field(repr=False)


def make_variants(folder: Path, base: Path | None, args: argparse.Namespace) -> tuple[dict[str, Path], int]:
    """Write the checkpoints of the base and its variants; return them, and the number of layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if base is None:
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[args.size])).to(getattr(torch, args.dtype))
        model.save_pretrained(folder / "base")
        base = folder / "base"
    made = {"base": base}
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    layers: int = model.config.num_hidden_layers
    first = layers - round(layers * args.private)
    for number in range(args.variants):
        name = f"{args.kind}{number}"
        made[name] = folder / name
        if args.kind == "full":
            model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
            parts = [part for layer in model.model.layers[first:] for part in layer.parameters()]
        else:
            plain = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
            config = LoraConfig(
                r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
                layers_to_transform=list(range(first, layers)),
            )  # fmt: skip
            model = get_peft_model(plain, config)
            parts = [part for name_, part in model.named_parameters() if "lora_B" in name_]
        with torch.no_grad():
            for part in parts:
                part.add_(torch.randn_like(part) * 1e-2)
        model.save_pretrained(made[name])
        if args.kind == "lora":
            file = made[name] / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    return made, layers


def store_of(folder: Path, made: Mapping[str, Path]) -> Path:
    """Ingest the checkpoints; those of full fine-tunes are deleted, because the store has their tensors."""
    with Store.open(folder / "store") as store:
        for name, source in made.items():
            ingest(store, open_source(str(source)), name=name, base=None if name == "base" else "base")
            if name.startswith("full"):
                shutil.rmtree(source)
    return folder / "store"


class SharingZoo:
    """One engine with all variants, which counts the tokens times layers of prompts."""

    def __init__(self, store: Path, names: Sequence[str], nbytes: int) -> None:
        self._prompts = self._passes = 0
        self.driver = start_one_device(
            api.Zoo(store), EngineConfig(kv_cache_memory_bytes=1 << 30), Chosen(tuple(names), ()),
            shared_prompt_bytes=nbytes, made=self._watch,
        )  # fmt: skip

    def run(self, load: PromptLoad) -> PromptRun:
        answers: dict[str, list[tuple[int, float | None]]] = {one.seq: [] for one in load.asked}
        self._passes = self._prompts = 0
        worked = time.process_time()
        begin = first = time.perf_counter()
        for event in self.driver.run(load.asked):
            if event.token is not None:
                if not event.index:
                    first = time.perf_counter()
                answers[event.seq].append((event.token, event.logprob))
        end = time.perf_counter()
        cpu = time.process_time() - worked
        # A layer is two components; the embedding comes before the first one.
        return PromptRun(self._prompts * load.layers - self._passes / 2, first - begin, end - begin, cpu, answers)

    def _watch(self, engine: Any) -> None:
        run = engine.run

        def counted(plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
            for row in plan.rows:
                if row.generated == 0:
                    self._prompts += len(row.tokens)
                    self._passes += len(row.tokens) * max(row.enters - 1, 0)
            result: StageResult = run(plan, inputs)
            return result

        engine.run = counted


def load_of(names: Sequence[str], layers: int, args: argparse.Namespace, seed: int) -> PromptLoad:
    rng = random.Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1000, 8000) for _ in range(count))

    system, sampling = some(args.prompt), SamplingParams(max_tokens=args.tokens, ignore_eos=True, logprobs=0)
    asked = [
        SequenceRequest(
            name, name, name, (*(some(args.prompt) if args.distinct else system), *some(args.own)), sampling
        )
        for name in names
    ]
    return PromptLoad(tuple(asked), layers)


def compared(store: Path, names: Sequence[str], layers: int, args: argparse.Namespace) -> dict[str, Any]:
    sides = {"shared": SharingZoo(store, names, 256 << 20), "whole": SharingZoo(store, names, 0)}
    for side in sides.values():
        side.run(load_of(names[:2], layers, args, -1))
    runs: dict[str, list[PromptRun]] = {name: [] for name in sides}
    for number in range(args.rounds):
        load = load_of(names, layers, args, number)
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            runs[name].append(sides[name].run(load))
    for side in sides.values():
        side.driver.shutdown()
    pairs = list(zip(runs["shared"], runs["whole"], strict=True))
    return {
        "same_bits": all(one.answers == two.answers for one, two in pairs),
        "work": statistics.median(one.layer_tokens / two.layer_tokens for one, two in pairs),
        "layer_tokens": {name: [each.layer_tokens for each in some] for name, some in runs.items()},
        "prompts_s": {name: spread([each.prompts for each in some]) for name, some in runs.items()},
        "whole_s": {name: spread([each.whole for each in some]) for name, some in runs.items()},
        "cpu_s": {name: spread([each.cpu for each in some]) for name, some in runs.items()},
        "speedup_cpu": spread([two.cpu / one.cpu for one, two in pairs]),
        "speedup_prompts": spread([two.prompts / one.prompts for one, two in pairs]),
        "speedup_whole": spread([two.whole / one.whole for one, two in pairs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=None)
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--variants", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--own", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--private", type=float, default=0.5)
    parser.add_argument("--size", choices=tuple(SHAPES), default="32m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, layers = make_variants(Path(folder), args.base, args)
        names = [name for name in made if name != "base"]
        found = compared(store_of(Path(folder), made), names, layers, args)
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    deliver(
        {"machine": platform.machine(), "torch": torch.__version__, "asked": asked, "layers": layers} | found,
        args.output,
    )


if __name__ == "__main__":
    main()
