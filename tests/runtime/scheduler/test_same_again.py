"""The same inputs give the same commands in every process, whatever its hashes of text are: nothing is decided by a set's order."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

from runtime.agent.commands import Pause, Resume
from runtime.config import ClusterConfig, ControlConfig, SpeculationConfig
from runtime.engine.counted import counting_model, surrogate_of
from runtime.stages import Surrogate
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

A = counting_model("a", "1 2* 3* 4* 5", max_model_len=128)
B = counting_model("b", "11 12* 3* 4* 15", max_model_len=128)


class Unchecked(VirtualCluster):
    """Books are other tests' affair, and take their time."""

    def check(self) -> None:
        pass


def digest() -> str:
    """Of all that was said in a run in which everything happens that decides: moves, pauses, deaths, scaling, placement, prediction."""
    rng = random.Random(7)
    control = ControlConfig(
        period_ms=30, every_ms=5, calm_ms=20, idle_ms=40, patience_ms=200, crossing_us=1e6, margin=1, balancing="owner", low=0.1, high=0.3,
        bandwidth=64000.0,
    )  # fmt: skip
    config = ClusterConfig(
        devices=4, placing="split", control=control, hop_cost=0.0, sharing="cached", speculation=SpeculationConfig("exact", top=0.5)
    )
    cluster = Unchecked(
        [A, B], [(2, 3), (2, 3)], devices=4, pages=60, config=config, servers=("x", "y", "z", "x"), limits=(6500,) * 4,
        stand_ins=[surrogate_of(A, "a~", 2, 3)], surrogates={"a": [Surrogate("a~", 2, 3, 1)]},
    )  # fmt: skip
    cluster.scheduler.speculation.pin([(A.chain(2, 3).uses[1].block, f"d{at}") for at in range(4)])
    cluster.ticks(4 * MS, 400 * MS)
    for number in range(40):
        one = request(f"s{number}", range(1 + rng.randrange(20)), rng.choice("ab"), max_tokens=rng.randrange(2, 40))
        at, seq = rng.randrange(200 * MS), one.seq
        cluster.ask(one, at=at)
        begin = at + rng.randrange(20 * MS)
        cluster.at(begin, lambda seq=seq: cluster.tell(Pause(seq)))
        cluster.at(begin + rng.randrange(100 * MS), lambda seq=seq: cluster.tell(Resume(seq)))
    for when in (60, 150):
        cluster.at(when * MS, lambda: cluster.kill(f"d{rng.randrange(4)}"))
    cluster.run()
    cluster.expect()
    told = hashlib.blake2b(digest_size=16)
    for entry in (*cluster.sent, *cluster.trace.events):
        told.update(repr(entry).encode())
    return told.hexdigest()


def test_hashes_of_text_decide_nothing() -> None:
    code = f"from {__name__} import digest; print(digest())"
    seen = set()
    for seed in ("1", "2", "3"):
        made = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        seen.add(made.stdout)
    assert len(seen) == 1
