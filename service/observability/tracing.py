"""OpenTelemetry spans of accepted requests: one for the request, with child spans for queue, prefill and decode.

    triptych serve --otlp-endpoint http://collector:4318     (pip install 'triptych[otel]')

Spans are created when a request has ended, from times that are recorded anyway, so tracing does not slow decoding down.
Names and attributes follow OpenTelemetry's semantic conventions for generative AI. A client's `traceparent` (W3C Trace
Context) is the parent, and its `tracestate` is kept. Spans contain no prompt, output or key.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from triptych.model.api.request import FinishReason, Timings
from triptych.model.errors import ConfigError
from triptych.service.core.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {"generate": "text_completion", "encode": "embeddings"}  # the convention has no term for scores or labels
_CHAT = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"})


class Tracer:
    """Exports the spans of one application in batches, from a separate thread."""

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "triptych", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("triptych", version)

    @classmethod
    def to(cls, endpoint: str, version: str) -> Tracer:
        """Create a tracer that sends spans as OTLP over HTTP; raises `ConfigError` if the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise ConfigError("otlp_endpoint needs the extra: pip install 'triptych[otel]'") from None
        return cls(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"), version)

    def ended(self, context: RequestContext, outcome: FinishReason, timings: Timings, has_output: bool) -> None:
        """Export the spans of an accepted request that has ended, once the status of its reply is known."""
        end = time.time_ns()
        context.at_end(lambda: self._export(context, outcome, timings, has_output, end))

    def _export(
        self, context: RequestContext, outcome: FinishReason, timings: Timings, has_output: bool, end: int
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        start = end - round(timings.total_ms * 1e6)
        operation = "chat" if context.path in _CHAT else _OPERATIONS[context.task or "generate"]
        span = self._tracer.start_span(
            f"{operation} {context.model}",
            context=TraceContextTextMapPropagator().extract(
                {"traceparent": context.traceparent, "tracestate": context.tracestate}
            ),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "triptych",
                "gen_ai.request.model": context.model,
                "gen_ai.response.id": context.request_id,
                "gen_ai.usage.input_tokens": context.tokens_in,
                "gen_ai.usage.cache_read.input_tokens": context.cached_tokens,
                "gen_ai.usage.output_tokens": context.tokens_out,
                "gen_ai.response.finish_reasons": [outcome.value],
                "http.request.method": "POST",
                "http.route": context.path,
                "url.path": context.path,
                "url.scheme": context.scheme,
            },
        )
        if context.status:  # 0 if the client disconnected before the reply began
            span.set_attribute("http.response.status_code", context.status)
        if outcome is FinishReason.ERROR:
            span.set_attribute("error.type", "engine_failed")
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        at = start
        parts = (("queue", timings.queue_ms), ("prefill", timings.prefill_ms), ("decode", timings.decode_ms))
        for name, milliseconds in parts if has_output else parts[:1]:
            part = self._tracer.start_span(name, context=inside, start_time=at)
            at += round(milliseconds * 1e6)
            part.end(at)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
