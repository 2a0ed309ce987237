"""Health, draining, keys, ids, metrics, logs and the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import re
import socket
import wave
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import httpx
import jsonschema
import pytest
from PIL import Image
from starlette.types import Receive, Scope, Send

from tests.service.dialects.support import chat_app
from tests.service.support import (
    App,
    HeldTokenizer,
    ask,
    check_accounts,
    counted,
    info,
    make_app,
    run,
    samples,
    served,
    until,
)
from tests.service.test_bad_requests import check_error
from triptych.model.api.request import FinishReason
from triptych.model.errors import ConfigError
from triptych.service.app import TABLE
from triptych.service.cli import banner
from triptych.service.core.errors import ANTHROPIC_PATHS, OLLAMA_ROUTES, SERVER_FAULTS
from triptych.service.core.request_context import IN_PROXY, SENDS_ON, RequestContext
from triptych.service.observability import logs
from triptych.service.runtimes.assembly import check_metrics_port
from triptych.service.runtimes.http_server import MonitoringApp
from triptych.service.schemas.replies import InfoReply, ModelsReply
from triptych.service.settings.service_settings import Limits, ServiceSettings

GOOD = {"model": "gen", "prompt": "ab", "max_tokens": 4}
SERVED = {("gen", "generate"), ("seq", "generate"), ("gen", "encode"), ("seq", "encode"), ("enc", "encode")}


def test_info_shows_every_limit(app: App) -> None:
    reply = InfoReply.model_validate_json(ask(app, "GET", "/info").content)
    assert set(reply.limits) == {item.name for item in fields(Limits)}
    assert [model["name"] for model in reply.models] == ["gen", "seq", "enc"]
    assert reply.models[0]["max_queued_requests"] == 32
    assert "path" not in reply.models[0]


def test_the_metrics_port_needs_no_key_and_answers_nothing_else() -> None:
    made = make_app(settings=ServiceSettings(api_keys=("a-key",), metrics_port=9400))

    async def talk() -> None:
        transport = httpx.ASGITransport(MonitoringApp(made.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            found = await client.get("/metrics")
            assert found.headers["content-type"].startswith("text/plain") and b"triptych_http_requests" in found.content
            assert (await client.get("/livez")).json() == {"status": "ok"}
            assert (await client.head("/metrics")).status_code == 200
            rebound = await client.get("/metrics", headers={"Host": "evil.example:9400"})
            assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "unknown_host")
            assert (await client.get("/readyz", headers={"Host": "evil.example"})).status_code == 200
            for method, path in (("GET", "/info"), ("POST", "/generate"), ("POST", "/metrics"), ("GET", "/metrics/")):
                assert (await client.request(method, path)).json()["error"]["code"] == "not_found"

    asyncio.run(talk())
    with pytest.raises(ConfigError, match=r"metrics_port must be 1 to 65535 and not port \(8000\), found 8000"):
        ServiceSettings(metrics_port=8000)


def test_slow_fallbacks_are_shown(app: App) -> None:
    """By the banner, loudly, by /info and by a metric."""
    slow = info(
        "gen",
        "decoder-only",
        fallbacks=("attention is not Triton's: no compiler",),
        recorded_sizes=20,
        recorded_prompts=5,
        recorded_batches=9,
    )
    lines = banner._model_lines(slow)
    assert sum("SLOWER THAN IT COULD BE: attention is not Triton's: no compiler" in line for line in lines) == 1
    assert sum("CUDA graphs, 20 batch sizes, with prompts 5" in line for line in lines) == 1
    assert sum("inputs encoded by CUDA graphs, 9 batch sizes" in line for line in lines) == 1
    quiet = banner._model_lines(info("gen", "decoder-only"))
    assert len(quiet) == len(lines) - 3
    (shown, *_) = InfoReply.model_validate_json(ask(app, "GET", "/info").content).models
    assert (shown["fallbacks"], shown["recorded_sizes"]) == ([], 0)
    app.metrics.loaded(slow, "1", (), restarts=0)
    assert samples(app, "triptych_slow_fallbacks")["gen",] == 1
    app.metrics.loaded(info("gen", "decoder-only"), "1", (), restarts=0)
    assert samples(app, "triptych_slow_fallbacks")["gen",] == 0


def test_models_and_docs(app: App) -> None:
    reply = ModelsReply.model_validate_json(ask(app, "GET", "/v1/models").content)
    assert [card.id for card in reply.data] == ["gen", "seq", "enc"]
    assert ask(app, "GET", "/docs").status_code == 200


def test_health(app: App) -> None:
    for path in ("/livez", "/readyz", "/health"):
        assert ask(make_app(), "GET", path).json() == {"status": "ok"}
    app = make_app(ready=False, live=False, reason="engine died at 0x7fff12345678 in /usr/lib/secret.py")
    for path, code in (("/livez", "not_live"), ("/readyz", "not_ready"), ("/health", "not_ready")):
        error = check_error(ask(app, "GET", path), 503, None, code)
        assert "engine died" in error["message"] and "secret" not in error["message"]
    for shown, number in ((make_app(), 1), (app, 0)):  # (A12)
        text = ask(shown, "GET", "/metrics").text
        for name in ("engine_live", "engine_ready"):
            assert f'triptych_{name}{{model="gen"}} {number}.0' in text
    check_error(ask(app, "POST", "/generate", json=GOOD), 503, None, "not_ready")
    check_accounts(app)


def test_draining_lets_the_running_finish() -> None:
    app = make_app(delay_s=0.01)

    async def work(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(client.post("/generate", json=GOOD))
        await until(lambda: app.client.running)
        drained = asyncio.create_task(app.service.drain())
        await asyncio.sleep(0)
        refused = await client.post("/generate", json=GOOD)
        check_error(refused, 503, None, "draining")
        assert refused.headers["retry-after"]
        check_error(await client.get("/readyz"), 503, None, "draining")
        assert (await client.get("/livez")).status_code == 200
        await drained
        assert (await running).json()["choices"][0]["finish_reason"] == "length"

    run(app, work)
    check_accounts(app)


def test_a_drain_that_takes_too_long_cancels() -> None:
    app = make_app(delay_s=0.01, settings=ServiceSettings(drain_timeout_s=0.05))

    async def work(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(client.post("/generate", json={**GOOD, "max_tokens": 60}))
        await until(lambda: app.client.running)
        await app.service.drain()
        assert (await running).json()["choices"][0]["finish_reason"] == "cancelled"

    run(app, work)
    check_accounts(app)


LONG_TEXTS = ["w1" + " " * 900] * 3  # enough for a thread
HELD: dict[str, Any] = {"/generate": {"prompt": LONG_TEXTS, "max_tokens": 2}, "/encode": {"input": LONG_TEXTS}}


class Held:
    """An application with a model whose tokenizer waits in its thread to be let go."""

    def __init__(self, **settings: Any) -> None:
        self.tokenizer = HeldTokenizer()
        model = served("held", "decoder-only", self.tokenizer)
        self.app = make_app(model, settings=ServiceSettings(**settings))

    async def planning(self, client: httpx.AsyncClient, path: str) -> asyncio.Task[httpx.Response]:
        """A request whose text is being tokenised."""
        request = asyncio.create_task(client.post(path, json={"model": "held", **HELD[path]}))
        await until(self.tokenizer.asked.is_set)
        return request


@pytest.mark.parametrize("path", HELD)
def test_draining_waits_for_what_is_being_planned(path: str) -> None:
    held = Held()

    async def work(client: httpx.AsyncClient) -> None:
        planned = await held.planning(client, path)
        drained = asyncio.create_task(held.app.service.drain())
        await asyncio.sleep(0)
        check_error(await client.post("/generate", json=GOOD), 503, None, "draining")
        assert not drained.done()
        held.tokenizer.go.set()
        await drained
        assert (await planned).status_code == 200

    run(held.app, work)
    check_accounts(held.app)


@pytest.mark.parametrize("path", HELD)
def test_requests_still_being_planned_at_the_end_of_a_drain_are_refused(path: str) -> None:
    held = Held(drain_timeout_s=0.01)

    async def work(client: httpx.AsyncClient) -> None:
        planned = await held.planning(client, path)
        await held.app.service.drain()
        held.tokenizer.go.set()
        check_error(await planned, 503, None, "draining")

    run(held.app, work)
    check_accounts(held.app)
    assert not held.app.client.submitted and not held.app.client.encoded


@pytest.mark.parametrize("path", HELD)
def test_an_engine_that_is_gone_by_then_refuses(path: str) -> None:
    held = Held()

    async def work(client: httpx.AsyncClient) -> None:
        planned = await held.planning(client, path)
        held.app.script.dead = True
        held.tokenizer.go.set()
        check_error(await planned, 503, None, "engine_dead")

    run(held.app, work)
    check_accounts(held.app)
    assert counted(held.app, "triptych_rejections_total") == {("held", "engine_dead"): 1}


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def test_every_route_asks_for_a_key() -> None:
    app = make_app(settings=ServiceSettings(api_keys=("canary-key", "other-key")))
    paths = [re.sub(r"{id(:path)?}", "x", route.path) for route in TABLE.rows] + [
        "/nope",
        "/generate/",
        "//generate",
        "/DOCS",
    ]
    assert {"/generate", "/docs", "/openapi.json", "/metrics", "/"} <= set(paths)

    async def work(client: httpx.AsyncClient) -> None:
        for path in paths:
            for method in METHODS:
                wrong = (
                    {"authorization": "Bearer wrong"},
                    {"authorization": "Basic canary-key"},
                    {"x-api-key": "wrong"},
                )
                for headers in ({}, *wrong):
                    reply = await client.request(method, path, headers=headers)
                    if path in ("/livez", "/readyz", "/health"):
                        assert reply.status_code in (200, 405)
                    elif method == "HEAD":
                        assert reply.status_code == 401
                    else:
                        assert reply.headers["www-authenticate"] == "Bearer"
                        if path in ANTHROPIC_PATHS:
                            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
                        elif path.startswith(OLLAMA_ROUTES):
                            assert reply.status_code == 401 and "API key" in reply.json()["error"]
                        else:
                            check_error(reply, 401, None, "invalid_api_key")
                    host = await client.request(method, path, headers={**headers, "host": "x/livez?"})
                    assert host.status_code == reply.status_code
                for key in ("canary-key", "other-key"):
                    reply = await client.request(method, path, headers={"authorization": f"bearer {key}"})
                    assert reply.status_code != 401, (method, path)

    run(app, work)
    check_accounts(app)


@pytest.mark.parametrize("sent", ["mine", "a.b:c_d-1", "x" * 128])
def test_request_ids_are_echoed(app: App, sent: str) -> None:
    for path in ("/info", "/nope"):
        assert ask(app, "GET", path, headers={"x-request-id": sent}).headers["x-request-id"] == sent
    reply = ask(app, "POST", "/generate", json=GOOD, headers={"x-request-id": sent})
    assert reply.json()["id"] == reply.headers["x-request-id"] == sent
    reply = ask(app, "POST", "/generate", json={**GOOD, "request_id": "wins"}, headers={"x-request-id": sent})
    assert reply.json()["id"] == reply.headers["x-request-id"] == "wins"


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "a;b", "<script>"])
def test_bad_request_ids_are_replaced(app: App, sent: str) -> None:
    made = ask(app, "GET", "/info", headers={"x-request-id": sent}).headers["x-request-id"]
    assert made != sent and len(made) == 24


def test_counters_of_objectives_begin_at_zero() -> None:
    """A series that is born with the first failure has risen before anybody saw it: `rate()` of it is 0."""
    app = make_app()
    ask(app, "GET", "/info")
    begun = samples(app, "triptych_requests_total")
    assert begun == dict.fromkeys(
        ((model, outcome, task) for model, task in SERVED for outcome in map(str, FinishReason)), 0
    )
    assert samples(app, "triptych_requests_received_total") == {("encode",): 0, ("generate",): 0}
    names = {"", *(model for model, _ in SERVED)}
    assert samples(app, "triptych_rejections_total") == {
        (name, reason): 0 for name in names for reason in SERVER_FAULTS
    }
    for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"):
        assert samples(app, f"triptych_{name}") == {(model,): 0 for model, task in SERVED if task == "generate"}


def test_metrics_add_up() -> None:
    app = make_app()

    async def work(client: httpx.AsyncClient) -> str:
        await client.post("/generate", json=GOOD)
        await client.post("/generate", json={**GOOD, "stop": "l", "stream": True})
        await client.post("/generate", json={**GOOD, "n": 0})
        await client.post("/generate", json={**GOOD, "model": "nope-\u00e9"})
        await client.post("/encode", json={"input": "w1"})
        app.script.queue_full = "queue_requests"
        await client.post("/encode", json={"input": "w1"})
        await client.post("/generate", json=GOOD)
        return (await client.get("/metrics")).text

    text = run(app, work)
    check_accounts(app)
    assert counted(app, "triptych_requests_total") == {
        ("gen", "length", "generate"): 1,
        ("gen", "stop", "generate"): 1,
        ("enc", "stop", "encode"): 1,
    }
    assert counted(app, "triptych_rejections_total") == {
        ("", "invalid_value"): 1,
        ("", "model_not_found"): 1,
        ("enc", "queue_requests"): 1,
        ("gen", "queue_requests"): 1,
    }
    assert samples(app, "triptych_generation_tokens_total") == {("gen",): 4 + 3}
    assert samples(app, "triptych_prompt_tokens_total") == {("gen",): 6, ("enc",): 3}
    assert samples(app, "triptych_request_prompt_tokens_sum") == {("gen",): 6, ("enc",): 3}
    assert samples(app, "triptych_request_generation_tokens_sum") == {("gen",): 7}
    assert counted(app, "triptych_time_to_first_token_seconds_count") == {("gen",): 2}
    assert counted(app, "triptych_inter_token_latency_seconds_count") == {("gen",): 5}
    for name in (
        "step_seconds",
        "batch_tokens",
        "encode_batch_tokens",
        "kv_blocks",
        "build_info",
        "slow_fallbacks",
        "tokenize_seconds",
    ):
        assert f"triptych_{name}" in text
    assert 'le="0.0005"' in text
    assert "nope" not in text


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, as JSON lines."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup("json", stream=stream)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = False


def test_replies_are_counted_by_route() -> None:
    app = make_app()

    async def work(client: httpx.AsyncClient) -> None:
        await client.post("/generate", json=GOOD)
        await client.post("/generate", json={**GOOD, "n": 0})
        for path in ("/requests/a", "/requests/b"):
            await client.delete(path)
        for path in ("/nope-1", "/nope-2"):
            await client.request("NOPE", path)
        await client.head("/livez")

    run(app, work)
    assert samples(app, "triptych_http_requests_total") == {  # labels by their names: method, route, status
        ("POST", "/generate", "200"): 1,
        ("POST", "/generate", "400"): 1,
        ("DELETE", "/requests/{id}", "404"): 2,
        ("other", "", "404"): 2,
        ("HEAD", "/livez", "200"): 1,
    }


def test_the_access_line(lines: io.StringIO) -> None:
    app = make_app(settings=ServiceSettings(api_keys=("canary-key",)))
    headers = {"authorization": "Bearer canary-key", "x-request-id": "mine"}
    ask(app, "POST", "/generate", json={**GOOD, "prompt": "canary-prompt"}, headers=headers)
    ask(app, "POST", "/generate?key=canary-key", json={"prompt": "canary-prompt", "x": 1}, headers=headers)
    app.script.crash_after = 0
    ask(app, "POST", "/generate", json={**GOOD, "prompt": "canary-prompt"}, headers=headers)
    text = lines.getvalue()
    assert "canary" not in text and "hello" not in text
    found = [json.loads(line) for line in text.splitlines()]
    first = next(line for line in found if line["logger"] == "triptych.access")
    assert first["request_id"] == "mine"
    assert (first["method"], first["path"], first["status"], first["model"]) == ("POST", "/generate", 200, "gen")
    assert (first["tokens_in"], first["tokens_out"], first["tokens_cached"]) == (14, 4, 0)
    assert all(first[f"{name}_ms"] >= 0 for name in ("queue", "prefill", "decode")) and "replica" not in first
    assert first["queue_ms"] + first["prefill_ms"] + first["decode_ms"] <= first["ms"] + 0.1
    assert [line["status"] for line in found if line["logger"] == "triptych.access"] == [200, 400, 500]
    assert any(line["message"].startswith("unexpected RuntimeError") for line in found)


def test_the_access_line_and_a_metric_tell_the_time_in_haproxy(lines: io.StringIO) -> None:
    app = make_app()

    async def behind_haproxy(scope: Scope, receive: Receive, send: Send) -> None:
        await app.app({**scope, IN_PROXY: 0.25}, receive, send)

    async def work(_: httpx.AsyncClient) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(behind_haproxy), base_url="http://x") as client:
            await client.post("/generate", json=GOOD)
            await client.get("/info")

    run(app, work)
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["proxy_ms"] for line in found if line["logger"] == "triptych.access"] == [250.0] * 2
    assert sum(samples(app, "triptych_proxy_seconds_count").values()) == 1
    context = RequestContext("r", proxy_s=0.25)
    logs.access(context, "POST", "/generate")
    assert " after 250.0 ms in HAProxy" in json.loads(lines.getvalue().splitlines()[-1])["message"]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_refusal_that_haproxy_sends_on_is_no_fault(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    app = make_app()
    monkeypatch.setattr(app.metrics, "is_ready_elsewhere", lambda: elsewhere)

    async def behind_haproxy(scope: Scope, receive: Receive, send: Send) -> None:
        await app.app({**scope, SENDS_ON: 425}, receive, send)

    async def work(_: httpx.AsyncClient) -> None:
        transport = httpx.ASGITransport(behind_haproxy)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            app.script.ready = False
            assert (await client.post("/generate", json=GOOD)).status_code == 503

    run(app, work)
    (line,) = [found for found in map(json.loads, lines.getvalue().splitlines()) if "status" in found]
    reason, status = ("sent_on", 425) if elsewhere else ("not_ready", 503)
    assert (line["outcome"], line["status"]) == (reason, status)
    counted_as = samples(app, "triptych_rejections_total")
    assert {reason for (_, reason), value in counted_as.items() if value} == {reason}
    assert samples(app, "triptych_http_requests_total")["POST", "/generate", str(status)] == 1


def test_plain_lines() -> None:
    record = logging.LogRecord("triptych", logging.INFO, "", 0, "ready", None, None)
    assert logs.PlainFormatter().format(record).endswith("INFO triptych ready")
    assert json.loads(logs.JsonFormatter("r1").format(record))["replica"] == "r1"


def test_openapi_declares_bodies_and_errors() -> None:
    app = make_app(settings=ServiceSettings(api_keys=("k",)))
    document = ask(app, "GET", "/openapi.json", headers={"authorization": "Bearer k"}).json()
    text = json.dumps(document)
    assert '"422"' not in text and "HTTPValidationError" not in text
    known = document["components"]["schemas"]
    for reference in set(_references(document)):
        assert reference.removeprefix("#/components/schemas/") in known, reference
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert {"200", "401", "413", "431", "500"} <= set(operation["responses"]), path
            assert operation["summary"]
    for body in ("GenerateBody", "EncodeBody", "TokenizeBody", "DetokenizeBody"):
        for name, field in known[body]["properties"].items():
            assert "description" in field and "examples" in field, (body, name)
        assert known[body]["additionalProperties"] is False
    assert "text/event-stream" in document["paths"]["/generate"]["post"]["responses"]["200"]["content"]
    assert document["security"]


def test_openapi_shows_a_body_that_each_route_reads() -> None:
    app = make_app()
    document = ask(app, "GET", "/openapi.json").json()
    known = document["components"]["schemas"]
    read = [(row.path, row.body) for row in app.app.table.rows if row.body is not None and row.replies is not None]
    assert len(read) > 30
    for path, body in read:
        media_type = body.media_types[-1]
        shown = document["paths"][path]["post"]["requestBody"]["content"][media_type]["examples"]
        for example in (one["value"] for one in shown.values()):
            model = next((one for one in body.models if set(example) <= set(one.model_fields)), None)
            assert model is not None, (path, example)
            model.model_validate_json(json.dumps(example))
    for body, name in (("ImageBody", "inputs"), ("ImageFile", "image")):
        Image.open(io.BytesIO(base64.b64decode(known[body]["properties"][name]["examples"][0]))).load()
    for body, name in (("SpeechBody", "inputs"), ("TranscribeBody", "audio")):
        with wave.open(io.BytesIO(base64.b64decode(known[body]["properties"][name]["examples"][0]))) as file:
            assert file.getnframes() == 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", GOOD),
        ("/generate", {"model": "gen", "inputs": "a"}),
        ("/v1/completions", {"model": "gen", "prompt": "a", "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ],
)
def test_openapi_describes_every_event_of_a_stream(path: str, body: dict[str, Any]) -> None:
    app = chat_app(max_model_len=256)
    document = ask(app, "GET", "/openapi.json").json()
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    data = content["schema"]["properties"]["data"]
    text = ask(app, "POST", path, json={**body, "stream": True}).text
    sent = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert len(sent) > 2
    for one in sent:
        jsonschema.validate(one, data)
        if not any(one == other.get("const") for other in data["anyOf"]):
            event = {**data["anyOf"][0]["contentSchema"], "components": document["components"]}
            jsonschema.validate(json.loads(one), event)


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "$ref":
                yield value
            else:
                yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def test_settings_are_checked() -> None:
    for wrong in ({"port": 70_000}, {"api_keys": ("",)}, {"drain_timeout_s": -1}, {"tokenizer_threads": 0}):
        with pytest.raises(ConfigError):
            ServiceSettings(**wrong)
    with pytest.raises(ConfigError, match="max_n"):
        Limits(max_n=0)
    for priority in (-101, 1):
        with pytest.raises(ConfigError, match="min_priority"):
            Limits(min_priority=priority)
    for number in (float("nan"), float("inf")):
        for name in ("drain_timeout_s", "stall_timeout_s", "stream_interval_s"):
            with pytest.raises(ConfigError, match=name.removesuffix("_s")):
                ServiceSettings(**{name: number})
        for name in ("request_timeout_s", "receive_s", "grammar_s"):
            with pytest.raises(ConfigError, match=name):
                Limits(**{name: number})
    assert "secret" not in repr(ServiceSettings(api_keys=("secret",)))


def test_a_metrics_port_that_another_service_shares_among_its_replicas_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        settings = ServiceSettings(metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another with --metrics-port"):
            check_metrics_port(settings)
    check_metrics_port(settings)
