"""What clients' keys use, for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.keys.key_book import KeyBook
from zoo.money import COST_DECIMALS


class KeyCollector(Collector):
    """Collector that reads the totals of a server's `KeyBook` once per scrape."""

    def __init__(self, keys: KeyBook) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("blockzoo:key_requests", "Requests by the client's key.", labels=["key"])
        tokens = CounterMetricFamily(
            "blockzoo:key_tokens", "Tokens of requests that ended, by the client's key.", labels=["key", "kind"]
        )
        cached = CounterMetricFamily(
            "blockzoo:key_cached_tokens", "Prompt tokens of them that were not computed, by the key.", labels=["key"]
        )
        refused = CounterMetricFamily(
            "blockzoo:key_refused", "Requests that a key's limits refused, by the key.", labels=["key"]
        )
        cost = CounterMetricFamily(
            "blockzoo:key_cost", "Money that tokens cost when they were counted, by the client's key.", labels=["key"]
        )
        for name, used in list(self._keys.totals.items()):
            cost.add_metric([name], used.cost / 10**COST_DECIMALS)
            requests.add_metric([name], used.requests)
            tokens.add_metric([name, "prompt"], used.prompt_tokens)
            tokens.add_metric([name, "generated"], used.generated_tokens)
            cached.add_metric([name], used.cached_tokens)
        for name, count in list(self._keys.refused.items()):
            refused.add_metric([name], count)
        yield from (requests, tokens, cached, cost, refused)
