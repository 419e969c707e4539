"""Measure the control plane's cost per step: the time of the scheduler and of an agent for a decode step of many rows.

    python -m benchmarks.cluster.scheduling [--rows 256] [--steps 300] [--output FILE]

Scheduler and agent are real, without engines and processes. The scheduler gets the answer of each step (`RowsDone`, all
rows in one message) and returns the next `RunRows`; the agent gets that, plans a step, finishes it and forwards its
results. Printed are microseconds per step, median and p95; `agent_us` is the agent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from runtime.agent.agent import Agent
from runtime.chains import Array, StageResult
from runtime.config import AgentConfig, ClusterConfig
from runtime.control.agent_io import Send, StageLoaded
from runtime.control.scheduler_io import AddRequest
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import PROTOCOL, AgentHello, LoadStages, OpenSequences, RowsDone, RunRows, StageReady
from runtime.scheduler.scheduler import Scheduler
from runtime.types import Sampled, SamplingParams, SequenceRequest, StepResult

MODEL = counting_model("m", "1 2* 3 4* 5* 6", max_model_len=8192, page_tokens=16)
CUTS = (1, 3, 4)
NOTHING = Array("float32", (1, 0), b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    scheduler, agent = measure(options.rows, options.steps)
    report: dict[str, Any] = {
        "rows": options.rows,
        "steps": options.steps,
        "scheduler_us": scheduler,
        "agent_us": agent,
    }
    for name in ("scheduler", "agent"):
        print(
            f"{name}: {report[f'{name}_us']['median']:.0f} us per step of {options.rows} rows (p95 "
            f"{report[f'{name}_us']['p95']:.0f})"
        )
    deliver(report, options.output)


def measure(rows: int, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return microseconds per step of the scheduler, and of the agent of the first hop."""
    config = ClusterConfig(devices=2, placement="partition", max_num_seqs=rows)
    scheduler = Scheduler([MODEL.chain(*CUTS)], MODEL.blocks(*CUTS), config)
    agent = Agent("d0", 1 << 20, AgentConfig(max_num_seqs=rows, max_num_batched_tokens=1 << 20), strides=True)
    said: list[Any] = []
    for device in ("d0", "d1"):
        said += scheduler.handle(AgentHello(device, PROTOCOL, "v", 1 << 20, 64, 0, device), 0)
    for to, load in ((each.to, each.message) for each in _sends(said) if isinstance(each.message, LoadStages)):
        for stage in load.stages:
            spec = replace(
                MODEL.spec, name=stage.id, kv_layers=sum(part.attends for part in MODEL.parts[stage.lo : stage.hi])
            )
            scheduler.handle(StageReady(to, stage, spec, 0), 0)
            if to == "d0":
                agent.handle(load, (), 0)
                agent.handle(StageLoaded(stage, spec, 0), (), 0)
    sampling = SamplingParams(8000, ignore_eos=True)
    said = []
    for number in range(rows):
        said += scheduler.handle(
            AddRequest(SequenceRequest(f"s{number}", "r", "m", tuple(range(number % 7, number % 7 + 20)), sampling)), 0
        )
    go = _opened(agent, said)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        times[1].append(_agent_step(agent, go, step))
        done = RowsDone("d1", go.seqs, go.epochs, go.counts, tuple(Sampled(seq, 5) for seq in go.seqs))
        begin = time.perf_counter()
        said = scheduler.handle(done, step)
        times[0].append(time.perf_counter() - begin)
        go = _opened(agent, said)
    return _summary(times[0][1:]), _summary(times[1][1:])


def _agent_step(agent: Agent, go: RunRows, now: int) -> float:
    begin = time.perf_counter()
    agent.handle(go, (), now)
    step = agent.next_step(now)
    planned = time.perf_counter() - begin
    assert step is not None
    result = StageResult(StepResult(step.plan.step, ()), {row.seq: NOTHING for row in step.plan.rows})
    begin = time.perf_counter()
    agent.finish_step(result, now)
    return planned + time.perf_counter() - begin


def _opened(agent: Agent, said: Iterable[Any]) -> RunRows:
    """Pass new sequences to the agent, and return the rows to run as one message."""
    gos = []
    for each in _sends(said):
        if each.to == "d0" and isinstance(each.message, OpenSequences):
            agent.handle(each.message, (), 0)
        elif isinstance(each.message, RunRows):
            gos.append(each.message)
    if len(gos) == 1:
        return gos[0]  # with the number of its batch
    names = [name for name in RunRows.__struct_fields__ if name != "batch"]
    return RunRows(*(tuple(value for go in gos for value in getattr(go, name)) for name in names))


def _sends(commands: Iterable[Any]) -> Iterable[Send]:
    return (each for each in commands if isinstance(each, Send))


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered) * 1e6, "p95": ordered[int(len(ordered) * 0.95)] * 1e6}


if __name__ == "__main__":
    main()
