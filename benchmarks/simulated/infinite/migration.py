"""Run Infinite-LLM's Figure 9: a request outgrows its instance; loans beside a new and larger instance.

    python -m benchmarks.simulated.infinite.migration [--answers 5000 10000 20000 30000] [--rate 1e9]

LLaMA2-7B on one A100 that holds 108,000 tokens; a prompt of 105,000. Seconds from the first token to the last of:

- `lent`: a second instance lends.
- `reloaded`: the paper's live migration. When the first instance is full, one on two A100 downloads the weights at
  `--rate` bytes per second, copies them to its devices, and computes the context again.
- `copied`: as Llumnix migrates, to two A100 that run already: K and V are copied while the request decodes, which stops
  for the last two page sets.

The steps are the simulator's; download, copy and stop are computed. Virtual time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulated.infinite.setups import SETUPS
from runtime.sim.cost.hardware import LINKS
from runtime.sim.experiments.run import play
from runtime.sim.models.shapes import SHAPES
from runtime.sim.results.played import Played

SETUP = SETUPS["7B, 2"]
PROMPT, HOLDS = 105_000, 108_000
#: What the paper's times say: live migration over loans.
PAPER = {5_000: 3.5, 10_000: 2.2, 20_000: 1.6, 30_000: 1.4}
#: Page sets that a migration copies at the end, while the request stops.
_FINAL = 2


@dataclass(frozen=True, slots=True)
class Outgrown:
    """Seconds from the first token to the last.

    Fields:
        overhead: What live migration adds: download, copy to the devices, computing again.
        sent: Seconds in which loans' pages, queries and results were under way.
        fitting: Bytes per second of a download with which the paper's ratio comes out; 0: none.
    """

    lent: float
    reloaded: float
    copied: float
    overhead: float
    sent: float
    fitting: float


def usable() -> float:
    """Return the share of an A100's memory with which an instance holds 108,000 tokens."""
    shape = SHAPES[SETUP.model]
    return (shape.nbytes + (HOLDS + SETUP.page_tokens) * shape.kv_bytes * shape.layers) / 80e9


def outgrown(answer: int, rate: float = 1e9) -> Outgrown:
    """Run one length of the answer."""
    shape, here = SHAPES[SETUP.model], HOLDS - PROMPT
    lent = _run("lent", PROMPT, answer)
    first = _decoding(_run("alone", PROMPT, here))
    later = _run("together", HOLDS, answer - here)
    copy_in = LINKS["pcie4"].busy_ns(shape.nbytes // 2) / 1e9
    again = (later.ledger.first[-1] - later.ledger.arrived[-1]) / 1e9
    overhead = shape.nbytes / rate + copy_in + again
    final = LINKS["nvlink3"].busy_ns(_FINAL * SETUP.page_tokens * shape.kv_bytes * shape.layers) / 1e9
    loans, ratio = _decoding(lent), PAPER.get(answer)
    left = 0.0 if ratio is None else ratio * loans - first - _decoding(later) - copy_in - again
    return Outgrown(
        loans,
        first + overhead + _decoding(later),
        first + final + _decoding(later),
        overhead,
        lent.network.inside.ns / 1e9,
        shape.nbytes / left if left > 0 else 0.0,
    )


def _run(system: str, prompt: int, answer: int) -> Played:
    """Run one request. Raises ValueError if it was not served whole."""
    played = play(SETUP.scenario(system, usable=usable()), system, SETUP.demand(system, [prompt], [answer]))
    if played.ledger.errors or played.ledger.tokens[-1] != answer:
        raise ValueError(f"{system}: {played.ledger.errors}, {played.ledger.tokens[-1]} of {answer} tokens")
    return played


def _decoding(played: Played) -> float:
    return (played.ledger.ended[-1] - played.ledger.first[-1]) / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--answers", type=int, nargs="+", default=list(PAPER))
    parser.add_argument("--rate", type=float, default=1e9, help="bytes per second of the download")
    given = parser.parse_args(arguments)
    print("| answer | lent s | reloaded s | copied s | reloaded / lent, paper's | overhead s | sent s | fitting MB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for answer in given.answers:
        one = outgrown(answer, given.rate)
        print(
            f"| {answer:,} | {one.lent:.0f} | {one.reloaded:.0f} | {one.copied:.0f} | {one.reloaded / one.lent:.2f}, "
            f"{PAPER.get(answer, 0):g} | {one.overhead:.1f} | {one.sent:.2f} | {one.fitting / 1e6:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
