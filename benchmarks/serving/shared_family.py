"""Compare decode throughput of eight models of one family: served together, and by eight transformers models in turn.

    python -m benchmarks.serving.shared_family [--kind full|lora] [--size 32m|206m] [--models 8] [--requests 2]
        [--dtype float32|bfloat16] [--tokens 128] [--pairs 3] [--output FILE]

`full`: the models share all but their last layer; `lora`: all but an adapter on the attention. Weights are random. Both
sides generate the same number of tokens from the same prompts, greedily, with answers of equal length, and the tokens
are compared.

`decode` is tokens per second after the first one of each answer: the time of a run less that of a run for one token.
`whole` includes the prompts. Pairs of runs alternate; a ratio is per pair, with median and spread. Resident memory is
reported too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo import api
from zoo.store import Store

_COMMON = {"vocab_size": 8192, "max_position_embeddings": 2048}

#: Llamas of 32 M and 206 M parameters. All eight small ones fit a large cache, so call overhead dominates; with the
#: large ones memory bandwidth does.
SHAPES = {
    "32m": {
        **_COMMON,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "206m": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}


@dataclass(frozen=True, slots=True)
class Load:
    """The work of both sides."""

    names: tuple[str, ...]
    prompts: dict[str, list[tuple[int, ...]]]
    tokens: int

    @property
    def total(self) -> int:
        return self.tokens * sum(len(prompts) for prompts in self.prompts.values())


def make_family(folder: Path, kind: str, count: int, size: str, dtype: str) -> dict[str, Path]:
    """Write checkpoints: a foundation, and models that differ from it in one layer or one adapter each."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPES[size])).to(getattr(torch, dtype)).eval()
    base.save_pretrained(folder / "base")
    made = {"base": folder / "base"}
    for number in range(count - 1 if kind == "full" else count):
        name = f"{kind}{number}"
        made[name] = folder / name
        model = LlamaForCausalLM.from_pretrained(folder / "base")
        if kind == "full":
            _move(model.model.layers[-1].parameters(), 1e-2)
        else:
            config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = get_peft_model(model, config)
            _move((p for n, p in model.named_parameters() if "lora_B" in n), 1e-2)
        model.save_pretrained(made[name])
    if kind == "lora":
        config = json.loads((made["lora0"] / "adapter_config.json").read_text())
        for number in range(count):
            config["base_model_name_or_path"] = str(made["base"])
            (made[f"lora{number}"] / "adapter_config.json").write_text(json.dumps(config))
    return made


def _move(parameters: Any, scale: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * scale)


class FamilyZoo:
    """Our side: one engine with all models."""

    def __init__(self, store: Store, names: Sequence[str], kv_cache_memory_bytes: int) -> None:
        self.driver = start_one_device(
            api.Zoo(store.root),
            EngineConfig(kv_cache_memory_bytes=kv_cache_memory_bytes),
            Chosen(tuple(names), ()),
            prefix_caching="off",
        )

    def run(self, load: Load) -> dict[str, list[list[int]]]:
        params = SamplingParams(max_tokens=load.tokens, ignore_eos=True)
        requests = [
            SequenceRequest(f"{name}/{i}", name, name, prompt, params)
            for name in load.names
            for i, prompt in enumerate(load.prompts[name])
        ]
        out: dict[str, list[list[int]]] = {name: [[] for _ in load.prompts[name]] for name in load.names}
        for event in self.driver.run(requests):
            name, _, index = event.seq.rpartition("/")
            if event.token is not None:
                out[name][int(index)].append(event.token)
        return out


