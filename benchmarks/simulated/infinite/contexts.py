"""Run Infinite-LLM's Figure 7: the throughput of the largest batch of requests of one context length.

    python -m benchmarks.simulated.infinite.contexts [--setups "7B, 2"]... [--json]

Of each length: as many requests at once as the memory of all instances holds. Printed are their prompts' tokens per
second, and the tokens decoded per second once all of them decode. `-`: refused. Virtual time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.simulated.infinite.setups import CHUNK, SETUPS, START, SYSTEMS, Setup
from runtime.sim.experiments.run import assemble

#: Tokens that all rows decode together, and the period of samples in ns.
_STEADY, _TICK = 128, 200_000_000
#: Lengths, as shares of the longest normal context.
SHARES = (0.1, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class BatchRate:
    """The throughput of one batch.

    Fields:
        requests: How many were run at once.
        prompts: Tokens of prompts per second, until the last one has its first token.
        decoded: Tokens per second once all decode; 0 if some end before the last one begins.
        lent: Share of all tokens that lay at creditors.
    """

    requests: int
    prompts: float
    decoded: float
    lent: float


def batch_rate(setup: Setup, system: str, context: int) -> BatchRate | None:
    """Run the largest batch of requests of `context` tokens; None if a request of that length is refused."""
    made = setup.scenario(system, pace=_TICK)
    simulation = assemble(made, made.policies[system])
    tokens = [node.engine.page_capacity * setup.page_tokens for node in simulation.nodes.values()]
    # Rows decode a token at most beside each chunk of the prompts that come after theirs.
    answer = min(context // 2, _STEADY + -(-max(tokens) // CHUNK))
    if context <= min(tokens):
        count = sum(each // _whole_pages(setup, context) for each in tokens)
    else:
        count = max(1, sum(tokens) // _whole_pages(setup, context))
    demand = setup.demand(system, [context - answer] * count, [answer] * count)
    ledger = simulation.run(demand.requests(True))
    if ledger.errors:
        return None
    began, ended = max(ledger.first), min(ledger.ended[setup.warm(system) :])
    inside = [each for each in ledger.samples if began <= each.at <= ended]
    decoded = (inside[-1].tokens - inside[0].tokens) / (inside[-1].at - inside[0].at) * 1e9 if len(inside) > 1 else 0.0
    lent = simulation.counts()["loan_pages"] * setup.page_tokens / (count * context)
    return BatchRate(count, count * (context - answer) / (began - START) * 1e9, decoded, lent)


def _whole_pages(setup: Setup, context: int) -> int:
    return -(-context // setup.page_tokens) * setup.page_tokens


def table(
    setups: Sequence[Setup], shares: Sequence[float] = SHARES
) -> dict[str, dict[int, dict[str, BatchRate | None]]]:
    """Return the rates by setup, length and system."""
    return {
        setup.name: {
            length: {system: batch_rate(setup, system, length) for system in SYSTEMS}
            for length in (round(share * setup.normal) for share in shares)
        }
        for setup in setups
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--setups", action="append", choices=list(SETUPS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = table([SETUPS[name] for name in given.setups or SETUPS])
    if given.json:
        print(json.dumps(found, default=asdict))
        return 0
    print(f"| model, GPUs | context | {' | '.join(SYSTEMS)} (requests, prompts/s, decoded/s each) | lent |")
    print(f"|{'---|' * (3 + len(SYSTEMS))}")
    for name, lengths in found.items():
        for length, rates in lengths.items():
            cells = [
                "-" if rate is None else f"{rate.requests}, {rate.prompts:.0f}, {rate.decoded or '?':.4}"
                for rate in rates.values()
            ]
            lent = rates["lent"]
            print(f"| {name} | {length:,} | {' | '.join(cells)} | {0 if lent is None else lent.lent:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
