"""Pages of other origins: none may call the service unless its operator allows the origin."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.service.processes import eventually
from tests.service.support import App, ask, check_accounts, live, make_app
from triptych.model.errors import ConfigError
from triptych.service.http import sites
from triptych.service.settings import sources
from triptych.service.settings.service_settings import ServiceSettings

PAGE, OTHER = "https://app.example.com", "https://other.example.com"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}
BODY = {"model": "gen", "prompt": "Hi", "max_tokens": 2}


def app_for(*origins: str, keys: tuple[str, ...] = ("canary-key",)) -> App:
    return make_app(settings=ServiceSettings(cors_origins=origins, api_keys=keys))


def cors(reply: httpx.Response) -> dict[str, str]:
    names = (name for name in reply.headers if name.startswith("access-control-"))
    return {name.removeprefix("access-control-"): reply.headers[name] for name in names}


@pytest.mark.parametrize(
    ("origins", "page", "shown"),
    [
        ((PAGE,), PAGE, PAGE),
        ((OTHER, f"{PAGE.upper()}:443"), PAGE, PAGE),
        (("http://localhost:3000", "chrome-extension://abc"), "chrome-extension://abc", "chrome-extension://abc"),
        (("http://[::1]:80",), "http://[::1]", "http://[::1]"),
        (("*",), PAGE, "*"),
        (("*",), "null", "*"),
    ],
)
def test_a_page_of_an_allowed_origin(origins: tuple[str, ...], page: str, shown: str) -> None:
    """Its browser asks without a key, and replies of all kinds may be read, but never with a browser's credentials."""
    app = app_for(*origins)
    asked = ask(app, "OPTIONS", "/v1/chat/completions", headers={"origin": page, **ASKS})
    assert asked.status_code == 204 and asked.content == b""
    assert cors(asked) == {
        "allow-origin": shown,
        "allow-methods": "GET, HEAD, POST, DELETE",
        "allow-headers": ASKS["access-control-request-headers"],
        "max-age": "600",
    }
    for path, key, body, status in (
        ("/generate", "canary-key", BODY, 200),
        ("/generate", "canary-key", BODY | {"stream": True}, 200),
        ("/generate", "canary-key", BODY | {"model": "none"}, 404),
        ("/generate", "wrong", BODY, 401),
        ("/nothing", "canary-key", BODY, 404),
    ):
        headers = {"origin": page, "authorization": f"Bearer {key}"}
        reply = ask(app, "POST", path, json=body, headers=headers)
        expected = {"allow-origin": shown, "expose-headers": sites._EXPOSED.decode()}
        assert (reply.status_code, cors(reply)) == (status, expected)
        assert reply.headers.get("vary") == (None if shown == "*" else "Origin")
    check_accounts(app)


@pytest.mark.parametrize("origins", [(), (OTHER,), ("https://app.example.com:8443", "http://app.example.com")])
@pytest.mark.parametrize("page", [PAGE, "null", "https://app.example.com.evil.org", "https://evil.org#" + PAGE])
def test_a_page_of_another_origin(origins: tuple[str, ...], page: str) -> None:
    app = app_for(*origins)
    headers = {"origin": page, "authorization": "Bearer canary-key"}
    asked = ask(app, "OPTIONS", "/generate", headers={"origin": page, **ASKS})
    assert asked.status_code == 401 and not cors(asked)
    reply = ask(app, "POST", "/generate", json=BODY, headers=headers)
    assert reply.status_code == 200 and not cors(reply)
    assert reply.headers.get("vary") == ("Origin" if origins else None)  # caches must not give this to an allowed page


def test_what_is_no_question_of_a_browser_is_no_preflight() -> None:
    app = app_for(PAGE)
    assert ask(app, "OPTIONS", "/generate", headers={"origin": PAGE}).status_code == 401
    assert ask(app, "OPTIONS", "/generate", headers=ASKS).status_code == 401
    asked = ask(app, "OPTIONS", "/generate", headers={"origin": PAGE, **ASKS, "access-control-request-headers": "a;b"})
    assert asked.status_code == 204 and "allow-headers" not in cors(asked)


def test_a_full_queue_can_be_read_too() -> None:
    """Refused before the application is called."""
    app = app_for(PAGE, keys=())
    app.script.queue_full = "queue_requests"
    with live(app) as url:
        reply = httpx.post(f"{url}/generate", json=BODY, headers={"origin": PAGE})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (429, PAGE)
        asked = httpx.options(f"{url}/generate", headers={"origin": PAGE, **ASKS})
        assert asked.status_code == 204
        eventually(lambda: not app.client.running, 10)
    check_accounts(app)


def test_a_page_of_an_allowed_origin_sends_audio() -> None:
    headers = {"sec-fetch-site": "cross-site", "origin": PAGE, "content-type": "audio/wav"}
    path = "/pipeline/automatic-speech-recognition"
    for origins, code in (((PAGE,), None), ((OTHER,), "cross_site"), ((), "cross_site")):
        reply = ask(app_for(*origins, keys=()), "POST", path, content=b"RIFF", headers=headers)
        assert (reply.json()["error"]["code"] == "cross_site") == (code is not None), reply.text


@pytest.mark.parametrize(
    "origin",
    ["", "null", "https://", "app.example.com", f"{PAGE}/", f"{PAGE}/path", f"{PAGE}, {OTHER}", "https://a b", "**"],
)
def test_settings_that_no_browser_sends_as_an_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins: expected scheme://host"):
        ServiceSettings(cors_origins=(origin,))


def test_where_origins_are_set(tmp_path: Path) -> None:
    assert sources.from_environment({"TRIPTYCH_CORS_ORIGINS": f"{PAGE}, {OTHER}"}) == {"cors_origins": (PAGE, OTHER)}
    for empty in ("", " , "):
        with pytest.raises(ConfigError, match="TRIPTYCH_CORS_ORIGINS"):
            sources.from_environment({"TRIPTYCH_CORS_ORIGINS": empty})
    file = tmp_path / "a.yaml"
    file.write_text(f"cors-origins: [{PAGE}, {OTHER}]\n")
    assert sources.from_file(file).settings == {"cors_origins": (PAGE, OTHER)}
    with pytest.raises(ConfigError, match="give it alone"):
        ServiceSettings(cors_origins=("*", PAGE))
