"""Requests of web pages: of this service, of other sites, and of names that point here (DNS rebinding)."""

from __future__ import annotations

import base64

import pytest

from tests.service.support import ask, make_app
from tests.service.test_bad_requests import check_error
from triptych.model.errors import ConfigError
from triptych.service.app import TABLE
from triptych.service.settings.service_settings import ServiceSettings

KEY = {"authorization": "Basic " + base64.b64encode(b"me:key").decode()}  # as a browser adds it
GOOD = {"model": "gen", "prompt": "a", "max_tokens": 1}
LAN = "http://192.168.7.7:8000"

# Headers of a POST, and whether it is refused.
SENT = [
    ({}, False),
    ({"host": "192.168.7.7:8000", "origin": LAN}, False),
    ({"host": "192.168.7.7:8000", "origin": "http://192.168.7.7"}, True),
    ({"host": "192.168.7.7:8000", "origin": "http://192.168.7.7:3000"}, True),
    ({"host": "192.168.7.7:8000", "origin": "http://evil.example"}, True),
    ({"host": "192.168.7.7:8000", "origin": "http://192.168.7.7:8000.evil.example"}, True),
    ({"host": "192.168.7.7:8000", "origin": "null"}, True),
    ({"host": "192.168.7.7:8000", "origin": ""}, True),
    ({"host": "192.168.7.7:8000", "origin": "http://"}, True),
    ({"host": "localhost:8000", "origin": "http://127.0.0.1:8000"}, True),
    ({"host": "localhost", "origin": "https://localhost"}, False),  # TLS ended before
    ({"host": "localhost:443", "origin": "https://LOCALHOST"}, False),
    ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, False),
    ({"host": "[::1]:8000", "origin": "http://[::1"}, True),
    # Browsers say it themselves on https and localhost; a proxy may have changed Host.
    ({"host": "backend", "origin": "https://ai.example", "sec-fetch-site": "same-origin"}, False),
    ({"origin": "http://test", "sec-fetch-site": "same-site"}, True),
    ({"sec-fetch-site": "cross-site"}, True),
    ({"sec-fetch-site": "unheard-of"}, True),
]


@pytest.mark.parametrize("keys", [(), ("key",)])
@pytest.mark.parametrize(("headers", "refused"), SENT)
def test_a_page_of_another_site_sends_nothing(headers: dict[str, str], refused: bool, keys: tuple[str, ...]) -> None:
    app = make_app(settings=ServiceSettings(api_keys=keys))
    reply = ask(app, "POST", "/generate", json=GOOD, headers={**KEY, **headers})
    if refused:
        check_error(reply, 403, None, code="cross_site")
    else:
        assert reply.status_code == 200, reply.text
    assert ask(app, "GET", "/info", headers={**KEY, **headers}).status_code == 200  # a page cannot read the reply


def test_every_route_that_changes_something_is_closed_to_other_sites() -> None:
    app = make_app()
    asked = {(route.method, route.path) for route in TABLE.rows if route.method != "GET"}
    assert len(asked) > 30
    for method, path in sorted(asked):
        reply = ask(app, method, path, headers={"origin": "http://evil.example"})
        assert reply.status_code == 403 and "--cors-origin" in reply.text, path  # errors have the shape of its API


def test_a_sender_that_knows_the_key_is_no_strange_page() -> None:
    app = make_app(settings=ServiceSettings(api_keys=("key",)))
    for key, status in (({"authorization": "Bearer key"}, 200), ({"x-api-key": "key"}, 200), (KEY, 403)):
        headers = {**key, "origin": "app://desktop", "sec-fetch-site": "cross-site"}
        assert ask(app, "POST", "/generate", json=GOOD, headers=headers).status_code == status
    open_app = make_app()
    headers = {"authorization": "Bearer any", "origin": "http://evil.example"}
    assert ask(open_app, "POST", "/generate", json=GOOD, headers=headers).status_code == 403


def test_an_origin_that_is_allowed_sends_but_no_other() -> None:
    app = make_app(settings=ServiceSettings(cors_origins=("https://app.example",)))
    for origin, status in (("https://app.example", 200), ("https://other.example", 403)):
        headers = {"origin": origin, "sec-fetch-site": "cross-site"}
        assert ask(app, "POST", "/generate", json=GOOD, headers=headers).status_code == status


OURS = (
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "a.localhost",
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]",
    "[::1]:80",
    "box",
)
OTHERS = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "1.2.3.4.5",
    "a.b:x",
    "evil%2Eexample",
)


@pytest.mark.parametrize("listens", ["127.0.0.1", "::1", "localhost", "127.3.2.1"])
def test_a_keyless_loopback_answers_to_its_own_names_alone(listens: str) -> None:
    app = make_app(settings=ServiceSettings(host=listens))
    for host in OURS:
        assert ask(app, "GET", "/info", headers={"host": host}).status_code == 200, host
    for host in OTHERS:
        for method, path in (("GET", "/info"), ("POST", "/generate"), ("GET", "/"), ("GET", "/nowhere")):
            check_error(ask(app, method, path, headers={"host": host}), 403, None, code="unknown_host")
        for path in TABLE.open_paths:
            assert ask(app, "GET", path, headers={"host": host}).status_code == 200


def test_names_are_checked_where_they_are_given_and_not_where_others_may_call() -> None:
    def status(name: str, **settings: object) -> int:
        app = make_app(settings=ServiceSettings(**settings))  # type: ignore[arg-type]
        return ask(app, "GET", "/info", headers={**KEY, "host": name}).status_code

    assert status("ai.example", host="0.0.0.0") == status("ai.example", api_keys=("key",)) == 200
    assert status("AI.example:80", allowed_hosts=("ai.Example",)) == 200
    for settings in ({}, {"host": "0.0.0.0"}, {"api_keys": ("key",)}):
        assert status("other.example", allowed_hosts=("ai.example",), **settings) == 403
    assert status("other.example", allowed_hosts=("*",)) == 200
    for name in ("", "a b", "ai.example:80", "http://ai.example"):
        with pytest.raises(ConfigError, match=r"allowed_hosts: expected a name such as ai\.example\.com"):
            ServiceSettings(allowed_hosts=(name,))
