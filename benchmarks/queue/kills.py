"""Kill a server over and over while it answers keyed streams, and compare what clients got with an unkilled server's.

    python -m benchmarks.queue.kills STORE MODEL [--seeds 5] [--first-seed 0] [--kills 6] [--requests 8] [--output FILE]
                                     [--serve=--agents=2]

For each seed, requests (greedy and sampled, one or two choices, streamed) come in over the lives of the server, each of
which is killed with SIGKILL a random time after its first new token; the last one ends them all. Counted are requests
without an end (lost), event ids that came twice (doubled), choices whose tokens differ from the unkilled server's
(altered), the tokens that engines computed beside those of the unkilled server, and the time from a server's
announcement to the first new token of a stream that was under way. What is computed between the last look at the
counters and the kill, some milliseconds later, is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.queue.servers import KeyedStream, KillableServer, serving
from benchmarks.reports import deliver

_COMPUTED = ("prompt_tokens", "generated_tokens", "resumed_tokens")


@dataclass
class Totals:
    """What all seeds gave."""

    kills: int = 0
    requests: int = 0
    choices: int = 0
    lost: int = 0
    doubled: int = 0
    altered: int = 0
    errors: list[str] = field(default_factory=list)
    under_way: int = 0
    next_token: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    computed: int = 0
    computed_unkilled: int = 0

    def report(self) -> dict[str, Any]:
        """Return the figures as a document."""
        return {
            "kills": self.kills,
            "requests": self.requests,
            "choices": self.choices,
            "lost": self.lost,
            "doubled": self.doubled,
            "altered": self.altered,
            "errors": self.errors,
            "streams under way at a kill": self.under_way,
            "seconds to next token after ready": _spread(self.next_token),
            "seconds to start": _spread(self.start),
            "computed tokens": {
                "killed": self.computed,
                "unkilled": self.computed_unkilled,
                "ratio": round(self.computed / max(1, self.computed_unkilled), 3),
            },
        }


def bodies(seed: int, count: int, model: str, prompt: int, answer: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return the requests of a seed: prompts of token ids, every second one sampled, every fourth with two choices."""
    draw = random.Random(seed)
    return [
        {
            "model": model,
            "prompt": [draw.randrange(10, vocabulary) for _ in range(draw.randint(prompt // 2, prompt))],
            "max_tokens": draw.randint(answer // 2, answer),
            "ignore_eos": True,
            "temperature": 0.9 if number % 2 else 0,
            "seed": seed * 1000 + number,
            "n": 2 if number % 4 == 3 else 1,
            "stream": True,
            "return_token_ids": True,
        }
        for number in range(count)
    ]


def unkilled(server: KillableServer, given: Sequence[dict[str, Any]], totals: Totals) -> list[dict[int, list[int]]]:
    """Return the tokens of each choice of each request, which run together."""
    before = _computed(server)
    streams = [KeyedStream("", body) for body in given]
    threads = [threading.Thread(target=stream.follow, args=(server,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals.computed_unkilled += _computed(server) - before
    return [stream.tokens for stream in streams]


def killed(
    seed: int, given: Sequence[dict[str, Any]], arguments: argparse.Namespace, options: Sequence[str], totals: Totals
) -> list[KeyedStream]:
    """Run requests over servers that are killed; return what their clients got."""
    draw = random.Random(seed + 1)
    streams = [KeyedStream(f"{seed}-{number}", body) for number, body in enumerate(given)]
    per_life = -(-len(streams) // arguments.kills)
    for life in range(arguments.kills + 1):
        last = life == arguments.kills
        open_now = [stream for stream in streams[: per_life * (life + 1)] if not stream.ended]
        began = time.monotonic()
        with serving(arguments.store, arguments.model, options) as server:
            totals.start.append(server.ready - began)
            seen = {stream.key: (len(stream.arrivals), bool(stream.numbers)) for stream in open_now}
            threads = [threading.Thread(target=stream.follow, args=(server,)) for stream in open_now]
            for thread in threads:
                thread.start()
            if not last:
                while any(t.is_alive() for t in threads) and all(len(s.arrivals) == seen[s.key][0] for s in open_now):
                    time.sleep(0.01)
                time.sleep(draw.uniform(0.0, arguments.span))
                totals.computed += _computed(server)
                totals.under_way += sum(thread.is_alive() for thread in threads)
                server.kill()
                totals.kills += 1
            for thread in threads:
                thread.join()
            if last:
                totals.computed += _computed(server)
            totals.next_token += [
                stream.arrivals[count] - server.ready
                for stream in open_now
                for count, under_way in [seen[stream.key]]
                if under_way and len(stream.arrivals) > count
            ]
    return streams


def compare(streams: Sequence[KeyedStream], expected: Sequence[dict[int, list[int]]], totals: Totals) -> None:
    """Count what clients lost, got twice, and got otherwise than from the unkilled server."""
    for stream, reference in zip(streams, expected, strict=True):
        totals.requests += 1
        totals.choices += len(reference)
        totals.lost += not stream.ended
        totals.doubled += len(stream.numbers) - len(set(stream.numbers))
        totals.altered += sum(stream.tokens.get(index) != tokens for index, tokens in reference.items())
        totals.errors += stream.errors


def _computed(server: KillableServer) -> int:
    counters = server.counters()
    return sum(counters[name] for name in _COMPUTED)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "greatest": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=6, help="per seed")
    parser.add_argument("--requests", type=int, default=8, help="per seed")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt at most")
    parser.add_argument("--answer", type=int, default=96, help="tokens of a choice at most")
    parser.add_argument("--vocabulary", type=int, default=250, help="prompts draw from so many token ids")
    parser.add_argument(
        "--span", type=float, default=1.0, help="seconds from a life's first new token to its kill at most"
    )
    parser.add_argument("--serve", action="append", default=[], help="options of zoo serve: --serve=--agents=2")
    parser.add_argument("--queue", help="a PostgreSQL database; default: a folder")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    totals = Totals()
    given = {
        seed: bodies(
            seed, arguments.requests, arguments.model, arguments.prompt, arguments.answer, arguments.vocabulary
        )
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    }
    with serving(arguments.store, arguments.model, arguments.serve) as server:
        expected = {seed: unkilled(server, requests, totals) for seed, requests in given.items()}
    with tempfile.TemporaryDirectory() as folder:
        queue = arguments.queue or str(Path(folder) / "queue")
        for seed, requests in given.items():
            streams = killed(seed, requests, arguments, [*arguments.serve, "--queue", queue], totals)
            compare(streams, expected[seed], totals)
    deliver({"model": arguments.model, "serve": arguments.serve, **totals.report()}, arguments.output)


if __name__ == "__main__":
    main()
