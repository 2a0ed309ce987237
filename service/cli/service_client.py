"""A client of a service for commands: of a service that runs already, or of one that is started for a model."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from triptych.model.errors import ConfigError, EngineError
from triptych.model.system import python_child
from triptych.service.settings.option_table import BY_NAME, OPTIONS
from triptych.service.settings.service_settings import is_loopback

Json = dict[str, Any]
DEFAULT_URL = "http://{}:{}".format(*(BY_NAME[name].default for name in ("host", "port")))

_SHOWN_CHARACTERS = 100  # of a reply that is no HTTP
_CONNECT_SECONDS = 5.0  # for /info
_REPLY_SECONDS = 3600.0  # between two parts of a stream; the service has its own limits
_LAST_LINES = 20  # of a service that does not start
_END_SECONDS = 20.0  # for a service to end, which is killed then
# Variables that are meant for another service: where it listens, what it keeps and logs, its replicas and keys.
_KEPT = ("threads", "cpu_binding", "tool_format", "reasoning_format")
_OF_SERVICES = frozenset(
    ("TRIPTYCH_CONFIG", *(one.variable for one in OPTIONS if not (one.per_model or one.name in _KEPT)))
)
_LONG_WORK = frozenset(  # loggers whose lines tell why a start takes long
    {"triptych.model.native.build", "triptych.model.engine.packing", "triptych.model.checkpoint.progress"}
)


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Sends requests to a service at `url`, with an API key if it is not empty."""

    url: str
    key: str = ""

    def models(self) -> dict[str, Json]:
        """Return what /info says of each model, by name. Raises `EngineError` if there is no service."""
        return {one["name"]: one for one in self.info()["models"]}

    def info(self, seconds: float = _CONNECT_SECONDS) -> Json:
        """Return the reply of /info. Raises `EngineError` if there is no service."""
        with self._exchange("/info", None, seconds) as reply:
            found = json.load(reply)
        if isinstance(found, dict) and found.get("name") == "triptych" and isinstance(found.get("models"), list):
            return found
        raise EngineError(f"{self.url} is no triptych service: its /info has no models")

    def metrics(self) -> str:
        """Return the text of /metrics. Raises `EngineError` if there is no service."""
        with self._exchange("/metrics", None, _CONNECT_SECONDS) as reply:
            text: str = reply.read().decode()
        return text

    def reply(self, path: str, body: Mapping[str, Any] | None) -> Json:
        """Send a GET, or a POST of `body`, and return the whole reply, after which a model may have been loaded.

        Raises `EngineError`.
        """
        with self._exchange(path, body, _REPLY_SECONDS) as reply:
            found = json.load(reply)
        if not isinstance(found, dict):
            raise EngineError(f"{self.url} is no triptych service: {path} gives no object")
        return found

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Json]:
        """Yield the events of a streamed reply. Closing the iterator cancels the request. Raises `EngineError`."""
        with self._exchange(path, {**body, "stream": True}, _REPLY_SECONDS) as reply:
            for line in reply:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(event["error"]["message"])
                yield event

    @contextmanager
    def _exchange(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> Iterator[Any]:
        """Send a request, and give the reply to read. Raises `EngineError` for all that fails until it is read."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with _opener(self.url).open(request, timeout=seconds) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            raise EngineError(f"{error.code}: {error_message(error)}") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise EngineError(f"{self.url} is no triptych service: {path} gives no JSON") from None
        except IncompleteRead:
            raise EngineError(f"{self.url} ended in the middle of its reply") from None
        except HTTPException as error:
            found = ascii(str(error))[:_SHOWN_CHARACTERS]
            raise EngineError(f"{self.url} does not answer as an HTTP service does: {found}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ConnectionRefusedError):
                advice = "start one with `triptych serve`, or name another with --url"
                raise EngineError(f"no service listens at {self.url}: {advice}") from None
            raise EngineError(f"{self.url} does not answer: {reason}") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what opens a URL: without the proxy of the environment if it is of this machine."""
    direct = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else []))


def error_message(error: urllib.error.HTTPError) -> str:
    """Return the message of an error reply."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def service_url(given: str | None) -> str:
    """Return the address of the service that a command asks, without a last slash.

    That is `given`, else TRIPTYCH_URL, else the default. Raises `ConfigError`.
    """
    variable = os.environ.get("TRIPTYCH_URL", "")
    name, url = ("TRIPTYCH_URL", variable) if variable and not given else ("--url", given or DEFAULT_URL)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, an IPv6 address without its end
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise ConfigError(f"{name}: expected http://HOST:PORT, found {url!r}")
    return url.rstrip("/")


@contextmanager
def started_service(name: str, path: str, options: list[str]) -> Iterator[ServiceClient]:
    """Serve one model in a child process for the time of the block, on a free port of this machine, with a key."""
    key = secrets.token_urlsafe(24)
    environment = {name: value for name, value in os.environ.items() if name not in _OF_SERVICES}
    environment["TRIPTYCH_API_KEYS"] = key
    environment |= python_child.import_path()
    command = python_child.command("triptych.service.cli.main", "serve", f"{name}={path}", *options)
    command += ["--runtime", "local", "--host", "127.0.0.1", "--port", "0"]
    child = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        yield ServiceClient(_wait_ready(child), key)
    finally:
        child.terminate()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait_ready(child: subprocess.Popen[str]) -> str:
    """Return the service's address once it is ready; raises `EngineError` with what it says if it ends before."""
    assert child.stderr is not None
    last: deque[str] = deque(maxlen=_LAST_LINES)
    url = ""
    for line in child.stderr:
        last.append(line)
        if notice := _notice(line):
            print(notice, file=sys.stderr, flush=True)
        if found := re.match(r"triptych \S+ on (http://\S+)", line):
            url = found[1]
        if line.startswith("ready in") and url:
            threading.Thread(target=_drain, args=(child.stderr,), daemon=True).start()
            return url
    problem = next((line for line in reversed(last) if line.startswith("triptych: ")), "".join(last))
    raise EngineError(problem.removeprefix("triptych: ").strip() or "the service did not start")


def _notice(line: str) -> str:
    """Return the message of a log line that tells why the start takes long; empty for other lines."""
    try:
        found = json.loads(line)
        return str(found["message"]) if found["logger"] in _LONG_WORK else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _drain(lines: Iterator[str]) -> None:
    """Read the log to its end, so that the service never waits for a full pipe."""
    for _ in lines:
        pass
