"""The load generator GuideLLM, for a few chats, which it streams."""

import json
import os
import subprocess
from pathlib import Path

from features import KEY, TOKENIZER, URL, feature

OUT = Path(os.environ["HOME"]) / "guidellm.json"


def benchmark(kind):
    OUT.unlink(missing_ok=True)
    command = [
        *("guidellm", "run", "--disable-console", "--profile", "kind=synchronous", "--output", f"kind=json,path={OUT}"),
        *("--backend", f"kind=openai_http,target={URL},model=assistant,api_key={KEY},request_format={kind}"),
        *("--constraint", "kind=max_requests,count=3", "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and OUT.exists(), (done.stderr or done.stdout)[-500:]
    [found] = json.loads(OUT.read_text())["benchmarks"]
    requests = found["requests"]
    assert len(requests["successful"]) == 3 and not requests["errored"], str(requests["errored"])[:400]
    return f"{len(requests['successful'])} requests"


@feature("stream")
def chat():
    return benchmark("/v1/chat/completions")
