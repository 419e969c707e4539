"""Define Infinite-LLM's instances, datasets and baselines as scenarios of the simulator (sections 6 and 6.1, Table 2).

    lent        instances with `--lending planned`
    alone       the same instances without loans: requests longer than one are refused (the paper's vLLM-v1)
    together    one instance on all GPUs, which split every matrix (the paper's vLLM-v2)

All run this project's scheduler, step by step, with chunks of 2,048 tokens; they differ in devices and loans alone.
An instance is one device of the simulator: one A100, or as many as split its layers (`sim.cost.hardware.split_gpu`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.models.shapes import SHAPES
from runtime.sim.workload.requests import Demand

SYSTEMS = ("lent", "alone", "together")
#: GPUs of a server.
_SERVER = 8
START = round(LOADED * 1e9)
#: Requests for each instance that come before all, their prompts, and when, in seconds. Weights are loaded on demand.
_WARM, _WARM_PROMPT, _WARM_AT = 8, 8000, 5.0
#: Tokens of a prompt that run at once, and tokens of a page.
CHUNK, _PAGE = 2048, 256
#: Decoding rows of a step beside a chunk: all sequences that a device runs.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Setup:
    """A row of Table 2.

    Fields:
        each: GPUs of an instance. The paper gives that of 13B (2) and of 7B (1, section 6.3); 4 hold the 70B's weights
            and its normal requests.
        normal: Longest context of normal requests, in tokens; long ones have up to twice as many.
    """

    model: str
    gpus: int
    each: int
    normal: int

    @property
    def name(self) -> str:
        return f"{self.model.partition('-')[2].upper()}, {self.gpus}"

    @property
    def instances(self) -> int:
        return self.gpus // self.each

    @property
    def page_tokens(self) -> int:
        return _PAGE

    def scenario(self, system: str, pace: int = 10**9, usable: float = 0.9, **policy: Any) -> Scenario:
        """Return the scenario of a system, without requests of its own.

        Args:
            pace: ns between two samples of the cluster.
            usable: Share of a device's memory for weights and pages.
            policy: Further settings of the policy.
        """
        count = self.gpus if system == "together" else self.each
        kind = "A100-80GB" if count == 1 else f"{count}xA100-80GB"
        servers = [1] if system == "together" else _servers(self.instances, _SERVER // self.each)
        values: dict[str, Any] = {
            "parts": 1, "page_layers": SHAPES[self.model].layers, "page_tokens": _PAGE,
            "max_model_len": 4 * self.normal, "control": STILL, "placement": "replicate", "prefix_caching": "off",
            "stride": 1, "prefill_chunk": CHUNK, "max_num_batched_tokens": CHUNK + _ROWS,
        }  # fmt: skip
        if system == "lent":
            values["lending"] = {"mode": "planned", "cap": 1.0}
        return scenario_of(
            "infinite",
            {
                "cluster": {"gpu": kind, "servers": servers, "weights": 0.95, "net": "200gbps", "usable": usable},
                "apps": {"ladder": [self.model], "accuracy": [1.0]},
                "pace": {"tick": pace},
                "policies": {system: values | policy},
            },
        )

    def warm(self, system: str) -> int:
        """Return how many requests come before all, so that every instance has loaded its weights."""
        return _WARM * (1 if system == "together" else self.instances)

    def demand(
        self, system: str, prompts: Sequence[int], answers: Sequence[int], at: Sequence[float] | None = None
    ) -> Demand:
        """Return requests of so many tokens, `at` seconds after the start, or at once; before them the `warm` ones."""
        warm = self.warm(system)
        begin = np.full(warm + len(prompts), START, dtype=np.int64)
        begin[:warm] = round(_WARM_AT * 1e9)
        if at is not None:
            begin[warm:] += np.rint(np.array(at) * 1e9).astype(np.int64)
        lengths = (
            np.array([of_warm] * warm + list(each), dtype=np.int64)
            for of_warm, each in ((_WARM_PROMPT, prompts), (8, answers))
        )
        return Demand((self.model,), begin, np.zeros_like(begin), *lengths)


def _servers(instances: int, most: int) -> list[int]:
    whole, rest = divmod(instances, most)
    return [most] * whole + ([rest] if rest else [])


SETUPS: Mapping[str, Setup] = {
    each.name: each
    for each in (
        Setup("llama-7b", 2, 1, 100_000),
        Setup("llama-13b", 4, 2, 140_000),
        Setup("llama2-70b", 8, 4, 300_000),
        Setup("llama-13b", 8, 2, 240_000),
        Setup("llama-7b", 16, 1, 600_000),
        Setup("llama-7b", 32, 1, 950_000),
    )
}
#: Shares of long requests.
LONG = (0.01, 0.1, 0.3)


def dataset(setup: Setup, long: float, requests: int, seed: int, answer: int = 256) -> tuple[list[int], list[int]]:
    """Return the prompts and answers of a dataset of Table 2.

    Contexts, prompt and answer together, are uniform within their range: up to `normal` tokens, and from there to twice
    as many for the share `long`. The paper does not split them: answers have up to `answer` tokens, uniform, and at
    most half of the context.
    """
    draws = np.random.default_rng([seed, setup.gpus, setup.normal])
    is_long = draws.permutation(np.arange(requests) < max(1, round(long * requests)))
    share = draws.random(requests)
    context = np.where(is_long, setup.normal * (1 + share), setup.normal * share).astype(np.int64).clip(2)
    answers = np.minimum(draws.integers(1, answer, requests, endpoint=True), context // 2).clip(1)
    return (context - answers).tolist(), answers.tolist()
