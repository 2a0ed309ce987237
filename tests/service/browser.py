"""Headless Chromium by chromedriver's HTTP interface (https://www.w3.org/TR/webdriver2/), without a client library.

Every call and every wait is bounded. This module does not depend on the service.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

CHROMEDRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how WebDriver marks a reference to an element
_STARTED = "was started successfully on port "
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--window-size=1280,900",
)


@contextmanager
def chromium(profile: Path, *arguments: str) -> Iterator[Browser]:
    """Yield a browser with its own profile in the empty folder `profile`; it is closed at the end."""
    flags = [*_ARGUMENTS, f"--user-data-dir={profile}", *arguments]
    wanted = {"goog:chromeOptions": {"binary": CHROMIUM, "args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
    with _driver() as url, httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        session = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
        browser = Browser(http, f"/session/{session['sessionId']}")
        try:
            yield browser
        finally:
            browser.call("DELETE", "")


@contextmanager
def _driver() -> Iterator[str]:
    """Yield the URL of a chromedriver on its own port."""
    assert CHROMEDRIVER is not None
    driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    hung = threading.Timer(120, driver.kill)
    hung.start()
    try:
        started = next((line for line in driver.stdout if _STARTED in line), None)
        hung.cancel()
        assert started, "chromedriver did not start"
        yield f"http://127.0.0.1:{started.partition(_STARTED)[2].strip().rstrip('.')}"
    finally:
        driver.terminate()
        driver.communicate(timeout=60)


class Browser:
    """One window; CSS selectors name elements."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = {} if body is None and method == "POST" else body
        reply = self._http.request(method, self._session + path, json=content).json()["value"]
        assert not (isinstance(reply, dict) and "error" in reply), reply
        return reply

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the result of the function body `script`."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Return all text inside the element."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Replace a field's content by key presses."""
        element = self._find(selector)
        self.call("POST", f"/element/{element}/clear")
        self.call("POST", f"/element/{element}/value", {"text": text})

    def press(self, selector: str, keys: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/value", {"text": keys})

    def console(self) -> list[str]:
        """Return the browser's complaints since the last call: blocked by policy, thrown, not found."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def _find(self, selector: str) -> str:
        found: dict[str, str] = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]


def eventually(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Return the result of `condition()` once it is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return value
