"""Kill a server over and over while it answers keyed streams, and compare what clients got with an unkilled server's.

    python -m benchmarks.queue.kills STORE MODEL [--seeds 5] [--first-seed 0] [--kills 6] [--requests 8] [--lines 500]
                                     [--output FILE] [--serve=--agents=2] [--slo-ms 8000]
                                     [--phase PHASE|all]... [--process server|agent|broker] [--brokered]

For each seed, requests (greedy and sampled, one or two choices, streamed) come in over the lives of the server, each of
which is killed with SIGKILL; the last one ends them all. With `--lines` a batch of so many lines runs beside them, and
the kills are spread over its run: each comes once a random number of lines of its share have ended. Without, a kill
comes a random time after the first new token of its life. With `--phase` each comes in that phase of a request's way
(`benchmarks.queue.phases`), and takes the server, or an agent of it, or the private RabbitMQ broker that it has with
`--brokered`; `kills` are those that did. MODEL may be several with commas: requests name them in turn.

Counted are requests without an end (lost), event ids that came twice (doubled), choices whose tokens differ from the
unkilled server's (altered), lines of the batch's output file that do (times aside), the tokens that engines computed
beside those of the unkilled server, and the time from a server's announcement to the first new token of each stream
that was under way, in phases also of the first of them: where models take turns, streams wait for those. What is
computed between the last look at the counters and the kill, some milliseconds later, is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.queue.keyed_batch import KeyedBatch, altered_lines, batch_lines
from benchmarks.queue.phases import PHASES, VICTIMS, PhaseLives, phases_of
from benchmarks.queue.rabbitmq import SETTLED, Broker, find_server
from benchmarks.queue.rabbitmq import broker as private_broker
from benchmarks.queue.servers import KeyedStream, KillableServer, serving
from benchmarks.reports import deliver

#: Figures of kills in a phase.
_OF_PHASES = (
    "kills", "requests", "choices", "lost", "doubled", "altered", "errors", "seconds to next token after ready",
    "seconds to the first of them",
)  # fmt: skip
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
    lines: int = 0
    altered_lines: int = 0
    errors: list[str] = field(default_factory=list)
    under_way: int = 0
    next_token: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
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
            "lines": self.lines,
            "altered lines": self.altered_lines,
            "errors": self.errors,
            "streams under way at a kill": self.under_way,
            "seconds to next token after ready": _spread(self.next_token),
            "seconds to the first of them": _spread(self.resumed),
            "seconds to start": _spread(self.start),
            "computed tokens": {
                "killed": self.computed,
                "unkilled": self.computed_unkilled,
                "ratio": round(self.computed / max(1, self.computed_unkilled), 3),
            },
        }


def bodies(
    seed: int, count: int, model: str, prompt: int, answer: int, vocabulary: int, slo_ms: int = 0
) -> list[dict[str, Any]]:
    """Return the requests of a seed: prompts of token ids, every second one sampled, every fourth with two choices.

    They name the models, one or several with commas, in turn. `slo_ms`: objective of the first, 0 for none; each next
    one has a millisecond more, so that it is a group of its own.
    """
    draw, models = random.Random(seed), model.split(",")
    return [
        {
            "model": models[number % len(models)],
            **({"slo_ms": slo_ms + number} if slo_ms else {}),
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


@dataclass
class Reference:
    """What an unkilled server gave: tokens of each choice of each request, and the lines of the batch's output file."""

    tokens: list[dict[int, list[int]]]
    output: list[bytes]


def unkilled(
    server: KillableServer, given: Sequence[dict[str, Any]], batch: KeyedBatch | None, totals: Totals
) -> Reference:
    """Return what requests and a batch, which run together, come to."""
    before = _computed(server)
    if batch is not None:
        batch.submit(server)
    streams = [KeyedStream("", body) for body in given]
    for thread in _followed(streams, server):
        thread.join()
    if batch is not None:
        batch.wait_for(server)
    totals.computed_unkilled += _computed(server) - before
    return Reference([stream.tokens for stream in streams], [] if batch is None else batch.output(server))


