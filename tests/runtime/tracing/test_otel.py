"""OpenTelemetry spans record each row with the devices it passed, and end when their sequence ends."""

from __future__ import annotations

import pytest

from runtime.tracing.otel import OtelSpans
from tests.runtime.scheduler.test_scheduler import CUTS, M, N, some
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


def spans_of(kill: bool = False):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    cluster = VirtualCluster([M, N], CUTS, devices=2)
    spans = OtelSpans(provider, offset=0)
    cluster.ask(*some(6, 2))
    if kill:
        cluster.at(9 * MS, lambda: cluster.kill("d1"))
    cluster.run()
    cluster.expect()
    for event in cluster.trace.events:
        spans.emit(event)
    return cluster, exporter.get_finished_spans()


@pytest.mark.parametrize("kill", [False, True])
def test_each_sequence_is_a_span_and_each_row_one_within_it(kill: bool) -> None:
    cluster, spans = spans_of(kill)
    sequences = {span.attributes["zoo.seq"]: span for span in spans if span.name == "sequence"}
    assert set(sequences) == set(cluster.requests)
    for seq, span in sequences.items():
        assert span.attributes["gen_ai.usage.output_tokens"] == len(cluster.told[seq].tokens)
        rows = [row for row in spans if row.name == "row" and row.parent.span_id == span.context.span_id]
        assert len(rows) >= len(cluster.told[seq].tokens)
        assert all([mark.attributes["zoo.device"] for mark in row.events] == ["d0", "d1"] for row in rows)
        assert all(span.start_time <= row.start_time <= row.end_time <= span.end_time for row in rows)
