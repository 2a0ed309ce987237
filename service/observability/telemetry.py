"""OpenTelemetry spans and metrics of accepted requests.

    triptych serve --otlp-endpoint http://collector:4318     (pip install 'triptych[otel]')

A request is a span, with child spans for queue, prefill and decode. A client's `traceparent` (W3C Trace Context) is the
parent, and its `tracestate` is kept. Spans and metrics are recorded when a request has ended, from times that are known
anyway, so decoding does not slow down. Names, attributes and bounds follow OpenTelemetry's semantic conventions for
generative AI (gen-ai-spans, gen-ai-metrics). Neither contains a prompt, an output or a key.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from triptych.model.api.request import FinishReason, Timings
from triptych.model.errors import ConfigError
from triptych.service.core.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {"generate": "text_completion", "encode": "embeddings"}  # the convention has no term for scores or labels
_CLOSE_MS = 3_000  # for what remains, if the collector is away
_ERROR = "engine_failed"  # the one failure of an accepted request
_CHAT = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"})


# Name, unit and bounds of the conventions' histograms.
_DURATION = ("gen_ai.server.request.duration", "s", [0.01 * 2**power for power in range(14)])
_FIRST_TOKEN = (
    *("gen_ai.server.time_to_first_token", "s"),
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0],
)
_EACH_TOKEN = (
    *("gen_ai.server.time_per_output_token", "s"),
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
)
_TOKENS = ("gen_ai.client.token.usage", "{token}", [float(4**power) for power in range(14)])


class Telemetry:
    """Exports the spans and metrics of one application in batches, from separate threads."""

    def __init__(self, spans: SpanExporter, metrics: MetricExporter, version: str) -> None:
        from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "triptych", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._provider.get_tracer("triptych", version)
        readers = [PeriodicExportingMetricReader(metrics)]
        self._meters = MeterProvider(readers, resource, AlwaysOffExemplarFilter(), shutdown_on_exit=False)
        meter = self._meters.get_meter("triptych", version)
        self._duration, self._first_token, self._each_token, self._tokens = (
            meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)
            for name, unit, bounds in (_DURATION, _FIRST_TOKEN, _EACH_TOKEN, _TOKENS)
        )

    @classmethod
    def to(cls, endpoint: str, version: str) -> Telemetry:
        """Create an exporter of OTLP over HTTP; raises `ConfigError` if the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise ConfigError("otlp_endpoint needs the extra: pip install 'triptych[otel]'") from None
        base = endpoint.rstrip("/")
        return cls(OTLPSpanExporter(f"{base}/v1/traces"), OTLPMetricExporter(f"{base}/v1/metrics"), version)

    def ended(self, context: RequestContext, outcome: FinishReason, timings: Timings, has_output: bool) -> None:
        """Record an accepted request that has ended; its span is exported once the status of its reply is known."""
        end = time.time_ns()
        self._measure(context, outcome, timings, has_output)
        context.at_end(lambda: self._export(context, outcome, timings, has_output, end))

    def _measure(self, context: RequestContext, outcome: FinishReason, timings: Timings, has_output: bool) -> None:
        about = {
            "gen_ai.operation.name": _operation(context),
            "gen_ai.provider.name": "triptych",
            "gen_ai.request.model": context.model,
        }
        failed = {"error.type": _ERROR} if outcome is FinishReason.ERROR else {}
        self._duration.record(timings.total_ms / 1000, about | failed)
        self._tokens.record(context.tokens_in, about | {"gen_ai.token.type": "input"})
        if context.task == "generate" and has_output:
            self._tokens.record(context.tokens_out, about | {"gen_ai.token.type": "output"})
            self._first_token.record(timings.ttft_ms / 1000, about)
            if context.tokens_out > 1:
                self._each_token.record(timings.decode_ms / 1000 / (context.tokens_out - 1), about)

    def _export(
        self, context: RequestContext, outcome: FinishReason, timings: Timings, has_output: bool, end: int
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        start = end - round(timings.total_ms * 1e6)
        operation = _operation(context)
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
            span.set_attribute("error.type", _ERROR)
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
        """Send what remains, for at most `_CLOSE_MS`."""
        end = time.monotonic() + _CLOSE_MS / 1000
        spans = threading.Thread(target=self._provider.shutdown, daemon=True)  # it may wait for half a minute
        spans.start()
        self._meters.shutdown(_CLOSE_MS)
        spans.join(max(0.0, end - time.monotonic()))


def _operation(context: RequestContext) -> str:
    return "chat" if context.path in _CHAT else _OPERATIONS[context.task or "generate"]
