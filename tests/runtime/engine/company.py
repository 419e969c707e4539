"""Random companies for the same-bits tests: models that share blocks, requests, and the limits under which they run.

    python -m tests.runtime.engine.company --seeds 100        # a long run: companies number 0 to 99 in each dtype

It prints how many sequences differ. With `--kernels stock` some do, which shows that the comparison can fail. A
request's log-probabilities over the whole vocabulary are compared as bits, alone and in a company.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import IA3Config, PrefixTuningConfig

from runtime.config import EngineConfig, KernelChoice
from runtime.types import SamplingParams, SequenceRequest, TokenEvent
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.conftest import Bench
from tests.runtime.engine.drive import Drive, Limits, PagedDevice, drive
from tests.runtime.engine.test_sharing import fine_tune

DTYPES = ("float32", "bfloat16")
#: Adapters of "base", which "tune" shares all blocks with but one layer, and a chain of two widths.
ADAPTED = ("base", "tune", "lora", "lora2", "ia3", "dora", "prefix", "bottleneck", "other neck", "stitched")
#: Models with layers of transformers' own.
STOCK = ("gpt2", "glora", "phi", "mixtral", "gemma2")
MODELS = (*ADAPTED, *STOCK)
_PROMPT = 90
#: The pool of all models together: little more than the longest sequence needs.
_POOL_BYTES = {"float32": 240 << 10, "bfloat16": 120 << 10}
_VOCABULARY = 1 << 20  # the log-probabilities of all tokens

Bits = tuple[tuple[int, str, str], ...]


def add_models(bench: Bench, dtype: str) -> None:
    """Put the family into the bench's store."""
    bench.family("llama", "base", num_hidden_layers=3, seed=1, dtype=dtype, tie_word_embeddings=True)
    fine_tune(bench, "base", "tune", 1)
    bench.lora("base", "lora", seed=2)
    bench.lora("base", "lora2", seed=3, r=3, target_modules=["q_proj", "down_proj"])
    scaled = IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    bench.peft("base", "ia3", scaled, seed=4)
    bench.lora("base", "dora", seed=5, use_dora=True)
    bench.peft("base", "prefix", PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), seed=6)
    bench.bottleneck("base", "bottleneck", seed=7)
    bench.bottleneck("base", "other neck", seed=8)
    wide = dict(hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    bench.family("llama", "wide", seed=9, dtype=dtype, **wide)
    put_stitch(bench.store, "base", "wide", dtype=getattr(torch, dtype))
    put_chain(bench.store, "stitched", ("base", 0, 2), ("wide", 1, 2))
    bench.family("gpt2", "gpt2", seed=10, dtype=dtype)
    bench.lora("gpt2", "glora", seed=11, target_modules=["c_attn", "c_fc"])
    bench.family("phi", "phi", seed=12, dtype=dtype)
    bench.family("mixtral", "mixtral", seed=13, dtype=dtype)
    bench.family("gemma2", "gemma2", seed=14, dtype=dtype)


@dataclass(frozen=True)
class Company:
    """Requests by the step before which they arrive, and what a step and the pool have room for."""

    arrivals: dict[int, list[SequenceRequest]]
    limits: Limits
    shares: bool
    credit: int


def company_of(seed: int, models: tuple[str, ...] = MODELS) -> Company:
    """Return a random company. Prompts of a model begin alike, so that some hit the prefix cache."""
    chance = random.Random(seed)
    arrivals: dict[int, list[SequenceRequest]] = {}
    some = [models[seed % len(models)], *chance.sample(models, chance.randint(0, 4))]
    for number in range(chance.randint(4, 10)):
        model = chance.choice(some) if number else some[0]
        chosen = random.Random(chance.randint(0, 1))
        prompt = [chosen.randrange(3, 60) for _ in range(_PROMPT)][: chance.choice((1, 2, 9, 17, 33, 60, 90))]
        prompt += [chance.randrange(3, 60) for _ in range(chance.randint(0, 2))]
        sampling = SamplingParams(
            chance.randint(2, 10), temperature=chance.choice((0.0, 0.9)), top_p=0.9, seed=chance.randrange(99),
            logprobs=None if chance.random() < 0.3 else _VOCABULARY, ignore_eos=True,
            prompt_logprobs=_VOCABULARY if chance.random() < 0.2 else None,
        )  # fmt: skip
        request = SequenceRequest(f"{model}.{seed}.{number}", f"r{number}", model, tuple(prompt), sampling)
        arrivals.setdefault(chance.choice((0, 0, 1, 2, 5, 12, 25)), []).append(request)
    budget = chance.choice((3, 8, 17, 33, 64, 512))
    return Company(arrivals, Limits(budget, chance.choice((3, 256))), chance.random() < 0.5, chance.choice((1, 4)))


def bits_of(events: list[TokenEvent]) -> Bits:
    """Return tokens and log-probabilities, of outputs and prompts, with every bit."""
    out = []
    for event in events:
        out.append(
            (event.token or 0, _hex(event.logprob), " ".join(f"{one.token} {_hex(one.logprob)}" for one in event.top))
        )
        for part in event.prompt_logprobs:
            for at, (chosen, top) in enumerate(zip(part.chosen, part.top, strict=True)):
                said = " ".join(f"{one.token} {_hex(one.logprob)}" for one in (chosen, *top))
                out.append((-1 - part.start - at, "", said))
    return tuple(sorted(out, key=lambda one: one[0] < 0 and one[0]))


def _hex(value: float | None) -> str:
    return "" if value is None else value.hex()


class Engines:
    """The engines of one dtype: one with all models and few pages, and one for each model alone."""

    def __init__(self, bench: Bench, dtype: str, kernels: KernelChoice = "auto") -> None:
        self._bench, self._dtype, self._kernels = bench, dtype, kernels
        self._together: PagedDevice | None = None
        self._alone: dict[str, PagedDevice] = {}
        self.preemptions = self.shared = 0

    def run_alone(self, request: SequenceRequest) -> Bits:
        """Run one request in an engine with its model only, its prompt in one chunk."""
        if request.model not in self._alone:
            self._alone[request.model] = self._engine(2 << 20, [request.model])
        return bits_of(drive(self._alone[request.model], {0: [request]}).events[request.seq])

    def run_together(self, company: Company) -> Drive:
        if self._together is None:
            self._together = self._engine(_POOL_BYTES[self._dtype], list(MODELS))
        out = drive(
            self._together, company.arrivals, company.limits, "cached" if company.shares else "off", company.credit
        )
        self.preemptions, self.shared = self.preemptions + out.preemptions, self.shared + out.shared
        return out

    def differing(self, company: Company) -> list[str]:
        """Return the sequences of a company that have other bits than alone."""
        out = self.run_together(company)
        asked = [request for each in company.arrivals.values() for request in each]
        return [one.seq for one in asked if bits_of(out.events[one.seq]) != self.run_alone(one)]

    def _engine(self, nbytes: int, names: list[str]) -> PagedDevice:
        config = EngineConfig(kv_cache_memory_bytes=nbytes, page_tokens=4, kernels=self._kernels)
        return PagedDevice(self._bench.store, config, names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kernels", default="auto")
    asked = parser.parse_args()
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as root:
            bench = Bench(Path(root))
            add_models(bench, dtype)
            side, begin, bad, count = Engines(bench, dtype, asked.kernels), time.monotonic(), [], 0
            for seed in range(asked.first, asked.first + asked.seeds):
                company = company_of(seed)
                count += sum(len(each) for each in company.arrivals.values())
                bad += side.differing(company)
            seconds = time.monotonic() - begin
            print(f"{dtype}: {asked.seeds} companies of {count} sequences in {seconds:.0f} s", end=", ")
            print(f"{side.preemptions} preemptions, {side.shared} shared tokens", end=": ")
            print(f"{len(bad)} sequences differ {bad[:40]}", flush=True)
            bench.store.close()


if __name__ == "__main__":
    main()
