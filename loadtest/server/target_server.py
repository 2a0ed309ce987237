"""Requests to the server outside the load: its description, a probe, its tokenizer, its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.generator import targets
from triptych.loadtest.generator.connections import HEADERS
from triptych.loadtest.server.prometheus import Scrape
from triptych.loadtest.settings import PATHS, Settings
from triptych.loadtest.workload import prompts
from triptych.loadtest.workload.items import Turn

_PROBE_S = 120.0  # the first request may compile kernels
_MAX_REPLY_BYTES = 64 << 20  # bytes
_COUNTED_WORDS = 160  # each is a request to /tokenize


class Server:
    """Makes requests that are not part of the load, one at a time."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def probe(self, settings: Settings) -> str:
        """Make one small request, which must succeed, and return the name of the model that replied.

        Raises `UsageError` if the server refuses it as invalid, `ServerError` if it does not serve.
        """
        turn = Turn("The start", 3, 1, texts=("The start",))
        path = PATHS[settings.target]
        try:
            status, kind, content = self._ask(path, targets.body(settings, turn, [], stream=False))
        except httpx.HTTPError as error:
            raise ServerError(f"{settings.url} does not answer ({type(error).__name__}); is it running?") from None
        if status == 200:
            return _read_probe(settings, kind, content).model or settings.model
        said = f"POST {path}: expected 200, found {status}: {_message(content)}"
        raise UsageError(said) if 400 <= status < 500 and status != 429 else ServerError(said)

    def _ask(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Return status, content type and body of a reply; raises `UsageError` if it is a stream or too large.

        A server that is not the expected one may send anything.
        """
        end = time.monotonic() + _PROBE_S
        content = bytearray()
        with self._http.stream("POST", path, content=body, timeout=_PROBE_S) as reply:
            kind = reply.headers.get("content-type", "")
            if reply.status_code == 200 and kind.startswith("text/event-stream"):
                raise UsageError(f"POST {path}: expected one JSON reply, found an unrequested stream")
            for piece in reply.iter_bytes():
                content += piece
                if len(content) > _MAX_REPLY_BYTES or time.monotonic() > end:
                    most = f"{_MAX_REPLY_BYTES >> 20} MiB in {_PROBE_S:g} s"
                    raise UsageError(f"POST {path}: expected a reply of at most {most}, found a longer one")
        return reply.status_code, kind, bytes(content)

    def about(self) -> dict[str, Any]:
        """Return the server's /info (triptych) or /v1/models; empty if it has neither."""
        for path in ("/info", "/v1/models"):
            found = self._json(path)
            if found is not None:
                return found
        return {}

    def max_model_len(self, model: str, about: dict[str, Any]) -> int:
        """Return the context length of `model` from /info or /v1/models; 0: not known."""
        for entries in (about.get("models"), about.get("data")):
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict) and model in (entry.get("name"), entry.get("id")):
                    found = entry.get("max_input_tokens") or entry.get("max_model_len")
                    return found if isinstance(found, int) else 0
        return 0

    def vocabulary(self, model: str) -> prompts.Vocabulary | None:
        """Count words with the server's /tokenize (triptych takes `text`, vLLM `prompt`); None: it has none."""
        for name in ("text", "prompt"):
            try:
                count = self._counter(name, model)
                return prompts.counted(
                    count, "the server's /tokenize", prompts.WORDS[:: len(prompts.WORDS) // _COUNTED_WORDS]
                )
            except (httpx.HTTPError, KeyError, TypeError, ValueError):
                continue
        return None

    def scrape(self, start: float, models: Iterable[str]) -> dict[str, Scrape]:
        """Return its current metrics, by model; empty if it has none or does not reply."""
        try:
            at = time.monotonic() - start
            reply = self._http.get("/metrics")
            return {model: Scrape(reply.text, at, model) for model in models} if reply.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}

    def _counter(self, name: str, model: str) -> prompts.Count:
        def count(text: str) -> int:
            reply = self._http.post("/tokenize", json={name: text, **({"model": model} if model else {})})
            return int(reply.raise_for_status().json()["count"])

        count(prompts.OPENING)
        return count

    def _json(self, path: str) -> dict[str, Any] | None:
        try:
            reply = self._http.get(path)
            found = reply.json() if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _read_probe(settings: Settings, kind: str, content: bytes) -> targets.Reply:
    """Parse the reply to a probe; raises `UsageError` if it is not a reply of the target's API."""
    field = "data" if settings.embeds else "choices"
    said = f"POST {PATHS[settings.target]}: expected a JSON object with {field}, found"
    try:
        reply, fields = targets.decode(content), msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise UsageError(f"{said} {kind or 'no content type'}: {_line(content)!r}") from None
    if reply.error is not None:
        raise UsageError(f"{said} an error with status 200: {_message(content)}")
    if field not in fields:
        raise UsageError(f"{said} {_line(content)!r}; does it speak --target {settings.target}?")
    return reply


def _message(content: bytes) -> str:
    """Return the server's error message, as one line of bounded length."""
    try:
        failure = targets.decode(content).error
    except msgspec.DecodeError:
        failure = None
    text = failure if isinstance(failure, str) else failure.message if failure else ""
    return _line(text.encode() or content, 300)


def _line(content: bytes, most: int = 80) -> str:
    """Return the beginning of any body, as one line."""
    return " ".join(content[: 4 * most].decode(errors="replace").split())[:most]
