"""Requests to a service that runs as a process, and reads of its metrics."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import soundfile

from triptych.model.pretrained import CHECKPOINTS

RUNTIMES = {
    "local": ["--runtime", "local"],
    "ray": ["--runtime", "ray"],
    "ray-default-proxy": ["--runtime", "ray", "--haproxy", "off"],
}
PROMPT = {"model": "gen", "prompt": "def add(", "max_tokens": 12}
LONG = {**PROMPT, "max_tokens": 1500}
SPEECH = f"speech={CHECKPOINTS / 'speech'}"
SAMPLE = CHECKPOINTS / "speech" / "sample.flac"
SAID = "the meeting is on the fifth of july at eighteen twenty three"  # the sample's words


def generate(base_url: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{base_url}/generate", json={**PROMPT, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def transcribe(base_url: str, **fields: Any) -> str:
    """Return the transcript of the sample by a service that has `SPEECH`."""
    files = {"file": (SAMPLE.name, SAMPLE.read_bytes())}
    reply = httpx.post(f"{base_url}/v1/audio/transcriptions", data=fields, files=files, timeout=60)
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        return str(reply.json()["text"])
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(one["delta"] for one in events[:-1])
    assert events[-1]["type"] == "transcript.text.done" and events[-1]["text"] == text
    return text


def long_transcription(times: int = 10) -> dict[str, Any]:
    """Return a body of /generate: the sample repeated `times` times, 3.5 s each, as a stream."""
    samples, rate = soundfile.read(SAMPLE, dtype="float32")
    file = io.BytesIO()
    soundfile.write(file, np.tile(samples, times), rate, format="FLAC", subtype="PCM_16")
    return {"model": "speech", "audio": base64.b64encode(file.getvalue()).decode(), "stream": True}


def stream(base_url: str, body: dict[str, Any]) -> list[tuple[float, str]]:
    """Return the time of arrival and the data of every event."""
    with httpx.stream("POST", f"{base_url}/generate", json={**body, "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200
        lines = ((time.monotonic(), line) for line in reply.iter_lines())
        return [(at, line.removeprefix("data: ")) for at, line in lines if line.startswith("data: ")]


def metric(base_url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    samples = [
        line for line in httpx.get(f"{base_url}/metrics").text.splitlines() if line.startswith(f"triptych_{name}")
    ]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in samples if all(label in line for label in wanted))


def post(base_url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Return a connection on which the request has been sent and nothing has been read."""
    address = urlsplit(base_url)
    assert address.hostname is not None
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(head.encode() + content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
