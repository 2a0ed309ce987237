"""The load generator GuideLLM, for a few requests of each kind."""

import json
import os
import subprocess
from pathlib import Path

from features import KEY, TOKENIZER, URL, feature

OUT = Path(os.environ["HOME"]) / "guidellm.json"


def benchmark(kind):
    OUT.unlink(missing_ok=True)
    backend = json.dumps({"api_key": KEY})
    command = [
        *("guidellm", "benchmark", "run", "--target", URL, "--model", "assistant", "--processor", str(TOKENIZER)),
        *("--request-type", kind, "--backend-kwargs", backend, "--profile", "synchronous", "--max-requests", "3"),
        *("--data", "prompt_tokens=16,output_tokens=8", "--output-path", str(OUT), "--disable-console"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and OUT.exists(), (done.stderr or done.stdout)[-500:]
    [found] = json.loads(OUT.read_text())["benchmarks"]
    requests = found["requests"]
    assert len(requests["successful"]) == 3 and not requests["errored"], str(requests["errored"])[:400]
    return f"{len(requests['successful'])} requests"


@feature("stream")
def chat():
    return benchmark("chat_completions")


@feature("completion")
def completion():
    return benchmark("text_completions")
