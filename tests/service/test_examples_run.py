"""The commands that the service, its pages and docs/ show are run as they are printed, against the models they name."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.browser import CHROMEDRIVER, CHROMIUM, chromium, eventually
from tests.service.processes import ServiceProcess

ROOT = Path(__file__).parents[2]
SHOWN = "http://127.0.0.1:8000"  # the address in docs/
HEAD = 'set -o pipefail; curl() { command curl --fail-with-body -sS "$@"; }\n'
CHATS = ["chat", "complete", "decide"]
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def url(embedded_service: ServiceProcess) -> str:
    return embedded_service.url


def wrong(lines: Iterable[str], folder: Path = ROOT) -> list[str]:
    """Run commands as a shell does; return those that fail, with what they say."""
    found = []
    for line in lines:
        command = ["bash", "-c", HEAD + line]
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
        if done.returncode:
            found.append(f"{line}\n  exit {done.returncode}: {(done.stderr + done.stdout)[:400]!r}")
    return found


def test_what_a_model_can_do_is_true(url: str) -> None:
    found = {one["name"]: one["capabilities"] for one in httpx.get(f"{url}/info").json()["models"]}
    shown = {name: [one["name"] for one in able] for name, able in found.items()}
    assert shown.pop("chat", CHATS) == CHATS  # its package may not be installed
    assert shown == {
        "code": ["complete"],
        "normalize": ["rewrite"],
        "embed": ["embed", "rerank"],
        "assistant": CHATS,
        "speech": ["transcribe", "translate_speech"],
    }
    sample = httpx.get(f"{url}/sample.flac").content
    for able in found.values():
        for one in able:
            sent = {"json": one["body"]} if "body" in one else {"data": {"model": "speech"}, "files": {"file": sample}}
            reply = httpx.post(f"{url}{one['path']}", timeout=60, **sent)
            assert reply.status_code == 200, (one, reply.text)


def test_the_commands_of_the_start_run(url: str, embedded_service: ServiceProcess) -> None:
    lines = re.findall(rf"^  (curl .*{re.escape(url)}.*)$", embedded_service.output, re.M)
    assert len(lines) == 3 and "/v1/chat/completions" in lines[0]
    assert not wrong(lines)


def shown_lines(url: str, profile: Path) -> Iterator[str]:
    """Yield the commands of /docs that need nothing but the service."""
    with chromium(profile) as browser:
        browser.open(f"{url}/docs")
        eventually(lambda: browser.text("section pre"))
        yield from browser.run(
            "return [...document.querySelectorAll('pre:not(.template)')].map((one) => one.textContent)"
        )


@pytest.mark.skipif(not (CHROMEDRIVER and CHROMIUM), reason="needs chromium and chromedriver")
def test_every_command_of_the_documentation_runs(url: str, tmp_path: Path) -> None:
    """All but those of files and batches, which need `--state-dir` and a file. Those of docs/batches.md are run."""
    lines = list(shown_lines(url, tmp_path))
    assert len(lines) > 35
    assert not wrong([one for one in lines if "/v1/files" not in one and "/v1/batches" not in one], tmp_path)


def printed_lines(page: str) -> Iterator[str]:
    """Yield the commands with curl that a page shows after `$`, each with the lines that belong to it."""
    lines = iter((ROOT / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if not line.startswith("$ curl "):
            continue
        found = line.removeprefix("$ ")
        while found.endswith("\\") or found.count("'") % 2:
            found += f"\n{next(lines)}"
        yield found


@pytest.mark.parametrize(("page", "fewest"), [("docs/api.md", 5), ("docs/tools.md", 4)])
def test_the_commands_of_a_page_run(url: str, page: str, fewest: int) -> None:
    """All but those with an admin key, which is the reader's, and the one that shows an error."""
    lines = [one for one in printed_lines(page) if "ADMIN-KEY" not in one and 'temperatur"' not in one]
    if "chat" not in [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]:  # not installed
        lines = [one for one in lines if '"model": "chat"' not in one]
    assert len(lines) >= fewest
    assert not wrong(one.replace(SHOWN, url) for one in lines)


def test_control_a_wrong_command_is_found() -> None:
    assert wrong(["curl http://127.0.0.1:1/"]) and wrong(["false | true"]) and not wrong(["true"])
