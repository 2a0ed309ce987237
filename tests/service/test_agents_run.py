"""Installed coding agents, which `triptych launch` points at a service: a question, a call of a tool, its result.

    PATH=node_modules/.bin:$PATH python -m pytest -m slow tests/service/test_agents_run.py

runs those that are on PATH. They reach nothing but this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.service.dialects.support import calling_app, prompt_of
from tests.service.support import App, byte_tokenizer, live
from tests.service.test_launch import launch, printed
from triptych.model.api.request import Request

pytestmark = pytest.mark.slow
CLOSED = "http://127.0.0.1:9"
AWAY = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), CLOSED) | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
AGENTS = {  # arguments, the tool that runs commands, and its argument
    "claude": (["-p", "Hello", "--allowedTools", "Bash"], "Bash", "command"),
    "codex": (
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Hello"],
        *("exec_command", "cmd"),
    ),
    "opencode": (["run", "Hello"], "bash", "command"),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_calls_its_tool_and_reads_the_result(agent: str, tmp_path: Path) -> None:
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    app, tokenizer = calling_app(max_model_len=200_000), byte_tokenizer()
    arguments, tool, name = AGENTS[agent]
    given = json.dumps({name: "echo found-it", "description": "Echoes."})
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {given}}}\n</tool_call>'

    def answer(request: Request) -> tuple[int, ...]:
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        said = "It is done." if "<|turn|>tool\nfound-it" in prompt or "found-it\n<|end|>" in prompt else call
        return (*tokenizer.encode(said, add_special_tokens=False).ids, 256)

    app.script.answer, app.script.end_id = answer, 256
    done = run_agent(app, agent, arguments, tmp_path)
    assert done.returncode == 0 and "It is done." in done.stdout, done.stdout + done.stderr
    assert "found-it" in prompt_of(app)


def run_agent(app: App, agent: str, arguments: list[str], folder: Path) -> Any:
    """Run an agent with the variables and arguments of `triptych launch`, and with more arguments."""
    with live(app) as url:
        variables, command = printed(launch(url, agent, TRIPTYCH_API_KEY="").stdout)
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **AWAY, **variables}
        return subprocess.run(
            [*command, *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )


def test_aider_changes_a_file(tmp_path: Path) -> None:
    if shutil.which("aider") is None:
        pytest.skip("aider is not installed")
    app, tokenizer = calling_app(max_model_len=200_000), byte_tokenizer()
    said = "Done.\n\ngreet.py\n```\ndef greet():\n    return 'found-it'\n```\n"
    app.script.answer = lambda _: (*tokenizer.encode(said, add_special_tokens=False).ids, 256)
    app.script.end_id = 256
    (tmp_path / "greet.py").write_text("def greet():\n    return 'hello'\n")
    arguments = ["--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--no-show-release-notes"]
    done = run_agent(app, "aider", [*arguments, "--message", "Return found-it.", "greet.py"], tmp_path)
    assert done.returncode == 0 and "found-it" in (tmp_path / "greet.py").read_text(), done.stdout + done.stderr
    assert "return 'hello'" in prompt_of(app)
