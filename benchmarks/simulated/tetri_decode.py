"""Compare rules of decode admission and of the choice of a decode device (TetriInfer, sections 3.4 and 5.2.4).

    python -m benchmarks.simulated.tetri_decode admission [--apart] [--lengths long] [--rate 5 | --clients N]
    python -m benchmarks.simulated.tetri_decode choice [--seeds 10] [--lengths chat] [--rate 0] [--each 32]

`admission`: OPT-13B on two V100 that split each layer. `--rate`: requests per second, 5 is more than it decodes;
`--clients`: so many ask one request after another instead. `--apart`: with another such device for prompts.
`choice`: `--each` requests for each of 2 to 8 such devices that decode, all at once or `--rate` per second and device.

Both: `--lengths`: kinds of lengths (`SPREADS`); `--pool`: tokens of K and V that a device holds, 0: what the weights
leave. Several of each make a grid. Lengths are hidden from the scheduler: it gets forecasts of buckets 200 tokens wide,
right in 74.9 % (the paper's predictor) or exact ones, or learns from answers. Times are virtual.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.models.family import family_of
from runtime.sim.workload.requests import Demand, RequestClass

#: Most tokens of a prompt and its answer.
LONGEST = 2048


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Lengths spread as a logarithm is normal, answers over two orders of magnitude (as in Figure 1).

    Fields:
        prompt, answer: Medians, in tokens.
        most, longest: Most tokens of an answer and of a prompt.
        width: Standard deviation of the logarithms of prompts; 1 of answers.
        heavy, heavier: Share of the answers that have another median, and that.
        context: Most tokens of a prompt and its answer.
    """

    prompt: int
    answer: int
    most: int
    longest: int = 512
    width: float = 1.0
    heavy: float = 0.0
    heavier: int = 0
    context: int = LONGEST


#: As of chat, and with long answers, of which K and V grow far beyond what a prompt needs.
CHAT, LONG = LengthSpread(100, 180, 1024), LengthSpread(30, 500, 1500)
#: `documents`: prompts of which K and V are dear to compute again, and long answers. `few heavy`: three of ten answers
#: are heavy, the rest light.
SPREADS: Mapping[str, LengthSpread] = {
    "chat": CHAT,
    "long": LONG,
    "documents": LengthSpread(1400, 400, 1500, 2000, 0.25, context=2 * LONGEST),
    "few heavy": LengthSpread(100, 40, 1500, heavy=0.3, heavier=600),
}
#: Lengths known exactly, by the paper's predictor, and as learned from answers.
KNOWLEDGE: Mapping[str, Mapping[str, Any]] = {
    "exact": {"hidden": True, "granularity": 1},
    "predicted": {"hidden": True, "granularity": 200, "accuracy": 0.749},
    "learned": {"hidden": True},
}
RULES = ("greedy", "static", "dynamic", "peak")
CHOICES = ("po2", "least", "random", "worst", "load")
#: A request is good if its first token comes within the first, and each further one within the second (seconds): the
#: objectives of Past-Future (arXiv 2507.10150, section 5).
GOOD = (10.0, 1.5)
#: Short requests before all, that are not counted.
_WARM = 200
_START = round(LOADED * 1e9)


class DecodeCase(NamedTuple):
    """What is asked of a cluster.

    Fields:
        lengths: A key of `SPREADS`.
        pool: Tokens of K and V that a device holds; 0: what the weights leave.
        rate: Requests per second, of each device that decodes where it is chosen among several; 0: all at once.
        clients: Clients that ask one request after another instead; 0: none.
        order: The order of what waits (`--plan`), by the deadline of the first token if it has any.
    """

    lengths: str = "long"
    pool: int = 0
    rate: float = 0.0
    clients: int = 0
    order: str = "off"


