"""The site of the documentation: every page of the repository is in it, and the reference has the whole API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.site.pages import page_names, write
from lab.site.reference import page_name, reference
from tests.test_docs import LONGEST, ROOT, broken
from triptych.service.app import TABLE
from triptych.service.routes.docs import document

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository")
DOCUMENT: dict[str, Any] = document(TABLE, "1", True, ())
PAGES = reference(DOCUMENT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write(folder, "1")
    return folder


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, with the call that it has for anchors as nothing."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def named(entries: list[Any]) -> list[str]:
    """Return the pages of a navigation."""
    inner = [entry if isinstance(entry, str) else named(next(iter(entry.values()))) for entry in entries]
    return [name for one in inner for name in ([one] if isinstance(one, str) else one)]


def test_the_navigation_has_every_page_once(site: Path) -> None:
    nav = named(yaml.load((site / "mkdocs.yml").read_text(), Loader)["nav"])
    cards = {name for name in page_names() if name.startswith("model/pretrained/")}
    pages = sorted({*page_names(), *(f"reference/{name}" for name in PAGES)} - cards)
    assert sorted(nav) == pages, "put the page into `nav` of mkdocs.yml"


def test_each_link_of_the_site_leads_to_a_page_or_a_file(site: Path) -> None:
    pages = sorted((site / "pages").rglob("*.md"))
    links = {str(page.relative_to(site)): broken(str(page)) for page in pages}
    assert {page: found for page, found in links.items() if found} == {}
    assert not [page for page in pages for link in LINKS.findall(page.read_text()) if (page.parent / link).is_dir()]


LINKS = re.compile(r"\]\((?!https?://|#)([^()\s#]+)\)")


def test_the_reference_has_every_route_and_every_field() -> None:
    for path, operations in DOCUMENT["paths"].items():
        text = PAGES[page_name(path)]
        for method, operation in operations.items():
            assert f"## {method.upper()} {path}\n" in text and operation["summary"] in text
            content = operation.get("requestBody", {}).get("content", {})
            for name in re.findall(r'schemas/(\w+)"', json.dumps(content)):
                for field in DOCUMENT["components"]["schemas"][name].get("properties", {}):
                    assert f"\n| `{field}` |" in text, (path, field)
    assert len(set(map(page_name, DOCUMENT["paths"]))) == len(DOCUMENT["paths"])


def test_no_page_of_the_reference_is_too_long_to_read() -> None:
    lines = {name: len(text.splitlines()) for name, text in PAGES.items()}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
