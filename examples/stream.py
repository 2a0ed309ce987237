"""A stream of /generate: `python examples/stream.py http://127.0.0.1:8000`."""

import json
import sys

import httpx

body = {"model": "code", "prompt": "def add(a, b):", "max_tokens": 16, "stream": True}
with httpx.stream("POST", f"{sys.argv[1]}/generate", json=body, timeout=60) as reply:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            print(event["choices"][0]["text"], end="", flush=True)
print()
