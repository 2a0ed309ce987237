"""What a collector gets: a span of each accepted request with its parts as children, and histograms; no prompt."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import ClassVar

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.service.dialects.test_huggingface import judging
from tests.service.support import make_app, run
from triptych.model.errors import ConfigError
from triptych.service.observability import telemetry
from triptych.service.settings.service_settings import ServiceSettings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = {"model": "gen", "prompt": "canary words", "max_tokens": 4}


class Collector(BaseHTTPRequestHandler):
    """A collector that records the traces and metrics that it gets over OTLP."""

    spans: ClassVar[list[Span]] = []
    metrics: ClassVar[dict[str, Metric]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/metrics":
            (of_service,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
            self.metrics.update((one.name, one) for scope in of_service.scope_metrics for one in scope.metrics)
        else:
            assert self.path == "/v1/traces"
            sent = ExportTraceServiceRequest.FromString(body)
            assert {a.key: a.value.string_value for a in sent.resource_spans[0].resource.attributes}["service.name"]
            self.spans += [span for one in sent.resource_spans for scope in one.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.spans, Collector.metrics = [], {}
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def attributes(span: Span | HistogramDataPoint) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_is_a_span_with_its_parts_below(collector: str) -> None:
    app = make_app(settings=ServiceSettings(otlp_endpoint=collector))

    async def work(client: httpx.AsyncClient) -> None:
        headers = [
            ("traceparent", f"00-{TRACE}-{PARENT}-01"),
            ("x-request-id", "mine"),
            ("tracestate", "a=1,b=2"),
            ("tracestate", "c=3"),
        ]
        assert (await client.post("/generate", json=GOOD, headers=headers)).status_code == 200
        assert (await client.post("/generate", json={**GOOD, "stream": True})).status_code == 200
        assert (await client.post("/encode", json={"input": "w1"})).status_code == 200
        assert (await client.post("/generate", json={**GOOD, "n": 0})).status_code == 400  # never accepted

    run(app, work)
    roots = [span for span in Collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [span.name for span in roots] == ["text_completion gen", "text_completion gen", "embeddings enc"]
    first = roots[0]
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert first.trace_state == "a=1,b=2,c=3"
    for root in roots:
        told = attributes(root)
        assert told["http.response.status_code"] == 200
        assert (told["url.path"], told["url.scheme"]) == (told["http.route"], "http")
    told = attributes(first)
    assert told["gen_ai.usage.input_tokens"] == 13 and told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.id"] == "mine" and told["gen_ai.request.model"] == "gen"
    parts = [span for span in Collector.spans if span.parent_span_id == first.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert parts[0].start_time_unix_nano == first.start_time_unix_nano
    for before, after in pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert abs(parts[-1].end_time_unix_nano - first.end_time_unix_nano) < 20_000  # the parts are rounded
    assert "canary" not in str(Collector.spans)
    points = {
        (name, told["gen_ai.request.model"], told.get("gen_ai.token.type")): point
        for name, metric in Collector.metrics.items()
        for point in metric.histogram.data_points
        if (told := attributes(point))["gen_ai.operation.name"]
    }
    names = {(name.removeprefix("gen_ai."), *rest): (point.count, point.sum) for (name, *rest), point in points.items()}
    assert names["client.token.usage", "gen", "input"] == (2, 26)
    assert names["client.token.usage", "gen", "output"] == (2, 8)
    assert names["client.token.usage", "enc", "input"] == (1, 3)
    for name in ("time_to_first_token", "time_per_output_token", "request.duration"):
        count, seconds = names[f"server.{name}", "gen", None]
        assert count == 2 and 0 < seconds < 60
    assert names["server.request.duration", "enc", None][0] == 1
    assert ("server.time_to_first_token", "enc", None) not in names


def test_an_operation_is_named_by_what_the_route_does(collector: str) -> None:
    app = judging(ServiceSettings(otlp_endpoint=collector))
    bodies = {
        "/rerank": {"query": "w1", "texts": ["w2"]},
        "/predict": {"inputs": "w1"},
        "/v1/embeddings": {"model": "enc", "input": "w1"},
        "/v1/completions": GOOD,
    }

    async def work(client: httpx.AsyncClient) -> None:
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 200, path

    run(app, work)
    roots = [attributes(span) for span in Collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    operations = {one["http.route"]: one["gen_ai.operation.name"] for one in roots}
    assert operations == {**dict.fromkeys(bodies, "embeddings"), "/v1/completions": "text_completion"}


def test_a_failed_request_is_an_error(collector: str) -> None:
    app = make_app(settings=ServiceSettings(otlp_endpoint=collector), error_after=2)

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post("/generate", json=GOOD)).status_code == 500

    run(app, work)
    (root,) = [span for span in Collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert attributes(root)["error.type"] == "engine_failed"
    assert attributes(root)["http.response.status_code"] == 500
    assert root.status.code == 2


@pytest.mark.parametrize("sent", ["", "nonsense", "00-zz-yy-01", "x" * 5000])
def test_a_bad_parent_is_no_parent(collector: str, sent: str) -> None:
    app = make_app(settings=ServiceSettings(otlp_endpoint=collector))

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post("/generate", json=GOOD, headers={"traceparent": sent})).status_code == 200

    run(app, work)
    assert not next(span for span in Collector.spans if span.kind == Span.SPAN_KIND_SERVER).parent_span_id


def test_an_endpoint_is_an_address() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint must begin with http"):
        ServiceSettings(otlp_endpoint="collector:4318")


def test_a_collector_that_does_not_answer_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_CLOSE_MS", 100)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = make_app(settings=ServiceSettings(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
        began = time.monotonic()
        assert run(app, lambda client: client.post("/generate", json=GOOD)).status_code == 200
        assert time.monotonic() - began < 5  # the exporters wait for 10 s at each try
