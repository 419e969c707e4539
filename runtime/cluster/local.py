"""The driver of one device in this process: a thread that runs the engine, an agent behind a lock, streams to whoever
asked.

Contract: the engine is called from one thread only. The agent is called under the lock, which is never held while the
engine works, so requests and aborts get through during a step. Each step's events reach each event loop in one call.
A failing step ends its own sequences with an error; after several in a row (`cluster.stepping`), an EngineLost, or any
defect of the
control plane, the driver is dead: `alive` is false, `death` says why, every stream ends with an error and none hangs.
It knows no HTTP, no text, and no tensors: the engine is passed in.

The way of a request: open_stream -> LocalAgent.add -> [loop: next_step -> Engine.launch, result -> finish_step ->
_deliver] -> Stream
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from runtime.agent.local.agent import LocalAgent
from runtime.cluster.driver.base import BaseDriver
from runtime.cluster.errors import public
from runtime.cluster.jobs import Job
from runtime.cluster.stepping import Stepping
from runtime.cluster.streams.streams import Sink
from runtime.config import BatchingConfig
from runtime.control.counters import AgentState
from runtime.tracing.sink import TraceSink
from runtime.types import Engine, EngineLost, EngineMemory, ModelSpec, SequenceRequest, TokenEvent
from zoo.errors import InUse, NotServable, Unavailable, ZooError

_log = logging.getLogger(__name__)


class LocalDriver(BaseDriver):
    """Runs one device until `shutdown`. Every method may be called from any thread; those that wait say so."""

    def __init__(
        self,
        engine: Engine,
        config: BatchingConfig,
        trace: TraceSink | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        device: str = "0",
    ) -> None:
        """Starts the engine's thread. Raises NotServable if a loaded model is too large for the engine's pages."""
        super().__init__("engine")
        self._engine = engine
        self._clock = clock
        self._agent = LocalAgent(engine.models(), engine.page_capacity, config, trace, device, clock(), engine.ahead)
        self._memory = engine.memory()
        self._jobs: deque[Job] = deque()
        self._stopping = False
        self._steps = Stepping(engine, self._agent, self._changed, clock, self._deliver)
        self._thread = threading.Thread(target=self._run, name=f"zoo-engine-{device}", daemon=True)
        self._thread.start()

    # -- requests ------------------------------------------------------------------------------------------------------

    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that have ended already are nothing to do."""
        with self._changed:
            now = self._clock()
            self._deliver([event for seq in seqs for event in self._agent.abort(seq, now)])

    def pause(self, request: str, expected: int | None = None) -> int:
        """Raises NotServable: pages of one device alone have nowhere to go meanwhile."""
        raise NotServable("one device alone pauses no requests: serve with --agents or --backend")

    def resume(self, request: str) -> int:
        """Raises as `pause`."""
        return self.pause(request)

    # -- models --------------------------------------------------------------------------------------------------------

    def models(self) -> tuple[ModelSpec, ...]:
        """Models that take requests. `max_model_len` is what this device can really hold."""
        with self._changed:
            return tuple(spec for spec in self._agent.models if self._agent.models.serving(spec.name))

    def load(self, name: str) -> ModelSpec:
        """Load a model between two steps, which wait as long; one that is there is nothing to do.

        Raises what Engine.load raises, NotServable, Unavailable.
        """
        return self._on_engine_thread(lambda: self._load(name))

    def unload(self, name: str, timeout: float = 60.0) -> None:
        """Take no more requests for a model, wait for its running ones, drop it.

        Raises NotFound; InUse if they have not ended after `timeout` seconds, and then it takes requests again;
        Unavailable.
        """
        with self._changed:
            self._agent.models.close(name)
            if not self._changed.wait_for(lambda: self._death is not None or not self._agent.in_use(name), timeout):
                self._agent.models.reopen(name)
                raise InUse(f"sequences of {name} still run after {timeout:g} s")
        self._on_engine_thread(lambda: self._unload(name))

    # -- looking in ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return self._engine.device

    def health(self) -> Mapping[str, Any]:
        """For `/health`."""
        return {"status": "ok"}

    def state(self) -> AgentState:
        with self._changed:
            return self._agent.state()

    def picture(self) -> None:
        """There are no devices behind this one."""
        return

    def memory(self) -> EngineMemory:
        """Bytes as of the last load or unload; never waits for a step."""
        return self._memory

    # -- ends ----------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> bool:
        """Stop after the step under way; what is unfinished ends with an error. Again: nothing to do.

        Waits for the engine's thread, for `timeout` seconds at most; false if it is still in its step then.
        """
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- inside: any thread --------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[SequenceRequest], sink: Sink) -> list[TokenEvent]:
        """Hand sequences to the agent, all or none; returns the events of those that were refused."""
        with self._changed:
            self._require_open(requests)
            now = self._clock()
            refused = [event for one in requests for event in self._agent.add(one, now)]
            gone = {event.seq for event in refused}
            self._routes.add((one for one in requests if one.seq not in gone), sink)
            self._changed.notify_all()
            return refused

    def _busy(self) -> bool:
        return self._agent.busy

    def _on_engine_thread(self, act: Callable[[], ModelSpec]) -> ModelSpec:
        """Have the engine's thread do something between two steps; wait for what comes of it."""
        job = Job(act)
        with self._changed:
            if self._death is not None:
                raise Unavailable(self._death)
            self._jobs.append(job)
            self._changed.notify_all()
        return job.wait()

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Send events to their streams, drop sequences nobody can hear of, wake who waits for an end. The lock is
        held.
        """
        for seq in self._routes.deliver(events):
            self._agent.abort(seq, self._clock())
        self._changed.notify_all()

    # -- inside: the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the driver was shut down"
        try:
            self._loop()
        except EngineLost as error:
            _log.error("the engine is lost", exc_info=True)
            reason = f"the engine is lost: {public(error)}"
        except BaseException as error:
            _log.critical("the engine loop has died", exc_info=True)
            reason = f"the engine loop has died: {public(error)}"
        self._die(reason)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._jobs or self._agent.busy)
                stopping, job_waits = self._stopping, bool(self._jobs)
            if stopping or job_waits:
                self._steps.settle()
            if stopping:
                return
            if job_waits:
                self._jobs.popleft().run()
            else:
                self._steps.turn()

    def _load(self, name: str) -> ModelSpec:
        spec = self._engine.load(name)
        with self._changed:
            if spec.name in self._agent.models:
                return self._agent.models[spec.name]
            try:
                loaded = self._agent.load_model(spec, self._clock())
            except ZooError:
                self._engine.unload(spec.name)
                raise
        self._memory = self._engine.memory()
        return loaded

    def _unload(self, name: str) -> ModelSpec:
        with self._changed:
            spec = self._agent.models[name]
            plan = self._agent.flush()
        if plan is not None:
            self._steps.launch(plan)
            self._steps.settle()
        try:
            self._engine.unload(name)
        except Exception:
            with self._changed:
                self._agent.models.reopen(name)
            raise
        with self._changed:
            self._agent.unload_model(name, self._clock())
        self._memory = self._engine.memory()
        return spec

    def _die(self, reason: str) -> None:
        """Nothing may wait for this thread any more: no stream, no job, no drain."""
        with self._changed:
            self._death = reason
            try:
                self._deliver(self._agent.end_all(reason, self._clock()))
            except Exception:
                _log.critical("the agent could not end its sequences", exc_info=True)
            # A defect may have cost sequences their last event; their streams must end nevertheless.
            self._routes.deliver(self._routes.ends(reason))
            for job in self._jobs:
                job.refuse(Unavailable(reason))
            self._jobs.clear()
