"""The command `triptych launch`: checks what a coding agent needs, and points it at a running service."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from triptych.model.errors import ConfigError, EngineError
from triptych.service.cli.service_client import Json, ServiceClient, service_url

_KEY = "TRIPTYCH_API_KEY"
_NO_KEY = "none"  # for agents that refuse to start without a key
_NAME = "triptych"  # of the service in agents' settings
_COUNT = "/v1/messages/count_tokens"
_TOOL = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}
_WIDTHS = (10, 9)
Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class _Target:
    """The model that an agent will use."""

    url: str
    name: str
    context: int
    reasons: bool


@dataclass(frozen=True, slots=True)
class Agent:
    """What an agent needs, and how it is pointed at a service; `set_up` returns variables and arguments.

    The value of a variable is the key where it is None.
    """

    api: str
    context: int  # tokens with which it works well, by its makers or by the size of its own prompt
    install: str
    set_up: Callable[[_Target], tuple[dict[str, str | None], list[str]]]
    needs_tools: bool = True


def _claude(target: _Target) -> tuple[dict[str, str | None], list[str]]:
    aliases = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    found: dict[str, str | None] = {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": None}
    found |= dict.fromkeys(aliases, target.name) | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return found | ({} if target.reasons else {"MAX_THINKING_TOKENS": "0"}), []


def _codex(target: _Target) -> tuple[dict[str, str | None], list[str]]:
    provider = f"model_providers.{_NAME}"
    settings = {
        "model": target.name,
        "model_provider": _NAME,
        f"{provider}.name": _NAME,
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": _KEY,
        "web_search": "disabled",
        "model_context_window": target.context,
    }
    return {_KEY: None}, [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]


def _opencode(target: _Target) -> tuple[dict[str, str | None], list[str]]:
    limit = {"context": target.context, "output": target.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _NAME,
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{_KEY}}}"},
        "models": {target.name: {"name": target.name, "limit": limit}},
    }
    model = f"{_NAME}/{target.name}"
    settings = {"provider": {_NAME: provider}, "model": model, "small_model": model}
    return {_KEY: None, "OPENCODE_CONFIG_CONTENT": json.dumps(settings)}, []


def _aider(target: _Target) -> tuple[dict[str, str | None], list[str]]:
    # It knows the context of no model here, and would ask whether to open a page about that.
    arguments = ["--model", f"openai/{target.name}", "--no-show-model-warnings"]
    return {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": None}, arguments


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("/v1/messages", 32_768, "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("/v1/responses", 32_768, "npm install -g @openai/codex", _codex),
    "opencode": Agent("/v1/chat/completions", 32_768, "npm install -g opencode-ai", _opencode),
    "aider": Agent("/v1/chat/completions", 4_096, "pip install aider-chat", _aider, needs_tools=False),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    status: Status
    found: str


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `ConfigError` for a model that is not served, `EngineError` if no service answers."""
    agent = AGENTS[arguments.agent]
    url = service_url(arguments.url)
    key = arguments.api_key or os.environ.get(_KEY, "")
    client = ServiceClient(url, key)
    models = client.models()
    name = _chosen(models, arguments.model, url)
    found = [*_model_checks(client, agent, models[name], name), _installed(arguments.agent, agent)]
    for one in found:
        print(
            "  ".join(text.ljust(width) for text, width in zip((one.name, one.status), _WIDTHS, strict=True)), one.found
        )
    if any(one.status == "failure" and one.name != "program" for one in found):
        return 1
    model = client.models()[name]  # again: the count of tokens has loaded it
    target = _Target(url, name, model["max_model_len"], bool(model["chat"]["reasoning"]))
    variables, more = agent.set_up(target)
    print(f"\n{_shell([arguments.agent, *more], variables, with_key=bool(key))}", flush=True)
    if not arguments.exec:
        return 0
    if found[-1].status == "failure":
        raise EngineError(f"{arguments.agent} is not installed: {agent.install}")
    given = {one: (key or _NO_KEY) if value is None else value for one, value in variables.items()}
    os.execvpe(arguments.agent, [arguments.agent, *more], {**os.environ, **given})


def _chosen(models: Mapping[str, Json], wanted: str | None, url: str) -> str:
    """Return the named model, else the first that chats with tools, else the first that chats."""
    if wanted is not None:
        if wanted not in models:
            raise ConfigError(f"{url} has no model {wanted}; it has {', '.join(models) or 'none'}")
        return wanted
    chats = {name: one["chat"] for name, one in models.items() if (one.get("chat") or {}).get("serves")}
    able = [name for name, chat in chats.items() if chat["tools"]] or list(chats)
    if not able:
        raise ConfigError(f"{url} has no model that chats; it has {', '.join(models) or 'none'}")
    return able[0]


def _model_checks(client: ServiceClient, agent: Agent, model: Json, name: str) -> list[Check]:
    """Check the API by a request, and what the model says of itself."""
    found = [Check("model", "ok", f"{name} ({model['model_type']}, {model['state']})")]
    body: Json = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "system": "Be brief."}
    if agent.needs_tools:
        body["tools"] = [_TOOL]
    try:
        count = client.reply(_COUNT, body)["input_tokens"]
    except EngineError as error:
        return [*found, Check("prompt", "failure", str(error))]
    what = "with a system message" + (" and a tool" if agent.needs_tools else "")
    found.append(Check("prompt", "ok", f"{count} tokens {what}, for {agent.api}"))
    model = client.models()[name]
    context, chat = model["max_model_len"], model["chat"]
    enough: Status = "ok" if context >= agent.context else "warning"
    advice = "" if enough == "ok" else f"; {agent.context:,} are recommended (--max-model-len)"
    found.append(Check("context", enough, f"{context:,} tokens{advice}"))
    if agent.needs_tools:
        taught: Status = "warning" if chat["tools"] == "json" else "ok"
        note = ": the template knows no tools, so messages describe them" if taught == "warning" else ""
        found.append(Check("tools", taught, f"format {chat['tools']}{note}"))
    return [*found, Check("reasoning", "ok", chat["reasoning"] or "none")]


def _installed(program: str, agent: Agent) -> Check:
    path = shutil.which(program)
    return Check("program", "failure" if path is None else "ok", path or f"not found: {agent.install}")


def _shell(command: list[str], variables: Mapping[str, str | None], *, with_key: bool) -> str:
    """Return a command for a shell; the key is named and not shown."""

    def value(given: str | None) -> Any:
        return (f'"${_KEY}"' if with_key else _NO_KEY) if given is None else shlex.quote(given)

    parts = [*(f"{name}={value(given)}" for name, given in variables.items()), shlex.join(command)]
    return " \\\n    ".join(parts)
