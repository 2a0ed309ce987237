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

import pytest

from tests.service.dialects.support import calling_app, prompt_of
from tests.service.support import byte_tokenizer, live
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
    with live(app) as url:
        variables, command = printed(launch(url, agent, TRIPTYCH_API_KEY="").stdout)
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **AWAY, **variables}
        done = subprocess.run(
            [*command, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0 and "It is done." in done.stdout, done.stdout + done.stderr
    assert "found-it" in prompt_of(app)
