"""Endings of generate requests other than success: refused by a full queue, failed, late, cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.service.support import (
    App,
    ask,
    check_accounts,
    counted,
    hold,
    let_time_pass,
    make_app,
    opened,
    run,
    until,
)
from tests.service.test_bad_requests import check_error
from tests.service.test_generate import generate, streamed
from triptych.service.http.json_replies import NativeRendering
from triptych.service.http.sse import GenerationEvents
from triptych.service.lifecycle.fleet import Fleet, LocalFleet
from triptych.service.planning.encode import EncodePlan


def test_a_full_queue_is_a_429_before_any_byte(app: App) -> None:
    app.script.queue_full = "queue_tokens"
    for stream in (False, True):
        reply = ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab", "stream": stream})
        check_error(reply, 429, None, "queue_full")
        assert reply.headers["retry-after"] == "3"
    assert not app.client.submitted


def test_a_valid_body_is_refused_before_its_text_is_tokenised(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.service.threads, "run", None)
    app.script.queue_full, app.script.retry_after_s = "queue_requests", 7.0
    body = {"model": "gen", "prompt": "ab", "request_id": "mine-1"}
    for path in ("/generate", "/v1/completions"):
        reply = ask(app, "POST", path, json=body)
        check_error(reply, 429, None, "queue_full")
        assert (reply.headers["retry-after"], reply.headers["x-request-id"]) == ("7", "mine-1")
    assert counted(app, "triptych_rejections_total") == {("gen", "queue_requests"): 2}
    assert counted(app, "triptych_requests_received_total") == {("generate",): 2}
    slot = app.service.models.get("gen")
    assert slot is not None and not slot.users


FULL_BUT = [  # bodies that a full queue does not answer: status, code
    ({"prompt": "ab"}, 400, "missing_field"),  # two models generate
    ({"model": "nope", "prompt": "ab"}, 404, "model_not_found"),
    ({"model": "enc", "prompt": "ab"}, 400, "wrong_task"),
    ({"model": "gen", "prompt": "ab", "n": 9}, 400, "invalid_value"),
    ({"model": "gen", "prompt": "ab", "num_beams": "2"}, 400, "invalid_type"),
    ({"model": "gen", "prompt": "ab", "request_id": "no id"}, 400, "invalid_value"),
    ({"model": "gen", "prompt": "ab", "temprature": 1}, 400, "unknown_field"),
    ({"model": "gen"}, 400, "missing_field"),
    ({"model": "gen", "prompt": ["ab", 1]}, 400, "invalid_type"),
    ([], 400, "invalid_type"),
]


@pytest.mark.parametrize(("body", "status", "code"), FULL_BUT)
def test_what_goes_before_a_full_queue(app: App, body: Any, status: int, code: str) -> None:
    app.script.queue_full = "queue_tokens"
    reply = ask(app, "POST", "/generate", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text


def test_a_conversation_without_a_template_and_a_drain_go_before_a_full_queue(app: App) -> None:
    app.script.queue_full = "queue_tokens"
    chat = {"model": "gen", "messages": [{"role": "user", "content": "hi"}]}
    check_error(ask(app, "POST", "/v1/chat/completions", json=chat), 400, "model", "no_chat_template")
    app.service.begin_drain()
    check_error(ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab"}), 503, None, "draining")


def test_an_engine_that_dies_under_a_request() -> None:
    app = make_app(die_after=2)
    check_error(ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab"}), 500, None, "engine_failed")
    *_, failure, done = streamed(app)
    assert failure["error"]["code"] == "engine_failed"
    assert done == "[DONE]"
    app.script.die_after = None
    generate(app)
    check_accounts(app)
    assert len(app.client.aborted) == 2


def test_a_sequence_that_fails() -> None:
    app = make_app(error_after=1)
    check_error(ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab"}), 500, None, "engine_failed")
    *deltas, failure, done = streamed(app)
    assert len(deltas) == 1
    assert failure["error"]["code"] == "engine_failed" and done == "[DONE]"
    check_accounts(app)


def test_an_unexpected_exception_tells_nothing() -> None:
    app = make_app(crash_after=1)
    check_error(ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab"}), 500, None, "internal")
    *_, failure, done = streamed(app)
    assert failure["error"]["code"] == "internal" and done == "[DONE]"
    assert "canary" not in str(failure)
    check_accounts(app)
    assert counted(app, "triptych_requests_total") == {("gen", "error", "generate"): 2}


@pytest.mark.parametrize(
    ("of", "name", "path", "body"),
    [
        (NativeRendering, "reply", "/generate", {"model": "gen", "prompt": "ab"}),
        (GenerationEvents, "opening", "/generate", {"model": "gen", "prompt": "ab", "stream": True}),
        (EncodePlan, "items", "/encode", {"model": "enc", "input": "w1"}),
    ],
)
def test_a_reply_that_cannot_be_made_counts_as_an_error(
    app: App, monkeypatch: pytest.MonkeyPatch, of: type, name: str, path: str, body: Any
) -> None:
    """The engine has done its part; the client gets nothing of it, so the error budget is to know."""

    def broken(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(of, name, broken)
    ask(app, "POST", path, json=body)
    check_accounts(app)
    assert {outcome for _, outcome, _ in counted(app, "triptych_requests_total")} == {"error"}


def test_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(delay_s=0.05)
    late = {"model": "gen", "prompt": "ab", "timeout_s": 0.01}
    check_error(ask(app, "POST", "/generate", json=late), 504, "timeout_s", "deadline")
    let_time_pass(app, monkeypatch, 10.0, outputs=5)
    reply = generate(app, timeout_s=10.0, max_tokens=50)
    assert reply["choices"][0]["finish_reason"] == "deadline"
    assert 0 < reply["usage"]["completion_tokens"] < 50
    [only, done] = streamed(app, timeout_s=0.01)
    assert only["choices"][0]["finish_reason"] == "deadline" and done == "[DONE]"
    check_accounts(app)


@pytest.mark.parametrize("stream", [False, True])
def test_cancel_by_id(stream: bool) -> None:
    app = make_app(delay_s=0.01)
    free = hold(app)

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        body = {"model": "gen", "prompt": ["ab", "c"], "max_tokens": 50, "stream": stream, "request_id": "mine"}
        running = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: app.client.running)
        cancelled = await client.delete("/requests/mine")
        assert cancelled.json() == {"id": "mine", "cancelled": 1}
        free.set()
        return await running

    reply = run(app, work)
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == "mine"
    assert '"finish_reason":"cancelled"' in reply.text
    check_accounts(app)


class Others:
    """Other replicas; at most one answers."""

    app: App | None = None

    def fleet(self, local: LocalFleet) -> Fleet:
        return local

    def leases(self) -> None:
        """Each replica has its own quotas."""

    async def cancel(self, request_id: str) -> int:
        if self.app is None:
            raise TimeoutError
        return self.app.service.jobs.cancel(request_id)


def test_cancel_comes_to_the_replica_that_has_the_request() -> None:
    app = make_app(delay_s=0.05)
    others = Others()
    asked = make_app(replicas=others)

    async def work(client: httpx.AsyncClient) -> None:
        body = {"model": "gen", "prompt": "ab", "max_tokens": 50, "request_id": "mine"}
        running = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: app.client.running)
        async with opened(asked) as other:
            check_error(await other.delete("/requests/mine"), 503, None, "not_live")
            others.app = app
            check_error(await other.delete("/requests/unknown"), 404, "id", "request_not_found")
            assert (await other.delete("/requests/mine")).json() == {"id": "mine", "cancelled": 1}
        assert (await running).json()["choices"][0]["finish_reason"] == "cancelled"

    run(app, work)
    check_accounts(app)


def test_a_local_cancellation_is_reported_if_other_replicas_are_silent() -> None:
    app = make_app(delay_s=0.05, replicas=Others())

    async def work(client: httpx.AsyncClient) -> None:
        body = {"model": "gen", "prompt": "ab", "max_tokens": 50, "request_id": "mine"}
        running = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: app.client.running)
        assert (await client.delete("/requests/mine")).json() == {"id": "mine", "cancelled": 1}
        assert (await running).json()["choices"][0]["finish_reason"] == "cancelled"

    run(app, work)


def test_a_cancelled_task_aborts_once() -> None:
    app = make_app(delay_s=0.01)

    async def work(client: httpx.AsyncClient) -> None:
        body = {"model": "gen", "prompt": ["ab", "c"], "max_tokens": 50}
        running = [asyncio.create_task(client.post("/generate", json={**body, "stream": on})) for on in (True, False)]
        await until(lambda: len(app.client.running) == 4)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    run(app, work)
    assert len(app.client.aborted) == len(set(app.client.aborted)) == 4
    check_accounts(app)
