"""`--stream-interval`: fewer and larger events, and no other difference for clients and operators."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import checkpoints
from tests.service.processes import running
from tests.service.support import events
from triptych.model.errors import ConfigError
from triptych.service.settings.service_settings import ServiceSettings

INTERVAL = 0.25
TOKENS = 300
BODY = {"model": "gen", "prompt": "def add(", "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = f"gen={checkpoints.llama(tmp_path_factory.mktemp('models') / 'llama')}"
    with running([model, "--runtime", "local", "--stream-interval", str(INTERVAL)]) as service:
        yield service.url


def whole(url: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/generate", json={**BODY, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def streamed(url: str, path: str = "/generate", **fields: Any) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}{path}", json={**BODY, "stream": True, **fields}, timeout=60)
    found = events(reply.text)
    assert found.pop() == "[DONE]"
    return found


def joined(found: list[dict[str, Any]], name: str, index: int = 0) -> Any:
    parts = [choice[name] for event in found for choice in event["choices"] if choice["index"] == index]
    return "".join(parts) if name == "text" else [one for part in parts for one in part]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_with_an_interval_has_the_same_content_in_fewer_events(url: str, n: int) -> None:
    fields = {"return_token_ids": True, "logprobs": 2, "n": n, "temperature": 0.8, "seed": 7}
    expected, found = whole(url, **fields), streamed(url, **fields)
    assert len(found) < TOKENS * n / 3
    for choice in expected["choices"]:
        for name in ("text", "token_ids", "logprobs"):
            assert joined(found, name, choice["index"]) == choice[name]
    assert found[-1]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == TOKENS * n
    assert all(choice["token_ids"] for event in found for choice in event["choices"])


@pytest.mark.alone
def test_the_first_token_and_the_end_are_not_held_back(url: str) -> None:
    # More than one where the machine is so busy that the front is late.
    firsts = (streamed(url, return_token_ids=True)[0]["choices"][0]["token_ids"] for _ in range(20))
    assert any(len(first) < TOKENS / 10 for first in firsts)
    began = time.monotonic()
    found = streamed(url)
    assert len(found) <= 2 + (time.monotonic() - began) / INTERVAL  # all but the last are that far apart
    assert any(_seconds(url, max_tokens=2) < INTERVAL for _ in range(20))


def _seconds(url: str, **fields: Any) -> float:
    began = time.monotonic()
    streamed(url, **fields)
    return time.monotonic() - began


def test_a_stop_string_cuts_where_it_would(url: str) -> None:
    text = whole(url)["choices"][0]["text"]
    stop = text[40:44]
    found = streamed(url, stop=[stop])
    assert joined(found, "text") == text[: text.index(stop)]
    assert found[-1]["choices"][0] | {"text": ""} == {
        "index": 0,
        "prompt_index": 0,
        "text": "",
        "finish_reason": "stop",
        "stop_reason": stop,
    }


def test_a_cancelled_stream_gives_out_what_it_has(url: str) -> None:
    body = {**BODY, "max_tokens": 1500, "stream": True, "request_id": "to-cancel", "return_token_ids": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        found = [json.loads(next(lines).removeprefix("data: "))]
        assert httpx.delete(f"{url}/requests/to-cancel").status_code == 200
        found += [json.loads(line.removeprefix("data: ")) for line in lines]
    assert found[-1]["choices"][0]["finish_reason"] == "cancelled"
    assert found[-1]["usage"]["completion_tokens"] == len(joined(found, "token_ids"))


def test_dialects_that_have_an_event_for_each_token_keep_it(url: str) -> None:
    body = {"model": "gen", "inputs": "def add(", "parameters": {"max_new_tokens": 60}}
    reply = httpx.post(f"{url}/generate_stream", json=body, timeout=60)
    lines = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
    assert [event["index"] for event in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["details"]["generated_tokens"] == len(lines) > 1


def test_token_metrics_count_tokens_and_not_events(url: str) -> None:
    def figures() -> tuple[float, float]:
        samples = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines())
        names = ("triptych_generation_tokens_total", "triptych_inter_token_latency_seconds_count")
        return tuple(float(samples.get(f'{name}{{model="gen"}}', 0)) for name in names)  # type: ignore[return-value]

    tokens, gaps = figures()
    streamed(url)
    assert figures() == (tokens + TOKENS, gaps + TOKENS - 1)


@pytest.mark.parametrize("seconds", [-0.1, 11.0, float("nan")])
def test_stream_intervals_are_limited(seconds: float) -> None:
    with pytest.raises(ConfigError, match="stream_interval must be 0 to 10"):
        ServiceSettings(stream_interval_s=seconds)
