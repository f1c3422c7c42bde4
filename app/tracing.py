"""A request's trace: W3C Trace Context in and out, and spans where OpenTelemetry is there; it knows no socket.

The extra `phalanx[otel]` brings what sends spans. They are sent where OTEL_EXPORTER_OTLP_ENDPOINT says, as with every
program that has OpenTelemetry; without that, or without the extra, `traceparent` is all there is.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from app.log import Entry

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("app")

LAST = 3.0  # seconds for the last spans: the one who takes them may be gone
ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """Where a request stands in its trace; ids in hex, as `traceparent` has them."""

    trace_id: str
    span_id: str
    flags: str
    span: Span | None

    @property
    def traceparent(self) -> bytes:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}".encode()


class Tracing:
    """Begins and ends a request's trace."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        self._provider: Any = None
        if any(os.environ.get(name) for name in ENDPOINTS):
            self._open()

    def begin(self, path: str, header: bytes | None) -> Trace | None:
        """None where nobody traces: there is no valid `traceparent`, and spans are not sent."""
        match = _TRACEPARENT.fullmatch(header.strip()) if header is not None else None
        trace_id, parent, flags = (one.decode() for one in match.groups()[:3]) if match else ("", "", "01")
        if self._tracer is not None:
            return self._span(path, trace_id, parent, flags)
        return Trace(trace_id, f"{random.getrandbits(64) or 1:016x}", flags, None) if match else None

    def end(self, trace: Trace, entry: Entry) -> None:
        """The request's own span, and those of its stay in the queue, its steps and each rank's part in them."""
        if trace.span is None or self._tracer is None:
            return
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        # time.monotonic() counts from no date
        past = time.time_ns() - round(1e9 * time.monotonic())

        def span(name: str, parent: Span, start: float, stop: float, **attributes: Any) -> Span:
            assert self._tracer is not None
            context = set_span_in_context(parent)
            made = self._tracer.start_span(name, context, attributes=attributes, start_time=past + round(1e9 * start))
            made.end(past + round(1e9 * stop))
            return made

        request = entry.request
        if request is not None and request.added:
            span("queue", trace.span, request.added, request.started or entry.ended)
            for step in request.ran:
                own = span("step", trace.span, step.sent, step.ended, **{"phalanx.items": step.items})
                for stats in step.stats:
                    began = min(max(stats.began, step.sent), step.ended)
                    if not stats.began:  # by another host's clock: it ended before the collect, as it seems from here
                        began = max(step.sent, step.ended - step.collect_seconds - stats.forward_seconds)
                    stop = min(began + stats.forward_seconds, step.ended)
                    attributes = {"phalanx.rank": stats.rank, "phalanx.group": step.group, "phalanx.items": stats.items}
                    span("forward", own, began, stop, **attributes)
                span("collect", own, max(step.sent, step.ended - step.collect_seconds), step.ended)
            trace.span.set_attribute("phalanx.items", request.size)
            trace.span.set_attribute("phalanx.failed", len(request.failures))
        trace.span.set_attributes({"http.response.status_code": entry.status, "phalanx.request_id": entry.request_id})
        if entry.status >= 500:
            trace.span.set_status(Status(StatusCode.ERROR, entry.error))
        trace.span.end()

    def close(self) -> None:
        """Send what has not been sent, if that can be done in a moment."""
        if self._provider is not None:
            last = threading.Thread(target=self._provider.shutdown, daemon=True)
            last.start()
            last.join(LAST)

    def _open(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            log.warning("%s is set, but no spans are sent: install phalanx[otel]", " or ".join(ENDPOINTS))
            return
        given = os.environ.get("OTEL_SERVICE_NAME") or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if given else {"service.name": "phalanx"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("phalanx")

    def _span(self, path: str, trace_id: str, parent: str, flags: str) -> Trace:
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            SpanKind,
            TraceFlags,
            set_span_in_context,
        )

        assert self._tracer is not None
        context = None
        if trace_id:
            sampled = TraceFlags(int(flags, 16))
            context = set_span_in_context(
                NonRecordingSpan(SpanContext(int(trace_id, 16), int(parent, 16), is_remote=True, trace_flags=sampled))
            )
        attributes = {"http.request.method": "POST", "url.path": path}
        span = self._tracer.start_span(f"POST {path}", context, kind=SpanKind.SERVER, attributes=attributes)
        own = span.get_span_context()
        return Trace(f"{own.trace_id:032x}", f"{own.span_id:016x}", f"{own.trace_flags:02x}", span)
