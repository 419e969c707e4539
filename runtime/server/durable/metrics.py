"""The queue's metrics, read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.durable.runs import DurableRuns
from zoo.errors import StoreError


class QueueCollector(Collector):
    """Collector of one server's durable requests."""

    def __init__(self, durable: DurableRuns) -> None:
        self._durable = durable

    def describe(self) -> list[Metric]:
        """Return nothing: registration must not read the queue."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            requests = GaugeMetricFamily(
                "blockzoo:queue_requests", "Durable requests that wait, run, or were given up.", labels=["state"]
            )
            for state, count in self._durable.store.counts().items():
                requests.add_metric([state], count)
            uncounted = GaugeMetricFamily(
                "blockzoo:queue_uncounted", "Ended requests of clients' keys that the catalogue has not charged yet."
            )
            uncounted.add_metric([], self._durable.store.uncounted())
            counts = self._durable.store.journal.counts
        except StoreError:  # the other metrics are wanted most when the queue fails
            return
        yield from (requests, uncounted)
        for name, documentation, value in (
            ("blockzoo:queue_commits", "Transactions of the queue's journal.", counts.commits),
            ("blockzoo:queue_commit_seconds", "Seconds that they took.", counts.seconds),
            ("blockzoo:queue_appends", "Batches of token events in them.", counts.appends),
            ("blockzoo:queue_failures", "Writes of the queue that failed.", counts.failures),
        ):
            yield CounterMetricFamily(name, documentation, value=value)
