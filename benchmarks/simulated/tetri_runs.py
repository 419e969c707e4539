"""Run TetriInfer's interference study (section 2.2) on the simulator's scheduler and agents: OPT-13B on one device.

Prompts are not cut, and nothing limits a step but its sequences, as in the engine of the paper: what comes together
runs together. All times are virtual, so the same call gives the same figures on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.played import Played
from runtime.sim.workload.requests import Demand

#: Tokens of prompts, and of a light and a heavy answer (section 2.2; light ones have 20 to 100, heavy ones above 512).
LIGHT_PROMPT, HEAVY_PROMPT = 18, 512
LIGHT_ANSWERS, HEAVY_ANSWERS = (20, 100), (513, 768)
#: Tokens per second where steps grow: prompts of one request, and decoding rows.
PROMPT_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Rows of Figure 5.
BATCH = 128
_START, _MS = round(LOADED * 1e9), 1e6
#: Answer of sequences that decode beside something, and the time after which that comes, in ns.
_BESIDE, _LATER = 60, 600_000_000


@dataclass(frozen=True, slots=True)
class Interference:
    """The length of a step with decoding rows alone, and with prompts beside them, in ms."""

    alone: float
    beside: float


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """A batch that stays full: tokens per second, and ms per token of light decodes."""

    rate: float
    per_token: float


@dataclass(frozen=True, slots=True)
class Rig:
    """One device of a kind of `sim.cost.hardware`, with OPT-13B loaded."""

    gpu: str

    def prompts(self, *tokens: int) -> float:
        """Return the ms until prompts that come together have their first tokens."""
        played = self._played([(0, count, 1) for count in tokens])
        return (max(played.ledger.first) - _START) / _MS

    def decoding(self, rows: int, answer: int = 33) -> float:
        """Return the tokens per second of so many rows that decode together, behind light prompts."""
        ledger = self._played([(0, LIGHT_PROMPT, answer)] * rows).ledger
        return rows * (answer - 1) / (max(ledger.ended) - max(ledger.first)) * 1e9

    def beside(self, rows: int, *prompts: int) -> Interference:
        """Return what prompts that come while so many rows decode make of the one step that has both.

        The rows' answers end later by the difference of both kinds of step.
        """
        decodes = [(0, LIGHT_PROMPT, _BESIDE)] * rows
        quiet = self._played(decodes).ledger
        busy = self._played([*decodes, *((_LATER, count, 1) for count in prompts)]).ledger
        alone = (quiet.ended[0] - quiet.first[0]) / (_BESIDE - 1)
        return Interference(alone / _MS, (alone + busy.ended[0] - quiet.ended[0]) / _MS)

    def steady(self, heavy: float, requests: int = 2400) -> SteadyBatch:
        """Return the rates of a full batch, of which a share are heavy decodes, once it has both in that proportion.

        More requests wait than fit; as heavy answers are longer, fewer of them come for the same share of the batch.
        Measured from a third to two thirds of all tokens.
        """
        light, long = np.mean(LIGHT_ANSWERS), np.mean(HEAVY_ANSWERS)
        coming = heavy * light / (heavy * light + (1 - heavy) * long)
        draws = np.random.default_rng(0)
        is_heavy = draws.random(requests) < coming
        answers = [int(draws.integers(*(HEAVY_ANSWERS if each else LIGHT_ANSWERS), endpoint=True)) for each in is_heavy]
        played = self._played([(0, LIGHT_PROMPT, answer) for answer in answers], max_num_seqs=BATCH)
        ledger = played.ledger
        known = [each for each in ledger.samples if ledger.made / 3 <= each.tokens <= 2 * ledger.made / 3]
        begin, end = known[0], known[-1]
        mine = [
            (ledger.ended[at] - ledger.first[at]) / (answers[at] - 1)
            for at in range(requests)
            if not is_heavy[at] and begin.at <= ledger.first[at] and ledger.ended[at] <= end.at
        ]
        return SteadyBatch((end.tokens - begin.tokens) / (end.at - begin.at) * 1e9, float(np.mean(mine)) / _MS)

    def _played(self, requests: Sequence[tuple[int, int, int]], **policy: Any) -> Played:
        """Run requests of (ns after the start, tokens of the prompt, tokens of the answer)."""
        made = scenario(self.gpu, **policy)
        at, prompt, answer = np.array(requests, dtype=np.int64).T
        demand = Demand(made.models(), at + _START, np.zeros(len(at), dtype=np.int64), prompt, answer)
        return play(made, "whole prompts", demand)


def scenario(gpu: str, **policy: Any) -> Scenario:
    """Return a scenario of one device, without requests of its own. Raises InputError for an unknown kind."""
    values = {
        "provision": "blocks", "parts": 1, "page_layers": 40, "max_model_len": 4096, "control": STILL,
        "prefill_chunk": 4096, "max_num_batched_tokens": 65_536, "max_num_seqs": 1024, **policy,
    }  # fmt: skip
    return scenario_of(
        "tetri",
        {
            "cluster": {"gpu": gpu, "servers": [1], "weights": 0.95},
            "apps": {"ladder": ["opt-13b"], "accuracy": [1.0]},
            "policies": {"whole prompts": values},
        },
    )
