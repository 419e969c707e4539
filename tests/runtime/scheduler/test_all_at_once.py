"""All scheduler mechanisms at once, at random: tokens are right, nothing is left, and runs are reproducible."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import pytest

from runtime.chains import Surrogate
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, SpeculationConfig
from runtime.control.scheduler_io import PauseSequence, ResumeSequence
from runtime.engine.fakes.integer_model import counting_model, surrogate_of
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

A = counting_model("a", "1 2* 3* 4* 5", max_model_len=128)
B = counting_model("b", "11 12* 3* 4* 15", max_model_len=128)
CUT = (2, 3)


class Hasty(VirtualCluster):
    """A virtual cluster that checks its state after every tenth event only: the checks take most of the time."""

    def check(self) -> None:
        if self._count % 10 == 0:
            super().check()


def crowd(rng: random.Random, pages: int = 60, **changes: object) -> VirtualCluster:
    """A cluster of two models on four devices of three servers, with all controllers on and short intervals.

    It also has stand-ins, and prefix caching in one of its modes.
    """
    control = ControlConfig(
        rearrange_interval_ms=30, interval_ms=5, cooldown_ms=20, idle_ms=40, migration_timeout_ms=200,
        crossing_us=1e6, rebalance_margin=1, low=0.1, high=0.3,
        rebalance=rng.choice(("owner", "least-busy", "recompute", "strict")), bandwidth=64000.0,
    )  # fmt: skip
    config = ClusterConfig(
        devices=4,
        placement="partition",
        control=control,
        hop_cost=0.0,
        prefix_caching=rng.choice(("cached", "active", "off")),
        prefill_chunk=rng.choice((4, 256)),
        speculation=SpeculationConfig("exact", top=0.5),
    )
    cluster = Hasty(
        [A, B],
        [CUT, CUT],
        devices=4,
        pages=pages,
        config=config,
        servers=("x", "y", "z", "x"),
        limits=(6500,) * 4,
        stand_ins=[surrogate_of(A, "a~", 2, rng.choice((0, 3)))],
        surrogates={"a": [Surrogate("a~", 2, 3, 1)]},
        **changes,
    )
    cluster.scheduler.speculation.pin([(A.chain(*CUT).uses[1].block, f"d{at}") for at in range(4)])
    cluster.ticks(4 * MS, 500 * MS)
    return cluster


def ask(cluster: VirtualCluster, rng: random.Random, count: int = 40) -> list[str]:
    """Add requests that are paused once, and abort a fifth of them; return the aborted ones."""
    gone: list[str] = []
    for number in range(count):
        one = request(f"s{number}", range(1 + rng.randrange(20)), rng.choice("ab"), max_tokens=rng.randrange(2, 40))
        at, seq = rng.randrange(200 * MS), one.seq
        cluster.ask(one, at=at)
        begin = at + rng.randrange(20 * MS)
        cluster.at(begin, lambda seq=seq: cluster.tell(PauseSequence(seq)))
        cluster.at(begin + rng.randrange(100 * MS), lambda seq=seq: cluster.tell(ResumeSequence(seq)))
        if rng.random() < 0.2:
            cluster.abort(seq, at + rng.randrange(100 * MS))
            gone.append(seq)
    return gone


def played(seed: int) -> VirtualCluster:
    rng = random.Random(seed)
    cluster = crowd(
        rng, rng.choice((60, 90, 400)), latency=rng.choice((MS // 100, MS // 4)),
        page_bytes_per_ms=rng.choice((1e9, 200.0)),
        agent_config=AgentConfig(recompute_chunk=rng.choice((4, 64)), fetch_window=rng.choice((1, 4))),
        lanes=rng.choice((("all",), ("real", "ahead"))),
    )  # fmt: skip
    gone = ask(cluster, rng)
    for _ in range(rng.randrange(4)):
        cluster.at(rng.randrange(250 * MS), lambda: cluster.kill(f"d{rng.randrange(4)}"))
    for _ in range(20):
        cluster.at(rng.randrange(250 * MS), lambda: cluster.migrate_some(rng) and None)
    cluster.run()
    for seq in gone:
        del cluster.requests[seq]
    cluster.expect()
    return cluster


@pytest.mark.parametrize("seed", range(6))
def test_all_tokens_are_right_and_nothing_is_left(seed: int) -> None:
    played(seed)


def digest() -> str:
    """Return a digest of all messages and trace events."""
    cluster = played(2)
    told = hashlib.blake2b(digest_size=16)
    for entry in (*cluster.sent, *cluster.trace.events):
        told.update(repr(entry).encode())
    return told.hexdigest()


def test_no_order_of_a_set_decides() -> None:
    """Sets of strings have another order in each process."""
    code = f"from {__name__} import digest; print(digest())"
    seen = set()
    for seed in ("1", "2"):
        made = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        seen.add(made.stdout)
    assert len(seen) == 1
