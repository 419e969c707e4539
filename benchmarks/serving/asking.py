"""One side of `through_http` in its own process, controlled by orders: the engine without a server, or HTTP clients.

    python -m benchmarks.serving.asking inside STORE MODEL | http URL MODEL [--threads N]
        [--max-num-batched-tokens N]

Orders are JSON lines on stdin, `{"clients", "requests", "prompt", "tokens", "seed"}`: send `requests` requests,
`clients` at a time, with random prompts of `prompt` ids, each answered greedily with exactly `tokens` tokens.

Answers are JSON lines on stdout, `{"seconds", "tokens", "cpu", "first"}`: `cpu` is this process's CPU seconds, `first`
each request's seconds to its first token. A first line, `{}`, means that the process is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

Order = dict[str, int]
#: Seconds to each request's first token, and the total of tokens.
Outcome = tuple[list[float], int]
Asking = Callable[[Order], Outcome]


def prompts_of(order: Order) -> list[tuple[int, ...]]:
    draw = random.Random(order["seed"])
    return [tuple(draw.randrange(300, 8000) for _ in range(order["prompt"])) for _ in range(order["requests"])]


def inside(args: argparse.Namespace) -> Asking:
    """Return the function that runs an order on the engine through its driver: no text, no event loop."""
    import torch

    from cli.serving.driver import start_driver
    from cli.serving.models import Chosen
    from cli.serving.options import ServeOptions
    from runtime.types import SamplingParams, SequenceRequest
    from zoo.api import Zoo

    torch.set_num_threads(args.threads)
    options = ServeOptions(
        backend=args.backend, max_num_batched_tokens=args.max_num_batched_tokens, decode_credit=args.credit
    )
    driver = start_driver(Zoo(Path(args.where), create=False), options, Chosen((args.model,), ()))
    numbers = count()

    def ask(order: Order) -> Outcome:
        params = SamplingParams(max_tokens=order["tokens"], ignore_eos=True)
        firsts: list[float] = []
        tokens = 0
        prompts = prompts_of(order)
        for at in range(0, len(prompts), order["clients"]):
            wave = [
                SequenceRequest(str(next(numbers)), "r", args.model, one, params)
                for one in prompts[at : at + order["clients"]]
            ]
            begin, begun = time.perf_counter(), set()
            for event in driver.run(wave):
                tokens += event.token is not None
                if event.seq not in begun:
                    begun.add(event.seq)
                    firsts.append(time.perf_counter() - begin)
        return firsts, tokens

    return ask


def http(args: argparse.Namespace) -> Asking:
    """Return the function that runs an order with streaming clients. It raises RuntimeError if any request fails."""
    from runtime.bench.drive import WallClock, drive
    from runtime.bench.http import HttpClient
    from runtime.bench.workload import Workload, WorkloadRequest

    async def asked(order: Order) -> Outcome:
        clock = WallClock()
        asks = tuple(
            WorkloadRequest(i, 0.0, args.model, prompt, order["tokens"]) for i, prompt in enumerate(prompts_of(order))
        )
        async with HttpClient.connected(args.where, clock) as client:
            answers = await drive(Workload(asks, order["clients"]), client, clock)
        if failed := [answer for answer in answers if answer.error is not None]:
            raise RuntimeError(f"{len(failed)} requests failed, one with {failed[0].error}: {failed[0].heard.detail}")
        return [answer.ttft or 0.0 for answer in answers], sum(sum(answer.heard.lots) for answer in answers)

    return lambda order: asyncio.run(asked(order))


SIDES: dict[str, Callable[[argparse.Namespace], Asking]] = {"inside": inside, "http": http}


def main() -> None:
    parser = argparse.ArgumentParser(description="One side of through_http.")
    parser.add_argument("side", choices=tuple(SIDES))
    parser.add_argument("where")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--backend", choices=("auto", "inline", "local"), default="auto")
    parser.add_argument("--credit", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    # Libraries may print to stdout: answers go to the original stdout, everything else to stderr.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ask = SIDES[args.side](args)
    print("{}", file=out)
    for line in sys.stdin:
        order = json.loads(line)
        begin, spent = time.perf_counter(), time.process_time()
        firsts, tokens = ask(order)
        answer: dict[str, Any] = {
            "seconds": time.perf_counter() - begin,
            "tokens": tokens,
            "cpu": time.process_time() - spent,
        }
        print(json.dumps({**answer, "first": firsts}), file=out)


if __name__ == "__main__":
    main()
