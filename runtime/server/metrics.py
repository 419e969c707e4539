"""Prometheus metrics of one server: vLLM's names where the meaning is the same, `blockzoo:` for the rest.

Two kinds: latencies and token counts, recorded by the frontend as they happen; and the driver's state (queues, pages,
weights), read once per scrape. Each server has its own registry, so several may live in one process.

- The page pool belongs to the device, not to a model. Its usage is repeated under every model's name for dashboards
  made for vLLM, which filter by `model_name`.
- Preemptions are counted per device, without that label.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.control.counters import AgentState
from runtime.grammars.checking import GrammarChecker
from runtime.server.interfaces import Driver
from runtime.types import FinishReason

# Bucket bounds in seconds. Decode steps take 1 ms to 1 s; a first token or a whole answer may wait minutes in a queue.
_STEP_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
_FIRST_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_WHOLE_SECONDS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class ModelMetrics:
    """The instruments of one model, so that labels are looked up once per request and not once per token."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._finished, self._aliased = metrics.finished, metrics.aliased
        self._model = model
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.first_token = metrics.first_token.labels(model)
        self.steps = metrics.steps.get_tally(model)
        self.per_token = metrics.per_token.labels(model)
        self.whole = metrics.whole.labels(model)
        self.request_prompt = metrics.request_prompt.labels(model)
        self.request_generated = metrics.request_generated.labels(model)

    def finish(self, reason: FinishReason) -> None:
        self._finished.labels(self._model, reason).inc()

    def count_alias(self, alias: str) -> None:
        """Count a request for an alias that the model answers."""
        self._aliased.labels(alias, self._model).inc()


