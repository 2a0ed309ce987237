"""The command `triptych run`: a chat in the terminal, or one reply, with a model of a service or of a folder."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from triptych.model.errors import ConfigError, EngineError
from triptych.service.cli.service_client import Json, ServiceClient, service_url, started_service

_WRITES = ("chat", "complete", "translate", "summarize", "rewrite")  # abilities whose reply is text
_KEPT = ("temperature", "task", "source_language", "target_language")  # fields of the model's example that are sent
_COMMANDS_OF = {"transcribe": "triptych transcribe", "embed": "triptych encode"}
_HELP = """\
/help               this list
/system TEXT        instruct the model; without TEXT: no instruction
/clear              forget the conversation
/retry              ask for another answer to the last message
/set NAME VALUE     set a parameter, such as temperature 0.7; without VALUE: the default
/model NAME         go on with another model of the service
/models             list the models
/bye                end (also Ctrl+D)
Ctrl+C stops a reply. A message that begins with \"\"\" goes on to a line that ends with \"\"\"."""

Find = Callable[[str], tuple[str, str]]


def run(arguments: argparse.Namespace, find: Find, default: str) -> int:
    """Run the command. `find` returns the name and path of a model that no service has; `default` is one of these.

    Raises `ConfigError` for a usage error, `EngineError` if the service refuses or fails.
    """
    url = service_url(arguments.url)
    prompt = _prompt(arguments.prompt)
    with _client(url, arguments, find, default) as (client, name):
        session = Session(client, name, arguments)
        if prompt is not None:
            return session.answer_once(prompt)
        return session.talk()


def _prompt(given: str | None) -> str | None:
    """Return the prompt of the command line and of a pipe; None: the user types."""
    if sys.stdin is None or sys.stdin.isatty():
        return given
    try:
        piped = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"text on standard input is not {error.encoding}: {error.reason}") from None
    if not piped.strip():
        return given if given is not None else ""
    return piped if given is None else f"{given}\n\n{piped}"


def _client(
    url: str, arguments: argparse.Namespace, find: Find, default: str
) -> AbstractContextManager[tuple[ServiceClient, str]]:
    """Return a client, and the name of the model to use: of a running service that has it, else of a started one."""
    key = arguments.api_key or os.environ.get("TRIPTYCH_API_KEY", "")
    client, models, problem = ServiceClient(url, key), None, f"no service at {url} has it"
    try:
        models = client.models()
    except EngineError as error:
        if arguments.url:
            raise
        if re.match(r"\d{3}: ", str(error)):  # a service, which wants a key for example
            problem = f"{url} answers {error}"
    if models is not None and (arguments.model in models or (arguments.model is None and models)):
        return nullcontext((client, arguments.model or _first_that_writes(models)))
    if arguments.url and models is not None:
        had = f"{url} has no model {arguments.model or 'at all'}; it has {', '.join(models) or 'none'}"
        raise ConfigError(had + _before_prompt(arguments))
    try:
        name, path = find(arguments.model or default)
    except ConfigError as error:
        raise ConfigError(f"{error}{_before_prompt(arguments)}") from None
    _say(f"loading {name} ({problem}) ...")
    return _Started(name, path, arguments)


def _before_prompt(arguments: argparse.Namespace) -> str:
    """Return a hint for who has left the model out."""
    forgot = arguments.prompt is None and " " in (arguments.model or "").strip()
    return "; a prompt comes after MODEL" if forgot else ""


class _Started(AbstractContextManager[tuple[ServiceClient, str]]):
    """A service that is started for one model."""

    def __init__(self, name: str, path: str, arguments: argparse.Namespace) -> None:
        options = [f"--{name}={value}" for name in ("device", "dtype") if (value := getattr(arguments, name))]
        self._name = name
        self._service = started_service(name, path, options)

    def __enter__(self) -> tuple[ServiceClient, str]:
        return self._service.__enter__(), self._name

    def __exit__(self, *error: Any) -> None:
        self._service.__exit__(*error)


def _first_that_writes(models: dict[str, Json]) -> str:
    """Return the first model that chats, else the first that writes text, else the first."""
    for wanted in (_WRITES[:1], _WRITES):
        for name, one in models.items():
            if any(able["name"] in wanted for able in one["capabilities"]):
                return name
    return next(iter(models))


