"""Devices killed while loans stand, in agents of their own processes: no token changes, no debt stays (IL-18).

Each once, or `BLOCKZOO_FAULTS` times. Engines count, so that one wrong page changes every later token.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest

from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.lending_config import LendingConfig, LoanShape
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import LIMIT, answered, eventually, request
from tests.runtime.cluster.loan_kills import Killing, Victim, lends_layers, lost_tokens
from tests.runtime.cluster.test_loans import SETTINGS, all_free, right

#: Three attention layers, four tokens to a page: 84 page sets of an answer, of which a device has 40.
M = counting_model("org/m", "1* 2 3* 4* 5", max_model_len=8000)
PAGES, TOKENS, ANSWER, CHUNK = 120, 300, 36, 16
TURNS = int(os.environ.get("BLOCKZOO_FAULTS", "1"))


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize("victim", ["creditor", "debtor"])
def test_a_kill_costs_no_token_and_leaves_no_debt(victim: Victim, shape: LoanShape) -> None:
    names = [f"d{at}" for at in range(4)]
    made = ProcessLauncher(ProcessConfig(counting([M], PAGES), settings=SETTINGS, beat_seconds=0.1))
    lending = LendingConfig("planned", 1.0, recall=1.0, shape=shape)
    config = ClusterConfig(devices=4, placement="replicate", prefill_chunk=CHUNK, lending=lending)
    trace = Killing(victim=victim)
    lives = LifeConfig(starts=10_000, backoff_most=0.25)
    driver = ClusterDriver([M.chain()], M.blocks(), names, made, config, lives, trace=trace)
    slowest = mended = 0
    try:
        trace.scheduler = driver._scheduler
        for turn in range(TURNS):
            before, known = driver.state().counters, len(trace.named("kv.lost"))
            rng = random.Random(turn)
            asked = request(f"a{turn}", [rng.randrange(97) for _ in range(TOKENS)], "org/m", ANSWER)
            trace.after = rng.randrange(1, ANSWER - 4)
            assert right(asked, answered(driver, [asked])[asked.seq]) and len(trace.killed) == turn + 1
            assert lends_layers(trace, asked.seq) == (shape == "layers")
            now = driver.state().counters
            times = [event.t for event in trace.named("token") if event.seq == asked.seq]
            took = max(b - a for a, b in pairwise(times))  # most of it between the kill and the next token
            slowest, mended = max(slowest, took), mended + now.mended_tokens - before.mended_tokens
            assert took < 5e9 and (victim == "debtor" or now.recoveries == before.recoveries + 1)
            if victim == "creditor":
                assert now.loss_restarts == before.loss_restarts and now.mends == before.mends + 1
                assert now.mended_tokens - before.mended_tokens <= lost_tokens(trace, M.spec.page_tokens, known) + CHUNK
            assert eventually(lambda: all_free(driver) and not len(driver._scheduler.lending.loans))
    finally:
        print(f"\n{victim} {shape}: {len(trace.killed)} kills, mended {mended}, slowest token {slowest / 1e6:.0f} ms")
        assert driver.shutdown(LIMIT)
