"""Compare chats with and without local prefill of short remainders (`--local-prefill`, UN-18), in virtual time.

    python -m benchmarks.simulated.tetri_chats [--limits 0 64 128 256 512 1024] [--chats 150] [--rate 1.0]

OPT-13B on one device for prompts and two that decode, as in `tetri_decode`. Each chat has five turns: what is said is
drawn around 60 tokens, at times 600, and an answer around 100; the next turn comes 30 s after the last. With a
limit of 0 each turn is handed off; prefixes are cached where prompts run in each case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.simulated.tetri_decode import scenario
from runtime.sim.experiments.preset import LOADED
from runtime.sim.experiments.run import play
from runtime.sim.workload.requests import Demand
from runtime.types import SamplingParams, SequenceRequest

#: Turns of a chat, and seconds between two of them.
TURNS, PAUSE = 5, 30.0
#: Short requests before all, that are not counted: each device loads its weights.
_WARM = 200
LIMITS = (0, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class ChatTurns(Demand):
    """Requests of which the prompts of one chat continue each other: its number, then zeros, as simulated answers are.

    Fields:
        chat: Number of the chat of each request.
    """

    chat: tuple[int, ...] = ()

    def requests(self, adaptive: bool = False) -> Iterator[SequenceRequest]:
        columns = self.at.tolist(), self.prompt.tolist(), self.answer.tolist(), self.chat
        for number, (at, prompt, answer, chat) in enumerate(zip(*columns, strict=True)):
            sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
            tokens = (chat, *(0,) * (prompt - 1))
            yield SequenceRequest(f"r{number}", f"r{number}", self.models[0], tokens, sampling, arrival=at)


@dataclass(frozen=True, slots=True)
class ChatRun:
    """One run.

    Fields:
        first: Mean seconds to the first token of turns behind the first; `first_worst`: 99 % take no longer.
        second: Mean seconds from the first token to the end, per token.
        gap_worst: The longest gap between two tokens of an answer, in seconds: 99 % of answers have a shorter one.
        moved: GB of K and V that hand-offs sent.
    """

    handoffs: int
    local: int
    preemptions: int
    first: float
    first_worst: float
    second: float
    gap_worst: float
    moved: float


def turns(chats: int, rate: float, seed: int) -> ChatTurns:
    """Return the requests of so many chats, of which `rate` begin per second."""
    draws = np.random.default_rng(seed)
    begins = round(LOADED * 1e9) + np.cumsum(draws.exponential(1e9 / rate, chats))
    rows = [(round(LOADED * 1e9) // 2, 4, 40, 10_000 + number) for number in range(_WARM)]
    for chat in range(chats):
        context = 0
        for turn in range(TURNS):
            median = 600 if draws.random() < 0.1 else 60
            said = int(np.clip(draws.lognormal(np.log(median), 0.7), 4, 700))
            answer = int(np.clip(draws.lognormal(np.log(100), 0.7), 2, 300))
            if context + said + answer > 2000:
                break
            rows.append((int(begins[chat] + turn * PAUSE * 1e9), context + said, answer, chat))
            context += said + answer
    rows.sort()
    at, prompt, answers, numbers = zip(*rows, strict=True)
    columns = (np.array(each, dtype=np.int64) for each in (at, prompt, answers))
    times, prompts, lengths = columns
    return ChatTurns(("opt-13b",), times, np.zeros(len(rows), np.int64), prompts, lengths, chat=numbers)


def chatted(limit: int, demand: ChatTurns) -> ChatRun:
    """Run chats with this limit on remainders."""
    made = scenario(2, prefix_caching="cached", decode={"local_prefill": limit})
    played = play(made, "decode", demand)
    ledger = played.ledger
    first, ended, arrived, gap = (np.array(each, dtype=float) for each in (
        ledger.first, ledger.ended, ledger.arrived, ledger.gap
    ))  # fmt: skip
    chats = np.array(demand.chat)
    counted = chats < 10_000
    later = counted & np.array([number in chats[:at] for at, number in enumerate(demand.chat)])
    took, per = (first - arrived) / 1e9, (ended - first) / 1e9 / np.maximum(demand.answer - 1, 1)
    return ChatRun(
        played.counts["handoffs"] - _WARM, played.counts["local_prefills"], played.counts["preemptions"],
        float(took[later].mean()), float(np.quantile(took[later], 0.99)), float(per[counted].mean()),
        float(np.quantile(gap[counted] / 1e9, 0.99)), played.counts["moved_bytes"] / 1e9,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limits", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--chats", type=int, default=150)
    parser.add_argument("--rate", type=float, default=1.0, help="chats that begin per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    demand = turns(given.chats, given.rate, given.seed)
    runs = {limit: chatted(limit, demand) for limit in given.limits}
    if given.json:
        print(json.dumps({limit: asdict(run) for limit, run in runs.items()}))
        return 0
    print("limit  handoffs  local  preempted  first ms     p99  token ms  gap p99 ms   GB moved")
    for limit, run in runs.items():
        times = [1000 * each for each in (run.first, run.first_worst, run.second, run.gap_worst)]
        print(f"{limit:>5} {run.handoffs:>9} {run.local:>6} {run.preemptions:>10} {times[0]:>9.1f} {times[1]:>7.1f} "
              f"{times[2]:>9.2f} {times[3]:>11.1f} {run.moved:>10.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
