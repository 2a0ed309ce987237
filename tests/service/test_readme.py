"""The commands of README.md and docs/ exist, and those of README.md do what it says."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.processes import ServiceProcess
from triptych.service.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MOST_LINES = 120


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page's blocks as words, without variables, redirections and what follows a pipe."""
    found = []
    for language, text in BLOCK.findall(page.read_text()):
        if language in ("", "sh"):
            for line in text.replace("\\\n", " ").splitlines():
                try:
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                except ValueError:  # an unfinished quotation: part of a text of several lines
                    continue
                words = [word for word in words if not re.match(r"[A-Z_]+=|\d?>.", word)]
                ends = [at for at, word in enumerate(words) if word in ("|", "&", "&&", ";", ">", "2>")]
                found.append(words[: ends[0]] if ends else words)
    return [words for words in found if words]


def refused(words: list[str]) -> str:
    """Return why a command does not exist, or an empty text."""
    if words[0].removeprefix(".venv/bin/") == "triptych":
        try:
            _, unknown = make_parser().parse_known_args(words[1:])
        except SystemExit:
            return "its arguments are refused"
        except Exception as error:
            return str(error)
        return f"{unknown} is not known" if unknown else ""
    if words[:2] == ["python", "-m"] and words[2] not in ("pytest", "http.server"):
        return "" if importlib.util.find_spec(words[2]) else "there is no such module"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    wrong = {" ".join(words): why for words in commands(page) if (why := refused(words))}
    assert wrong == {}


def test_control_an_unknown_command_is_found() -> None:
    assert refused(["triptych", "serve", "--no-such-option"]) and refused(["python", "-m", "loadtests"])


def test_the_environment_is_named_once() -> None:
    """Commands are for a shell with the environment, but the first one, which comes before that is said."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if ".venv/bin/" in line]
    assert [line.partition(" #")[0].split(" ")[0] for line in lines] == [".venv/bin/triptych", "Everywhere"]


def test_readme_is_short_and_has_one_picture() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1


def fits(shown: str, got: Any) -> bool:
    """Return whether a reply is as it is shown; `...` stands for anything."""
    parts = [re.escape(one) for one in shown.split("...")]
    return re.fullmatch(".*".join(parts), json.dumps(got, ensure_ascii=False, separators=(",", ":"))) is not None


def test_requests_of_readme_get_the_replies_that_it_shows(embedded_service: ServiceProcess) -> None:
    shown = re.findall(r"^\$ (curl (?:.*\\\n)*.*)\n(\{.*\})$", README.read_text(), re.MULTILINE)
    assert len(shown) == 2
    for command, reply in shown:
        here = command.replace("http://127.0.0.1:8000", embedded_service.url)
        if "/audio/" in command:  # the service of the tests has several models
            here += " -F model=speech"
        done = subprocess.run(["bash", "-c", here], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert fits(reply, json.loads(done.stdout)), done.stdout


def test_the_program_of_readme_runs() -> None:
    ((_, program),) = (one for one in BLOCK.findall(README.read_text()) if one[0] == "python")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(ast.literal_eval(done.stdout)) == 1, done.stdout + done.stderr
