"""Below a route prefix that a server has taken off: what the application says of its own addresses."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.service.support import App, make_app, run
from tests.service.test_bad_requests import check_error
from triptych.service.http.route_prefix import unprefixed
from triptych.service.settings.service_settings import ServiceSettings


def below(app: App, prefix: str, method: str, path: str, **options: object) -> httpx.Response:
    """The answer to `path` (with the prefix) of `app`, mounted as Serve's replica mounts it."""

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await app.app(unprefixed(scope), receive, send)

    async def work(_: httpx.AsyncClient) -> httpx.Response:
        transport = httpx.ASGITransport(app=mounted, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)  # type: ignore[arg-type]

    return run(app, work)


def test_the_page_lies_where_its_relative_addresses_find_the_group(app: App) -> None:
    asked = below(app, "/grp", "GET", "/grp?a=b")
    assert (asked.status_code, asked.headers["location"]) == (307, "/grp/?a=b")
    page = below(app, "/grp", "GET", "/grp/", headers={"accept": "text/html"})
    assert page.status_code == 200 and "playground" in page.text
    assert below(app, "/grp", "GET", "/grp/info").status_code == 200
    assert below(app, "", "GET", "/").status_code == 200


def test_the_docs_describe_the_group_at_its_addresses(app: App) -> None:
    page = below(app, "/grp", "GET", "/grp/docs").text
    (described,) = re.findall(r'fetch\(address\("([^"]+)"\)\)', page)  # relative to the page
    assert urljoin("http://test/grp/docs", described) == "http://test/grp/openapi.json"
    document = below(app, "/grp", "GET", "/grp/openapi.json").json()
    assert document["servers"] == [{"url": "/grp"}]
    assert "servers" not in below(app, "", "GET", "/openapi.json").json()


@pytest.mark.parametrize("prefix", ["/generate", "/grp", "/a/b"])
def test_a_prefix_takes_no_path_of_the_application(prefix: str, app: App) -> None:
    body = {"model": "gen", "prompt": "ab", "max_tokens": 2}
    assert below(app, prefix, "POST", f"{prefix}/generate", json=body).status_code == 200
    assert below(app, prefix, "POST", prefix, json={"inputs": "ab", "model": "gen"}).status_code == 200


def test_no_route_replies_without_a_key() -> None:
    app = make_app(settings=ServiceSettings(api_keys=("k",)))
    for path in ("/grp", "/grp/", "/grp/docs", "/grp/openapi.json"):
        check_error(below(app, "/grp", "GET", path), 401, None, "invalid_api_key")
