"""The local runtime: each case on a connection of its own, to one server."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.service.http_conformance.cases import CASES, Case
from tests.service.http_conformance.checks import check
from tests.service.support import live, make_app


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with live(make_app()) as url:
        found = urlsplit(url).port
        assert found is not None
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_request_gets_its_reply(port: int, case: Case) -> None:
    check(port, case)
