"""Requests to a service that runs as a process, and its figures."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

RUNTIMES = {
    "local": ["--runtime", "local"],
    "fronts": ["--runtime", "local", "--front-processes", "2"],
    "ray": ["--runtime", "ray"],
    "ray-default-proxy": ["--runtime", "ray", "--haproxy", "off"],
}
PROMPT = {"model": "gen", "prompt": "def add(", "max_tokens": 12}
LONG = {**PROMPT, "max_tokens": 1500}


def generate(base_url: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{base_url}/generate", json={**PROMPT, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def stream(base_url: str, body: dict[str, Any]) -> list[tuple[float, str]]:
    """Time of arrival and data of every event."""
    with httpx.stream("POST", f"{base_url}/generate", json={**body, "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200
        lines = ((time.monotonic(), line) for line in reply.iter_lines())
        return [(at, line.removeprefix("data: ")) for at, line in lines if line.startswith("data: ")]


def metric(base_url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    samples = [
        line for line in httpx.get(f"{base_url}/metrics").text.splitlines() if line.startswith(f"triptych_{name}")
    ]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in samples if all(label in line for label in wanted))


def post(base_url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request has been sent and nothing been read."""
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
