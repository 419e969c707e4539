"""Run random schedules of everything (`anything`) for a while, from any seed on.

    python -m tests.runtime.scheduler.schedules apart|loans|negotiated|both|predicted [--first 0] [--minutes 10]

Prints the seeds, what the schedules had, and each that failed, with its error; exit status 1 if any did.
`BLOCKZOO_GRAIN=layer` hands off by layer in all of them, `BLOCKZOO_SHAPE=layers` lends layers.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.lending.test_negotiation_at_random import random_schedule

KINDS: dict[str, Callable[[int], Anything]] = {
    "apart": lambda seed: Anything(seed=seed, apart=True),
    "loans": lambda seed: Anything(seed=seed, lends=True),
    "negotiated": random_schedule,
    "both": lambda seed: Anything(seed=seed, lends=True, apart=True),
    "predicted": lambda seed: Anything(seed=seed, lends=True, predicts=True),
}
_COUNTED = (
    "handoffs", "handoffs_aborted", "loans", "loans_refused", "loan_recalls", "circles", "mends", "mended_tokens",
    "loss_restarts", "preemptions", "swapped_in", "moves", "shared",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args(arguments)
    until, seed, had, failed = time.monotonic() + 60 * given.minutes, given.first, Counter[str](), list[int]()
    while time.monotonic() < until:
        one = KINDS[given.kind](seed)
        try:
            one.run()
            one.expect_end()
        except Exception:
            failed.append(seed)
            print(f"seed {seed}\n{traceback.format_exc(limit=-4)}", flush=True)
        counters = one.scheduler.state().counters
        had.update({name: getattr(counters, name) for name in _COUNTED})
        had["deaths"] += len(one.trace.named("fault"))
        seed += 1
    seeds = f"seeds {given.first} to {seed - 1}"
    print(f"{given.kind}: {seed - given.first} schedules, {seeds}, {len(failed)} failed {failed}")
    print(", ".join(f"{name} {count}" for name, count in had.items()))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
