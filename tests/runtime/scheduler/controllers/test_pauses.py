"""Paused sequences (tool calls) get no rows, and their K and V move during the pause, before they return (BL-17)."""

from __future__ import annotations

import random

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.control.scheduler_io import PauseSequence, ResumeSequence
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import PageData, PageRequest, RunRows
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3* 4", max_model_len=128)
#: K and V of a page take 1 ms: 64 bytes at 64000 bytes per second.
CONTROL = ControlConfig(scaling=False, rearranging=False, bandwidth=64000.0, low=0.2)


def crowded(control: ControlConfig, pages: int = 64) -> VirtualCluster:
    """A cluster of two devices that hold all blocks; `p` and `r` are on one, and the other one is soon empty."""
    config = ClusterConfig(devices=2, placement="replicate", control=control)
    cluster = VirtualCluster([M], devices=2, pages=pages, config=config, page_bytes_per_ms=64)
    cluster.ask(
        request("p", range(8), "m", max_tokens=24),
        request("q", (1,), "m", max_tokens=2),
        request("r", range(8), "m", max_tokens=70),
    )
    cluster.ticks(4 * MS, 1000 * MS)
    return cluster


def told(cluster: VirtualCluster, kind: type) -> list[int]:
    """Return when messages of a kind were sent for `p`, in ns."""
    found = ((when, message) for when, _, _, message in cluster.sent if isinstance(message, kind))
    return [when for when, message in found if "p" in (getattr(message, "seqs", ()) or (message.seq,))]


def pause(cluster: VirtualCluster, begin: int, end: int, expected: int | None = None) -> None:
    cluster.at(begin * MS, lambda: cluster.tell(PauseSequence("p", expected)))
    cluster.at(end * MS, lambda: cluster.tell(ResumeSequence("p")))


def test_a_paused_sequence_gets_no_rows_and_goes_on_with_its_own_tokens() -> None:
    cluster = crowded(ControlConfig.off())
    pause(cluster, 12, 400)
    cluster.run()
    cluster.expect()
    assert not [when for when in told(cluster, RunRows) if 12 * MS < when < 400 * MS]
    assert max(told(cluster, RunRows)) > 400 * MS


def test_a_long_pause_moves_it_inside_the_pause() -> None:
    cluster = crowded(CONTROL, pages=48)
    pause(cluster, 12, 900)
    cluster.run()
    cluster.expect()
    copied = told(cluster, PageRequest) + told(cluster, PageData)
    assert copied and all(12 * MS < when < 900 * MS for when in copied)
    ahead = cluster.trace.named("migrate.ahead")
    assert len(ahead) == 1 and ahead[0].cause == "BL-17"
    assert ahead[0].t - 12 * MS >= ahead[0].extra["needed"], (
        "it began before the pause had lasted as long as the move takes"
    )
    assert cluster.scheduler.migrations.counts().committed == 1


def test_a_short_pause_causes_no_traffic() -> None:
    cluster = crowded(CONTROL, pages=48)
    pause(cluster, 12, 18)
    cluster.run()
    cluster.expect()
    assert not told(cluster, PageRequest) and not cluster.trace.named("migrate.ahead")


def test_negative_controls_with_room_enough_or_switched_off_nothing_moves() -> None:
    roomy = crowded(CONTROL, pages=400)
    off = crowded(ControlConfig.off(), pages=48)
    for cluster in (roomy, off):
        pause(cluster, 12, 900)
        cluster.run()
        cluster.expect()
        assert not told(cluster, PageRequest)


@pytest.mark.parametrize("seed", range(4))
def test_pauses_with_short_pages_and_deaths_change_no_token(seed: int) -> None:
    """A paused sequence gives its pages to running ones, is preempted, and is admitted again when it resumes."""
    rng = random.Random(seed)
    cluster = crowded(CONTROL, pages=rng.choice((40, 60)))
    for number in range(8):
        cluster.ask(request(f"s{number}", range(number + 1), "m", max_tokens=30), at=rng.randrange(30 * MS))
        begin = rng.randrange(60 * MS)
        cluster.at(begin, lambda number=number: cluster.tell(PauseSequence(f"s{number}")))
        cluster.at(begin + rng.randrange(200 * MS), lambda number=number: cluster.tell(ResumeSequence(f"s{number}")))
    for _ in range(seed % 3):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(2)}"))
    pause(cluster, 20, 300)
    cluster.run()
    cluster.expect()


def test_whoever_goes_on_while_it_moves_waits_for_its_row() -> None:
    """The move's last stage waits for the row under way, which a pause and its end do not bring back."""
    config = ClusterConfig(devices=2, placement="replicate", control=ControlConfig.off())
    cluster = VirtualCluster([M], devices=2, config=config, alpha=20 * MS)
    cluster.ask(request("p", range(8), "m", max_tokens=6))
    for when in (22, 30):  # the first attempt makes the device load the stage
        cluster.at(when * MS, lambda: cluster.migrate("p", range(1), other(cluster), recompute=False) and None)
    cluster.at(34 * MS, lambda: cluster.tell(PauseSequence("p")))
    for when in (36, 38, 40):
        cluster.at(when * MS, lambda: cluster.tell(ResumeSequence("p")) or cluster.tell(PauseSequence("p")))
    cluster.at(60 * MS, lambda: cluster.tell(ResumeSequence("p")))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.migrations.counts().committed == 1


def other(cluster: VirtualCluster) -> str:
    """Return the device that `p` is not on."""
    return "d1" if cluster.scheduler.sequences["p"].path[0].device == "d0" else "d0"
