"""A batch of many lines during faults: in the end each line has one result."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import httpx

from triptych.loadtest.errors import ServerError

LINES, KILLS = 1_000, 5


class BatchUnderFaults:
    """A batch of short completions, and what is true of it at its end."""

    def __init__(self, url: str, model: str, lines: int = LINES) -> None:
        """Upload the file and begin the batch."""
        self.url = url  # may change: a service that starts again may have another port
        self._lines = lines
        with self._client() as client:
            file = client.post(
                "/v1/files", files={"file": ("lines.jsonl", _file(model, lines))}, data={"purpose": "batch"}
            )
            body = {"input_file_id": file.raise_for_status().json()["id"], "endpoint": "/v1/completions"}
            made = client.post("/v1/batches", json=body | {"completion_window": "24h"})
            self.id = made.raise_for_status().json()["id"]

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def progress(self) -> int:
        """Return how many lines have a result; all of them only once the batch has ended. Raises `httpx.HTTPError`."""
        with self._client() as client:
            found = client.get(f"/v1/batches/{self.id}").raise_for_status().json()
        if found["status"] in ("failed", "expired", "cancelled"):
            raise ServerError(f"the batch is {found['status']}: {found['errors']}")
        done = found["request_counts"]["completed"] + found["request_counts"]["failed"]
        return done if found["status"] == "completed" else min(done, self._lines - 1)

    def check(self) -> str:
        """Return a remark on a complete batch. Raises `ServerError` if a line has no result or several."""
        with self._client() as client:
            found = client.get(f"/v1/batches/{self.id}").raise_for_status().json()
            files = [found[name] for name in ("output_file_id", "error_file_id") if found[name]]
            texts = [client.get(f"/v1/files/{one}/content").raise_for_status().text for one in files]
        results = [json.loads(line) for text in texts for line in text.splitlines()]
        counts = Counter(one["custom_id"] for one in results)
        wrong = [str(at) for at in range(self._lines) if counts[str(at)] != 1]
        usage = [one["response"]["body"]["usage"] for one in results if one["response"]["status_code"] == 200]
        tokens = sum(one["total_tokens"] for one in usage)
        if wrong or len(results) != self._lines or found["request_counts"]["total"] != self._lines:
            raise ServerError(f"{len(wrong)} of {self._lines} lines have no result or several: {wrong[:10]}")
        if tokens != found["usage"]["total_tokens"]:
            raise ServerError(f"the lines have {tokens} tokens, the batch {found['usage']['total_tokens']}")
        return f"{self._lines} lines, each with one result; {found['request_counts']['failed']} failed"


def killed_at_random(
    batch: BatchUnderFaults,
    kill: Callable[[], None],
    wait: Callable[[Callable[[], bool]], object],
    seed: int | None = None,
) -> str:
    """Call `kill` at random points of a batch, wait for its end, and check it; `wait` waits for a condition."""
    seed = random.randrange(1 << 32) if seed is None else seed
    for at in sorted(random.Random(seed).sample(range(1, LINES - 50), KILLS)):
        wait(lambda at=at: batch.progress() >= at)  # type: ignore[misc]
        kill()
    wait(lambda: batch.progress() == LINES)
    return f"{batch.check()} (seed {seed})"


def _file(model: str, lines: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": str(at),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": model, "prompt": f"def f{at}(", "max_tokens": 1 + at % 8, "seed": at},
            }
        ).encode()
        + b"\n"
        for at in range(lines)
    )
