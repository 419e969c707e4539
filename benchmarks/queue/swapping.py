"""Measure requests that give way for lack of pages: computed again, or kept in host memory (QL-10, QL-11).

    python -m benchmarks.queue.swapping STORE MODEL [--requests 16] [--prompt 1200] [--tokens 300] [--room 6]
        [--host 1GiB] [--side recompute]… [--rounds 3] [--output FILE]

Requests with long random prompts come at once; the pages hold `--room` of them at full length. All are admitted that
fit with their prompts, and as answers grow the latest ones give way. A side is a `--preemption-mode`, with a driver of
its own on the real engine; the sides take turns. `ample` has pages for all, so that nothing gives way.

- `tokens_per_second`: generated tokens until the last request has ended.
- `computed_again`: tokens of prompts and answers that were computed a second time.
- `brought_back`: tokens that host memory kept instead.
- `same`: whether all answers have the tokens of the first side.
- `copy`, `prefill`: estimates beside outcomes, as `cluster.estimates` has them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

SIDES = ("ample", "recompute", "swap", "auto")
#: Tokens of each sequence.
Answers = dict[str, list[int | None]]


def make_requests(model: str, args: argparse.Namespace) -> tuple[SequenceRequest, ...]:
    """Return requests with prompts that differ by up to a tenth in length."""
    rng = random.Random(args.seed)

    def one(number: int) -> SequenceRequest:
        prompt = tuple(rng.randrange(1000) for _ in range(args.prompt - rng.randrange(args.prompt // 10)))
        return SequenceRequest(f"s{number}", f"s{number}", model, prompt, SamplingParams(args.tokens, ignore_eos=True))

    return tuple(map(one, range(args.requests)))


def run(zoo: Zoo, model: str, side: str, args: argparse.Namespace, token_bytes: int) -> tuple[dict[str, Any], Answers]:
    """Return the figures of one side, and its answers."""
    room = args.requests if side == "ample" else args.room
    mode = "recompute" if side == "ample" else side
    options = ServeOptions(
        kv_cache_memory_bytes=int(1.02 * room * (args.prompt + args.tokens) * token_bytes),
        host_memory=args.host,
        preemption_mode=mode,
        plan=args.plan,
    )
    driver = start_driver(zoo, options, choose(zoo, [model]))
    try:
        warm = SequenceRequest("warm", "warm", model, tuple(range(300)), SamplingParams(8, ignore_eos=True))
        for _ in driver.run([warm]):
            pass
        answers: Answers = {}
        before, begin = driver.state().counters, time.monotonic()
        for event in driver.run([replace(one, arrival=time.monotonic_ns()) for one in make_requests(model, args)]):
            answers.setdefault(event.seq, []).append(event.token)
        seconds, counters = time.monotonic() - begin, driver.state().counters
        estimates = {each["kind"]: each for each in driver.snapshot()["estimates"]}
    finally:
        driver.shutdown()
    figures = {
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(map(len, answers.values())) / seconds, 1),
        "preemptions": counters.preemptions - before.preemptions,
        "computed_again": counters.resumed_tokens - before.resumed_tokens,
        "brought_back": counters.swapped_tokens - before.swapped_tokens,
        "copied_bytes": counters.swapped_bytes - before.swapped_bytes,
        **{kind: estimates[kind] for kind in ("copy", "prefill") if kind in estimates},
    }
    return figures, answers


def measure(zoo: Zoo, model: str, sides: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return each side's figures, one list entry per round."""
    token_bytes = args.token_bytes
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    first: Answers | None = None
    for turn in range(args.rounds):
        for side in sides if turn % 2 == 0 else tuple(reversed(sides)):
            if side == "ample" and turn:
                continue
            figures, answers = run(zoo, model, side, args, token_bytes)
            first = first or answers
            found[side].append({**figures, "same": answers == first})
            print(side, found[side][-1], flush=True)
    return {"sides": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--room", type=int, default=6, help="requests of full length that the pages hold")
    parser.add_argument(
        "--token-bytes", type=int, default=23_040, help="K and V of a token; default: SmolLM2-135M, bf16"
    )
    parser.add_argument("--host", default="1GiB", help="host memory")
    parser.add_argument("--plan", default="off")
    parser.add_argument("--side", action="append", choices=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with Zoo(args.store, create=False) as zoo:
        deliver(measure(zoo, zoo.model(args.model).name, args.side or SIDES, args), args.output)


if __name__ == "__main__":
    main()
