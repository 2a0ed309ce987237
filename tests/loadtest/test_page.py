"""The report as a browser draws it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.scripted import Script, serving
from tests.loadtest.support import CLOSED, Workload, constant, measured
from tests.service.browser import CHROMEDRIVER, CHROMIUM, Browser, chromium
from triptych.loadtest.results import page
from triptych.loadtest.runs import output
from triptych.loadtest.runs.sweep import Point

pytestmark = pytest.mark.skipif(
    CHROMEDRIVER is None or CHROMIUM is None, reason="the browser test needs chromium and chromedriver"
)
Json = dict[str, Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(Path(tmp_path_factory.mktemp("profile"))) as one:
        yield one


@pytest.fixture(scope="module")
def run() -> Json:
    with serving(Script(first_s=0.05, gap_s=0.01, capacity=4, queue=2)) as server:
        limits = "ttft_p50<500ms,error_rate<0.1%"
        return output.with_columns(measured(server.url, limits, requests=60, arrivals=constant(60)))


def opened(browser: Browser, path: Path, document: Json) -> None:
    """Open the page and check that it reports no error."""
    path.write_text(page.page(document), encoding="utf-8")
    browser.console()
    browser.open(path.as_uri())
    assert browser.console() == []


def titles(browser: Browser, of: str) -> list[str]:
    found: list[str] = browser.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", of)
    return found


def test_a_run(browser: Browser, tmp_path: Path, run: Json) -> None:
    opened(browser, tmp_path / "run.html", run)
    assert browser.text("h1") == "m · generate"
    assert titles(browser, "#charts h2") == [
        *("Over time", "Distributions", "Between tokens", "First token against prompt length"),
        *("Throughput over time", "Latency", "Not answered"),
    ]
    assert "missed error_rate<0.1%" in browser.text("#chips")
    bare = (
        "[...document.querySelectorAll('th:empty, .scroll:not([tabindex]), body > :not(header, main, script, [role])')]"
    )
    assert browser.run(f"return {bare}.map((one) => one.outerHTML)") == []  # what axe would find
    marks = browser.run(
        "return [...document.querySelectorAll('#charts svg')].map((s) => s.querySelectorAll('path').length)"
    )
    assert min(marks) >= 0 and sum(marks) > 8
    assert not browser.run("return document.body.innerText.match(/NaN|undefined|Infinity|\\[object/)")
    assert "NaN" not in "".join(browser.run("return [...document.querySelectorAll('svg')].map((s) => s.outerHTML)"))
    browser.run(
        """const area = document.querySelector('#charts svg rect[fill=transparent]'), at = area.getBoundingClientRect();
        area.dispatchEvent(new PointerEvent('pointermove', {clientX: at.x + at.width / 2, clientY: at.y + 20}));"""
    )
    tip = browser.text("#tip")
    assert re.fullmatch(r"due at [\d.]+ s\n(first token .*|rejected)", tip, re.DOTALL), tip  # whichever is nearest


@pytest.mark.parametrize("changes", [{"target": "encode", "workload": Workload(kind="embedding", texts="2")}, {}])
def test_a_run_of_few_figures(browser: Browser, tmp_path: Path, changes: Json) -> None:
    with serving(Script()) as server:
        few = output.with_columns(measured(server.url, requests=2, arrivals=CLOSED, **changes))
    opened(browser, tmp_path / "few.html", few)
    assert "Over time" in titles(browser, "#charts h2")


def test_a_sweep_shows_the_chosen_point(browser: Browser, tmp_path: Path, run: Json) -> None:
    points = [Point(load, run, load > 20, load < 20).document() for load in (10.0, 20.0, 40.0)]
    facts = {"over": "rate", "slo": ["ttft_p50<500ms"], "knee": 20.0, "saturation_seen": True, "capacity_per_s": 21.0}
    document = {"schema": 1, "kind": "sweep", **facts, "slo_load": 10.0, "interrupted": False, "points": points}
    opened(browser, tmp_path / "sweep.html", document)
    assert titles(browser, "#sweep-charts h2") == ["Latency against rate", "Throughput against latency", "Points"]
    assert browser.text("#detail-title") == "At 10 requests/s"
    browser.click("tr[data-at='2']")
    assert browser.text("#detail-title") == "At 40 requests/s"
    assert "saturated, SLO missed" in browser.text("tr[aria-selected=true]")
    assert browser.console() == []


def test_a_mix_shows_its_workloads_and_the_chosen_one(browser: Browser, tmp_path: Path, run: Json) -> None:
    with serving(Script()) as server:
        changes = {"target": "encode", "workload": Workload(kind="embedding", texts="2")}
        texts = measured(server.url, requests=6, arrivals=CLOSED, **changes)
    works = {"streams": run, "texts": output.with_columns(texts)}
    names = ("started", "commit", "machine", "server", "interrupted")
    sums = ("counts", "shares", "throughput", "offered_per_s", "series")
    document = {name: run[name] for name in names} | {
        **{"schema": 1, "kind": "mix", "valid": False, "doubts": ["texts: late"]},
        **{"slo": [{"work": "streams", **one} for one in run["slo"]], "together": {name: run[name] for name in sums}},
        "works": [{"name": name, "run": work} for name, work in works.items()],
    }
    opened(browser, tmp_path / "mix.html", document)
    assert browser.text("h1") == "streams + texts"
    assert titles(browser, "#sweep-charts h2") == [
        *("Each workload's tokens over time", "Each workload's latency over time", "Workloads")
    ]
    assert "invalid: texts: late" in browser.text("#chips")
    assert "missed streams: error_rate<0.1%" in browser.text("#chips")
    assert browser.text("#detail-title") == "streams: generate on m"
    browser.click("tr[data-at='1']")
    assert browser.text("#detail-title") == "texts: encode on m"
    assert "Between tokens" not in titles(browser, "#charts h2")
    assert not browser.run("return document.body.innerText.match(/NaN|undefined|Infinity|\\[object/)")
    assert browser.console() == []