class Lives:
    """The lives of a server that is killed, with the streams of one seed and its batch, if it has one."""

    def __init__(
        self, seed: int, given: Sequence[dict[str, Any]], batch: KeyedBatch | None, arguments: argparse.Namespace,
        options: Sequence[str], totals: Totals,
    ) -> None:  # fmt: skip
        self._draw = random.Random(seed + 1)
        self._batch = batch
        self._arguments = arguments
        self._options = options
        self._totals = totals
        self.streams = [KeyedStream(f"{seed}-{number}", body) for number, body in enumerate(given)]
        self.output: list[bytes] = []

    def run(self) -> None:
        """Run all lives; the last one ends everything."""
        per_life = -(-len(self.streams) // self._arguments.kills)
        for life in range(self._arguments.kills + 1):
            came = self.streams[: per_life * (life + 1)]
            began = time.monotonic()
            with serving(self._arguments.store, self._arguments.model, self._options) as server:
                self._totals.start.append(server.ready - began)
                self._live(server, life, [stream for stream in came if not stream.ended])

    def _live(self, server: KillableServer, life: int, open_now: list[KeyedStream]) -> None:
        """Let streams go on until the kill, or to their ends in the last life."""
        totals, last = self._totals, life == self._arguments.kills
        seen = {stream.key: (len(stream.arrivals), bool(stream.numbers)) for stream in open_now}
        under_way = [stream for stream in open_now if stream.numbers]
        threads = _followed(under_way, server)
        if self._batch is not None:
            self._pass_lines(server, life)
        threads += _followed([stream for stream in open_now if stream not in under_way], server)
        if last:
            for thread in threads:
                thread.join()
            if self._batch is not None:
                self._batch.wait_for(server)
                self.output = self._batch.output(server)
            totals.computed += _computed(server)
        else:
            while any(t.is_alive() for t in threads) and all(len(s.arrivals) == seen[s.key][0] for s in open_now):
                time.sleep(0.01)
            time.sleep(self._draw.uniform(0.0, self._arguments.span))
            totals.computed += _computed(server)
            totals.under_way += sum(thread.is_alive() for thread in threads)
            server.kill()
            totals.kills += 1
            for thread in threads:
                thread.join()
        totals.next_token += [
            stream.arrivals[count] - server.ready
            for stream in open_now
            for count, resumed in [seen[stream.key]]
            if resumed and len(stream.arrivals) > count
        ]

    def _pass_lines(self, server: KillableServer, life: int) -> None:
        """Submit the batch in the first life, and wait until its share of this life has run in part."""
        batch = self._batch
        if batch is None:
            return
        if not batch.id:
            batch.submit(server)
        share = len(batch.lines) / (self._arguments.kills + 1)
        if life < self._arguments.kills:
            batch.wait_for(server, round(share * (life + self._draw.random())))


def _followed(streams: Sequence[KeyedStream], server: KillableServer) -> list[threading.Thread]:
    threads = [threading.Thread(target=stream.follow, args=(server,)) for stream in streams]
    for thread in threads:
        thread.start()
    return threads


def compare(lives: Lives | PhaseLives, expected: Reference, totals: Totals) -> None:
    """Count what clients lost, got twice, and got otherwise than from the unkilled server."""
    for stream, reference in zip(lives.streams, expected.tokens, strict=True):
        totals.requests += 1
        totals.choices += len(reference)
        totals.lost += not stream.ended
        totals.doubled += len(stream.numbers) - len(set(stream.numbers))
        totals.altered += sum(stream.tokens.get(index) != tokens for index, tokens in reference.items())
        totals.errors += stream.errors
    totals.lines += len(expected.output)
    totals.altered_lines += altered_lines(lives.output, expected.output)


def _computed(server: KillableServer) -> int:
    counters = server.counters()
    return sum(counters[name] for name in _COMPUTED)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "p95": round(sorted(values)[min(len(values) - 1, int(0.95 * len(values)))], 3),
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
    parser.add_argument("--lines", type=int, default=0, help="lines of a batch beside the streams, per seed")
    parser.add_argument("--line-prompt", type=int, default=64, help="tokens of a line's prompt at most")
    parser.add_argument("--line-answer", type=int, default=48, help="tokens of a line's answer at most")
    parser.add_argument("--vocabulary", type=int, default=250, help="prompts draw from so many token ids")
    parser.add_argument(
        "--span", type=float, default=1.0, help="seconds from a life's first new token to its kill at most"
    )
    parser.add_argument("--serve", action="append", default=[], help="options of zoo serve: --serve=--agents=2")
    parser.add_argument("--slo-ms", type=int, default=0, help="objective of the first request; 0: none")
    parser.add_argument(
        "--phase", action="append", choices=(*PHASES, "all"), help="kill in these phases of a request's way"
    )
    parser.add_argument("--process", choices=VICTIMS, default="server", help="what is killed in the phase")
    parser.add_argument("--brokered", action="store_true", help="with a private RabbitMQ broker before the queue")
    parser.add_argument("--queue", help="a PostgreSQL database; default: a folder")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.phase and arguments.lines:
        parser.error("--phase is for streams: leave --lines out")
    if arguments.process != "server" and not arguments.phase:
        parser.error(f"--process {arguments.process} needs --phase")
    if arguments.process == "broker" and not arguments.brokered:
        parser.error("--process broker needs --brokered")
    totals = Totals()
    shape = arguments.prompt, arguments.answer, arguments.vocabulary, arguments.slo_ms
    given = {
        seed: bodies(seed, arguments.requests, arguments.model, *shape)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    }

    def batch_of(seed: int) -> KeyedBatch | None:
        shape = arguments.line_prompt, arguments.line_answer, arguments.vocabulary
        lines = batch_lines(seed, arguments.lines, arguments.model, *shape)
        return KeyedBatch(f"batch-{seed}", lines) if lines else None

    with tempfile.TemporaryDirectory() as folder:
        beside = ["--queue", str(Path(folder) / "unkilled")] if arguments.lines else []
        with serving(arguments.store, arguments.model, [*arguments.serve, *beside]) as server:
            expected = {seed: unkilled(server, requests, batch_of(seed), totals) for seed, requests in given.items()}
        queue = arguments.queue or str(Path(folder) / "queue")
        with _brokered(arguments.brokered) as broker:
            options = [*arguments.serve, "--queue", queue, *(["--broker", broker.url] if broker else [])]
            if arguments.phase:
                deliver(_killed_in_phases(arguments, options, given, expected, broker), arguments.output)
                return
            for seed, requests in given.items():
                lives = Lives(seed, requests, batch_of(seed), arguments, options, totals)
                lives.run()
                compare(lives, expected[seed], totals)
    deliver({"model": arguments.model, "serve": arguments.serve, **totals.report()}, arguments.output)


@contextmanager
def _brokered(wanted: bool) -> Iterator[Broker | None]:
    """Run a broker that may be killed soon; None where none is wanted."""
    if not wanted:
        yield None
        return
    program = find_server()
    if program is None:
        raise SystemExit("no RabbitMQ broker is installed")
    with private_broker(program) as broker:
        yield broker


def _killed_in_phases(
    arguments: argparse.Namespace, options: Sequence[str], given: Mapping[int, Sequence[dict[str, Any]]],
    expected: Mapping[int, Reference], broker: Broker | None,
) -> dict[str, Any]:  # fmt: skip
    """Return by phase what kills in it did."""
    found: dict[str, Any] = {}
    if broker is not None:
        with serving(arguments.store, arguments.model, options):
            time.sleep(SETTLED)
    phases = phases_of(arguments.process, broker is not None) if "all" in arguments.phase else arguments.phase
    for phase in phases:
        totals, gap, refused = Totals(), 0.0, 0
        for seed, requests in given.items():
            lives = PhaseLives(seed, requests, phase, arguments.process, arguments.kills, broker)
            lives.run(arguments.store, arguments.model, options)
            totals.kills += lives.reached
            totals.next_token += lives.next_token
            totals.resumed += lives.resumed
            gap, refused = max(gap, lives.gap), refused + lives.refused
            compare(lives, expected[seed], totals)
        report = totals.report()
        found[phase] = {name: report[name] for name in _OF_PHASES} | {"longest gap": round(gap, 3), "refused": refused}
        print(phase, found[phase], flush=True)
    return {"model": arguments.model, "serve": arguments.serve, "process": arguments.process, "phases": found}


if __name__ == "__main__":
    main()
