"""What clients of OpenAI's and Hugging Face's libraries see of a stream whose server is killed: an exception, never a
quiet end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import TextGenerationError

from tests.service.asking import LONG, RUNTIMES
from tests.service.processes import ServiceProcess, eventually, running

Told = Callable[[], None]  # to be called when something of the stream has come

pytestmark = pytest.mark.usefixtures("hub_client")

_OPENAI: dict[str, Any] = {**LONG, "temperature": 0, "stream": True}
_HUB: dict[str, Any] = {"prompt": LONG["prompt"], "max_new_tokens": LONG["max_tokens"], "stream": True}


def _openai(url: str) -> Iterator[object]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    yield from client.completions.create(**_OPENAI)


def _openai_async(url: str) -> Iterator[object]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    yield from _each(lambda: client.completions.create(**_OPENAI))


def _hub(url: str) -> Iterator[object]:
    client = InferenceClient(model=f"{url}/?model=gen", token="any")  # which closes its streams when it goes
    yield from client.text_generation(**_HUB)


def _hub_async(url: str) -> Iterator[object]:
    client = AsyncInferenceClient(model=f"{url}/?model=gen", token="any")
    yield from _each(lambda: client.text_generation(**_HUB))


def _each(begin: Callable[[], Any]) -> Iterator[object]:
    """The items of an asynchronous stream, for somebody without an event loop."""
    with asyncio.Runner() as runner:
        items = aiter(runner.run(begin()))
        while (item := runner.run(anext(items, None))) is not None:  # type: ignore[arg-type]
            yield item


CLIENTS = {"openai": _openai, "hub": _hub, "openai async": _openai_async, "hub async": _hub_async}


def _read(stream: Iterator[object], begun: threading.Event) -> Exception | None:
    """What was raised at the end of `stream`."""
    try:
        for _ in stream:
            begun.set()
    except Exception as error:
        return error
    return None


def _seen(service: ServiceProcess, kill: Callable[[], None]) -> dict[str, Exception | None]:
    """What each client sees when that is killed which it has begun to read from, and which makes nothing more."""
    with ThreadPoolExecutor(len(CLIENTS)) as threads, ExitStack() as held:
        found = {}
        for name, client in CLIENTS.items():
            held.close()  # the engine goes on until the next has begun
            begun = threading.Event()
            found[name] = threads.submit(_read, client(service.url), begun)
            eventually(lambda begun=begun, name=name: begun.is_set() or found[name].done())  # type: ignore[misc]
            held.enter_context(service.held())
        assert not any(one.done() for one in found.values()), found
        kill()
        return {name: one.result(60) for name, one in found.items()}


def _kill(*pids: int) -> Callable[[], None]:
    def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return kill


def _who_answers(service: ServiceProcess, runtime: str) -> Callable[[], None]:
    """Kills the processes whose application answers."""
    if runtime == "local":
        return lambda: service.signal(signal.SIGKILL)
    (pid,) = [pid for pid, line in service.descendants().items() if "ServeReplica" in line]
    return _kill(pid)


@pytest.mark.parametrize(
    "runtime", ["local", *(pytest.param(one, marks=pytest.mark.slow) for one in list(RUNTIMES)[1:])]
)
def test_clients_raise(models: list[str], runtime: str) -> None:
    with running([models[0], *RUNTIMES[runtime], "--log-format", "json"]) as service:
        list(_openai(service.url))  # the next begin quickly
        of_engine = _seen(service, _kill(service.engine_pid()))
        assert isinstance(of_engine["openai"], openai.APIError) and "engine failed" in of_engine["openai"].message
        assert isinstance(of_engine["hub"], TextGenerationError) and "engine failed" in str(of_engine["hub"])
        for name in ("openai", "hub"):
            assert type(of_engine[f"{name} async"]) is type(of_engine[name])
        eventually(lambda: httpx.get(f"{service.url}/readyz").status_code == 200)
        of_replica = _seen(service, _who_answers(service, runtime))
        assert all(isinstance(error, Exception) for error in of_replica.values()), of_replica
        for name in ("openai", "openai async"):
            assert isinstance(of_replica[name], openai.APIConnectionError)