class Session:
    """A conversation: its messages, its parameters, and the model that answers."""

    def __init__(self, client: ServiceClient, name: str, arguments: argparse.Namespace) -> None:
        """Raise `ConfigError` if the model writes no text."""
        self._client = client
        self._messages: list[Json] = []
        self._system = arguments.system or ""
        given = ("max_tokens", "temperature", "top_p", "seed")
        self._parameters = {key: value for key in given if (value := getattr(arguments, key)) is not None}
        self._name, self._chats = name, False
        self._example: Json = {}
        self._choose(name)

    def answer_once(self, prompt: str) -> int:
        """Print the reply to one prompt."""
        if not prompt.strip():
            raise ConfigError("the prompt is empty: give a PROMPT, or text on standard input")
        self._answer(prompt)
        return 0

    def talk(self) -> int:
        """Read messages and print replies until the user ends it."""
        with_editing()
        if not self._chats:
            _say(f"{self._name} has no chat template: it goes on with each text that you type")
        _say(f"{self._name} at {self._client.url}. /help lists commands, Ctrl+D ends.")
        while (line := _read()) is not None:
            try:
                if line.startswith("/"):
                    if not self._command(*line[1:].split(maxsplit=1)):
                        break
                elif line.strip():
                    self._answer(line)
            except (ConfigError, EngineError) as error:
                _say(f"triptych: {error}")
        return 0

    def _choose(self, name: str) -> None:
        models = self._client.models()
        if name not in models:
            raise ConfigError(f"there is no model {name}; the service has {', '.join(models) or 'none'}")
        able = [one["name"] for one in models[name]["capabilities"]]
        if not any(one in _WRITES for one in able):
            other = next((f": use {_COMMANDS_OF[one]}" for one in able if one in _COMMANDS_OF), "")
            raise ConfigError(f"{name} does not write text; it can {', '.join(able) or 'do nothing'}{other}")
        self._name, self._chats = name, "chat" in able
        example = next(one["body"] for one in models[name]["capabilities"] if one["name"] in _WRITES)
        self._example = {key: value for key, value in example.items() if key in _KEPT}

    def _command(self, name: str = "help", text: str = "") -> bool:
        """Run a command; return whether the conversation goes on."""
        if name in ("bye", "exit", "quit"):
            return False
        if name in ("help", "?"):
            _say(_HELP)
        elif name == "system":
            self._system = text
        elif name == "clear":
            self._messages.clear()
        elif name == "retry":
            self._retry()
        elif name == "set":
            self._set(*text.split(maxsplit=1))
        elif name == "model":
            self._choose(text.strip())
        elif name == "models":
            for key, one in self._client.models().items():
                _say(f"{'*' if key == self._name else ' '} {key}: {', '.join(a['name'] for a in one['capabilities'])}")
        else:
            _say(f"/{name} is not known; /help lists the commands")
        return True

    def _set(self, name: str = "", value: str = "") -> None:
        if not name:
            shown = ", ".join(f"{key} {one}" for key, one in self._parameters.items())
            _say(shown or "all parameters have their defaults")
        elif not value:
            self._parameters.pop(name, None)
        else:
            self._parameters[name] = _number(value)

    def _retry(self) -> None:
        while self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            raise ConfigError("there is no message to answer again")
        self._answer(self._messages.pop()["content"])

    def _answer(self, text: str) -> None:
        """Print the reply to a text, and keep both if it is a chat. A reply that Ctrl+C stops is kept as it is."""
        asked = [*self._messages, {"role": "user", "content": text}]
        body: Json = {"model": self._name, **self._example, **self._parameters}
        if self._chats:
            system = [{"role": "system", "content": self._system}] if self._system else []
            path, body = "/v1/chat/completions", body | {"messages": [*system, *asked]}
        else:
            path, body = "/generate", body | {"prompt": text}
        printed = _Printer()
        events = self._client.events(path, body)
        try:
            for event in events:
                printed.add(event)
        except KeyboardInterrupt:
            if _is_script():
                raise
        finally:
            close: Callable[[], None] | None = getattr(events, "close", None)
            if close is not None:
                close()
            printed.end()
        if self._chats:
            self._messages = [*asked, {"role": "assistant", "content": printed.content}]


class _Printer:
    """Prints the parts of a reply as they come: reasoning dimmed and apart from the content, calls of tools as text."""

    def __init__(self) -> None:
        self.content = ""
        self._reasons = False
        self._colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def add(self, event: Json) -> None:
        for choice in event.get("choices", ()):
            delta = choice.get("delta")
            if delta is None:
                self._content(choice.get("text") or "")
                continue
            if thought := delta.get("reasoning_content"):
                self._reasoning(thought)
            self._content(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                self._content((function.get("name") or "") + (function.get("arguments") or ""))

    def end(self) -> None:
        self._stop_reasoning()
        if not self.content.endswith("\n"):
            print(flush=True)

    def _reasoning(self, text: str) -> None:
        if not self._reasons and self._colours:
            print("\033[2m", end="")
        self._reasons = True
        out = sys.stdout if self._colours else sys.stderr
        print(text, end="", file=out, flush=True)

    def _content(self, text: str) -> None:
        if text:
            self._stop_reasoning()
            self.content += text
            print(text, end="", flush=True)

    def _stop_reasoning(self) -> None:
        if self._reasons:
            print("\033[0m\n" if self._colours else "\n", file=sys.stdout if self._colours else sys.stderr, flush=True)
        self._reasons = False


def with_editing() -> None:
    """Let the user edit the line and go back to earlier ones, where the module is installed."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def _read() -> str | None:
    """Return the user's next message, which may have several lines between triple quotes; None at the end."""
    lines = list(_lines())
    return None if not lines else "\n".join(lines)


def _lines() -> Iterator[str]:
    mark, prompt, more = '"""', ">>> ", False
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            prompt, more = ">>> ", False
            continue
        starts = not more and line.startswith(mark)
        line = line.removeprefix(mark) if starts else line
        more = more or starts
        if more and line.endswith(mark):
            yield line.removesuffix(mark)
            return
        yield line
        if not more:
            return
        prompt = "... "


def _number(text: str) -> Any:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _is_script() -> bool:
    return not sys.stdin.isatty()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