class Metrics:
    """All metrics of `/metrics`."""

    def __init__(self, driver: Driver, grammars: GrammarChecker) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        label = ["model_name"]
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Tokens of prompts whose first answer token came.", label
        )
        self.finished = self._counter(
            "vllm:request_success", "Sequences that ended, by reason.", [*label, "finished_reason"]
        )
        self.aliased = self._counter(
            "blockzoo:alias_requests", "Requests for an alias, by the model that answers them.", ["alias", *label]
        )
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", _FIRST_SECONDS
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between a sequence's tokens.", _STEP_SECONDS
        )
        self.whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its last token.", _WHOLE_SECONDS
        )
        self.request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_generated = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens per sequence.", _TOKENS
        )
        self.steps = _StepCollector()
        for collector in (self.steps, _DriverCollector(driver), _GrammarCollector(grammars)):
            self.registry.register(collector)
        self._models: dict[str, ModelMetrics] = {}

    def get_model(self, model: str) -> ModelMetrics:
        """Return the instruments of a served model. Only served models' names become labels, never a client's input."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    def text(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str, labels: list[str]) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, ["model_name"], buckets=buckets, registry=self.registry)


class StepTally:
    """Plain counters updated for every token of one model.

    `prometheus_client`'s instruments lock and look up at every call, which would be a tenth of the per-token cost here.
    Written on the event loop's thread only; a scrape on another thread may miss the latest values.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self.counts = [0] * (len(_STEP_SECONDS) + 1)

    def between(self, seconds: float) -> None:
        self.counts[bisect_left(_STEP_SECONDS, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative bucket counts, as Prometheus expects them."""
        return list(zip([*map(str, _STEP_SECONDS), "+Inf"], accumulate(self.counts), strict=True))


class _StepCollector(Collector):
    """Collector that exports the tallies of all models as two metrics."""

    def __init__(self) -> None:
        self._tallies: dict[str, StepTally] = {}

    def get_tally(self, model: str) -> StepTally:
        return self._tallies.setdefault(model, StepTally())

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=["model_name"])
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", labels=["model_name"]
        )
        for model, tally in list(self._tallies.items()):
            tokens.add_metric([model], tally.tokens)
            between.add_metric([model], tally.buckets(), tally.seconds)
        yield from (tokens, between)


class _GrammarCollector(Collector):
    """Collector that reads the counters of what checks grammars of answers once per scrape."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker

    def collect(self) -> Iterator[Metric]:
        checked = CounterMetricFamily(
            "blockzoo:grammars_checked", "Grammars of answers that were compiled, by result.", labels=["result"]
        )
        checked.add_metric(["passed"], self._checker.passed)
        checked.add_metric(["refused"], self._checker.refused - self._checker.given_up)
        checked.add_metric(["given_up"], self._checker.given_up)
        yield checked


class _DriverCollector(Collector):
    """Collector that reads the driver's state once per scrape."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def describe(self) -> list[Metric]:
        """Return nothing: registration must not call the driver."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._driver.state()
        yield from self._queues(state)
        wanted = self._driver.health().get("scale_up_wanted")
        if wanted is not None:
            documentation = "Whether late requests remain in the best planned order."
            yield GaugeMetricFamily("blockzoo:scale_up_wanted", documentation, value=float(wanted))
        yield from self._pages(state)
        yield from self._counters(state)
        yield from self._blocks(state)
        yield from self._memory()
        yield from self._agents()

    def _queues(self, state: AgentState) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "Sequences in the running batch.", labels=["model_name"]
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Sequences that wait for a place.", labels=["model_name"]
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the device's pages in use, 0 to 1.", labels=["model_name"]
        )
        pages = state.pages
        for load in state.models:
            running.add_metric([load.model], load.running)
            waiting.add_metric([load.model], load.waiting)
            usage.add_metric([load.model], 1.0 - pages.free / pages.capacity if pages.capacity else 0.0)
        yield from (running, waiting, usage)

    def _pages(self, state: AgentState) -> Iterator[Metric]:
        metric = GaugeMetricFamily("blockzoo:pages", "KV pages of the device by state.", labels=["device", "state"])
        pages = state.pages
        for name in ("free", "local", "lent", "reserved", "in_flight"):
            metric.add_metric([self._driver.device, name], getattr(pages, name))
        yield metric

    def _counters(self, state: AgentState) -> Iterator[Metric]:
        """Yield the counters of agents and scheduler, named as in `control.counters.AgentCounters`."""
        for name, documentation, value in state.counters.shown():
            yield CounterMetricFamily(name, documentation, value=value)

    def _blocks(self, state: AgentState) -> Iterator[Metric]:
        batch = GaugeMetricFamily(
            "blockzoo:block_batch_size", "Sequences of all models in a block's batch.", labels=["block"]
        )
        queue = GaugeMetricFamily(
            "blockzoo:block_queue_length", "Sequences of all models that wait for a block.", labels=["block"]
        )
        for load in state.instances:
            batch.add_metric([load.block], load.batch)
            queue.add_metric([load.block], load.queue)
        yield from (batch, queue)

    def _agents(self) -> Iterator[Metric]:
        """Yield one value per device of a cluster."""
        up = GaugeMetricFamily("blockzoo:agent_up", "Whether a device's agent is there.", labels=["device"])
        deaths = CounterMetricFamily(
            "blockzoo:agent_deaths", "Agents of a device that died unasked.", labels=["device"]
        )
        agents = self._driver.health().get("agents", ())
        for each in agents:
            up.add_metric([each["device"]], float(each["phase"] == "up"))
            deaths.add_metric([each["device"]], each["deaths"])
        yield from (up, deaths) if agents else ()

    def _memory(self) -> Iterator[Metric]:
        memory, device = self._driver.memory(), self._driver.device
        for name, documentation, value in (
            ("blockzoo:weight_bytes", "Resident weights, each distinct tensor once.", memory.weights),
            (
                "blockzoo:weight_bytes_unshared",
                "What the same models would take without sharing.",
                memory.weights_unshared,
            ),
            ("blockzoo:kv_pool_bytes", "The page pool.", memory.kv_pool),
        ):
            metric = GaugeMetricFamily(name, documentation, labels=["device"])
            metric.add_metric([device], value)
            yield metric
        host = GaugeMetricFamily(
            "blockzoo:host_memory_bytes",
            "Host memory with K and V of sequences that gave way, and with weights that wait.",
            labels=["device", "kind"],
        )
        host.add_metric([device, "kv"], memory.host_kv)
        host.add_metric([device, "weights"], memory.host_weights)
        yield host
