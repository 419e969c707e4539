"""Loans where hops are predicted (BL-25): what may be written again is never lent, nor are a stand-in's pages.

Every token depends on every page, so one that was lent before it was right changes the answer.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from runtime.chains import Stage, Surrogate
from runtime.config import ClusterConfig, SpeculationConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import counting_model, surrogate_of
from runtime.lending_config import LendingConfig, LendingMode
from runtime.messages import RunRows, SendAway
from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Three hops of one, two and one layers of attention; the middle one is predicted.
CUT = (2, 5)
M = counting_model("m", "1* 2 3* 4* 5 6* 7 8", vocab_size=3)
#: The stage of the predicted hop: its rows take longer than those of all others.
SLOW = Stage("m", *CUT).id
#: Layers of attention in each hop.
LAYERS = {0: 1, 2: 2, 5: 1}


def predicting(misses: int, pages: int = 44, mode: str = "exact", lending: LendingMode = "planned") -> VirtualCluster:
    """Return a cluster whose requests take more pages than their path has; the stand-in has pages of its own there."""
    stand_in = surrogate_of(M, "m~", 4, misses)
    config = ClusterConfig(
        devices=5, placement="partition", prefill_chunk=8, lending=LendingConfig(lending),
        speculation=SpeculationConfig(mode),  # type: ignore[arg-type]
    )  # fmt: skip
    one = VirtualCluster(
        [M], [CUT], devices=5, pages=pages, config=config, stand_ins=[stand_in],
        surrogates={"m": [Surrogate("m~", 4, 5, 1)]},
        make_engine=lambda name: IntegerEngine([M, stand_in], pages, device=name, rewrites=True),
        costs=lambda plan: 6 * MS if any(row.model == SLOW for row in plan.rows) else MS,
    )  # fmt: skip
    block = M.chain(*CUT).uses[1].block
    one.scheduler.speculation.pin([(block, f"d{at}") for at in range(5)])
    return one


def asked(one: VirtualCluster, seed: int, **changes: Any) -> None:
    rng = random.Random(seed)
    one.ask(request("warm", (1,), "m", max_tokens=1))
    for number in range(4):
        words = [rng.randrange(3) for _ in range(rng.randrange(12, 24))]
        one.ask(request(f"s{number}", words, "m", max_tokens=24, **changes), at=(5 + number) * MS)


@pytest.mark.parametrize("misses", [0, 1, 3])
def test_predicted_sequences_lend_what_is_certain(misses: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        one = predicting(misses)
        asked(one, seed)
        while one._heap:
            before = len(one.sent)
            one.run_one()
            for _, _, _, message in one.sent[before:]:
                sequence = one.scheduler._state.running.get(message.seq) if isinstance(message, SendAway) else None
                if sequence is not None:
                    assert message.last <= sequence.computed
                    assert message.layers == (0, LAYERS[message.lo]), "the stand-in's pages come behind the hop's"
                    seen["predicted"] += sequence.predicted is not None
        one.expect()
        seen["redone"] += one.scheduler.speculation.counts().redone
        seen["guesses"] += one.scheduler.speculation.counts().guesses
        seen["loans"] += one.scheduler.state().counters.loans
    assert seen["predicted"] > 3 and seen["guesses"] > 3 and (seen["redone"] > 0) == (misses > 0), seen


def test_rows_that_run_again_begin_behind_what_is_lent() -> None:
    begun = 0
    for seed in range(4):
        one = predicting(2)
        asked(one, seed)
        lent: Counter[tuple[str, int]] = Counter()
        one.run()
        one.expect()
        for _, _, _, message in one.sent:
            if isinstance(message, SendAway):
                lent[message.seq, message.epoch] = max(lent[message.seq, message.epoch], message.last)
            elif isinstance(message, RunRows):
                for seq, epoch, start in zip(message.seqs, message.epochs, message.starts, strict=True):
                    assert start >= lent[seq, epoch]
                    begun += lent[seq, epoch] > 0
    assert begun > 20


def test_predictions_go_on_over_lent_pages() -> None:
    """The same request with and without loans: the same tokens, and predictions of about the same number of rows."""
    told = {}
    for mode in ("off", "planned"):
        one = predicting(3, pages=44 if mode == "planned" else 400, lending=mode)  # type: ignore[arg-type]
        asked(one, 1, ignore_eos=True)
        one.run()
        one.expect()
        told[mode] = {seq: each.tokens for seq, each in one.told.items()}, one.scheduler.speculation.counts()
        assert (one.scheduler.state().counters.loans > 0) == (mode == "planned")
    assert told["off"][0] == told["planned"][0]
    assert told["planned"][1].guesses > 0


@pytest.mark.parametrize("seed", range(0, 18, 3))
def test_whatever_happens_with_loans_and_predictions(seed: int) -> None:
    one = Anything(seed=seed, lends=True, predicts=True)
    one.run()
    one.expect_end()


def test_schedules_with_loans_and_predictions_have_both() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30, 66, 3):
        one = Anything(seed=seed, lends=True, predicts=True)
        one.run()
        one.expect_end()
        seen["loans"] += one.scheduler.state().counters.loans
        seen["guesses"] += one.scheduler.speculation.counts().guesses
        seen["deaths"] += len(one.trace.named("fault"))
    assert min(seen.values()) > 0 and len(seen) == 3, seen
