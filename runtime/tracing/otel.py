"""Export requests as OpenTelemetry spans, built from the trace's events.

One span per sequence, and within it one per row with the devices that it passes:

    arrive -> span `sequence` … block.hop -> span `row` … token -> its end … finish | abort -> the end

`OtelSpans` is a TraceSink that passes every event on to another sink. It needs the extra `otel`; the caller provides
the provider, which exports on a thread of its own. Monotonic event times are converted to wall-clock times with the
offset at construction. A sequence that never ends is not exported.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from runtime.tracing.sink import TraceSink
from runtime.types import TraceEvent
from zoo.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

#: Events that are added to the span of their sequence.
_MARKS = frozenset(
    [
        "batch.insert", "batch.resume", "batch.preempt", "kv.swap.out", "kv.swap.in", "kv.move.start", "kv.meet",
        "kv.move.abort",
    ]
)  # fmt: skip


class OtelSpans:
    """Convert trace events to spans and pass them on to `then`."""

    def __init__(self, provider: TracerProvider, then: TraceSink | None = None, offset: int | None = None) -> None:
        """Create the sink.

        `offset`: nanoseconds from the events' clock to the epoch; by default the current difference.
        """
        self._tracer = provider.get_tracer("blockzoo")
        self._then = then
        self._offset = time.time_ns() - time.monotonic_ns() if offset is None else offset
        self._lock = threading.Lock()
        self._sequences: dict[str, Span] = {}
        self._rows: dict[str, Span] = {}

    def emit(self, event: TraceEvent) -> None:
        if self._then is not None:
            self._then.emit(event)
        if event.seq is not None:
            with self._lock:
                self._record_event(event, event.seq)

    def _record_event(self, event: TraceEvent, seq: str) -> None:
        now = event.t + self._offset
        if event.ev == "arrive":
            model = str(event.extra.get("model", ""))
            attributes = {"gen_ai.request.model": model, "gen_ai.usage.input_tokens": event.n or 0, "zoo.seq": seq}
            self._sequences[seq] = self._tracer.start_span("sequence", start_time=now, attributes=attributes)
            return
        span = self._sequences.get(seq)
        if span is None:
            return
        if event.ev == "block.hop":
            self._hop(event, seq, span, now)
        elif event.ev in _MARKS:
            span.add_event(
                event.ev, {key: str(value) for key, value in event.extra.items()} | {"n": event.n or 0}, timestamp=now
            )
        elif event.ev == "token":
            self._end_row(seq, now)
        elif event.ev in ("finish", "abort"):
            self._end_row(seq, now)
            span.set_attribute("gen_ai.usage.output_tokens", event.n or 0)
            span.set_attribute("gen_ai.response.finish_reasons", (event.cause or event.ev,))
            span.end(end_time=now)
            del self._sequences[seq]

    def _hop(self, event: TraceEvent, seq: str, parent: Span, now: int) -> None:
        from opentelemetry.trace import set_span_in_context

        extra = event.extra
        if extra["hop"] == 0:
            self._end_row(seq, now)
            context = set_span_in_context(parent)
            self._rows[seq] = self._tracer.start_span(
                "row",
                context=context,
                start_time=now,
                attributes={"zoo.start": extra["start"], "zoo.tokens": event.n or 0},
            )
        attributes = {"zoo.device": str(extra["to"]), "zoo.lo": extra["lo"], "zoo.hi": extra["hi"]}
        self._rows[seq].add_event("block.hop", attributes, timestamp=now)

    def _end_row(self, seq: str, now: int) -> None:
        row = self._rows.pop(seq, None)
        if row is not None:
            row.end(end_time=now)


def exporting(endpoint: str) -> TracerProvider:
    """Return a provider that exports spans to a collector by OTLP over HTTP, in batches.

    Raises InputError if the OpenTelemetry packages are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise InputError("spans need OpenTelemetry: pip install 'blockzoo[otel]'") from None
    settings: dict[str, Any] = {"service.name": "blockzoo"}
    provider = TracerProvider(resource=Resource.create(settings))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
