"""Quotas of keys: what is counted, what is refused and until when, and that other keys do not notice."""

from __future__ import annotations

import asyncio
import copy
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.support import App, ask, make_app, run
from triptych.service.cli.main import main
from triptych.service.core.errors import ApiError
from triptych.service.core.request_context import RequestContext
from triptych.service.settings.key_lines import read_lines
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.settings.tenant import Tenant
from triptych.service.tenants.allowances import Minute, Receipt
from triptych.service.tenants.quotas import Quotas, duration

BODY = {"model": "gen", "prompt": [5, 6, 7], "max_tokens": 4}


def app_of(tmp_path: Path, lines: str, **script: Any) -> App:
    file = tmp_path / "keys"
    file.write_text(lines)
    return make_app(settings=ServiceSettings(api_key_file=str(file)), **script)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def post(client: httpx.AsyncClient, name: str, path: str = "/generate", **fields: Any) -> httpx.Response:
    return await client.post(path, json=BODY | fields, headers=key(name))


def test_a_key_beyond_its_tokens_is_told_when_to_come_back_and_another_notices_nothing(tmp_path: Path) -> None:
    app = app_of(tmp_path, "alice a tokens/min=25\nbob b\n")

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await post(client, name) for name in "aaaab" * 2]

    replies = run(app, work)
    assert [one.status_code for one in replies] == [200, 200, 200, 429, 200, 429, 429, 429, 429, 200]
    refused = replies[3]
    assert 55 <= int(refused.headers["retry-after"]) <= 61 and int(refused.headers["retry-after-ms"]) > 50_000
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("tokens", "rate_limit_exceeded", None)
    assert "the key of alice has tokens/min=25 with 4 left, and the request needs 7" in error["message"]
    left = [one.headers.get("x-ratelimit-remaining-tokens") for one in replies[:5]]
    assert left == ["18", "11", "4", "4", None]
    assert replies[0].headers["x-ratelimit-limit-tokens"] == "25"
    assert "x-ratelimit-limit-requests" not in replies[0].headers


def test_requests_are_counted_in_every_dialect_and_refused_in_its_shape(tmp_path: Path) -> None:
    app = app_of(tmp_path, "alice a requests/min=3\n")

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        encoded = {"model": "enc", "input": "hello"}
        bodies = [("/encode", encoded), ("/v1/embeddings", encoded), ("/generate", {**BODY, "no": 1})]
        bodies += [(path, BODY) for path in ("/generate", "/v1/messages", "/api/chat", "/v1/chat/completions")]
        found = [await client.post(path, json=body, headers=key("a")) for path, body in bodies]
        return [*found, await client.get("/v1/models", headers=key("a"))]

    replies = run(app, work)
    assert [one.status_code for one in replies] == [200, 200, 400, 429, 429, 429, 429, 200]
    assert replies[0].headers["x-ratelimit-remaining-requests"] == "2"
    assert replies[3].headers["x-ratelimit-reset-requests"].endswith("s")
    assert replies[3].json()["error"]["type"] == "requests"
    assert replies[4].json()["error"]["type"] == "rate_limit_error"
    assert replies[5].json() == {"error": replies[3].json()["error"]["message"]}
    assert all("retry-after" in one.headers for one in replies[3:7])


def test_a_place_is_given_back_at_the_end_of_a_request_however_it_ends(tmp_path: Path) -> None:
    app = app_of(tmp_path, "alice a concurrent=2\nbob b\n", delay_s=0.02)

    async def work(client: httpx.AsyncClient) -> list[int]:
        streams = [
            asyncio.create_task(post(client, "a", stream=True)),
            asyncio.create_task(post(client, "a", max_tokens=8)),
        ]
        await asyncio.sleep(0.02)
        beyond = [await post(client, name) for name in "ab"]
        assert beyond[0].headers["retry-after"] == "1" and "concurrent=2" in beyond[0].json()["error"]["message"]
        streams[1].cancel()  # the client leaves
        await asyncio.wait(streams)
        await asyncio.sleep(0.02)
        again = [await post(client, "a", **fields) for fields in ({}, {"prompt": 5})]
        return [one.status_code for one in (*beyond, *again)]

    assert run(app, work) == [429, 200, 200, 400]
    places = app.service.tenants.quotas._allowances["name:alice", "concurrent"]
    assert places.left(0.0) == 2