class Transformers:
    """The other side: each model in memory separately, run one after the other with its own batch."""

    def __init__(self, folders: dict[str, Path], names: Sequence[str]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self.models: dict[str, Any] = {}
        for name in names:
            if (folders[name] / "adapter_config.json").exists():
                base = AutoModelForCausalLM.from_pretrained(folders["base"])
                self.models[name] = PeftModel.from_pretrained(base, folders[name]).eval()
            else:
                self.models[name] = AutoModelForCausalLM.from_pretrained(folders[name]).eval()

    @torch.inference_mode()
    def run(self, load: Load) -> dict[str, list[list[int]]]:
        out = {}
        for name in load.names:
            ids = torch.tensor(load.prompts[name])
            answer = self.models[name].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=load.tokens,
                min_new_tokens=load.tokens,
                do_sample=False,
                pad_token_id=0,
            )
            out[name] = answer[:, ids.shape[1] :].tolist()
        return out


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of one side's run.

    Fields:
        whole: Tokens per second, prompts included.
        decode: Tokens per second without prompts.
        answers: Tokens by model and request.
    """

    whole: float
    decode: float
    answers: dict[str, list[list[int]]]


def timed(side: Any, load: Load) -> Timed:
    """Run for one token, then run the load; the difference is decoding alone."""
    one = Load(load.names, load.prompts, 1)
    begin = time.perf_counter()
    side.run(one)
    between = time.perf_counter()
    answers = side.run(load)
    end = time.perf_counter()
    return Timed(
        load.total / (end - between), (load.total - one.total) / ((end - between) - (between - begin)), answers
    )


def agreement(a: dict[str, list[list[int]]], b: dict[str, list[list[int]]]) -> float:
    """Return the share of sequences with identical tokens."""
    pairs = [(x, y) for name in a for x, y in zip(a[name], b[name], strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


def spread(ratios: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def measure(
    kind: str, size: str, dtype: str, count: int, requests: int, tokens: int, prompt: int, pairs: int
) -> dict[str, Any]:
    """Return the report of one kind of family."""
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_family(Path(scratch), kind, count, size, dtype)
        names = tuple(folders) if kind == "full" else tuple(name for name in folders if name != "base")
        prompts = {
            name: [
                tuple(torch.randint(3, SHAPES[size]["vocab_size"], (prompt,), generator=generator).tolist())
                for _ in range(requests)
            ]
            for name in names
        }
        load = Load(names, prompts, tokens)
        with Store.open(Path(scratch) / "store") as store:
            for name, folder in folders.items():
                ingest(store, open_source(str(folder)), name=name, base=None if name == "base" else "base")
            ours, theirs = FamilyZoo(store, names, 256 << 20), Transformers(folders, names)
            warm = Load(names, prompts, 4)
            ours.run(warm), theirs.run(warm)
            rows = []
            for _ in range(pairs):
                mine, other = timed(ours, load), timed(theirs, load)
                rows.append(
                    {
                        "ours": {"decode": mine.decode, "whole": mine.whole},
                        "transformers": {"decode": other.decode, "whole": other.whole},
                        "same_tokens": agreement(mine.answers, other.answers),
                    }
                )
            memory = asdict(ours.driver.memory())
            with store.catalog.reading() as catalog:
                distinct = {t.digest: t.nbytes for name in names for t in catalog.model(name).tensors}
            ours.driver.shutdown()
    return {
        "kind": kind,
        "size": size,
        "dtype": dtype,
        "models": count,
        "requests_per_model": requests,
        "prompt_tokens": prompt,
        "new_tokens": tokens,
        "tokens_per_second": rows,
        "ratio": {
            what: spread([row["ours"][what] / row["transformers"][what] for row in rows])
            for what in ("decode", "whole")
        },
        "memory": {
            **memory,
            "distinct": sum(distinct.values()),
            "resident_over_distinct": memory["weights"] / sum(distinct.values()),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=["full", "lora"], action="append")
    parser.add_argument("--size", choices=list(SHAPES), action="append")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reports = [
        measure(kind, size, args.dtype, args.models, args.requests, args.tokens, args.prompt, args.pairs)
        for size in args.size or list(SHAPES)
        for kind in args.kind or ["full", "lora"]
    ]
    document = {
        "benchmark": "shared_family",
        "shapes": SHAPES,
        "threads": args.threads,
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "reports": reports,
    }
    deliver(document, args.output)


if __name__ == "__main__":
    main()
