"""The replay log contains every event that the scheduler handled, and replaying it gives the same commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.config import ClusterConfig
from runtime.control.scheduler_io import AbortSequence, PauseSequence, ResumeSequence, SchedulerCommand, Send, Tick
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import Message
from runtime.scheduler.observe.replay_log import Diverged, ReplayRecorder, head_of, replay
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request
from zoo.errors import InputError

M = counting_model("m", "1 2* 3* 4")
CONFIG = ClusterConfig(devices=2, placement="partition")


def recorded(path: Path) -> int:
    """Write the log of a run with pauses, an abort and a death on two devices; return its number of events."""
    cluster = VirtualCluster([M], [(2,)], devices=2, config=CONFIG)
    with path.open("wb") as file:
        recorder = ReplayRecorder(cluster.scheduler, head_of([M.chain(2)], M.blocks(2), CONFIG), file.write)
        count = 0

        def tell(event: Message) -> None:
            nonlocal count
            count += 1
            said: list[SchedulerCommand] = recorder.handle(event, cluster.now)
            cluster.carry_out(said)

        cluster.tell = tell  # type: ignore[method-assign]
        cluster.ask(*(request(f"s{at}", range(at + 1), "m", max_tokens=12) for at in range(4)))
        cluster.at(8 * MS, lambda: tell(PauseSequence("s1", 5 * MS)))  # type: ignore[arg-type]
        cluster.at(9 * MS, lambda: cluster.kill("d1"))
        cluster.at(12 * MS, lambda: tell(AbortSequence("s2")))  # type: ignore[arg-type]
        cluster.at(20 * MS, lambda: tell(ResumeSequence("s1")))  # type: ignore[arg-type]
        cluster.at(30 * MS, lambda: tell(Tick()))  # type: ignore[arg-type]
        cluster.run()
    return count


def test_all_that_was_told_is_played_again(tmp_path: Path) -> None:
    count = recorded(tmp_path / "log")
    kinds = {json.loads(line)[1] for line in (tmp_path / "log").read_text().splitlines()[1:]}
    assert kinds >= {"PauseSequence", "ResumeSequence", "AbortSequence", "AgentDown", "Tick", "AgentHello", "RowsDone"}
    assert replay(tmp_path / "log") == count


def test_what_was_commanded_can_be_looked_at(tmp_path: Path) -> None:
    count, told = recorded(tmp_path / "log"), list[str]()
    sizes = []

    def look(commands: Sequence[SchedulerCommand]) -> None:
        sizes.append(len(commands))
        told.extend(type(each.message).__name__ for each in commands if isinstance(each, Send))

    replay(tmp_path / "log", look)
    assert len(sizes) == count and {"LoadStages", "RunRows", "CloseSequences"} <= set(told)


def test_another_config_gives_other_commands(tmp_path: Path) -> None:
    recorded(tmp_path / "log")
    head, *events = (tmp_path / "log").read_text().splitlines(keepends=True)
    changed = json.loads(head)
    changed["config"]["prefill_chunk"] = 2
    (tmp_path / "other").write_text(json.dumps(changed) + "\n" + "".join(events))
    with pytest.raises(Diverged):
        replay(tmp_path / "other")


@pytest.mark.parametrize("protocol", [None, 1])
def test_a_log_of_another_version_is_refused(tmp_path: Path, protocol: int | None) -> None:
    recorded(tmp_path / "log")
    head, *events = (tmp_path / "log").read_text().splitlines(keepends=True)
    changed = json.loads(head)
    del changed["protocol"]
    if protocol is not None:
        changed["protocol"] = protocol
    (tmp_path / "other").write_text(json.dumps(changed) + "\n" + "".join(events))
    with pytest.raises(InputError, match=f"protocol {protocol or 'unknown'}, not"):
        replay(tmp_path / "other")
