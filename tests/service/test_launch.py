"""`triptych launch`: what a coding agent needs is checked, and its command points at the service."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from tests.service.dialects.support import TURNS, calling_app, talker
from tests.service.support import App, live
from tests.service.test_cli import triptych_here
from triptych.service.cli.launch import AGENTS
from triptych.service.settings.service_settings import ServiceSettings

KEY = "secret-key"


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[App, str]]:
    app = calling_app(max_model_len=40_000, settings=ServiceSettings(api_keys=(KEY,)))
    with live(app) as url:
        yield app, url


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH on which every agent is installed."""
    for name in AGENTS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def launch(url: str, *arguments: str, **environment: str) -> Any:
    return triptych_here("launch", *arguments, "--url", url, **{"TRIPTYCH_API_KEY": KEY, **environment})


def printed(output: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the command of the printed text, as a shell reads them."""
    words = shlex.split(output.partition("\n\n")[2].replace("\\\n", "").replace("$TRIPTYCH_API_KEY", KEY))
    at = next(at for at, word in enumerate(words) if word in AGENTS)
    return dict(word.split("=", 1) for word in words[:at]), words[at:]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_command_points_at_the_service(service: tuple[App, str], programs: str, agent: str) -> None:
    _, url = service
    shown = launch(url, agent, PATH=programs)
    assert shown.returncode == 0, shown.stderr
    assert KEY not in shown.stdout and "$TRIPTYCH_API_KEY" in shown.stdout
    table = {line.split()[0]: line.split()[1] for line in shown.stdout.partition("\n\n")[0].splitlines()}
    assert set(table.values()) == {"ok"} and {"model", "prompt", "context", "program"} <= set(table)
    variables, command = printed(shown.stdout)
    with mock.patch("os.execvpe") as run:
        launch(url, agent, "chat", "--exec", PATH=programs)
    program, arguments, environment = run.call_args[0]
    assert (program, arguments) == (agent, command)
    assert {name: environment[name] for name in variables} == variables
    assert url in json.dumps([variables, command]) and "chat" in json.dumps([variables, command])


def test_the_settings_are_those_that_agents_read(service: tuple[App, str], programs: str) -> None:
    _, url = service
    given = {agent: printed(launch(url, agent, PATH=programs).stdout) for agent in AGENTS}
    claude = given["claude"][0]
    assert (claude["ANTHROPIC_BASE_URL"], claude["ANTHROPIC_AUTH_TOKEN"]) == (url, KEY)
    headers = {"authorization": f"Bearer {claude['ANTHROPIC_AUTH_TOKEN']}"}
    body = {
        "model": claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"],
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "a"}],
    }
    assert httpx.post(f"{claude['ANTHROPIC_BASE_URL']}/v1/messages", json=body, headers=headers).status_code == 200
    import tomllib

    settings = tomllib.loads("\n".join(given["codex"][1][2::2]))
    provider = settings["model_providers"][settings["model_provider"]]
    assert (provider["base_url"], provider["wire_api"], settings["model"]) == (f"{url}/v1", "responses", "chat")
    assert given["codex"][0][provider["env_key"]] == KEY
    opencode = json.loads(given["opencode"][0]["OPENCODE_CONFIG_CONTENT"])
    name, model = opencode["model"].split("/")
    assert opencode["provider"][name]["models"][model]["limit"]["context"] == 40_000
    assert given["aider"][0] == {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY}
    assert "--no-show-model-warnings" in given["aider"][1]


def test_what_an_agent_lacks_is_told(service: tuple[App, str], tmp_path: Path) -> None:
    _, url = service
    none = launch(url, "claude", PATH=str(tmp_path))
    assert none.returncode == 0 and "not found: npm install" in none.stdout
    assert launch(url, "claude", "--exec", PATH=str(tmp_path)).returncode == 1
    plain = launch(url, "codex", "gen")
    assert plain.returncode == 1 and "no chat template" in plain.stdout and "export" not in plain.stdout
    unknown = launch(url, "aider", "nope")
    assert unknown.returncode == 2 and "has no model nope; it has gen, seq, enc, chat" in unknown.stderr
    assert launch(url, "aider", "chat", TRIPTYCH_API_KEY="wrong").returncode == 1
    small = calling_app(max_model_len=4_096)
    with live(small) as other:
        shown = launch(other, "opencode", TRIPTYCH_API_KEY="")
    assert "context     warning" in shown.stdout and "--max-model-len" in shown.stdout
    assert printed(shown.stdout)[0]["TRIPTYCH_API_KEY"] == "none"


def test_tools_that_messages_describe_are_a_warning() -> None:
    from tests.service.support import make_app

    app = make_app(talker(TURNS), max_model_len=40_000)
    with live(app) as url:
        assert "tools       warning" in launch(url, "claude", TRIPTYCH_API_KEY="").stdout