def test_what_was_reserved_is_replaced_by_what_was_used(tmp_path: Path) -> None:
    app = app_of(tmp_path, "alice a tokens/min=1000\n")

    def left(**fields: Any) -> int:
        ask(app, "POST", "/generate", json=BODY | fields, headers=key("a"))
        return app.service.tenants.quotas._allowances["name:alice", "tokens"].left(0.0)

    before = left()
    assert before == 1000 - 7
    assert left(max_tokens=None) < before - 4  # without max_tokens the output counts at its end
    before = left()
    assert left(prompt="one two", max_tokens=6, stop=["hello"]) > before - 14
    before = left()
    assert left(temperature=-1) == before and left(model="none") == before


def test_a_request_beyond_the_whole_quota_is_not_told_to_try_again(tmp_path: Path) -> None:
    app = app_of(tmp_path, "alice a tokens/min=5\n")
    reply = ask(app, "POST", "/generate", json=BODY, headers=key("a"))
    assert (reply.status_code, reply.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in reply.headers
    assert "needs 7 tokens, and the key of alice has tokens/min=5" in reply.json()["error"]["message"]


def test_keys_of_one_name_share_a_quota_and_a_new_one_holds_at_once(tmp_path: Path) -> None:
    tenants = {line.tenant.name: line.tenant for line in read_lines("a x requests/min=2\na y requests/min=2", "f")}
    quotas = Quotas(clock=lambda: 5.0)

    async def enter(tenant: Tenant) -> bool:
        try:
            await quotas.enter(RequestContext("r", tenant=tenant))
        except ApiError:
            return False
        return True

    async def work() -> list[bool]:
        found = [await enter(tenants["a"]) for _ in range(3)]
        return [*found, await enter(Tenant("a", "name:a", requests_per_minute=3))]

    assert asyncio.run(work()) == [True, True, False, True]


def test_no_minute_has_more_than_the_limit_and_the_wait_is_exact() -> None:
    random_numbers, minute, now = random.Random(1), Minute(100), 0.0
    taken: list[tuple[float, Receipt]] = []
    for _ in range(1000):
        now += random_numbers.expovariate(2)
        units = random_numbers.randint(1, 30)
        if (receipt := minute.take(units, now)) is not None:
            taken.append((now, receipt))
            if random_numbers.random() < 0.5:
                minute.correct(receipt, random_numbers.randint(0, units), now)
        else:
            wait = minute.wait(units, now)
            assert 0 < wait <= 60.25
            assert copy.deepcopy(minute).left(now + wait + 1e-6) >= units > 0
        full = minute.wait(100, now)
        assert copy.deepcopy(minute).left(now + full + 1e-6) == 100
        assert full == 0 or copy.deepcopy(minute).left(now + full - 1e-6) < 100
        assert sum(one.units for at, one in taken if now - 60 < at <= now) <= 100
    assert len(taken) > 100


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (0.02, "20ms"), (1.5, "1.5s"), (60, "1m0s"), (99, "1m39s")])
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_command_makes_a_line_and_a_key_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["key", "alice", "tokens/min=9", "models=gen"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and err.split()[-1] not in out
    app = app_of(tmp_path, out)
    assert ask(app, "POST", "/generate", json=BODY, headers=key(err.split()[-1])).status_code == 200
    with pytest.raises(SystemExit):
        main(["key", "alice", "colour=red"])
    out, err = capsys.readouterr()
    assert out == "" and "triptych key alice: unknown option 'colour'" in err
