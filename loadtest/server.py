"""The server beside the load: what it is, whether it answers, its tokenizer, its metrics."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from loadtest import targets, texts
from loadtest.connections import HEADERS
from loadtest.errors import ServerError, UsageError
from loadtest.prometheus import Scrape
from loadtest.settings import PATHS, Settings
from loadtest.workloads import Turn

_PROBE_S = 120.0  # a first request may compile
_COUNTED_WORDS = 160  # each is a call of /tokenize


class Server:
    """Calls that are no part of the load, one at a time."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def probe(self, settings: Settings) -> str:
        """Make one small request, which must succeed; the name of the model that answered.

        Raises `UsageError` where the server refuses it as wrong, `ServerError` where it does not serve.
        """
        turn = Turn("The start", 3, 1, texts=("The start",))
        path = PATHS[settings.target]
        try:
            body = targets.body(settings, turn, [], stream=False)
            reply = self._http.post(path, content=body, timeout=_PROBE_S)
        except httpx.HTTPError as error:
            raise ServerError(f"{settings.url} does not answer ({type(error).__name__}); is it running?") from None
        if reply.status_code == 200:
            return targets.decode(reply.content).model or settings.model
        said = f"POST {path}: expected 200, found {reply.status_code}: {_message(reply)}"
        raise UsageError(said) if 400 <= reply.status_code < 500 and reply.status_code != 429 else ServerError(said)

    def about(self) -> dict[str, Any]:
        """What it says of itself at /info (ours), else at /v1/models; empty where there is neither."""
        for path in ("/info", "/v1/models"):
            found = self._json(path)
            if found is not None:
                return found
        return {}

    def max_model_len(self, model: str, about: dict[str, Any]) -> int:
        """Of `model` as /info or /v1/models tells; 0: not known."""
        for entry in [*about.get("models", ()), *about.get("data", ())]:
            if model in (entry.get("name"), entry.get("id")):
                return int(entry.get("max_input_tokens") or entry.get("max_model_len") or 0)
        return 0

    def vocabulary(self, model: str) -> texts.Vocabulary | None:
        """Words as its /tokenize counts them (ours takes `text`, vLLM's `prompt`); None: it has none."""
        for name in ("text", "prompt"):
            try:
                count = self._counter(name, model)
                return texts.counted(
                    count, "the server's /tokenize", texts.WORDS[:: len(texts.WORDS) // _COUNTED_WORDS]
                )
            except (httpx.HTTPError, KeyError, ValueError):
                continue
        return None

    def scrape(self, start: float, model: str) -> Scrape | None:
        """Its metrics now; None: it has none or does not answer."""
        try:
            at = time.monotonic() - start
            reply = self._http.get("/metrics")
            return Scrape(reply.text, at, model) if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def _counter(self, name: str, model: str) -> texts.Count:
        def count(text: str) -> int:
            reply = self._http.post("/tokenize", json={name: text, **({"model": model} if model else {})})
            return int(reply.raise_for_status().json()["count"])

        count(texts.OPENING)
        return count

    def _json(self, path: str) -> dict[str, Any] | None:
        try:
            reply = self._http.get(path)
            found = reply.json() if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _message(reply: httpx.Response) -> str:
    """The server's own words, on one line of bounded length."""
    try:
        failure = targets.decode(reply.content).error
    except msgspec.DecodeError:
        failure = None
    text = failure if isinstance(failure, str) else failure.message if failure else reply.text
    return " ".join(text.split())[:300]
