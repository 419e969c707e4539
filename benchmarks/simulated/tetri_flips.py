"""Compare fixed roles with roles that the scheduler changes, under a load that shifts (TetriInfer, section 3.5).

    python -m benchmarks.simulated.tetri_flips [--seeds 3] [--json]

OPT-13B on three devices of two V100 each. For ten minutes prompts are long and answers short, for ten minutes it is the
other way round, and so on, three times in all. Fixed roles suit one of the two; `spare` and `idle` begin with those for
long prompts and have the defaults of `zoo serve --role-changes`. `both`: prompts and decodes mix on all devices. Times
are virtual.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.simulated.tetri_decode import LONGEST
from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import scenario_of
from runtime.sim.workload.requests import Demand

#: Requests per second, and median tokens of prompts and answers.
PHASES = ((10.0, 900, 20), (2.0, 30, 700))
#: K and V travel when a prompt is done, as in the paper.
_BY_REQUEST = {"decode": {"grain": "request"}}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "both": {"roles": []},
    "2 prefill, 1 decode": {"roles": ["prefill", "prefill", "decode"], **_BY_REQUEST},
    "1 prefill, 2 decode": {"roles": ["prefill", "decode", "decode"], **_BY_REQUEST},
    "spare": {"roles": ["prefill", "prefill", "decode"], "role_changes": {"watch": "spare"}, **_BY_REQUEST},
    "idle": {"roles": ["prefill", "prefill", "decode"], "role_changes": {"watch": "idle"}, **_BY_REQUEST},
}


@dataclass(frozen=True, slots=True)
class ShiftRun:
    """One run. Seconds of requests that arrived while prompts were long, and while answers were.

    Fields:
        changes: Changes of roles.
        first_long: Until the first token, 99 % take no longer, with long prompts.
        gap_long: Longest time between two tokens of an answer, 99 % have no longer one, with long prompts.
        mean_long, mean_answers: Until a request has ended, with long prompts and with long answers.
        whole: Until all have ended.
    """

    changes: int
    first_long: float
    gap_long: float
    mean_long: float
    mean_answers: float
    whole: float


def demand(minutes: float, times: int, seed: int) -> Demand:
    """Return requests of phases in turn, each so many minutes long."""
    draws = np.random.default_rng(seed)
    at, prompt, answer = list[float](), list[int](), list[int]()
    for turn in range(times):
        rate, prompts, answers = PHASES[turn % 2]
        now = LOADED + turn * minutes * 60
        end = now + minutes * 60
        while (now := now + draws.exponential(1 / rate)) < end:
            at.append(now)
            prompt.append(int(np.clip(draws.lognormal(np.log(prompts), 0.3), 4, 1300)))
            answer.append(int(np.clip(draws.lognormal(np.log(answers), 0.3), 2, 1400 - min(prompts, 800))))
    numbers = [np.array(each, dtype=np.int64) for each in (np.array(at) * 1e9, prompt, answer)]
    return Demand(("opt-13b",), numbers[0], np.zeros(len(at), dtype=np.int64), numbers[1], numbers[2])


def shifted(settings: Mapping[str, Any], minutes: float, times: int, seed: int) -> ShiftRun:
    """Run the phases with these settings."""
    tables = {
        "cluster": {"gpu": "2xV100-tetri", "servers": [1] * 3, "weights": 0.95, "net": "nvlink3"},
        "apps": {"ladder": ["opt-13b"], "accuracy": [1.0]},
        "asked": {"longest": LONGEST},
        "policies": {
            "shift": {
                "provision": "blocks", "parts": 1, "page_layers": 40, "max_model_len": LONGEST, "control": STILL,
                "prefill_chunk": 512, "max_num_batched_tokens": 512, "max_num_seqs": 256, "placement": "replicate",
                **settings,
            }
        },
    }  # fmt: skip
    asked = demand(minutes, times, seed)
    played = play(scenario_of("tetri-flips", tables), "shift", asked)
    ledger = played.ledger
    arrived, first, ended, gap = (
        np.array(each, dtype=float) / 1e9 for each in (ledger.arrived, ledger.first, ledger.ended, ledger.gap)
    )
    turn = ((arrived - LOADED) // (minutes * 60)).astype(int) % 2
    counted = arrived > LOADED + 60  # without the first minute, in which devices load their weights
    long, answers, took = counted & (turn == 0), turn == 1, ended - arrived
    return ShiftRun(
        played.counts["role_changes"], float(np.quantile((first - arrived)[long], 0.99)),
        float(np.quantile(gap[long], 0.99)), float(took[long].mean()), float(took[answers].mean()),
        float(ended.max() - arrived.min()),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of a phase")
    parser.add_argument("--phases", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = {
        name: [shifted(settings, given.minutes, given.phases, seed) for seed in range(given.seeds)]
        for name, settings in SETTINGS.items()
    }
    if given.json:
        print(json.dumps({name: [asdict(run) for run in runs] for name, runs in found.items()}))
        return 0
    names = tuple(ShiftRun.__dataclass_fields__)
    print(f"{'':>20} " + " ".join(f"{name:>12}" for name in names))
    for name, runs in found.items():
        print(f"{name:>20} " + " ".join(f"{np.mean([getattr(run, each) for run in runs]):>12.2f}" for each in names))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
