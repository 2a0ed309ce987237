"""Keys from a file: read again when it changes, kept when it breaks, never shown."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.service.support import ask, make_app, run, until
from triptych.model.errors import ConfigError
from triptych.service.core.request_context import RequestContext, set_current
from triptych.service.planning.requests import priority_of
from triptych.service.settings import api_keys, key_lines
from triptych.service.settings.api_keys import KeyRing
from triptych.service.settings.key_lines import KeyLine, new_key, read_lines
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.settings.tenant import UNNAMED, Tenant

scrypt = key_lines._scrypt


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "_CHECK_SECONDS", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who\nalpha\n\n  beta  \n")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def good(ring: KeyRing, *names: str) -> list[bool]:
    return [ring.find(name.encode()) is not None for name in names]


def test_a_file_holds_a_key_a_line_beside_those_of_the_settings(file: Path) -> None:
    ring = KeyRing(("gamma",), str(file))
    assert good(ring, "alpha", "beta", "gamma", "# who", "", "delta") == [True, True, True, False, False, False]


def test_changes_count_without_a_restart(file: Path) -> None:
    ring = KeyRing((), str(file))
    file.write_text("beta\ndelta\n")
    assert good(ring, "alpha", "beta", "delta") == [False, True, True]
    other = file.with_name("other")  # as a mounted secret changes: by another file in its place
    other.write_text("epsilon\n")
    os.replace(other, file)
    assert good(ring, "beta", "epsilon") == [False, True]


@pytest.mark.parametrize("broken", ["", "# none\n", "three words here\n", "schlüssel\n", None])
def test_a_broken_file_opens_nothing_and_locks_nobody_out(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing((), str(file))
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    for _ in range(3):
        assert good(ring, "alpha", "", "words", "three words here") == [True, False, False, False]
    assert len(caplog.records) == 1  # not one with every request
    file.write_text("zeta\n")
    assert good(ring, "alpha", "zeta") == [False, True]
    assert "zeta" not in caplog.text and "schl" not in caplog.text and "here" not in caplog.text


@pytest.mark.parametrize(
    "content",
    ["\ufeffalpha\r\nbeta", "# der Schlüssel von Jürgen\u2028beta2\nalpha\nbeta\n"],
    ids=["windows", "comment"],
)
def test_a_file_of_any_editor_is_read(file: Path, content: str) -> None:
    file.write_text(content, "utf-8", newline="")
    assert good(KeyRing((), str(file)), "alpha", "beta", "beta2") == [True, True, False]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_any_more_does_not_stop_the_service(
    file: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing((), str(file))
    file.unlink()
    make(file)
    thread = Thread(target=ring.find, args=(b"alpha",), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and good(ring, "alpha") == [True]
    assert "the keys are unchanged" in caplog.text


def test_at_the_start_a_broken_file_is_an_error_that_names_the_line(file: Path, tmp_path: Path) -> None:
    file.write_text("fine\nsch\x01n\n")
    with pytest.raises(ConfigError, match=r"line 2 of api_key_file .* must be printable ASCII") as error:
        KeyRing((), str(file))
    assert "sch" not in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing((), str(tmp_path / "absent"))


def test_without_keys_none_is_needed() -> None:
    assert KeyRing.of(ServiceSettings()) is None
    assert ask(make_app(), "GET", "/info").status_code == 200


def test_keys_of_either_kind_are_asked_for(file: Path) -> None:
    for settings in (ServiceSettings(api_keys=("alpha",)), ServiceSettings(api_key_file=str(file))):
        ring = KeyRing.of(settings)
        assert settings.asks_for_key and ring is not None
        assert good(ring, "alpha", "delta") == [True, False]
        assert ask(make_app(settings=settings), "GET", "/info").status_code == 401


def test_the_service_follows_its_file(file: Path) -> None:
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    assert ask(app, "GET", "/info").status_code == 401
    assert ask(app, "GET", "/livez").status_code == 200
    assert ask(app, "GET", "/info", headers=bearer("alpha")).status_code == 200
    file.write_text("new\n")
    assert ask(app, "GET", "/info", headers=bearer("alpha")).status_code == 401
    assert ask(app, "GET", "/info", headers=bearer("new")).status_code == 200
    file.write_text("new key colour=red\n")
    shown = ask(app, "GET", "/metrics", headers=bearer("new")).text
    assert '\ntriptych_key_file_errors_total{setting="api_key_file"} 1.0\n' in shown


def named(text: str) -> dict[str, KeyLine]:
    return {line.tenant.name: line for line in read_lines(text, "the file")}


def test_lines_have_names_and_what_is_allowed() -> None:
    found = named(
        "alice a1 requests/min=10 tokens/min=1000 concurrent=2 priority=-5 models=code-*,chat expires=2027-01-31\n"
        "alice a2 requests/min=10 tokens/min=1000 concurrent=2 priority=-5 models=code-*,chat\nplain\n"
    )
    alice = found["alice"].tenant
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.concurrent, alice.priority) == (10, 1000, 2, -5)
    assert [alice.may_use(name) for name in ("code-7b", "chat", "chat2", "mycode-")] == [True, True, False, False]
    assert found["alice"].expires == math.inf  # of the last line with this name
    assert not found[UNNAMED].tenant.has_quota and found[UNNAMED].tenant.may_use("any")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice secret colour=red", "line 1 of the file: unknown option 'colour'; expected some of requests/min"),
        ("alice secret tokens/min=many", "tokens/min: found 'many', expected a whole number"),
        ("alice secret tokens/min=0", "tokens/min: found '0'"),
        ("alice secret priority=101", "priority: found '101', expected a whole number from -100 to 100"),
        ("alice secret expires=soon", "expires: found 'soon', expected a date"),
        ("alice secret models=a,,b", "models: found"),
        ("alice secret concurrent=1 concurrent=2", "concurrent is given twice"),
        ("al/ice secret", "a name is 1 to 64 letters"),
        ("unnamed secret", "a name is"),
        ("alice scrypt$14$short", "the hash is broken"),
        ("alice secret\nbob secret", "line 2 of the file: an earlier line has the same key"),
        ("alice secret\nalice secret2 concurrent=1", "line 2 of the file: alice has other options"),
    ],
)
def test_a_broken_line_is_named_with_its_problem_and_never_its_key(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as error:
        read_lines(line, "the file")
    assert "secret" not in str(error.value) and len(str(error.value)) < 600


def test_admin_keys_have_no_limits_that_would_not_hold() -> None:
    read_lines("root secret expires=2999-01-01", "the file", for_admins=True)
    with pytest.raises(ConfigError, match="unknown option 'tokens/min'; expected some of expires"):
        read_lines("root secret tokens/min=5", "the file", for_admins=True)


def test_an_expired_key_says_so(file: Path) -> None:
    file.write_text("alice old expires=2020-01-01\nalice new\n")
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    refused = ask(app, "GET", "/info", headers=bearer("old"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "expired_api_key")
    assert ask(app, "GET", "/info", headers=bearer("wrong")).json()["error"]["code"] == "invalid_api_key"
    assert ask(app, "GET", "/info", headers=bearer("new")).status_code == 200


def test_a_key_may_be_for_metrics_alone(file: Path) -> None:
    file.write_text("prometheus p1 only=metrics\nalice a1\n")
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    assert ask(app, "GET", "/metrics", headers=bearer("p1")).status_code == 200
    for method, path in (("GET", "/info"), ("GET", "/v1/models"), ("POST", "/generate"), ("GET", "/nowhere")):
        refused = ask(app, method, path, headers=bearer("p1"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_not_allowed"), path
    assert ask(app, "GET", "/info", headers=bearer("a1")).status_code == 200
    with pytest.raises(ConfigError, match="only: found 'all', expected metrics"):
        read_lines("prometheus p1 only=all", "the file")


def test_a_key_that_is_a_hash_is_computed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, hashed = new_key()
    file.write_text(f"alice {hashed}\nbob plain\n")
    computed = []
    monkeypatch.setattr(key_lines, "_scrypt", lambda *given: computed.append(given) or scrypt(*given))
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    assert [ask(app, "GET", "/info", headers=bearer(one)).status_code for one in (key, key, "plain")] == [200] * 3
    assert len(computed) == 1
    answers = [ask(app, "GET", "/info", headers=bearer(one)) for one in (wrong, wrong, wrong[::-1], "tk-x", key)]
    assert [one.status_code for one in answers] == [401, 401, 401, 401, 200] and len(computed) == 2
    other = ask(app, "GET", "/info", headers=bearer(wrong[:-2] + "CC"))  # a second wrong one within a second
    assert (other.status_code, other.json()["error"]["code"], len(computed)) == (429, "too_many_wrong_keys", 2)


def test_requests_with_one_new_key_wait_for_its_hash_together(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, hashed = new_key()
    file.write_text(f"alice {hashed}\n")
    computed, go = [], Event()

    def held(*given: Any) -> bytes:
        computed.append(given)
        assert go.wait(60)
        return scrypt(*given)

    monkeypatch.setattr(key_lines, "_scrypt", held)
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))

    async def asked(client: httpx.AsyncClient, keys: list[str], hashes: int) -> list[int]:
        go.clear()
        tasks = [asyncio.create_task(client.get("/info", headers=bearer(one))) for one in keys]
        await until(lambda: len(computed) == hashes)
        tasks.pop(0).cancel()  # the client of the first request leaves
        await asyncio.sleep(0)
        go.set()
        return [one.status_code for one in await asyncio.gather(*tasks)]

    wrong = [f"{key[:-2]}{number:02}" for number in range(20)]
    assert run(app, lambda client: asked(client, [key] * 20, 1)) == [200] * 19 and len(computed) == 1
    # Of wrong ones a single hash is computed, whose client has left.
    assert run(app, lambda client: asked(client, wrong, 2)) == [429] * 19 and len(computed) == 2
    assert run(app, lambda client: asked(client, [key] * 3, 2)) == [200] * 2


def test_clients_who_leave_while_their_keys_are_proved_leave_room_for_others(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_lines, "_scrypt", lambda key, salt, ln: sha256(key).digest())
    made = [new_key() for _ in range(api_keys._MOST_PROVING + 1)]
    file.write_text("".join(f"user{at} {hashed}\n" for at, (_, hashed) in enumerate(made)))
    ring = KeyRing(file=str(file))

    async def work() -> None:
        leaving = [asyncio.create_task(ring.prove(key.encode())) for key, _ in made[:-1]]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.wrap_future(ring._thread.submit(lambda: None))  # all of them are computed
        await ring.prove(made[-1][0].encode())

    asyncio.run(work())
    assert ring.find(made[-1][0].encode()) is not None


def test_a_key_may_be_bound_to_models(file: Path) -> None:
    file.write_text("alice a1 models=enc*\nbob b1\n")
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    body = {"model": "gen", "prompt": [5, 6], "max_tokens": 1}
    refused = ask(app, "POST", "/generate", json=body, headers=bearer("a1"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert refused.json()["error"]["param"] == "model"
    assert ask(app, "POST", "/generate", json=body, headers=bearer("b1")).status_code == 200
    names = [
        {one["id"] for one in ask(app, "GET", "/v1/models", headers=bearer(key)).json()["data"]} for key in ("a1", "b1")
    ]
    assert names[0] < names[1] and "gen" in names[1] - names[0]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "/v1/models/gen", None), ("POST", "/api/show", {"model": "gen"}), ("POST", "/tokenize", {"text": "a"})],
)
def test_no_dialect_shows_a_model_that_a_key_may_not_use(
    file: Path, method: str, path: str, body: dict[str, str] | None
) -> None:
    file.write_text("alice a1 models=enc*\nbob b1\n")
    app = make_app(settings=ServiceSettings(api_key_file=str(file)))
    sent = body if body is None else {"model": "gen", **body}
    assert ask(app, method, path, json=sent, headers=bearer("b1")).status_code == 200
    refused = ask(app, method, path, json=sent, headers=bearer("a1"))
    assert refused.status_code == 403 and "alice may not use model 'gen'" in refused.text
    for listing in ("/api/tags", "/api/ps", "/v1/models"):
        shown = [ask(app, "GET", listing, headers=bearer(key)).text for key in ("a1", "b1")]
        assert ["gen" in text for text in shown] == [False, True], listing


def test_priority_of_a_key_is_added_to_that_of_a_request() -> None:
    def found() -> list[int]:
        set_current(RequestContext("r", tenant=Tenant("alice", "name:alice", priority=-5)))
        return [priority_of(one) for one in (0, 3, -98)]

    assert contextvars.copy_context().run(found) == [-5, -2, -100]
