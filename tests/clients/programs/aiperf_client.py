"""The load generator AIPerf, for a few requests of each kind."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from features import KEY, TOKENIZER, URL, feature


def profile(kind, model, *arguments):
    with tempfile.TemporaryDirectory(dir=os.environ["HOME"]) as folder:
        command = [
            *("aiperf", "profile", "--model", model, "--url", URL, "--endpoint-type", kind, "--api-key", KEY),
            *("--tokenizer", str(TOKENIZER), "--request-count", "4", "--concurrency", "2", "--ui-type", "none"),
            *("--synthetic-input-tokens-mean", "16", "--output-artifact-dir", folder, *arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, (done.stderr or done.stdout)[-500:]
        [file] = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(file.read_text())
        assert found["request_count"]["avg"] == 4, str(found)[:400]
        assert not found.get("error_summary"), str(found["error_summary"])[:400]
        return "4 requests"


@feature("stream")
def chat():
    return profile("chat", "assistant", "--streaming", "--output-tokens-mean", "8")


@feature("embeddings")
def embeddings():
    return profile("embeddings", "embed")
