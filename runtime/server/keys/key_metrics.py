"""What clients' keys use, for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.keys.key_book import KeyBook


class KeyCollector(Collector):
    """Collector that reads the totals of a server's `KeyBook` once per scrape."""

    def __init__(self, keys: KeyBook) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("blockzoo:key_requests", "Requests by the client's key.", labels=["key"])
        tokens = CounterMetricFamily(
            "blockzoo:key_tokens", "Tokens of requests that ended, by the client's key.", labels=["key", "kind"]
        )
        refused = CounterMetricFamily(
            "blockzoo:key_refused", "Requests that a key's limits refused, by the key.", labels=["key"]
        )
        for name, used in list(self._keys.totals.items()):
            requests.add_metric([name], used.requests)
            tokens.add_metric([name, "prompt"], used.prompt_tokens)
            tokens.add_metric([name, "generated"], used.generated_tokens)
        for name, count in list(self._keys.refused.items()):
            refused.add_metric([name], count)
        yield from (requests, tokens, refused)