#: What the choice is measured with, by default.
CHATS = DecodeCase("chat")


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One run.

    Fields:
        preemptions: Sequences that gave way for want of pages.
        good: Good requests per second; `rate`: all of them.
        mean: Mean seconds until a request has ended; `worst`: 99 % take no longer.
        whole: Seconds until all have ended.
        late, halted: Shares of the requests with a late first token, and with a too long gap.
    """

    preemptions: int
    good: float
    rate: float
    mean: float
    worst: float
    whole: float
    late: float
    halted: float


def demand(model: str, requests: int, rate: float, seed: int, spread: LengthSpread) -> Demand:
    """Return requests behind those that let devices load their weights. `rate`: per second; 0: all at once."""
    draws = np.random.default_rng(seed)
    at = np.cumsum(draws.exponential(1e9 / rate, requests)) if rate else np.zeros(requests)
    prompt = np.clip(draws.lognormal(np.log(spread.prompt), spread.width, requests), 4, spread.longest)
    answer = draws.lognormal(np.log(spread.answer), 1.0, requests)
    if spread.heavy:
        heavier = draws.lognormal(np.log(spread.heavier), 0.5, requests)
        answer = np.where(draws.random(requests) < spread.heavy, heavier, answer)
    answer = np.clip(answer, 2, spread.most)
    numbers = (np.rint(each).astype(np.int64) for each in (at + _START, prompt, answer))
    at, prompt, answer = numbers
    early = np.full(_WARM, _START // 2)  # so many at once that each device loads its weights
    at, prompt, answer = (np.concatenate(each) for each in ((early, at), ([4] * _WARM, prompt), ([40] * _WARM, answer)))
    return Demand((model,), at, np.zeros(len(at), dtype=np.int64), prompt, answer)


def scenario(decoders: int, net: str = "nvlink3", pool: int = 0, context: int = LONGEST, **policy: Any) -> Scenario:
    """Return a scenario with a device for prompts for every two that decode; 0: with one device for both.

    K and V travel over links of the kind `net` when a prompt is done, as in the paper.
    """
    policy["decode"] = {"grain": "request", **policy.get("decode", {})}
    roles = ["prefill"] * -(-decoders // 2) + ["decode"] * decoders
    values = {
        "provision": "blocks", "parts": 1, "page_layers": 40, "max_model_len": context, "control": STILL,
        "roles": roles, "prefill_chunk": 512, "max_num_batched_tokens": 512, "max_num_seqs": 256,
        "placement": "replicate", **policy,
    }  # fmt: skip
    tables = {
        "cluster": {"gpu": "2xV100-tetri", "servers": [1] * max(len(roles), 1), "weights": 0.95, "net": net},
        "apps": {"ladder": ["opt-13b"], "accuracy": [1.0]},
        "asked": {"longest": context},
        "policies": {"decode": values},
    }
    made = scenario_of("tetri-decode", tables)
    if not pool:
        return made
    cutting = made.policies["decode"].cutting
    family = family_of(made.apps.apps(), cutting)
    needed = family.nbytes + -(-pool // cutting.page_tokens) * family.page_bytes
    memory = made.cluster.cluster().servers[0].gpu.memory
    # Half a page more, so that rounding the share takes none away.
    share = (needed + family.page_bytes // 2) / memory
    return replace(made, cluster=replace(made.cluster, usable=share, weights=0.99))


def decoded(
    decoders: int, requests: int, rate: float, seed: int, spread: LengthSpread = CHAT, pool: int = 0,
    clients: int = 0, order: str = "off", **policy: Any,
) -> DecodeRun:  # fmt: skip
    """Run requests on so many devices that decode."""
    made = scenario(decoders, pool=pool, context=spread.context, order={"plan": order}, **policy)
    asked = replace(demand("opt-13b", requests, rate, seed, spread), clients=clients)
    if order != "off":
        objective = RequestClass("first", ttft_slo_ms=round(GOOD[0] * 1000))
        asked = replace(asked, classes=(objective,), kind=np.zeros(len(asked), dtype=np.int64))
    played = play(made, "decode", asked)
    ledger = played.ledger
    arrived, first, ended, gap = (
        np.array(each, dtype=float)[_WARM:] for each in (ledger.arrived, ledger.first, ledger.ended, ledger.gap)
    )
    took = (ended - arrived) / 1e9
    whole = (ended.max() - arrived.min()) / 1e9
    late, halted = (first - arrived) / 1e9 > GOOD[0], gap / 1e9 > GOOD[1]
    return DecodeRun(
        played.counts["preemptions"], float(np.count_nonzero(~late & ~halted)) / whole, requests / whole,
        float(took.mean()), float(np.quantile(took, 0.99)), whole, float(late.mean()), float(halted.mean()),
    )  # fmt: skip


def admission(
    seeds: Sequence[int], load: DecodeCase, requests: int, decoders: int, known: Sequence[str] = tuple(KNOWLEDGE),
    rules: Sequence[str] = RULES,
) -> dict[str, dict[str, list[DecodeRun]]]:  # fmt: skip
    """Return the runs of each rule with each knowledge of lengths."""

    def runs(rule: str, lengths: Mapping[str, Any]) -> list[DecodeRun]:
        settings = {"decode": {"admission": rule}}
        return [
            decoded(
                decoders, requests, 0.0 if load.clients else load.rate, seed, SPREADS[load.lengths], load.pool,
                load.clients, load.order, **settings, lengths={**lengths, "seed": seed},
            )
            for seed in seeds
        ]  # fmt: skip

    return {name: {rule: runs(rule, KNOWLEDGE[name]) for rule in rules} for name in known}


def choice(
    seeds: Sequence[int], decoders: Sequence[int], load: DecodeCase = CHATS, each: int = 32,
    rules: Sequence[str] = CHOICES, **decode: Any,
) -> dict[int, dict[str, list[DecodeRun]]]:  # fmt: skip
    """Return the runs of each rule for each number of devices that decode."""

    def runs(count: int, rule: str) -> list[DecodeRun]:
        settings = {"decode": {"choice": rule, **decode}}
        return [
            decoded(
                count, each * count, load.rate * count, seed, SPREADS[load.lengths], load.pool,
                order=load.order, **settings, lengths={**KNOWLEDGE["predicted"], "seed": seed},
            )
            for seed in seeds
        ]  # fmt: skip

    return {count: {rule: runs(count, rule) for rule in rules} for count in decoders}


def no_worse(better: Sequence[DecodeRun], worse: Sequence[DecodeRun]) -> int:
    """Return in how many seeds requests take no longer on the mean than with the other rule."""
    return sum(one.mean <= two.mean for one, two in zip(better, worse, strict=True))


def _show(title: str, found: Mapping[Any, Mapping[str, Sequence[DecodeRun]]]) -> None:
    print(f"{title}\n{'':>10} {'':>8} {'preempted':>10} {'good/s':>8} {'all/s':>8} {'mean s':>8} {'p99 s':>8} "
          f"{'whole s':>8} {'late':>8} {'halted':>8}")  # fmt: skip
    for key, some in found.items():
        for rule, runs in some.items():
            columns = [np.mean([getattr(run, name) for run in runs]) for name in DecodeRun.__dataclass_fields__]
            print(f"{key:>10} {rule:>8} {columns[0]:>10.1f} " + " ".join(f"{each:>8.2f}" for each in columns[1:]))
        if "peak" in some and len(some) > 1:
            good = {rule: np.mean([run.good for run in runs]) for rule, runs in some.items()}
            others = [rate for rule, rate in good.items() if rule in ("static", "dynamic")]
            print(f"{key:>10} good/s of peak by the better of static and dynamic: {good['peak'] / max(others):.3f}")
        pairs = [pair for pair in (("po2", "random"), ("random", "worst"), ("po2", "load")) if set(pair) <= set(some)]
        for one, two in pairs:
            print(f"{key:>10} {one} takes no longer than {two} in {no_worse(some[one], some[two])} seeds", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("study", choices=("admission", "choice"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengths", choices=SPREADS, nargs="+", default=[], help="long (admission), chat (choice)")
    parser.add_argument("--pool", type=int, nargs="+", default=[0], help="tokens of K and V on a device; 0: all it has")
    parser.add_argument("--rate", type=float, nargs="+", default=[],
                        help="requests per second: 5 (admission); of each device, 0: all at once (choice)")  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="+", default=[0], help="instead, clients (admission)")
    parser.add_argument("--plan", nargs="+", default=["off"], help="order of what waits, as of zoo serve")
    parser.add_argument("--requests", type=int, default=400, help="requests (admission)")
    parser.add_argument("--known", choices=KNOWLEDGE, nargs="+", default=list(KNOWLEDGE), help="lengths (admission)")
    parser.add_argument("--rules", choices=RULES + CHOICES, nargs="+", default=[], help="all of the study's")
    parser.add_argument("--decoders", type=int, nargs="+", default=[2, 4, 8], help="devices that decode (choice)")
    parser.add_argument("--each", type=int, default=32, help="requests for each device (choice)")
    parser.add_argument("--reports", type=int, default=0, help="period of reports of loads in ms (choice)")
    parser.add_argument("--apart", action="store_true", help="prompts on another device (admission)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    seeds, chooses = range(given.seeds), given.study == "choice"
    lengths, rates = given.lengths or ["chat" if chooses else "long"], given.rate or [0.0 if chooses else 5.0]
    rules, documents = given.rules or (CHOICES if chooses else RULES), []
    for load in map(DecodeCase._make, product(lengths, given.pool, rates, given.clients, given.plan)):
        found: Mapping[Any, Mapping[str, Sequence[DecodeRun]]] = (
            choice(seeds, given.decoders, load, given.each, rules, load_reports_ms=given.reports)
            if chooses
            else admission(seeds, load, given.requests, int(given.apart), given.known, rules)
        )
        if given.json:
            documents.append({**load._asdict(), "runs": {
                key: {rule: [asdict(run) for run in runs] for rule, runs in some.items()} for key, some in found.items()
            }})  # fmt: skip
        else:
            _show(", ".join(f"{name} {value}" for name, value in load._asdict().items()), found)
    if given.json:
        print(json.dumps(documents))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
