"""Short ways to play a few sequences through an agent."""

from __future__ import annotations

from runtime.agent.local.agent import LocalAgent
from runtime.config import BatchingConfig
from runtime.engine.fakes.fake import FakeEngine
from runtime.types import ModelSpec, SequenceRequest, TokenEvent
from tests.runtime.virtual import ListTrace, Told, Virtual, spec

M = spec()


def played(
    *requests: SequenceRequest, models: tuple[ModelSpec, ...] = (M,), pages: int = 200, **config: float
) -> Virtual:
    virtual = Virtual(FakeEngine(models, pages), BatchingConfig(**config))  # type: ignore[arg-type]
    for one in requests:
        virtual.arrive(one)
    virtual.run()
    return virtual


def only(one: SequenceRequest, **values: object) -> Told:
    return played(one, **values).told[one.seq]  # type: ignore[arg-type]


def agent_with(
    *requests: SequenceRequest, pages: int = 200, trace: ListTrace | None = None, **config: int
) -> LocalAgent:
    agent = LocalAgent([M], pages, BatchingConfig(**config), trace)  # type: ignore[arg-type]
    for one in requests:
        assert agent.add(one, 0) == []
    return agent


def step(agent: LocalAgent, engine: FakeEngine) -> list[TokenEvent]:
    plan = agent.next_step(0)
    assert plan is not None
    return agent.finish_step(engine.execute(plan), 0)
